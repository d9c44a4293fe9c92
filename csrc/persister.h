#pragma once

#include <condition_variable>
#include <memory>
#include <mutex>

#include "env.h"
#include "file_writer.h"
#include "schedule.h"

namespace ckpt {

// What the engine's threads share. `changed` is signalled whenever a waiting thread may have something to do.
struct Shared {
  explicit Shared(HostCache* cache) : schedule(cache) {}

  std::mutex mutex;
  std::condition_variable stage_changed;    // for whoever fills blocks, or waits for a ticket
  std::condition_variable persist_changed;  // for the persister
  Schedule schedule;
  bool stopping = false;  // threads end when nothing is left to do

  void NotifyAll() {
    stage_changed.notify_all();
    persist_changed.notify_all();
  }
};

// Everything that happens to files, on the one thread that calls Run: sealed blocks are written under the
// temporary names, files are made durable, approved tickets get their files renamed, failed ones are cleaned
// up.
//
// A ticket that waits for its approval holds up nobody: later ones are written meanwhile.
class Persister {
 public:
  Persister(Env* env, IoMode mode, Shared* shared, HostCache* cache);

  // Works until the engine stops and every ticket is over.
  void Run();

 private:
  using Lock = std::unique_lock<std::mutex>;

  // Each does one thing if there is something of its kind to do, and says whether there was.
  bool AbandonFailed(Lock* lock);
  bool CleanUp(Lock* lock);
  bool Publish(Lock* lock);
  bool OpenNext(Lock* lock);
  bool StartWrite(Lock* lock);
  bool FinishFile(Lock* lock);
  bool WaitForWrite(Lock* lock);

  void DeleteTemporaries(const Ticket& ticket);
  Status RenameAll(const Ticket& ticket);

  Env* const env_;
  Shared& shared_;
  HostCache& cache_;
  FileWriter writer_;
  std::shared_ptr<Ticket>
      open_;  // whose file at write_file the writer has open; all writes in flight are its
};

}  // namespace ckpt
