#pragma once

#include <sys/types.h>
#include <sys/uio.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>

namespace ckpt {

// Writes that run in the background of one thread. Not thread-safe.
class Ring {
 public:
  struct Completion {
    uint64_t tag;
    int64_t result;  // bytes written, or -errno
  };

  virtual ~Ring() = default;

  // Starts to write `size` bytes at `data` to `offset` of `fd`. Returns 0 or -errno; after 0, `data` must
  // stay as it is until Wait has returned `tag`. The caller keeps no more writes under way than the depth the
  // ring was made with.
  virtual int Write(int fd, const void* data, size_t size, uint64_t offset, uint64_t tag) = 0;

  // Waits for one of the writes under way to end. Returns 0 or -errno. Must not be called with none under
  // way.
  virtual int Wait(Completion* completion) = 0;
};

// Every system call that the engine makes on files and memory, so that a test can fail any one of them in a
// subclass.
//
// Results follow the kernel: a value of 0 or more, or -errno. EINTR is handled inside. Safe to use from any
// thread.
class Env {
 public:
  virtual ~Env() = default;

  // The real system. Never deleted.
  static Env* Default();

  // Creates a file that did not exist, for writing, with the mode that the umask leaves of 0666. Returns its
  // descriptor. A file or link of that name that is already there: -EEXIST.
  virtual int Create(const std::string& path);
  // Turns writing past the page cache on or off. -EINVAL: not on this file system.
  virtual int SetDirect(int fd, bool direct);
  virtual int64_t Pwrite(int fd, const void* data, size_t size, uint64_t offset);
  // Tells the kernel to begin writing out what the page cache holds of a range; waits for nothing.
  virtual int StartWriteback(int fd, uint64_t offset, uint64_t size);
  virtual int Truncate(int fd, uint64_t size);
  virtual int Datasync(int fd);
  virtual int Close(int fd);
  virtual int Rename(const std::string& from, const std::string& to);
  virtual int Unlink(const std::string& path);
  // Makes the entries of a directory durable. A file system that knows no such thing counts as success.
  virtual int SyncDirectory(const std::string& path);

  // A ring for up to `depth` writes at a time, or null where the system has none (or forbids it).
  virtual std::unique_ptr<Ring> NewRing(unsigned depth);

  // Shared memory without a name in any file system, all zeros, mapped at *base; returns its descriptor. No
  // page of it exists before it is touched or committed. A forked child has no mapping of it.
  virtual int MapMemory(const std::string& name, size_t size, char** base);
  // Makes the pages of a page-aligned range exist: -ENOMEM or the like instead of a SIGBUS at the first
  // touch.
  virtual int CommitMemory(int fd, char* base, size_t offset, size_t size);
  virtual void UnmapMemory(int fd, char* base, size_t size);

  // Copies memory of this process as process_vm_readv does: memory that is not there gives -EFAULT, or a
  // short count, and no signal. -EPERM or -ENOSYS where the kernel does not allow it.
  virtual int64_t ReadMemory(const iovec* to, size_t to_count, const iovec* from, size_t from_count);
};

}  // namespace ckpt
