#include "engine.h"

#include <errno.h>
#include <pthread.h>
#include <signal.h>
#include <sys/resource.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <new>
#include <thread>

#include "capture.h"

namespace ckpt {
namespace {

constexpr auto kNoDeadline = Clock::time_point::max();
constexpr uint64_t kEveryTicket = ~uint64_t{0};
constexpr size_t kDeviceDepth = 4;                           // blocks on their way from devices at a time
constexpr auto kDevicePoll = std::chrono::microseconds(50);  // of a thread that may not block in the driver
constexpr auto kCloseGrace = std::chrono::seconds(5);        // for threads to end, once nothing holds them

// Training comes first: our threads take what processor time it leaves.
void LowerPriority() { setpriority(PRIO_PROCESS, static_cast<id_t>(syscall(SYS_gettid)), 19); }

// Keeps signals away from threads that are started in its scope: they are for the program's own.
class SignalsBlocked {
 public:
  SignalsBlocked() {
    sigset_t all;
    sigfillset(&all);
    for (const int fault : {SIGSEGV, SIGBUS, SIGFPE, SIGILL, SIGTRAP, SIGABRT}) sigdelset(&all, fault);
    pthread_sigmask(SIG_BLOCK, &all, &before_);
  }
  ~SignalsBlocked() { pthread_sigmask(SIG_SETMASK, &before_, nullptr); }

 private:
  sigset_t before_;
};

// condition_variable computes with deadlines; the end of time overflows.
template <typename Predicate>
bool WaitUntil(std::condition_variable* changed, std::unique_lock<std::mutex>* lock,
               Clock::time_point deadline, Predicate predicate) {
  if (deadline != kNoDeadline) return changed->wait_until(*lock, deadline, predicate);
  changed->wait(*lock, predicate);
  return true;
}

}  // namespace

Status Engine::Open(const EngineOptions& options, std::shared_ptr<Engine>* engine) {
  std::unique_ptr<HostCache> cache;
  Status status = HostCache::Create(options.env, options.cache_bytes, options.block_bytes, &cache);
  if (!status.ok()) return status;
  engine->reset(new Engine(options, std::move(cache)));
  status = (*engine)->StartThreads();
  if (!status.ok()) (*engine)->Close(Clock::now());
  return status;
}

Engine::Engine(const EngineOptions& options, std::unique_ptr<HostCache> cache)
    : options_(options),
      cache_(std::move(cache)),
      shared_(cache_.get()),
      stager_(options.env, cache_.get()),
      pinned_(cache_->count(), 0),
      pin_(options.pin) {}

Status Engine::StartThreads() {
  const SignalsBlocked blocked;
  const auto start = [this](const char* name, void (Engine::*loop)()) {
    std::thread([self = shared_from_this(), name, loop] {
      pthread_setname_np(pthread_self(), name);
      LowerPriority();
      (self.get()->*loop)();
      const Lock lock(self->shared_.mutex);
      --self->threads_running_;
      self->shared_.NotifyAll();
    }).detach();
  };
  const Lock lock(shared_.mutex);
  try {
    start("ckpt-run-write", &Engine::PersistLoop);
    ++threads_running_;
    for (int i = 0; i < options_.threads; ++i) {
      start("ckpt-run-stage", &Engine::StageLoop);
      ++threads_running_;
    }
  } catch (const std::system_error& error) {
    return Status::Error("start a thread", "", error.code().value());
  }
  return {};
}

void Engine::StageLoop() {
  Lock lock(shared_.mutex);
  while (!shared_.stopping || !device_jobs_.empty()) {
    if (!StageSome(&lock, kEveryTicket, kNoDeadline)) shared_.stage_changed.wait(lock);
  }
}

void Engine::PersistLoop() {
  for (;;) {
    try {
      Persister(options_.env, options_.io, &shared_, cache_.get()).Run();
      return;
    } catch (const std::exception& error) {
      // Out of memory for a name or a list: what is in flight is lost, the thread goes on.
      const Lock lock(shared_.mutex);
      for (const auto& ticket : shared_.schedule.tickets()) {
        shared_.schedule.Fail(ticket.get(), Status::Error("write", "", 0, error.what()));
      }
    }
  }
}

Status Engine::Submit(std::vector<PendingFile> files, std::shared_ptr<Ticket>* submitted) {
  const auto ticket = std::make_shared<Ticket>();
  ticket->seed = next_seed_++;
  Status status = MakePlans(std::move(files), ticket.get());
  if (!status.ok()) return status;
  const Status captured = CaptureParts(ticket.get());
  ticket->stats["capture_s"] = Seconds(Clock::now() - ticket->submitted);
  const Lock lock(shared_.mutex);
  if (closed_) {
    ticket->DropCaptured();
    return Status::Error("submit", "", 0, "the engine is closed");
  }
  shared_.schedule.Add(ticket);
  if (!captured.ok()) shared_.schedule.Fail(ticket.get(), captured);
  shared_.NotifyAll();
  *submitted = ticket;
  return {};
}

Status Engine::MakePlans(std::vector<PendingFile> files, Ticket* ticket) {
  double bytes = 0;
  ticket->files.resize(files.size());
  for (size_t i = 0; i < files.size(); ++i) {
    TicketFile& file = ticket->files[i];
    file.temporary = std::move(files[i].temporary);
    file.final_path = std::move(files[i].final_path);
    const Status status = FilePlan::Make(std::move(files[i].image), options_.block_bytes, &file.plan);
    if (!status.ok()) return Status::Error(status.operation(), file.final_path, 0, status.text());
    bytes += static_cast<double>(file.plan.size());
  }
  ticket->stats["bytes"] = bytes;
  MakeBlocks(options_.block_bytes, ticket);
  ticket->stats["cache_need"] = static_cast<double>(ticket->blocks.size() * options_.block_bytes);
  return {};
}

Status Engine::CaptureParts(Ticket* ticket) {
  for (const auto& file : ticket->files) {
    for (const auto& part : file.plan.image().memory) {
      if (part.device == kHostDevice || part.size == 0 || ticket->cuda != nullptr) continue;
      const Status status = FindCuda(&ticket->cuda);
      if (!status.ok()) return status;
    }
  }
  return Capture(ticket->cuda.get(), ticket);
}

Status Engine::FindCuda(std::shared_ptr<Cuda>* cuda) {
  const std::lock_guard<std::mutex> lock(cuda_mutex_);
  if (cuda_ == nullptr) {
    std::unique_ptr<Cuda> opened;
    const Status status = Cuda::Open(options_.cuda_library, &opened);
    if (!status.ok()) return status;
    cuda_ = std::move(opened);
  }
  *cuda = cuda_;
  return {};
}

bool Engine::StageSome(Lock* lock, uint64_t last, Deadline deadline) {
  FillJob job;
  if (device_jobs_.size() < kDeviceDepth && shared_.schedule.TakeFill(last, &job)) {
    const bool device = job.ticket->blocks[job.block].device;
    Guard(job, lock, [&] { device ? FillFromDevice(job, lock) : Fill(job, lock); });
    return true;
  }
  if (device_jobs_.empty()) return false;
  FinishDevice(lock, deadline);
  return true;
}

template <typename Work>
void Engine::Guard(const FillJob& job, Lock* lock, Work work) {
  try {
    work();
  } catch (const std::bad_alloc&) {
    if (!lock->owns_lock()) lock->lock();
    shared_.schedule.Fail(job.ticket.get(), Status::Error("stage", "", ENOMEM));
    if (job.ticket->blocks[job.block].state == BlockState::kFilling) shared_.schedule.FinishFill(job);
    shared_.NotifyAll();
  }
}

void Engine::Fill(const FillJob& job, Lock* lock) {
  const Block block = job.ticket->blocks[job.block];
  lock->unlock();
  std::vector<uint32_t> torn;
  const Status status = stager_.Fill(job.ticket.get(), block, &torn);
  lock->lock();
  FinishFill(job, status, torn, lock);
}

void Engine::FillFromDevice(const FillJob& job, Lock* lock) {
  const Block block = job.ticket->blocks[job.block];
  Cuda* const cuda = job.ticket->cuda.get();
  lock->unlock();
  DeviceJob device_job;
  device_job.job = job;
  PinSlot(cuda, block.slot);
  device_job.status = stager_.Begin(cuda, job.ticket.get(), block, &device_job.marks, &device_job.torn);
  lock->lock();
  device_jobs_.push_back(std::move(device_job));
  shared_.stage_changed.notify_all();
}

void Engine::PinSlot(Cuda* cuda, int slot) {
  char& pinned = pinned_[static_cast<size_t>(slot)];
  if (pinned || !pin_.load(std::memory_order_relaxed)) return;
  const Status status = cuda->Pin(cache_->Data(slot), cache_->block_bytes());
  // Copies work from ordinary memory as well, only slower.
  if (!status.ok()) pin_.store(false, std::memory_order_relaxed);
  pinned = status.ok();
}

void Engine::FinishDevice(Lock* lock, Deadline deadline) {
  DeviceJob device_job = std::move(device_jobs_.front());
  device_jobs_.pop_front();
  Ticket* const ticket = device_job.job.ticket.get();
  const Block block = ticket->blocks[device_job.job.block];
  lock->unlock();
  bool reached = false;
  const Status arrived = AwaitMarks(ticket->cuda.get(), device_job.marks, deadline, &reached);
  if (!reached) {
    lock->lock();
    device_jobs_.push_front(std::move(device_job));
    shared_.stage_changed.notify_all();
    return;
  }
  for (const auto& mark : device_job.marks) ticket->cuda->Release(mark);
  const Status status = device_job.status.ok() ? arrived : device_job.status;
  Guard(device_job.job, lock, [&] {
    if (status.ok()) stager_.End(ticket, block, &device_job.torn);
    lock->lock();
    FinishFill(device_job.job, status, device_job.torn, lock);
  });
}

Status Engine::AwaitMarks(Cuda* cuda, const std::vector<Cuda::Mark>& marks, Deadline deadline,
                          bool* reached) {
  Status first;
  *reached = true;
  for (const auto& mark : marks) {
    Status status;
    if (deadline == kNoDeadline) {
      status = cuda->Wait(mark);
    } else {
      while (status = cuda->Query(mark, reached), !*reached && Clock::now() < deadline) {
        std::this_thread::sleep_for(kDevicePoll);
      }
      if (!*reached) return {};
    }
    if (first.ok()) first = status;
  }
  return first;
}

void Engine::FinishFill(const FillJob& job, Status status, const std::vector<uint32_t>& torn, Lock* lock) {
  Ticket* const ticket = job.ticket.get();
  const TicketFile& file = ticket->files[ticket->blocks[job.block].file];
  if (!torn.empty() && !ticket->failed) {
    lock->unlock();
    // What else has changed will be wanted too: whoever made the save will not trust those parts again.
    std::vector<std::string> names = stager_.ChangedParts(ticket->cuda.get(), ticket);
    for (const uint32_t part : torn) names.push_back(file.plan.image().memory[part].name);
    lock->lock();
    FailTorn(ticket, std::move(names), status);
  } else if (!status.ok()) {
    const std::string& path = status.path().empty() ? file.final_path : status.path();
    shared_.schedule.Fail(ticket, Status::Error(status.operation(), path, status.error(), status.text()));
  }
  shared_.schedule.FinishFill(job);
  if (ticket->quiet()) {
    ticket->stats["pinned"] = ticket->cuda != nullptr && pin_;
    shared_.NotifyAll();
    SideMemory captured = ticket->DropCaptured();
    lock->unlock();
    captured = SideMemory();
    lock->lock();
  }
  SealReady(job.ticket, lock);
  shared_.NotifyAll();
}

void Engine::FailTorn(Ticket* ticket, std::vector<std::string> names, const Status& status) {
  std::sort(names.begin(), names.end());
  names.erase(std::unique(names.begin(), names.end()), names.end());
  std::string text =
      status.ok() ? "memory changed between the save and its staging: " + names.front() : status.text();
  if (names.size() > 1) text += " and " + std::to_string(names.size() - 1) + " more";
  if (!ticket->failed) ticket->torn = std::move(names);
  shared_.schedule.Fail(ticket, Status::Error("snapshot", "", status.error(), text));
}

void Engine::SealReady(const std::shared_ptr<Ticket>& ticket, Lock* lock) {
  size_t number;
  while (shared_.schedule.TakeSeal(ticket, &number)) {
    const Block block = ticket->blocks[number];
    lock->unlock();
    ticket->files[block.file].plan.Seal(block.begin, block.end, cache_->Data(block.slot));
    lock->lock();
    shared_.schedule.FinishSeal(ticket.get());
    shared_.persist_changed.notify_all();
  }
}

template <typename Done>
bool Engine::Await(const std::shared_ptr<Ticket>& ticket, Deadline deadline, bool help, Done done) {
  Lock lock(shared_.mutex);
  while (!done()) {
    if (Clock::now() >= deadline) return false;
    const auto begun = Clock::now();
    if (help && StageSome(&lock, ticket->number, deadline)) {
      ticket->stats["help_s"] += Seconds(Clock::now() - begun);
      continue;
    }
    if (deadline == kNoDeadline) {
      shared_.stage_changed.wait(lock);
    } else {
      shared_.stage_changed.wait_until(lock, deadline);
    }
  }
  return true;
}

bool Engine::AwaitEager(const std::shared_ptr<Ticket>& ticket, Deadline deadline) {
  return Await(ticket, deadline, true,
               [&] { return ticket->eager_left == 0 || (ticket->failed && ticket->quiet()); });
}

bool Engine::AwaitStaged(const std::shared_ptr<Ticket>& ticket, Deadline deadline, bool help) {
  return Await(ticket, deadline, help, [&] { return ticket->quiet(); });
}

bool Engine::AwaitOver(const std::shared_ptr<Ticket>& ticket, Deadline deadline) {
  return Await(ticket, deadline, false, [&] { return ticket->over; });
}

void Engine::Approve(const std::shared_ptr<Ticket>& ticket) {
  const Lock lock(shared_.mutex);
  ticket->approved = true;
  shared_.NotifyAll();
}

void Engine::Cancel(const std::shared_ptr<Ticket>& ticket, const std::string& reason) {
  const Lock lock(shared_.mutex);
  shared_.schedule.Fail(ticket.get(), Status::Error("cancel", "", ECANCELED, reason));
  shared_.NotifyAll();
}

TicketView Engine::Look(const std::shared_ptr<Ticket>& ticket) {
  const Lock lock(shared_.mutex);
  TicketView view{ticket->state, ticket->quiet(), ticket->over, ticket->error, ticket->torn, {},
                  ticket->stats};
  if (ticket->state != TicketState::kPersisted) return view;
  for (const auto& file : ticket->files)
    view.files.push_back({file.final_path, file.plan.size(), file.plan.crc()});
  return view;
}

bool Engine::Drain(Deadline deadline) {
  Lock lock(shared_.mutex);
  closed_ = true;
  return WaitUntil(&shared_.stage_changed, &lock, deadline, [&] { return shared_.schedule.idle(); });
}

bool Engine::Close(Deadline deadline) {
  const bool drained = Drain(deadline);
  Lock lock(shared_.mutex);
  if (!drained) {
    gave_up_ = true;
    const auto status =
        Status::Error("close", "", ECANCELED, "the engine was closed before the save was on disk");
    for (const auto& ticket : shared_.schedule.tickets()) shared_.schedule.Fail(ticket.get(), status);
  }
  shared_.stopping = true;
  shared_.NotifyAll();
  const auto ended = [&] { return threads_running_ == 0; };
  if (!shared_.stage_changed.wait_for(lock, kCloseGrace, ended)) {
    gave_up_ = true;
    return false;
  }
  lock.unlock();
  ReleaseResources();
  return !gave_up_;
}

void Engine::ReleaseResources() {
  const std::lock_guard<std::mutex> lock(cuda_mutex_);
  for (size_t slot = 0; slot < pinned_.size(); ++slot) {
    if (pinned_[slot]) cuda_->Unpin(cache_->Data(static_cast<int>(slot)));
    pinned_[slot] = 0;
  }
  cuda_.reset();
  cache_.reset();
}

}  // namespace ckpt
