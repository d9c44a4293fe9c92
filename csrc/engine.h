#pragma once

#include <atomic>
#include <chrono>
#include <deque>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "cuda_driver.h"
#include "env.h"
#include "file_writer.h"
#include "host_cache.h"
#include "persister.h"
#include "schedule.h"
#include "stager.h"
#include "status.h"
#include "ticket.h"

namespace ckpt {

struct EngineOptions {
  size_t cache_bytes = 0;  // at least two blocks
  size_t block_bytes = 0;  // a multiple of kPage
  int threads = 1;         // that stage; one more writes
  bool pin = true;         // page-lock cache blocks that take bytes from a device
  IoMode io = IoMode::kAuto;
  std::string cuda_library = "libcuda.so.1";
  Env* env = Env::Default();  // not owned; outlives the engine and its threads
};

struct FileOutcome {
  std::string path;
  uint64_t size;
  uint32_t crc32;
};

// All that can be asked about a ticket, at one moment.
struct TicketView {
  TicketState state;
  bool quiet;  // nobody reads the submitter's memory any more, nor will
  bool over;   // nothing more will happen
  Status error;
  std::vector<std::string> torn;
  std::vector<FileOutcome> files;  // in the order submitted, once persisted
  std::map<std::string, double> stats;
};

// Turns file images into durable files on its own threads, through a host cache of fixed size.
//
// Thread-safe. Nothing is thrown, on no thread. Its threads keep it alive; Close ends them, and must be
// called. In a forked child nothing may be called at all: the threads and the cache are not there.
class Engine : public std::enable_shared_from_this<Engine> {
 public:
  using Deadline = Clock::time_point;

  static Status Open(const EngineOptions& options, std::shared_ptr<Engine>* engine);

  // Takes in one save. Refuses a malformed image (operation "image") and everything after Close (operation
  // "submit"); any later trouble is the ticket's. The memory of parts that are not still must not change
  // before AwaitEager has returned true, that of still parts before AwaitStaged has; literals must live as
  // long.
  Status Submit(std::vector<PendingFile> files, std::shared_ptr<Ticket>* ticket);

  // Wait, each until the deadline; false: not yet. AwaitEager always helps; AwaitStaged copies on the calling
  // thread too when `help`. Both are over as well when the ticket has failed and nobody reads its memory any
  // more.
  bool AwaitEager(const std::shared_ptr<Ticket>& ticket, Deadline deadline);
  bool AwaitStaged(const std::shared_ptr<Ticket>& ticket, Deadline deadline, bool help);
  bool AwaitOver(const std::shared_ptr<Ticket>& ticket, Deadline deadline);

  void Approve(const std::shared_ptr<Ticket>& ticket);
  // Gives the ticket up, with operation "cancel". No effect once its files are getting their names.
  void Cancel(const std::shared_ptr<Ticket>& ticket, const std::string& reason);
  TicketView Look(const std::shared_ptr<Ticket>& ticket);

  // Takes in no more, and waits until nothing is in flight; false: the deadline came first.
  bool Drain(Deadline deadline);

  // Drains, gives up at the deadline what is not on disk then, and ends the
  // threads. True if every ticket ended by itself and every thread has ended. A thread that hangs in a system
  // call is left behind, with the cache.
  bool Close(Deadline deadline);

  size_t block_bytes() const { return options_.block_bytes; }

 private:
  using Lock = std::unique_lock<std::mutex>;

  // A block whose copies from devices are on their way.
  struct DeviceJob {
    FillJob job;
    std::vector<Cuda::Mark> marks;
    std::vector<uint32_t> torn;
    Status status;
  };

  Engine(const EngineOptions& options, std::unique_ptr<HostCache> cache);
  Status StartThreads();
  void StageLoop();
  void PersistLoop();

  Status MakePlans(std::vector<PendingFile> files, Ticket* ticket);
  Status CaptureParts(Ticket* ticket);
  Status FindCuda(std::shared_ptr<Cuda>* cuda);

  // Does one piece of staging work of tickets up to number `last`, if there is any. A caller with a deadline
  // does not wait for a device longer than that.
  bool StageSome(Lock* lock, uint64_t last, Deadline deadline);
  // Calls `work`, which fills the job's block; out of memory, the ticket fails and the thread goes on.
  template <typename Work>
  void Guard(const FillJob& job, Lock* lock, Work work);
  void Fill(const FillJob& job, Lock* lock);
  void FillFromDevice(const FillJob& job, Lock* lock);
  void FinishDevice(Lock* lock, Deadline deadline);
  Status AwaitMarks(Cuda* cuda, const std::vector<Cuda::Mark>& marks, Deadline deadline, bool* reached);
  void FinishFill(const FillJob& job, Status status, const std::vector<uint32_t>& torn, Lock* lock);
  void FailTorn(Ticket* ticket, std::vector<std::string> names, const Status& status);
  void SealReady(const std::shared_ptr<Ticket>& ticket, Lock* lock);
  void PinSlot(Cuda* cuda, int slot);
  template <typename Done>
  bool Await(const std::shared_ptr<Ticket>& ticket, Deadline deadline, bool help, Done done);
  void ReleaseResources();

  const EngineOptions options_;
  std::unique_ptr<HostCache> cache_;
  Shared shared_;
  Stager stager_;
  int threads_running_ = 0;  // guarded by shared_.mutex, like the next three
  bool closed_ = false;
  bool gave_up_ = false;  // Close did, on a ticket or a thread
  std::deque<DeviceJob> device_jobs_;
  std::atomic<uint64_t> next_seed_{1};

  std::mutex cuda_mutex_;
  std::shared_ptr<Cuda> cuda_;
  std::vector<char> pinned_;  // by slot; touched by whoever has the slot
  std::atomic<bool> pin_;     // false: not asked for, or refused
};

}  // namespace ckpt
