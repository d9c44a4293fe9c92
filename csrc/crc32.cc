#include "crc32.h"

#include <array>
#include <cstring>

#if defined(__x86_64__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <asm/hwcap.h>
#include <sys/auxv.h>
#endif

namespace ckpt {
namespace {

constexpr uint32_t kPolynomial = 0xedb88320;  // reflected: bit 31 is the coefficient of x^0

// kTables[k][b]: the effect of byte b followed by k zero bytes.
constexpr std::array<std::array<uint32_t, 256>, 8> MakeTables() {
  std::array<std::array<uint32_t, 256>, 8> tables{};
  for (uint32_t byte = 0; byte < 256; ++byte) {
    uint32_t crc = byte;
    for (int bit = 0; bit < 8; ++bit) crc = (crc >> 1) ^ ((crc & 1) ? kPolynomial : 0);
    tables[0][byte] = crc;
  }
  for (size_t k = 1; k < 8; ++k) {
    for (uint32_t byte = 0; byte < 256; ++byte) {
      const uint32_t previous = tables[k - 1][byte];
      tables[k][byte] = (previous >> 8) ^ tables[0][previous & 0xff];
    }
  }
  return tables;
}

constexpr auto kTables = MakeTables();

// The functions named Raw work on the register itself, which is the complement of the CRC.
uint32_t RawPortable(uint32_t state, const uint8_t* data, size_t size) {
  while (size >= 8) {
    uint64_t word;
    std::memcpy(&word, data, 8);
    word ^= state;
    state = 0;
    for (int k = 0; k < 8; ++k) state ^= kTables[7 - k][(word >> (8 * k)) & 0xff];
    data += 8;
    size -= 8;
  }
  for (; size > 0; --size) state = (state >> 8) ^ kTables[0][(state ^ *data++) & 0xff];
  return state;
}

// a * b modulo the polynomial, both reflected.
constexpr uint32_t MultiplyModulo(uint32_t a, uint32_t b) {
  uint32_t product = 0;
  for (uint32_t bit = 1u << 31; bit != 0; bit >>= 1) {
    if (a & bit) product ^= b;
    b = (b >> 1) ^ ((b & 1) ? kPolynomial : 0);
  }
  return product;
}

// kPowers[n]: x^(2^n) modulo the polynomial. The order of x divides 2^32 - 1, so exponents of 2 repeat
// after 32.
constexpr std::array<uint32_t, 32> MakePowers() {
  std::array<uint32_t, 32> powers{};
  powers[0] = 1u << 30;
  for (size_t n = 1; n < 32; ++n) powers[n] = MultiplyModulo(powers[n - 1], powers[n - 1]);
  return powers;
}

constexpr auto kPowers = MakePowers();

// x^(8 * bytes) modulo the polynomial, reduced as it goes so that no size overflows.
constexpr uint32_t PowerOfBytes(uint64_t bytes) {
  uint32_t power = 1u << 31;
  for (size_t n = 3; bytes != 0; bytes >>= 1, n = (n + 1) & 31) {
    if (bytes & 1) power = MultiplyModulo(kPowers[n], power);
  }
  return power;
}

#if defined(__x86_64__)

// "Fast CRC Computation for Generic Polynomials Using PCLMULQDQ Instruction" (Gopal and others, Intel, 2009):
// a 128-bit register is moved n bits ahead by multiplying its halves with x^(n+32) and x^(n-32); the product
// of two reflected numbers is one bit short, hence the shift by one in the constants.
constexpr int64_t FoldConstant(uint64_t bits) {
  return static_cast<int64_t>(uint64_t{PowerOfBytes(bits / 8)} << 1);
}

__attribute__((target("pclmul,sse4.1"))) inline __m128i Fold(__m128i value, __m128i constants, __m128i next) {
  const __m128i low = _mm_clmulepi64_si128(value, constants, 0x00);
  const __m128i high = _mm_clmulepi64_si128(value, constants, 0x11);
  return _mm_xor_si128(_mm_xor_si128(low, high), next);
}

__attribute__((target("pclmul,sse4.1"))) uint32_t RawFolding(uint32_t state, const uint8_t* data,
                                                             size_t size) {
  if (size < 64) return RawPortable(state, data, size);
  const auto* next = reinterpret_cast<const __m128i*>(data);
  const __m128i by_512 = _mm_set_epi64x(FoldConstant(512 - 32), FoldConstant(512 + 32));
  const __m128i by_128 = _mm_set_epi64x(FoldConstant(128 - 32), FoldConstant(128 + 32));
  __m128i lane[4];
  for (auto& value : lane) value = _mm_loadu_si128(next++);
  lane[0] = _mm_xor_si128(lane[0], _mm_cvtsi32_si128(static_cast<int>(state)));
  for (size -= 64; size >= 64; size -= 64) {
    for (auto& value : lane) value = Fold(value, by_512, _mm_loadu_si128(next++));
  }
  __m128i value = lane[0];
  for (int i = 1; i < 4; ++i) value = Fold(value, by_128, lane[i]);
  for (; size >= 16; size -= 16) value = Fold(value, by_128, _mm_loadu_si128(next++));
  // What is left is 16 bytes that have the same remainder as everything before them.
  alignas(16) uint8_t rest[16];
  _mm_store_si128(reinterpret_cast<__m128i*>(rest), value);
  state = RawPortable(0, rest, sizeof(rest));
  return RawPortable(state, reinterpret_cast<const uint8_t*>(next), size);
}

#elif defined(__aarch64__)

// Spelled out, since the intrinsics want the extension for the whole file, or a header that differs between
// compilers.
inline uint32_t StepWord(uint32_t state, uint64_t word) {
  asm(".arch_extension crc\n\tcrc32x %w0, %w0, %x1" : "+r"(state) : "r"(word));
  return state;
}

inline uint32_t StepByte(uint32_t state, uint32_t byte) {
  asm(".arch_extension crc\n\tcrc32b %w0, %w0, %w1" : "+r"(state) : "r"(byte));
  return state;
}

uint32_t RawInstruction(uint32_t state, const uint8_t* data, size_t size) {
  for (; size >= 8; size -= 8, data += 8) {
    uint64_t word;
    std::memcpy(&word, data, 8);
    state = StepWord(state, word);
  }
  for (; size > 0; --size) state = StepByte(state, *data++);
  return state;
}

#endif

using RawFunction = uint32_t (*)(uint32_t, const uint8_t*, size_t);

struct Path {
  RawFunction function;
  const char* name;
};

Path ChoosePath() {
#if defined(__x86_64__)
  __builtin_cpu_init();
  if (__builtin_cpu_supports("pclmul") && __builtin_cpu_supports("sse4.1")) return {RawFolding, "pclmulqdq"};
#elif defined(__aarch64__)
  if (getauxval(AT_HWCAP) & HWCAP_CRC32) return {RawInstruction, "armv8-crc"};
#endif
  return {RawPortable, "portable"};
}

const Path kPath = ChoosePath();

}  // namespace

uint32_t Crc32(uint32_t crc, const void* data, size_t size) {
  return ~kPath.function(~crc, static_cast<const uint8_t*>(data), size);
}

uint32_t Crc32Portable(uint32_t crc, const void* data, size_t size) {
  return ~RawPortable(~crc, static_cast<const uint8_t*>(data), size);
}

uint32_t Crc32Combine(uint32_t crc_a, uint32_t crc_b, uint64_t size_b) {
  return MultiplyModulo(PowerOfBytes(size_b), crc_a) ^ crc_b;
}

const char* Crc32Path() { return kPath.name; }

}  // namespace ckpt
