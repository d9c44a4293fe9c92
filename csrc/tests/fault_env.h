#pragma once

#include <errno.h>

#include <functional>
#include <mutex>
#include <string>

#include "../env.h"

namespace ckpt::test {

// The real system with faults. `fault` is asked before each call, with its name; an answer other than 0 is
// returned instead of making the call. Calls may come from any thread, one at a time.
class FaultEnv : public Env {
 public:
  using Fault = std::function<int(const std::string& call)>;

  void SetFault(Fault fault) {
    const std::lock_guard<std::mutex> lock(mutex_);
    fault_ = std::move(fault);
  }

  bool use_ring = true;
  size_t largest_write = ~size_t{0};  // longer ones are cut short

  int Create(const std::string& path) override {
    const int error = Ask("create");
    return error != 0 ? error : Env::Create(path);
  }
  int SetDirect(int fd, bool direct) override {
    const int error = Ask(direct ? "direct" : "buffered");
    return error != 0 ? error : Env::SetDirect(fd, direct);
  }
  int64_t Pwrite(int fd, const void* data, size_t size, uint64_t offset) override {
    const int error = Ask("pwrite");
    return error != 0 ? error : Env::Pwrite(fd, data, size < largest_write ? size : largest_write, offset);
  }
  int Truncate(int fd, uint64_t size) override {
    const int error = Ask("truncate");
    return error != 0 ? error : Env::Truncate(fd, size);
  }
  int Datasync(int fd) override {
    const int error = Ask("datasync");
    return error != 0 ? error : Env::Datasync(fd);
  }
  int Rename(const std::string& from, const std::string& to) override {
    const int error = Ask("rename");
    return error != 0 ? error : Env::Rename(from, to);
  }
  int Unlink(const std::string& path) override {
    const int error = Ask("unlink");
    return error != 0 ? error : Env::Unlink(path);
  }
  int SyncDirectory(const std::string& path) override {
    const int error = Ask("syncdir");
    return error != 0 ? error : Env::SyncDirectory(path);
  }
  int CommitMemory(int fd, char* base, size_t offset, size_t size) override {
    const int error = Ask("commit");
    return error != 0 ? error : Env::CommitMemory(fd, base, offset, size);
  }
  int64_t ReadMemory(const iovec* to, size_t to_count, const iovec* from, size_t from_count) override {
    const int error = Ask("readmemory");
    return error != 0 ? error : Env::ReadMemory(to, to_count, from, from_count);
  }
  std::unique_ptr<Ring> NewRing(unsigned depth) override {
    if (!use_ring) return nullptr;
    std::unique_ptr<Ring> ring = Env::NewRing(depth);
    if (ring == nullptr) return nullptr;
    return std::make_unique<FaultRing>(this, std::move(ring));
  }

 private:
  class FaultRing : public Ring {
   public:
    FaultRing(FaultEnv* env, std::unique_ptr<Ring> ring) : env_(*env), ring_(std::move(ring)) {}
    int Write(int fd, const void* data, size_t size, uint64_t offset, uint64_t tag) override {
      const int error = env_.Ask("ringwrite");
      if (error != 0) return error;
      return ring_->Write(fd, data, size < env_.largest_write ? size : env_.largest_write, offset, tag);
    }
    int Wait(Completion* completion) override {
      const int result = ring_->Wait(completion);
      if (result < 0) return result;
      const int error = env_.Ask("ringresult");
      if (error != 0) completion->result = error;
      return 0;
    }

   private:
    FaultEnv& env_;
    const std::unique_ptr<Ring> ring_;
  };

  int Ask(const std::string& call) {
    const std::lock_guard<std::mutex> lock(mutex_);
    return fault_ ? fault_(call) : 0;
  }

  std::mutex mutex_;
  Fault fault_;
};

// A fault that happens at the `nth` call of one name (from 1), and at all after it if `from_then_on`.
inline FaultEnv::Fault At(std::string name, int nth, int error, bool from_then_on = true) {
  return [name = std::move(name), nth, error, from_then_on, count = 0](const std::string& call) mutable {
    if (call != name) return 0;
    ++count;
    return count == nth || (from_then_on && count > nth) ? error : 0;
  };
}

// The same for writes, whichever way they are made here: a machine may have no io_uring.
inline FaultEnv::Fault AtWrite(int nth, int error, bool from_then_on = true) {
  return [at = At("write", nth, error, from_then_on)](const std::string& call) mutable {
    return call == "ringresult" || call == "pwrite" ? at("write") : 0;
  };
}

}  // namespace ckpt::test
