#include "uring.h"

#if defined(__has_include)
#if __has_include(<linux/io_uring.h>)
#define CKPT_HAVE_URING 1
#endif
#endif

#ifdef CKPT_HAVE_URING

#include <errno.h>
#include <linux/io_uring.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cstring>

#ifndef SYS_io_uring_setup
#define SYS_io_uring_setup 425
#define SYS_io_uring_enter 426
#endif

namespace ckpt {
namespace {

// A mapping of a part of the ring's memory that goes with its owner.
class Mapping {
 public:
  ~Mapping() {
    if (base_ != nullptr) munmap(base_, size_);
  }

  bool Map(int fd, size_t size, off_t offset) {
    void* base = mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_POPULATE, fd, offset);
    if (base == MAP_FAILED) return false;
    base_ = static_cast<char*>(base);
    size_ = size;
    // A forked child must not see our writes end, nor start any.
    madvise(base, size, MADV_DONTFORK);
    return true;
  }

  template <typename T>
  T* At(size_t offset) const {
    return reinterpret_cast<T*>(base_ + offset);
  }

 private:
  char* base_ = nullptr;
  size_t size_ = 0;
};

// One submission at a time, so the only concurrency is with the kernel: the ring's own protocol of head and
// tail.
class Uring : public Ring {
 public:
  ~Uring() override {
    if (fd_ >= 0) close(fd_);
  }

  bool Init(unsigned depth) {
    io_uring_params params;
    std::memset(&params, 0, sizeof(params));
    fd_ = static_cast<int>(syscall(SYS_io_uring_setup, depth, &params));
    if (fd_ < 0) return false;
    offsets_ = params;
    return submissions_.Map(fd_, params.sq_off.array + params.sq_entries * sizeof(uint32_t),
                            IORING_OFF_SQ_RING) &&
           completions_.Map(fd_, params.cq_off.cqes + params.cq_entries * sizeof(io_uring_cqe),
                            IORING_OFF_CQ_RING) &&
           entries_.Map(fd_, params.sq_entries * sizeof(io_uring_sqe), IORING_OFF_SQES);
  }

  int Write(int fd, const void* data, size_t size, uint64_t offset, uint64_t tag) override {
    auto* tail = submissions_.At<uint32_t>(offsets_.sq_off.tail);
    const uint32_t at = *tail;
    const uint32_t slot = at & *submissions_.At<uint32_t>(offsets_.sq_off.ring_mask);
    io_uring_sqe& entry = entries_.At<io_uring_sqe>(0)[slot];
    std::memset(&entry, 0, sizeof(entry));
    entry.opcode = IORING_OP_WRITE;
    entry.fd = fd;
    entry.addr = reinterpret_cast<uint64_t>(data);
    entry.len = static_cast<uint32_t>(size);
    entry.off = offset;
    entry.user_data = tag;
    submissions_.At<uint32_t>(offsets_.sq_off.array)[slot] = slot;
    __atomic_store_n(tail, at + 1, __ATOMIC_RELEASE);
    const int submitted = Enter(1, 0, 0);
    if (submitted == 1) return 0;
    // The kernel took nothing: take the entry back, so that it is not submitted later with a buffer that is
    // gone.
    __atomic_store_n(tail, at, __ATOMIC_RELEASE);
    return submitted < 0 ? submitted : -EAGAIN;
  }

  int Wait(Completion* completion) override {
    auto* head = completions_.At<uint32_t>(offsets_.cq_off.head);
    const auto* tail = completions_.At<uint32_t>(offsets_.cq_off.tail);
    while (*head == __atomic_load_n(tail, __ATOMIC_ACQUIRE)) {
      const int result = Enter(0, 1, IORING_ENTER_GETEVENTS);
      if (result < 0) return result;
    }
    const uint32_t slot = *head & *completions_.At<uint32_t>(offsets_.cq_off.ring_mask);
    const io_uring_cqe& entry = completions_.At<io_uring_cqe>(offsets_.cq_off.cqes)[slot];
    *completion = {entry.user_data, entry.res};
    __atomic_store_n(head, *head + 1, __ATOMIC_RELEASE);
    return 0;
  }

 private:
  int Enter(unsigned submit, unsigned wait, unsigned flags) {
    for (;;) {
      const long result = syscall(SYS_io_uring_enter, fd_, submit, wait, flags, nullptr, 0);
      if (result >= 0) return static_cast<int>(result);
      if (errno != EINTR) return -errno;
    }
  }

  int fd_ = -1;
  io_uring_params offsets_;
  Mapping submissions_;
  Mapping completions_;
  Mapping entries_;
};

}  // namespace

std::unique_ptr<Ring> NewUring(unsigned depth) {
  auto ring = std::make_unique<Uring>();
  if (!ring->Init(depth)) return nullptr;
  return ring;
}

}  // namespace ckpt

#else

namespace ckpt {

std::unique_ptr<Ring> NewUring(unsigned) { return nullptr; }

}  // namespace ckpt

#endif
