#include "snapshot.h"

#include <algorithm>
#include <cstring>

namespace ckpt {
namespace {

// A well-spread number from two (the finalizer of a 64-bit multiplicative hash).
uint64_t Mix(uint64_t a, uint64_t b) {
  uint64_t x = a * 0x9e3779b97f4a7c15u + b;
  x ^= x >> 32;
  x *= 0xd6e8feb86659fd93u;
  return x ^ (x >> 32);
}

}  // namespace

uint64_t HostSpot(uint64_t size, size_t i, uint64_t seed) {
  if (i == 0) return 0;
  if (i == kSpots - 1) return size - kSpotBytes;
  const uint64_t stratum = size / kSpots;
  return i * stratum + Mix(seed, i) % (stratum - kSpotBytes + 1);
}

uint64_t DeviceSpotPitch(uint64_t size) { return (size - kSpotBytes) / (kSpots - 1); }

uint64_t DeviceSpot(uint64_t size, size_t i) {
  return size - kSpotBytes - (kSpots - 1 - i) * DeviceSpotPitch(size);
}

uint64_t Spot(const MemoryPart& part, size_t i, uint64_t seed) {
  return part.device == kHostDevice ? HostSpot(part.size, i, seed) : DeviceSpot(part.size, i);
}

void TakeHostSample(const MemoryPart& part, uint64_t seed, char* sample) {
  const char* memory = reinterpret_cast<const char*>(part.address);
  for (size_t i = 0; i < kSpots; ++i) {
    std::memcpy(sample + i * kSpotBytes, memory + HostSpot(part.size, i, seed), kSpotBytes);
  }
}

bool AgreesWithSample(const MemoryPart& part, uint64_t seed, uint64_t begin, uint64_t end, const char* data) {
  for (size_t i = 0; i < kSpots; ++i) {
    const uint64_t spot = Spot(part, i, seed);
    const uint64_t from = std::max(spot, begin);
    const uint64_t to = std::min(spot + kSpotBytes, end);
    if (from >= to) continue;
    if (std::memcmp(part.sample + i * kSpotBytes + (from - spot), data + (from - begin), to - from) != 0)
      return false;
  }
  return true;
}

char* SideMemory::Allocate(size_t size) {
  if (size > left_) {
    const size_t chunk = std::max(size, kChunk);
    chunks_.emplace_back(new char[chunk]);
    next_ = chunks_.back().get();
    left_ = chunk;
  }
  char* const allocated = next_;
  next_ += size;
  left_ -= size;
  return allocated;
}

}  // namespace ckpt
