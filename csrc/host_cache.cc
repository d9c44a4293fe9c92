#include "host_cache.h"

#include <unistd.h>

#include <algorithm>

namespace ckpt {

Status HostCache::Create(Env* env, size_t cache_bytes, size_t block_bytes,
                         std::unique_ptr<HostCache>* cache) {
  const size_t count = cache_bytes / block_bytes;
  const std::string name = "ckpt-run-" + std::to_string(getpid());
  char* base = nullptr;
  const int fd = env->MapMemory(name, kHeaderBytes + count * block_bytes, &base);
  if (fd < 0) return Status::Error("allocate", "host cache", -fd);
  cache->reset(new HostCache(env, fd, base, block_bytes, count));
  return {};
}

HostCache::HostCache(Env* env, int fd, char* base, size_t block_bytes, size_t count)
    : env_(env), fd_(fd), base_(base), block_bytes_(block_bytes), committed_(count, 0), free_(count) {
  for (size_t i = 0; i < count; ++i) free_[i] = static_cast<int>(count - 1 - i);
}

HostCache::~HostCache() { env_->UnmapMemory(fd_, base_, kHeaderBytes + count() * block_bytes_); }

int HostCache::Take() {
  const int block = free_.back();
  free_.pop_back();
  return block;
}

void HostCache::Give(int block) { free_.push_back(block); }

Status HostCache::Commit(int block, size_t bytes) {
  size_t& committed = committed_[static_cast<size_t>(block)];
  bytes = std::min((bytes + kPage - 1) / kPage * kPage, block_bytes_);
  if (bytes <= committed) return {};
  const size_t offset = static_cast<size_t>(Data(block) - base_) + committed;
  const int error = env_->CommitMemory(fd_, base_, offset, bytes - committed);
  if (error < 0) return Status::Error("allocate", "host cache", -error);
  committed = bytes;
  return {};
}

}  // namespace ckpt
