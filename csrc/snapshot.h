#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "file_image.h"

// How a torn snapshot is noticed: a few spots of every watched part are read at the save and compared with
// the bytes that were staged later.

namespace ckpt {

constexpr size_t kSpots = 32;
constexpr size_t kSpotBytes = 8;
constexpr size_t kSampleBytes = kSpots * kSpotBytes;

// A part of up to this size is simply copied at the save: no dearer than its sample.
constexpr uint64_t kAlwaysCopied = 1024;

// Where spot `i` of a part of `size` > kAlwaysCopied bytes begins. Spots rise and do not overlap; the last
// one ends the part. On the host the first one begins it and those between vary with `seed`, so that
// different saves look at different places; on a device they lie at one distance, which is what one strided
// copy can fetch.
uint64_t HostSpot(uint64_t size, size_t i, uint64_t seed);
uint64_t DeviceSpot(uint64_t size, size_t i);
uint64_t DeviceSpotPitch(uint64_t size);
uint64_t Spot(const MemoryPart& part, size_t i, uint64_t seed);

// Reads the spots of a host part into `sample` (kSampleBytes).
void TakeHostSample(const MemoryPart& part, uint64_t seed, char* sample);

// Whether the bytes [begin, end) of the part, which are at `data`, agree with its sample as far as spots lie
// in them.
bool AgreesWithSample(const MemoryPart& part, uint64_t seed, uint64_t begin, uint64_t end, const char* data);

// Memory for the copies that are made at a save, given back all at once. Not thread-safe.
class SideMemory {
 public:
  char* Allocate(size_t size);

 private:
  static constexpr size_t kChunk = 1 << 20;
  std::vector<std::unique_ptr<char[]>> chunks_;
  char* next_ = nullptr;
  size_t left_ = 0;
};

}  // namespace ckpt
