#pragma once

#include <cstddef>
#include <memory>
#include <vector>

#include "env.h"
#include "status.h"

namespace ckpt {

constexpr size_t kPage = 4096;  // also what O_DIRECT wants memory, offsets and sizes to be a multiple of

// The fixed pool of host memory that staged bytes wait in: `count` blocks of one size, each aligned to kPage.
//
// The memory is one anonymous file, named ckpt-run-<pid>, that another process can map; its first page is
// left to an index. It is reserved at once but exists only where it was committed, and a block that was given
// back last is taken first, so a job that needs few blocks touches few.
//
// Take, Give and free_count need the caller's lock. Commit and Data may be called without it by whoever took
// the block.
class HostCache {
 public:
  static constexpr size_t kHeaderBytes = kPage;

  // `block_bytes` is a multiple of kPage; `cache_bytes` holds at least two blocks.
  static Status Create(Env* env, size_t cache_bytes, size_t block_bytes, std::unique_ptr<HostCache>* cache);
  ~HostCache();
  HostCache(const HostCache&) = delete;
  HostCache& operator=(const HostCache&) = delete;

  size_t block_bytes() const { return block_bytes_; }
  size_t count() const { return committed_.size(); }
  size_t free_count() const { return free_.size(); }

  // A free block's number. There must be one.
  int Take();
  void Give(int block);

  char* Data(int block) const { return base_ + kHeaderBytes + static_cast<size_t>(block) * block_bytes_; }

  // Makes sure that the first `bytes` of a block can be touched.
  Status Commit(int block, size_t bytes);

 private:
  HostCache(Env* env, int fd, char* base, size_t block_bytes, size_t count);

  Env* const env_;
  const int fd_;
  char* const base_;
  const size_t block_bytes_;
  std::vector<size_t> committed_;  // bytes of each block that exist
  std::vector<int> free_;
};

}  // namespace ckpt
