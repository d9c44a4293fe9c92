#include "file_image.h"

#include <algorithm>
#include <cinttypes>
#include <cstdio>
#include <cstring>
#include <limits>

#include "crc32.h"

namespace ckpt {
namespace {

Status Malformed(const std::string& reason) { return Status::Error("image", "", 0, reason); }

std::string Number(uint64_t value) { return std::to_string(value); }

}  // namespace

Status FilePlan::Make(FileImage image, uint64_t block_bytes, FilePlan* plan) {
  plan->image_ = std::move(image);
  const Status status = plan->CollectPieces();
  if (!status.ok()) return status;
  plan->MakeCuts(block_bytes);
  return {};
}

Status FilePlan::CollectPieces() {
  pieces_.reserve(image_.literals.size() + image_.memory.size() + image_.checksums.size() +
                  image_.digests.size());
  uint32_t index = 0;
  for (const auto& part : image_.literals) {
    pieces_.push_back({part.offset, part.size, part.data, index++, PieceKind::kBytes});
  }
  index = 0;
  for (const auto& part : image_.memory) {
    const PieceKind kind = part.device == kHostDevice ? PieceKind::kHost : PieceKind::kDevice;
    if (part.size > 0 && part.address == 0)
      return Malformed("the memory of part '" + part.name + "' has address 0");
    pieces_.push_back({part.offset, part.size, reinterpret_cast<const char*>(part.address), index++, kind});
  }
  index = 0;
  for (const auto& part : image_.checksums) {
    const Status status = CheckRange(part.offset, part.range);
    if (!status.ok()) return status;
    pieces_.push_back({part.offset, ChecksumPart::kSize, nullptr, index++, PieceKind::kChecksum});
  }
  index = 0;
  for (const auto& part : image_.digests) {
    for (const auto& range : part.ranges) {
      const Status status = CheckRange(part.offset, range);
      if (!status.ok()) return status;
    }
    pieces_.push_back({part.offset, DigestPart::kSize, nullptr, index++, PieceKind::kDigest});
  }
  pieces_.erase(
      std::remove_if(pieces_.begin(), pieces_.end(), [](const Piece& piece) { return piece.size == 0; }),
      pieces_.end());
  std::sort(pieces_.begin(), pieces_.end(),
            [](const Piece& a, const Piece& b) { return a.offset < b.offset; });
  uint64_t covered = 0;
  for (const auto& piece : pieces_) {
    if (piece.offset > covered) {
      return Malformed("no part covers bytes " + Number(covered) + " to " + Number(piece.offset));
    }
    if (piece.offset < covered) return Malformed("two parts cover the byte at " + Number(piece.offset));
    if (piece.size > image_.size - covered) {
      return Malformed("the part at " + Number(piece.offset) + " goes beyond the size of " +
                       Number(image_.size));
    }
    covered += piece.size;
  }
  if (covered != image_.size) {
    return Malformed("no part covers bytes " + Number(covered) + " to " + Number(image_.size));
  }
  return {};
}

Status FilePlan::CheckRange(uint64_t field, const Range& range) const {
  if (range.start <= range.end && range.end <= field) return {};
  return Malformed("the derived field at " + Number(field) + " needs bytes " + Number(range.start) + " to " +
                   Number(range.end) + ", which are not a range before it");
}

void FilePlan::MakeCuts(uint64_t block_bytes) {
  const auto add_range = [this](const Range& range) {
    cuts_.push_back(range.start);
    cuts_.push_back(range.end);
  };
  for (uint64_t offset = 0; offset < image_.size; offset += block_bytes) {
    cuts_.push_back(offset);
    if (image_.size - offset <= block_bytes) break;  // no overflow near the end of 64 bits
  }
  cuts_.push_back(image_.size);
  for (const auto& part : image_.checksums) {
    add_range(part.range);
    add_range({part.offset, part.offset + ChecksumPart::kSize});
  }
  for (const auto& part : image_.digests) {
    for (const auto& range : part.ranges) add_range(range);
    add_range({part.offset, part.offset + DigestPart::kSize});
  }
  std::sort(cuts_.begin(), cuts_.end());
  cuts_.erase(std::unique(cuts_.begin(), cuts_.end()), cuts_.end());

  const size_t segments = cuts_.size() - 1;
  derived_.assign(segments, 0);
  segment_crcs_.assign(segments, 0);
  prefix_crcs_.assign(cuts_.size(), 0);
  for (const auto& piece : pieces_) {
    if (!piece.derived()) continue;
    for (size_t i = CutAt(piece.offset); cuts_[i] < piece.end(); ++i) derived_[i] = 1;
  }
}

size_t FilePlan::PieceAt(uint64_t offset) const {
  const auto after =
      std::upper_bound(pieces_.begin(), pieces_.end(), offset,
                       [](uint64_t value, const Piece& piece) { return value < piece.offset; });
  return static_cast<size_t>(after - pieces_.begin()) - 1;
}

size_t FilePlan::CutAt(uint64_t offset) const {
  return static_cast<size_t>(std::lower_bound(cuts_.begin(), cuts_.end(), offset) - cuts_.begin());
}

void FilePlan::Seal(uint64_t begin, uint64_t end, char* data) {
  for (size_t segment = CutAt(begin); cuts_[segment] < end; ++segment) {
    const uint64_t start = cuts_[segment];
    const uint64_t size = cuts_[segment + 1] - start;
    if (derived_[segment]) {
      const Piece& piece = pieces_[PieceAt(start)];
      if (start == piece.offset) ComputeDerived(piece);
      std::memcpy(data + (start - begin), value_ + (start - piece.offset), size);
      segment_crcs_[segment] = Crc32(0, data + (start - begin), size);
    }
    prefix_crcs_[segment + 1] = Crc32Combine(prefix_crcs_[segment], segment_crcs_[segment], size);
  }
}

void FilePlan::ComputeDerived(const Piece& piece) {
  if (piece.kind == PieceKind::kChecksum) {
    const uint32_t crc = RangeCrc(image_.checksums[piece.index].range);
    for (size_t i = 0; i < ChecksumPart::kSize; ++i) value_[i] = static_cast<char>(crc >> (8 * i));
    return;
  }
  uint64_t hash = 0;
  for (const auto& range : image_.digests[piece.index].ranges) {
    hash ^= RangeCrc(range) + uint64_t{0x9e3779b9} + (hash << 6) + (hash >> 2);
  }
  char digits[DigestPart::kSize + 1];
  std::snprintf(digits, sizeof(digits), "%020" PRIu64, hash);
  std::memcpy(value_, digits, DigestPart::kSize);
}

uint32_t FilePlan::RangeCrc(const Range& range) const {
  return Crc32Suffix(prefix_crcs_[CutAt(range.end)], prefix_crcs_[CutAt(range.start)],
                     range.end - range.start);
}

}  // namespace ckpt
