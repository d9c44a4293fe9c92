#pragma once

#include <cstddef>
#include <cstdint>

// The CRC-32 of zip and zlib (polynomial 0x04C11DB7, bits reflected).
//
// All functions are pure and may be called from any thread. The fast paths hide behind the same functions;
// which one runs is decided once, by what the processor can do.

namespace ckpt {

// The CRC-32 of `size` bytes at `data`, continued from `crc`, the CRC-32 of what comes before them (0:
// nothing). Equal to zlib's crc32(crc, data, size).
uint32_t Crc32(uint32_t crc, const void* data, size_t size);

// The same through tables alone: what runs where the processor has no instruction to help.
uint32_t Crc32Portable(uint32_t crc, const void* data, size_t size);

// The CRC-32 of A followed by B, from the CRC-32 of each and the size of B in bytes.
uint32_t Crc32Combine(uint32_t crc_a, uint32_t crc_b, uint64_t size_b);

// The CRC-32 of B alone, from the CRC-32 of A followed by B, that of A, and the size of B: the inverse of
// Crc32Combine. With it, the checksum of any range follows from the checksums of two prefixes of the file.
inline uint32_t Crc32Suffix(uint32_t crc_ab, uint32_t crc_a, uint64_t size_b) {
  return crc_ab ^ Crc32Combine(crc_a, 0, size_b);
}

// What Crc32 uses on this machine: "pclmulqdq", "armv8-crc" or "portable".
const char* Crc32Path();

}  // namespace ckpt
