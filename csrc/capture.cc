#include "capture.h"

#include <cstring>
#include <set>
#include <utility>

namespace ckpt {
namespace {

class Capturer {
 public:
  Capturer(Cuda* cuda, Ticket* ticket) : cuda_(cuda), ticket_(*ticket) {}

  Status Run() {
    Status status = FollowStreams();
    for (auto& file : ticket_.files) {
      for (auto& piece : file.plan.pieces()) {
        if (!status.ok()) break;
        if (piece.kind == PieceKind::kHost) CaptureHost(&file, &piece);
        if (piece.kind == PieceKind::kDevice) status = CaptureDevice(&file, &piece);
      }
    }
    const Status waited = WaitForDevices(status.ok());
    CollectEagerBlocks();
    return status.ok() ? waited : status;
  }

 private:
  Status FollowStreams() {
    std::set<std::pair<int, uint64_t>> streams;
    for (const auto& file : ticket_.files) {
      for (const auto& part : file.plan.image().memory) {
        if (part.device != kHostDevice && part.size > 0) streams.insert({part.device, part.stream});
      }
    }
    for (const auto& [device, stream] : streams) {
      devices_.insert(device);
      const Status status = cuda_->Follow(device, stream);
      if (!status.ok()) return status;
    }
    return {};
  }

  // Small parts are copied whatever they promise: it costs no more than a sample, and cannot be torn.
  bool CopyNow(const MemoryPart& part) {
    if (part.size <= kAlwaysCopied) return true;
    if (part.still || part.size > kSmallPart || side_bytes_ + part.size > kSideMemory) return false;
    side_bytes_ += part.size;
    return true;
  }

  void CaptureHost(TicketFile* file, Piece* piece) {
    MemoryPart& part = file->plan.memory()[piece->index];
    if (CopyNow(part)) {
      char* copy = ticket_.side.Allocate(part.size);
      std::memcpy(copy, piece->source, part.size);
      KeepCopy(piece, copy);
    } else if (part.still) {
      char* sample = ticket_.side.Allocate(kSampleBytes);
      TakeHostSample(part, ticket_.seed, sample);
      part.sample = sample;
    } else {
      MarkEager(*file, *piece);
    }
  }

  Status CaptureDevice(TicketFile* file, Piece* piece) {
    MemoryPart& part = file->plan.memory()[piece->index];
    char* memory = nullptr;
    if (CopyNow(part)) {
      Status status = AllocatePinned(part.size, &memory);
      if (status.ok()) status = cuda_->Copy(part.device, part.address, memory, part.size);
      if (!status.ok()) return status;
      KeepCopy(piece, memory);
      copied_ = true;
      return {};
    }
    MarkDevice(*file, *piece);
    if (!part.still) {
      MarkEager(*file, *piece);
      return {};
    }
    Status status = AllocatePinned(kSampleBytes, &memory);
    const uint64_t first = part.address + DeviceSpot(part.size, 0);
    const size_t pitch = DeviceSpotPitch(part.size);
    if (status.ok()) status = cuda_->CopySpots(part.device, first, pitch, kSpotBytes, kSpots, memory);
    if (status.ok()) part.sample = memory;
    return status;
  }

  void KeepCopy(Piece* piece, const char* copy) {
    piece->kind = PieceKind::kBytes;
    piece->source = copy;
  }

  Status AllocatePinned(size_t size, char** memory) {
    if (size > pinned_left_) {
      const Status status = cuda_->TakeChunk(&pinned_);
      if (!status.ok()) return status;
      ticket_.device_chunks.push_back(pinned_);
      pinned_left_ = Cuda::kChunk;
    }
    *memory = pinned_;
    pinned_ += size;
    pinned_left_ -= size;
    return {};
  }

  // After an error the memory that copies may still be on their way to is about to be given back.
  Status WaitForDevices(bool ok) {
    if (ok && !copied_) return {};
    Status first;
    for (const int device : devices_) {
      Cuda::Mark mark;
      Status status = cuda_->PutMark(device, &mark);
      if (status.ok()) {
        status = cuda_->Wait(mark);
        cuda_->Release(mark);
      }
      if (first.ok()) first = status;
    }
    return first;
  }

  template <typename Change>
  void ForBlocks(const TicketFile& file, const Piece& piece, Change change) {
    const uint64_t block_bytes =
        ticket_.blocks[file.first_block].end;  // of the file's first block, or all of the file
    const size_t first = file.first_block + piece.offset / block_bytes;
    const size_t last = file.first_block + (piece.end() - 1) / block_bytes;
    for (size_t i = first; i <= last; ++i) change(&ticket_.blocks[i]);
  }

  void MarkEager(const TicketFile& file, const Piece& piece) {
    ForBlocks(file, piece, [](Block* block) { block->eager = true; });
  }

  void MarkDevice(const TicketFile& file, const Piece& piece) {
    ForBlocks(file, piece, [](Block* block) { block->device = true; });
  }

  void CollectEagerBlocks() {
    for (size_t i = 0; i < ticket_.blocks.size(); ++i) {
      if (ticket_.blocks[i].eager) ticket_.eager_blocks.push_back(i);
    }
    ticket_.eager_left = ticket_.eager_blocks.size();
    ticket_.stats["side_bytes"] = static_cast<double>(side_bytes_);
  }

  Cuda* const cuda_;
  Ticket& ticket_;
  std::set<int> devices_;
  uint64_t side_bytes_ = 0;
  char* pinned_ = nullptr;
  size_t pinned_left_ = 0;
  bool copied_ = false;  // a copy from a device is on its way that must arrive before submit returns
};

}  // namespace

void MakeBlocks(uint64_t block_bytes, Ticket* ticket) {
  for (size_t i = 0; i < ticket->files.size(); ++i) {
    TicketFile& file = ticket->files[i];
    file.first_block = ticket->blocks.size();
    const uint64_t size = file.plan.size();
    for (uint64_t begin = 0; begin < size;) {
      Block block;
      block.file = static_cast<uint32_t>(i);
      block.begin = begin;
      block.end = size - begin <= block_bytes ? size : begin + block_bytes;
      begin = block.end;
      ticket->blocks.push_back(block);
    }
    file.end_block = ticket->blocks.size();
  }
}

Status Capture(Cuda* cuda, Ticket* ticket) { return Capturer(cuda, ticket).Run(); }

}  // namespace ckpt
