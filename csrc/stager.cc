#include "stager.h"

#include <errno.h>

#include <algorithm>
#include <array>
#include <cstring>

#include "crc32.h"

namespace ckpt {
namespace {

// Copied and checksummed while it is in the processor's cache.
constexpr uint64_t kChunk = 256 << 10;

// Checksums the segments of a block one after another, as far as their bytes are there.
class SegmentChecksums {
 public:
  SegmentChecksums(FilePlan* plan, const Block& block, const char* data)
      : plan_(*plan),
        data_(data),
        begin_(block.begin),
        at_(block.begin),
        segment_(plan->CutAt(block.begin)) {}

  // Everything before `end` is there.
  void Advance(uint64_t end) {
    while (at_ < end) {
      const uint64_t stop = std::min(end, plan_.cut(segment_ + 1));
      if (!plan_.derived(segment_)) crc_ = Crc32(crc_, data_ + (at_ - begin_), stop - at_);
      at_ = stop;
      if (at_ < plan_.cut(segment_ + 1)) return;
      plan_.SetSegmentCrc(segment_++, crc_);
      crc_ = 0;
    }
  }

 private:
  FilePlan& plan_;
  const char* const data_;
  const uint64_t begin_;
  uint64_t at_;
  size_t segment_;
  uint32_t crc_ = 0;
};

}  // namespace

// Collects copies from memory that may have gone, to make many with one system call.
class Stager::Gather {
 public:
  Gather(Stager* stager, const FilePlan& plan, std::vector<uint32_t>* torn)
      : stager_(*stager), plan_(plan), torn_(*torn) {}

  Status Add(uint32_t part, const char* from, char* to, size_t size) {
    parts_[count_] = part;
    from_[count_] = {const_cast<char*>(from), size};
    to_[count_] = {to, size};
    return ++count_ == kMany ? Flush() : Status();
  }

  Status Flush() {
    size_t first = 0;
    while (first < count_ && stager_.may_read_memory_.load(std::memory_order_relaxed)) {
      const int64_t copied =
          stager_.env_->ReadMemory(&to_[first], count_ - first, &from_[first], count_ - first);
      if (copied == -EPERM || copied == -ENOSYS || copied == -EACCES) {
        stager_.may_read_memory_.store(false, std::memory_order_relaxed);
        break;
      }
      if (copied <= 0) return Gone(parts_[first], copied < 0 ? static_cast<int>(-copied) : EFAULT);
      first = Skip(first, static_cast<size_t>(copied));
    }
    for (; first < count_; ++first)
      std::memcpy(to_[first].iov_base, from_[first].iov_base, to_[first].iov_len);
    count_ = 0;
    return {};
  }

 private:
  static constexpr size_t kMany = 256;

  size_t Skip(size_t first, size_t copied) {
    while (first < count_ && copied >= to_[first].iov_len) copied -= to_[first++].iov_len;
    if (copied > 0) {
      for (iovec* part : {&to_[first], &from_[first]}) {
        part->iov_base = static_cast<char*>(part->iov_base) + copied;
        part->iov_len -= copied;
      }
    }
    return first;
  }

  Status Gone(uint32_t part, int error) {
    torn_.push_back(part);
    return Status::Error(
        "snapshot", "", error,
        "the memory of " + plan_.image().memory[part].name + " went away between the save and its staging");
  }

  Stager& stager_;
  const FilePlan& plan_;
  std::vector<uint32_t>& torn_;
  std::array<uint32_t, kMany> parts_;
  std::array<iovec, kMany> from_;
  std::array<iovec, kMany> to_;
  size_t count_ = 0;
};

Status Stager::Fill(Ticket* ticket, const Block& block, std::vector<uint32_t>* torn) {
  FilePlan& plan = ticket->files[block.file].plan;
  SegmentChecksums checksums(&plan, block, cache_->Data(block.slot));
  for (uint64_t begin = block.begin; begin < block.end && !ticket->failed.load(std::memory_order_relaxed);) {
    const uint64_t end = std::min(begin + kChunk, block.end);
    Status status = cache_->Commit(block.slot, end - block.begin);
    if (status.ok()) status = CopyHost(*ticket, plan, block, begin, end, torn);
    if (!status.ok()) return status;
    checksums.Advance(end);
    begin = end;
  }
  ClearPadding(block);
  Compare(*ticket, plan, block, torn);
  return {};
}

Status Stager::Begin(Cuda* cuda, Ticket* ticket, const Block& block, std::vector<Cuda::Mark>* marks,
                     std::vector<uint32_t>* torn) {
  FilePlan& plan = ticket->files[block.file].plan;
  char* const data = cache_->Data(block.slot);
  Status status = cache_->Commit(block.slot, block.end - block.begin);
  std::vector<int> devices;
  for (size_t i = plan.PieceAt(block.begin); status.ok() && i < plan.pieces().size(); ++i) {
    const Piece& piece = plan.pieces()[i];
    if (piece.offset >= block.end) break;
    if (piece.kind != PieceKind::kDevice) continue;
    const uint64_t begin = std::max(piece.offset, block.begin);
    const uint64_t end = std::min(piece.end(), block.end);
    const MemoryPart& part = plan.image().memory[piece.index];
    if (std::find(devices.begin(), devices.end(), part.device) == devices.end())
      devices.push_back(part.device);
    status = cuda->Copy(part.device, part.address + (begin - piece.offset), data + (begin - block.begin),
                        end - begin);
  }
  for (const int device : devices) {
    Cuda::Mark mark;
    const Status marked = cuda->PutMark(device, &mark);
    if (marked.ok()) marks->push_back(mark);
    if (status.ok()) status = marked;
  }
  if (status.ok()) status = CopyHost(*ticket, plan, block, block.begin, block.end, torn);
  return status;
}

void Stager::End(Ticket* ticket, const Block& block, std::vector<uint32_t>* torn) {
  FilePlan& plan = ticket->files[block.file].plan;
  SegmentChecksums(&plan, block, cache_->Data(block.slot)).Advance(block.end);
  ClearPadding(block);
  Compare(*ticket, plan, block, torn);
}

// Copies what comes from host memory of the bytes [begin, end) of the file.
Status Stager::CopyHost(const Ticket&, const FilePlan& plan, const Block& block, uint64_t begin, uint64_t end,
                        std::vector<uint32_t>* torn) {
  char* const data = cache_->Data(block.slot);
  Gather gather(this, plan, torn);
  for (size_t i = plan.PieceAt(begin); i < plan.pieces().size(); ++i) {
    const Piece& piece = plan.pieces()[i];
    if (piece.offset >= end) break;
    const uint64_t from = std::max(piece.offset, begin);
    const uint64_t size = std::min(piece.end(), end) - from;
    const char* const source = piece.source + (from - piece.offset);
    char* const to = data + (from - block.begin);
    if (piece.kind == PieceKind::kBytes) std::memcpy(to, source, size);
    if (piece.kind != PieceKind::kHost) continue;
    if (plan.image().memory[piece.index].still) {
      const Status status = gather.Add(piece.index, source, to, size);
      if (!status.ok()) return status;
    } else {
      std::memcpy(to, source, size);
    }
  }
  return gather.Flush();
}

// O_DIRECT writes whole pages: what follows the file's last byte in its page must not be another file's.
void Stager::ClearPadding(const Block& block) {
  const size_t size = block.end - block.begin;
  const size_t padding = (kPage - size % kPage) % kPage;
  std::memset(cache_->Data(block.slot) + size, 0, padding);
}

void Stager::Compare(const Ticket& ticket, const FilePlan& plan, const Block& block,
                     std::vector<uint32_t>* torn) {
  const char* const data = cache_->Data(block.slot);
  for (size_t i = plan.PieceAt(block.begin); i < plan.pieces().size(); ++i) {
    const Piece& piece = plan.pieces()[i];
    if (piece.offset >= block.end) break;
    if (piece.kind != PieceKind::kHost && piece.kind != PieceKind::kDevice) continue;
    const MemoryPart& part = plan.image().memory[piece.index];
    if (part.sample == nullptr) continue;
    const uint64_t begin = std::max(piece.offset, block.begin);
    const uint64_t end = std::min(piece.end(), block.end);
    const char* const staged = data + (begin - block.begin);
    if (!AgreesWithSample(part, ticket.seed, begin - piece.offset, end - piece.offset, staged)) {
      torn->push_back(piece.index);
    }
  }
}

std::vector<std::string> Stager::ChangedParts(Cuda* cuda, Ticket* ticket) {
  std::vector<std::string> names;
  char* spots = nullptr;
  if (cuda != nullptr && !cuda->TakeChunk(&spots).ok()) spots = nullptr;
  for (const auto& file : ticket->files) {
    for (const auto& part : file.plan.image().memory) {
      if (part.sample == nullptr) continue;
      const bool changed = part.device == kHostDevice
                               ? HostPartChanged(part, ticket->seed)
                               : spots != nullptr && DevicePartChanged(cuda, part, spots);
      if (changed) names.push_back(part.name);
    }
  }
  if (spots != nullptr) cuda->GiveChunk(spots);
  return names;
}

bool Stager::HostPartChanged(const MemoryPart& part, uint64_t seed) {
  if (!may_read_memory_.load(std::memory_order_relaxed)) {
    // The memory may be gone, and touching it would end the process.
    return false;
  }
  std::array<char, kSampleBytes> spots;
  std::array<iovec, kSpots> from;
  for (size_t i = 0; i < kSpots; ++i) {
    from[i] = {reinterpret_cast<char*>(part.address) + HostSpot(part.size, i, seed), kSpotBytes};
  }
  const iovec to{spots.data(), spots.size()};
  if (env_->ReadMemory(&to, 1, from.data(), kSpots) != static_cast<int64_t>(kSampleBytes)) return true;
  return std::memcmp(spots.data(), part.sample, kSampleBytes) != 0;
}

bool Stager::DevicePartChanged(Cuda* cuda, const MemoryPart& part, char* spots) {
  const uint64_t first = part.address + DeviceSpot(part.size, 0);
  Cuda::Mark mark;
  Status status = cuda->CopySpots(part.device, first, DeviceSpotPitch(part.size), kSpotBytes, kSpots, spots);
  if (status.ok()) status = cuda->PutMark(part.device, &mark);
  if (!status.ok()) return false;
  status = cuda->Wait(mark);
  cuda->Release(mark);
  return status.ok() && std::memcmp(spots, part.sample, kSampleBytes) != 0;
}

}  // namespace ckpt
