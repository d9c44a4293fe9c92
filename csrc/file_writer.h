#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "env.h"
#include "status.h"

namespace ckpt {

enum class IoMode {
  kAuto,      // past the page cache where the file system takes it
  kDirect,    // past the page cache, or fail
  kBuffered,  // through the page cache
};

// Writes one file after another, several blocks at a time. Belongs to one thread.
//
// How a file is written is found by trying: io_uring with O_DIRECT, then pwrite with O_DIRECT, then pwrite
// through the page cache; the next is taken where the one before is refused (EINVAL and its kin). Short
// writes are continued.
class FileWriter {
 public:
  FileWriter(Env* env, IoMode mode, unsigned depth);
  ~FileWriter();

  // Creates the file. One of the same name (left by a process that died) is replaced.
  Status Open(const std::string& path);
  bool is_open() const { return fd_ >= 0; }

  // Starts to write `size` bytes at `data` to `offset`, a multiple of kPage. `data` is aligned to kPage, and
  // readable up to the next multiple of kPage beyond `size`; it must stay as it is until WaitOne has returned
  // `tag`. Not when full.
  void Start(const char* data, size_t size, uint64_t offset, uint64_t tag);
  bool full() const { return in_flight_ == depth_; }
  size_t in_flight() const { return in_flight_; }

  // Waits until one block is written, or has failed: *tag says which in both cases. Needs one in flight.
  Status WaitOne(uint64_t* tag);

  // Cuts the file at `size`, makes it durable and closes it. Needs none in flight.
  Status Finish(uint64_t size);

  // Closes the file as it is. Needs none in flight.
  void Abandon();

  // How the last block was written.
  bool direct() const { return direct_; }
  bool background() const { return direct_ && ring_ != nullptr && !ring_refused_; }

 private:
  struct Write {
    const char* data;
    size_t size;
    uint64_t offset;
    uint64_t tag;
    size_t done = 0;
    int stalls = 0;
    bool busy = false;
    bool direct = false;  // how it was issued last, like the next one
    bool in_ring = false;
    bool avoid_ring = false;
  };

  void Issue(size_t slot);
  // Takes the result of a write; true when there is nothing more to do for it and `status` is final.
  bool Settle(Write& write, int64_t result, Status* status);
  // Takes the next plainer way for a write that was refused; false when there is none.
  bool StepDown(Write& write);
  void WaitForRing();
  Status Error(const char* operation, int64_t result) const;

  Env* const env_;
  const IoMode mode_;
  const unsigned depth_;
  std::unique_ptr<Ring> ring_;
  std::vector<Write> writes_;
  std::vector<Ring::Completion> finished_;  // writes that ended without the ring
  size_t in_flight_ = 0;
  std::string path_;
  int fd_ = -1;
  bool direct_ = false;
  bool ring_refused_ = false;
  uint64_t written_end_ = 0;
};

}  // namespace ckpt
