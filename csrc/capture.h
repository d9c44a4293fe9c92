#pragma once

#include <cstdint>

#include "cuda_driver.h"
#include "status.h"
#include "ticket.h"

// What is taken of a save's memory before submit returns.

namespace ckpt {

constexpr uint64_t kSmallPart = 1 << 20;       // parts up to this size may be copied aside
constexpr uint64_t kSideMemory = 64ull << 20;  // of one save, beside parts up to kAlwaysCopied

// Lays out the ticket's blocks of `block_bytes` each. Its plans must be made.
void MakeBlocks(uint64_t block_bytes, Ticket* ticket);

// Copies small parts that will not hold still into side memory, marks the blocks of large ones as eager, and
// takes the samples of the others. Device work that is queued on the parts' streams now comes before every
// later copy.
//
// `cuda` may be null if no part is on a device. Waits for a device only if a part on it had to be copied at
// once.
Status Capture(Cuda* cuda, Ticket* ticket);

}  // namespace ckpt
