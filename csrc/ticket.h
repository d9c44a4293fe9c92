#pragma once

#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "cuda_driver.h"
#include "file_image.h"
#include "snapshot.h"
#include "status.h"

namespace ckpt {

using Clock = std::chrono::steady_clock;

inline double Seconds(Clock::duration duration) { return std::chrono::duration<double>(duration).count(); }

// What a submitter asks for: an image and where it goes, first under a temporary name, then under its own.
struct PendingFile {
  FileImage image;
  std::string temporary;
  std::string final_path;
};

enum class TicketState {
  kStaging,    // tensor memory is still needed
  kStaged,     // every byte is in the host cache or beyond
  kPersisted,  // every file is durable under its own name
  kFailed,     // `error` says why; nothing of it is left but files that already had their own name
};

enum class BlockState : uint8_t {
  kWaiting,  // has no memory yet
  kFilling,  // a thread, or a device, is copying into it
  kFilled,   // holds its bytes, but for derived fields
  kSealed,   // complete: may be written
  kWriting,
  kWritten,
};

// One cache block's worth of one file: the bytes [begin, end).
struct Block {
  uint32_t file = 0;
  BlockState state = BlockState::kWaiting;
  bool eager = false;   // has bytes that must be copied before submit returns
  bool device = false;  // has bytes that come from a device
  int slot = -1;        // block of the host cache, while it has one
  uint64_t begin = 0;
  uint64_t end = 0;
};

struct TicketFile {
  FilePlan plan;
  std::string temporary;
  std::string final_path;
  size_t first_block = 0;  // its blocks are [first_block, end_block) of the ticket
  size_t end_block = 0;
  bool created = false;  // there is something under the temporary name
};

// One save on its way to the disk. All blocks of all its files, in file order, make one queue.
//
// `files` (but for `created`) and the extent of `blocks` are fixed once it is submitted; everything from
// `number` on, and the state of blocks, is guarded by the engine's mutex.
struct Ticket {
  std::vector<TicketFile> files;
  std::vector<Block> blocks;
  std::vector<size_t> eager_blocks;  // in file order
  uint64_t seed = 0;                 // where this save's samples lie
  SideMemory side;                   // copies and samples made at the save
  std::shared_ptr<Cuda> cuda;        // null: no part is on a device
  std::vector<char*> device_chunks;  // like `side`, for devices: page-locked, from Cuda::TakeChunk

  std::atomic<bool> failed{false};  // set with kFailed; may be read without the lock to stop early

  uint64_t number = 0;
  TicketState state = TicketState::kStaging;
  Status error;
  std::vector<std::string> torn;
  bool approved = false;
  bool publishing = false;  // files are getting their own names: too late to cancel
  bool over = false;        // persisted, or failed and cleaned up

  size_t next_ordered = 0;  // every block before it has, or had, memory
  size_t next_eager = 0;    // the same in eager_blocks
  size_t eager_left = 0;    // eager blocks not yet filled
  size_t filled = 0;
  int fillers = 0;       // blocks being filled now
  size_t next_seal = 0;  // every block before it is sealed
  bool sealing = false;

  size_t write_file = 0;  // the file that is being written; files.size(): all are durable
  size_t next_write = 0;  // every block before it was given to the writer

  Clock::time_point submitted = Clock::now();
  Clock::time_point starved_since{};  // no block was free since then; zero: not starved
  std::map<std::string, double> stats;

  bool all_durable() const { return write_file == files.size(); }
  // No thread and no device reads the submitter's memory any more, nor will.
  bool quiet() const { return fillers == 0 && state != TicketState::kStaging; }

  // Gives back what was captured at the save, when quiet. The side memory is handed out to be freed without
  // the lock.
  SideMemory DropCaptured();
};

}  // namespace ckpt
