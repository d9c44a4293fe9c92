#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "status.h"

// The exact bytes of one file, before they exist anywhere as a file; the same as
// datastates.engine.image.FileImage.

namespace ckpt {

constexpr int kHostDevice = -1;

struct LiteralPart {
  uint64_t offset;
  const char* data;  // the submitter keeps it alive until the ticket is staged
  uint64_t size;
};

struct MemoryPart {
  uint64_t offset;
  uint64_t address;
  uint64_t size;
  uint64_t stream;  // CUstream whose queued work comes first; device parts only
  int device;       // kHostDevice or a CUDA ordinal
  bool still;       // promised not to change until staged
  std::string name;
  const char* sample = nullptr;  // what the spots of snapshot.h held at the save; null: not watched
};

struct Range {
  uint64_t start;
  uint64_t end;
};

// Four bytes: the little-endian CRC-32 of an earlier range of the file.
struct ChecksumPart {
  static constexpr uint64_t kSize = 4;
  uint64_t offset;
  Range range;
};

// Twenty decimal digits that fold the CRC-32s of earlier ranges into one number.
struct DigestPart {
  static constexpr uint64_t kSize = 20;
  uint64_t offset;
  std::vector<Range> ranges;
};

struct FileImage {
  uint64_t size = 0;
  std::vector<LiteralPart> literals;
  std::vector<MemoryPart> memory;
  std::vector<ChecksumPart> checksums;
  std::vector<DigestPart> digests;
};

enum class PieceKind : uint8_t {
  kBytes,     // bytes that stay as they are at `source`: a literal, or a copy that was made at the save
  kHost,      // host memory at `source`
  kDevice,    // device memory at `source`
  kChecksum,  // filled in when the block is sealed
  kDigest,
};

// One part at its place in the file. `index` is its place in the image's list of its kind.
struct Piece {
  uint64_t offset;
  uint64_t size;
  const char* source;
  uint32_t index;
  PieceKind kind;

  uint64_t end() const { return offset + size; }
  bool derived() const { return kind == PieceKind::kChecksum || kind == PieceKind::kDigest; }
};

// A checked image, laid out for one pass through blocks of a fixed size.
//
// The file is cut at every offset where a checksum begins or ends, and where a block or a derived field does;
// what lies between two cuts is a segment. Whoever fills a block stores the CRC-32 of its segments (in any
// order of blocks, by any thread); Seal, called block by block in file order, turns them into the CRC-32 of
// every prefix that ends at a cut. The checksum of any range between cuts follows from two prefixes, so
// derived fields cost the same however they nest.
class FilePlan {
 public:
  // Refuses, with operation "image" and the reason, an image whose parts do not cover [0, size) exactly once,
  // or whose derived fields look forward.
  static Status Make(FileImage image, uint64_t block_bytes, FilePlan* plan);

  uint64_t size() const { return image_.size; }
  const FileImage& image() const { return image_; }
  std::vector<MemoryPart>& memory() { return image_.memory; }

  // All parts but empty ones, by offset.
  std::vector<Piece>& pieces() { return pieces_; }
  const std::vector<Piece>& pieces() const { return pieces_; }
  // The index of the piece that holds the byte at `offset` < size.
  size_t PieceAt(uint64_t offset) const;

  // Segment i is [cut(i), cut(i + 1)). The index of the cut at `offset`, which must be one.
  size_t CutAt(uint64_t offset) const;
  uint64_t cut(size_t i) const { return cuts_[i]; }
  bool derived(size_t segment) const { return derived_[segment] != 0; }
  void SetSegmentCrc(size_t segment, uint32_t crc) { segment_crcs_[segment] = crc; }

  // Fills in the derived fields of the block [begin, end), whose bytes are at `data`. Blocks come in file
  // order, each after its segments' checksums are set.
  void Seal(uint64_t begin, uint64_t end, char* data);

  // The CRC-32 of the whole file, once every block is sealed.
  uint32_t crc() const { return prefix_crcs_.empty() ? 0 : prefix_crcs_.back(); }

 private:
  Status CollectPieces();
  Status CheckRange(uint64_t field, const Range& range) const;
  void MakeCuts(uint64_t block_bytes);
  void ComputeDerived(const Piece& piece);
  uint32_t RangeCrc(const Range& range) const;

  FileImage image_;
  std::vector<Piece> pieces_;
  std::vector<uint64_t> cuts_;
  std::vector<char> derived_;
  std::vector<uint32_t> segment_crcs_;
  std::vector<uint32_t> prefix_crcs_;
  char value_[DigestPart::kSize] =
      {};  // the derived field that Seal reached last: it may go on in the next block
};

}  // namespace ckpt
