#include "persister.h"

#include <set>

namespace ckpt {
namespace {

constexpr unsigned kDepth = 4;  // writes under way at a time

std::string ParentOf(const std::string& path) {
  const size_t slash = path.find_last_of('/');
  if (slash == std::string::npos) return ".";
  return slash == 0 ? "/" : path.substr(0, slash);
}

}  // namespace

Persister::Persister(Env* env, IoMode mode, Shared* shared, HostCache* cache)
    : env_(env), shared_(*shared), cache_(*cache), writer_(env, mode, kDepth) {}

void Persister::Run() {
  Lock lock(shared_.mutex);
  for (;;) {
    if (AbandonFailed(&lock) || CleanUp(&lock) || Publish(&lock)) continue;
    if (OpenNext(&lock) || StartWrite(&lock) || FinishFile(&lock) || WaitForWrite(&lock)) continue;
    if (shared_.stopping && shared_.schedule.idle()) return;
    shared_.persist_changed.wait(lock);
  }
}

bool Persister::AbandonFailed(Lock* lock) {
  if (open_ == nullptr || !open_->failed) return false;
  if (WaitForWrite(lock)) return true;
  writer_.Abandon();
  open_.reset();
  return true;
}

bool Persister::CleanUp(Lock* lock) {
  const std::shared_ptr<Ticket> ticket = shared_.schedule.TakeCleanUp();
  if (ticket == nullptr) return false;
  lock->unlock();
  DeleteTemporaries(*ticket);
  lock->lock();
  shared_.schedule.Retire(ticket.get());
  shared_.NotifyAll();
  return true;
}

void Persister::DeleteTemporaries(const Ticket& ticket) {
  for (const auto& file : ticket.files) {
    // One that cannot be deleted keeps its temporary name, by which the next run knows it.
    if (file.created) env_->Unlink(file.temporary);
  }
}

bool Persister::Publish(Lock* lock) {
  const std::shared_ptr<Ticket> ticket = shared_.schedule.TakePublish();
  if (ticket == nullptr) return false;
  ticket->publishing = true;
  lock->unlock();
  const Status status = RenameAll(*ticket);
  lock->lock();
  ticket->publishing = false;
  if (!status.ok()) {
    shared_.schedule.Fail(ticket.get(), status);
    return true;  // to be cleaned up
  }
  ticket->state = TicketState::kPersisted;
  ticket->stats["persist_s"] = Seconds(Clock::now() - ticket->submitted);
  shared_.schedule.Retire(ticket.get());
  shared_.NotifyAll();
  return true;
}

Status Persister::RenameAll(const Ticket& ticket) {
  std::set<std::string> directories;
  for (const auto& file : ticket.files) {
    const int result = env_->Rename(file.temporary, file.final_path);
    if (result < 0) return Status::Error("rename", file.final_path, -result);
    directories.insert(ParentOf(file.final_path));
  }
  for (const auto& directory : directories) {
    const int result = env_->SyncDirectory(directory);
    if (result < 0) return Status::Error("fsync", directory, -result);
  }
  return {};
}

bool Persister::OpenNext(Lock* lock) {
  const std::shared_ptr<Ticket> ticket = shared_.schedule.Writing();
  if (open_ != nullptr || ticket == nullptr) return false;
  TicketFile& file = ticket->files[ticket->write_file];
  const bool empty = file.first_block == file.end_block;
  if (!empty && ticket->blocks[file.first_block].state != BlockState::kSealed) return false;
  open_ = ticket;
  file.created = true;
  lock->unlock();
  const Status status = writer_.Open(file.temporary);
  lock->lock();
  if (!status.ok()) shared_.schedule.Fail(ticket.get(), status);
  return true;
}

bool Persister::StartWrite(Lock* lock) {
  size_t block;
  if (open_ == nullptr || writer_.full() || !shared_.schedule.TakeWrite(open_.get(), &block)) return false;
  const Block& work = open_->blocks[block];
  const char* const data = cache_.Data(work.slot);
  lock->unlock();
  writer_.Start(data, work.end - work.begin, work.begin, block);
  lock->lock();
  return true;
}

bool Persister::FinishFile(Lock* lock) {
  if (open_ == nullptr || writer_.in_flight() > 0) return false;
  const TicketFile& file = open_->files[open_->write_file];
  if (open_->next_write != file.end_block) return false;
  lock->unlock();
  const Status status = writer_.Finish(file.plan.size());
  lock->lock();
  if (!status.ok()) {
    shared_.schedule.Fail(open_.get(), status);
    return true;  // to be abandoned
  }
  open_->stats["direct"] = writer_.direct();
  open_->stats["io_uring"] = writer_.background();
  if (++open_->write_file == open_->files.size()) {
    open_->stats["durable_s"] = Seconds(Clock::now() - open_->submitted);
  }
  open_.reset();
  return true;
}

bool Persister::WaitForWrite(Lock* lock) {
  if (writer_.in_flight() == 0) return false;
  lock->unlock();
  uint64_t block;
  const Status status = writer_.WaitOne(&block);
  lock->lock();
  shared_.schedule.FinishWrite(open_.get(), block);
  if (!status.ok()) shared_.schedule.Fail(open_.get(), status);
  shared_.NotifyAll();
  return true;
}

}  // namespace ckpt
