#include "env.h"

#include <errno.h>
#include <fcntl.h>
#include <linux/memfd.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "uring.h"

#ifndef MADV_POPULATE_WRITE
#define MADV_POPULATE_WRITE 23
#endif

namespace ckpt {
namespace {

// Calls `call` until no signal interrupts it; turns -1 into -errno.
template <typename Call>
auto Retry(Call call) -> decltype(call()) {
  for (;;) {
    const auto result = call();
    if (result >= 0) return result;
    if (errno != EINTR) return -errno;
  }
}

}  // namespace

Env* Env::Default() {
  static Env* const env = new Env();  // threads may outlive static destruction
  return env;
}

int Env::Create(const std::string& path) {
  return Retry(
      [&] { return open(path.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_NOFOLLOW | O_CLOEXEC, 0666); });
}

int Env::SetDirect(int fd, bool direct) {
  const int flags = fcntl(fd, F_GETFL);
  if (flags < 0) return -errno;
  return Retry([&] { return fcntl(fd, F_SETFL, direct ? flags | O_DIRECT : flags & ~O_DIRECT); });
}

int64_t Env::Pwrite(int fd, const void* data, size_t size, uint64_t offset) {
  return Retry([&]() -> int64_t { return pwrite(fd, data, size, static_cast<off_t>(offset)); });
}

int Env::StartWriteback(int fd, uint64_t offset, uint64_t size) {
  return Retry([&] {
    return sync_file_range(fd, static_cast<off_t>(offset), static_cast<off_t>(size), SYNC_FILE_RANGE_WRITE);
  });
}

int Env::Truncate(int fd, uint64_t size) {
  return Retry([&] { return ftruncate(fd, static_cast<off_t>(size)); });
}

int Env::Datasync(int fd) {
  return Retry([&] { return fdatasync(fd); });
}

int Env::Close(int fd) {
  // After EINTR the descriptor is closed all the same on Linux; trying again could close another thread's.
  return close(fd) == 0 || errno == EINTR ? 0 : -errno;
}

int Env::Rename(const std::string& from, const std::string& to) {
  return Retry([&] { return rename(from.c_str(), to.c_str()); });
}

int Env::Unlink(const std::string& path) {
  return Retry([&] { return unlink(path.c_str()); });
}

int Env::SyncDirectory(const std::string& path) {
  const int fd = Retry([&] { return open(path.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC); });
  if (fd < 0) return fd;
  const int result = Retry([&] { return fsync(fd); });
  close(fd);
  return result == -EINVAL ? 0 : result;
}

std::unique_ptr<Ring> Env::NewRing(unsigned depth) { return NewUring(depth); }

int Env::MapMemory(const std::string& name, size_t size, char** base) {
  const int fd = static_cast<int>(syscall(SYS_memfd_create, name.c_str(), MFD_CLOEXEC));
  if (fd < 0) return -errno;
  int error = Env::Truncate(fd, size);
  if (error == 0) {
    void* address = mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    if (address != MAP_FAILED) {
      madvise(address, size, MADV_DONTFORK);
      madvise(address, size, MADV_DONTDUMP);
      *base = static_cast<char*>(address);
      return fd;
    }
    error = -errno;
  }
  close(fd);
  return error;
}

int Env::CommitMemory(int fd, char* base, size_t offset, size_t size) {
  const int populated = Retry([&] { return madvise(base + offset, size, MADV_POPULATE_WRITE); });
  if (populated == -EFAULT) return -ENOMEM;  // what would have been a SIGBUS
  if (populated != -EINVAL) return populated;
  // Linux before 5.14.
  return Retry([&] { return fallocate(fd, 0, static_cast<off_t>(offset), static_cast<off_t>(size)); });
}

void Env::UnmapMemory(int fd, char* base, size_t size) {
  munmap(base, size);
  close(fd);
}

int64_t Env::ReadMemory(const iovec* to, size_t to_count, const iovec* from, size_t from_count) {
  return Retry([&]() -> int64_t { return process_vm_readv(getpid(), to, to_count, from, from_count, 0); });
}

}  // namespace ckpt
