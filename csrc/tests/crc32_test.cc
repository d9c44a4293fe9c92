#include "../crc32.h"

#include "support.h"

namespace ckpt::test {

TEST(Crc32GivesTheKnownValues) {
  CHECK(Crc32(0, "123456789", 9) == 0xcbf43926);
  CHECK(Crc32Portable(0, "123456789", 9) == 0xcbf43926);
  CHECK(Crc32(0, "", 0) == 0);
}

TEST(Crc32IsThePortableOneForEveryLengthAndAlignment) {
  const std::string bytes = RandomBytes(3000, 1);
  for (size_t start = 0; start < 17; ++start) {
    for (size_t size = 0; size < 1100; ++size) {
      CHECK(Crc32(77, bytes.data() + start, size) == Crc32Portable(77, bytes.data() + start, size));
    }
  }
}

TEST(Crc32CombinesAndTakesApart) {
  const std::string bytes = RandomBytes(5000, 2);
  const uint32_t whole = Crc32(0, bytes.data(), bytes.size());
  for (const size_t cut : {0, 1, 64, 4096, 4999, 5000}) {
    const uint32_t a = Crc32(0, bytes.data(), cut);
    const uint32_t b = Crc32(0, bytes.data() + cut, bytes.size() - cut);
    CHECK(Crc32Combine(a, b, bytes.size() - cut) == whole);
    CHECK(Crc32Suffix(whole, a, bytes.size() - cut) == b);
  }
}

}  // namespace ckpt::test
