#include "file_writer.h"

#include <errno.h>

#include <algorithm>

#include "host_cache.h"

namespace ckpt {
namespace {

constexpr int kMaxStalls = 4;  // writes in a row that return without progress before that counts as an error

bool Refused(int64_t result) { return result == -EINVAL || result == -EOPNOTSUPP || result == -ENOSYS; }

size_t RoundUp(size_t size) { return (size + kPage - 1) / kPage * kPage; }

}  // namespace

FileWriter::FileWriter(Env* env, IoMode mode, unsigned depth)
    : env_(env), mode_(mode), depth_(depth), writes_(depth) {
  if (mode_ != IoMode::kBuffered) ring_ = env_->NewRing(depth);
  finished_.reserve(depth);
}

FileWriter::~FileWriter() {
  uint64_t tag;
  while (in_flight_ > 0) WaitOne(&tag);
  Abandon();
}

Status FileWriter::Open(const std::string& path) {
  path_ = path;
  written_end_ = 0;
  int fd = env_->Create(path);
  if (fd == -EEXIST) {
    const int unlinked = env_->Unlink(path);
    if (unlinked < 0) return Error("unlink", unlinked);
    fd = env_->Create(path);
  }
  if (fd < 0) return Error("open", fd);
  fd_ = fd;
  direct_ = false;
  if (mode_ == IoMode::kBuffered) return {};
  const int result = env_->SetDirect(fd_, true);
  direct_ = result >= 0;
  if (!direct_ && mode_ == IoMode::kDirect) return Error("open with O_DIRECT", result);
  return {};
}

void FileWriter::Start(const char* data, size_t size, uint64_t offset, uint64_t tag) {
  const auto free =
      std::find_if(writes_.begin(), writes_.end(), [](const Write& write) { return !write.busy; });
  Write write{data, direct_ ? RoundUp(size) : size, offset, tag};
  write.busy = true;
  *free = write;
  written_end_ = std::max(written_end_, offset + write.size);
  ++in_flight_;
  Issue(static_cast<size_t>(free - writes_.begin()));
}

void FileWriter::Issue(size_t slot) {
  Write& write = writes_[slot];
  const char* data = write.data + write.done;
  const size_t size = write.size - write.done;
  const uint64_t offset = write.offset + write.done;
  write.direct = direct_;
  write.in_ring = background() && !write.avoid_ring && ring_->Write(fd_, data, size, offset, slot) == 0;
  if (write.in_ring) return;
  const int64_t result = env_->Pwrite(fd_, data, size, offset);
  if (result > 0 && !direct_) env_->StartWriteback(fd_, offset, static_cast<uint64_t>(result));
  finished_.push_back({slot, result});
}

Status FileWriter::WaitOne(uint64_t* tag) {
  for (;;) {
    if (finished_.empty()) WaitForRing();
    if (finished_.empty()) continue;
    const Ring::Completion completion = finished_.back();
    finished_.pop_back();
    Write& write = writes_[completion.tag];
    Status status;
    if (!Settle(write, completion.result, &status)) {
      Issue(completion.tag);
      continue;
    }
    *tag = write.tag;
    write.busy = false;
    --in_flight_;
    return status;
  }
}

void FileWriter::WaitForRing() {
  Ring::Completion completion;
  const int result = ring_->Wait(&completion);
  if (result >= 0) {
    finished_.push_back(completion);
    return;
  }
  if (result == -EAGAIN || result == -EBUSY) return;
  // The ring is gone (its descriptor was closed by someone else, say): so are the answers to what it was
  // given.
  for (size_t slot = 0; slot < writes_.size(); ++slot) {
    if (writes_[slot].busy && writes_[slot].in_ring) finished_.push_back({slot, result});
  }
  ring_.reset();
}

bool FileWriter::Settle(Write& write, int64_t result, Status* status) {
  if (result == -EINTR || result == -EAGAIN) result = 0;
  if (result < 0) {
    if (Refused(result) && StepDown(write)) return false;
    *status = Error("write", result);
    return true;
  }
  if (write.avoid_ring && write.direct) ring_refused_ = true;  // it was the ring that did not take this write
  size_t done = write.done + static_cast<size_t>(result);
  if (done >= write.size) return true;
  if (direct_) done = done / kPage * kPage;  // the rest must begin at an aligned offset again
  write.stalls = done > write.done ? 0 : write.stalls + 1;
  write.done = done;
  if (write.stalls < kMaxStalls) return false;
  *status = Error("write", -EIO);
  return true;
}

bool FileWriter::StepDown(Write& write) {
  if (write.in_ring) {
    write.avoid_ring = true;
    return true;
  }
  if (!write.direct || mode_ == IoMode::kDirect) return false;
  // Another write may have taken this step while this one was under way.
  if (direct_ && env_->SetDirect(fd_, false) < 0) return false;
  direct_ = false;
  return true;
}

Status FileWriter::Finish(uint64_t size) {
  int result = written_end_ == size ? 0 : env_->Truncate(fd_, size);
  if (result < 0) return Error("truncate", result);
  result = env_->Datasync(fd_);
  if (result < 0) return Error("fdatasync", result);
  const int fd = fd_;
  fd_ = -1;
  result = env_->Close(fd);
  if (result < 0) return Error("close", result);
  return {};
}

void FileWriter::Abandon() {
  if (fd_ < 0) return;
  env_->Close(fd_);
  fd_ = -1;
}

Status FileWriter::Error(const char* operation, int64_t result) const {
  return Status::Error(operation, path_, static_cast<int>(-result));
}

}  // namespace ckpt
