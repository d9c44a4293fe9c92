#include "../file_image.h"

#include <cstring>

#include "../crc32.h"
#include "support.h"

namespace ckpt::test {
namespace {

FilePlan Planned(const FileImage& image, uint64_t block_bytes) {
  FilePlan plan;
  CHECK(FilePlan::Make(image, block_bytes, &plan).ok());
  return plan;
}

std::string Refusal(const FileImage& image) {
  FilePlan plan;
  const Status status = FilePlan::Make(image, kPage, &plan);
  CHECK(status.operation() == "image");
  return status.text();
}

FileImage Literal(uint64_t size, uint64_t offset, const std::string& bytes) {
  FileImage image;
  image.size = size;
  image.literals.push_back({offset, bytes.data(), bytes.size()});
  return image;
}

}  // namespace

TEST(AnImageMustCoverEveryByteOnce) {
  const std::string bytes(10, 'x');
  CHECK(Refusal(Literal(11, 0, bytes)) == "no part covers bytes 10 to 11");
  CHECK(Refusal(Literal(11, 1, bytes)) == "no part covers bytes 0 to 1");
  CHECK(Refusal(Literal(9, 0, bytes)) == "the part at 0 goes beyond the size of 9");
  FileImage twice = Literal(10, 0, bytes);
  twice.literals.push_back({5, bytes.data(), 5});
  CHECK(Refusal(twice) == "two parts cover the byte at 5");
  FileImage huge = Literal(10, 0, bytes);
  huge.memory.push_back({10, 1, ~uint64_t{0}, 0, kHostDevice, true, "huge"});
  CHECK(Refusal(huge) == "the part at 10 goes beyond the size of 10");
}

TEST(ADerivedFieldLooksBackwardsOnly) {
  const std::string bytes(10, 'x');
  FileImage image = Literal(14, 4, bytes);
  image.checksums.push_back({0, {4, 14}});
  CHECK(Refusal(image) == "the derived field at 0 needs bytes 4 to 14, which are not a range before it");
  image = Literal(14, 0, bytes);
  image.checksums.push_back({10, {6, 5}});
  CHECK(Refusal(image) == "the derived field at 10 needs bytes 6 to 5, which are not a range before it");
}

TEST(MemoryAtAddressZeroIsRefused) {
  FileImage image;
  image.size = 4;
  image.memory.push_back({0, 0, 4, 0, kHostDevice, true, "nothing"});
  CHECK(Refusal(image) == "the memory of part 'nothing' has address 0");
}

TEST(AnEmptyImageHasNothingToDo) {
  FilePlan plan = Planned(FileImage(), kPage);
  CHECK(plan.pieces().empty());
  CHECK(plan.crc() == 0);
}

// A checksum that lies across two blocks, of bytes that lie across two blocks, and one of both.
TEST(DerivedFieldsMayLieAcrossBlocks) {
  const std::string bytes = RandomBytes(kPage - 2, 3);
  FileImage image = Literal(bytes.size() + 8, 0, bytes);
  image.checksums.push_back({bytes.size(), {1, bytes.size()}});
  image.checksums.push_back({bytes.size() + 4, {0, bytes.size() + 4}});
  FilePlan plan = Planned(image, kPage);
  std::string file = bytes + std::string(8, '\0');
  for (size_t i = 0; plan.cut(i) < plan.size(); ++i) {
    if (!plan.derived(i)) plan.SetSegmentCrc(i, Crc32(0, &file[plan.cut(i)], plan.cut(i + 1) - plan.cut(i)));
  }
  plan.Seal(0, kPage, file.data());
  plan.Seal(kPage, plan.size(), file.data() + kPage);
  uint32_t stored;
  std::memcpy(&stored, &file[bytes.size()], 4);
  CHECK(stored == Crc32(0, &bytes[1], bytes.size() - 1));
  std::memcpy(&stored, &file[bytes.size() + 4], 4);
  CHECK(stored == Crc32(0, file.data(), bytes.size() + 4));
  CHECK(plan.crc() == Crc32(0, file.data(), file.size()));
}

}  // namespace ckpt::test
