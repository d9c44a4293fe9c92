#include "ticket.h"

#include <utility>

namespace ckpt {

SideMemory Ticket::DropCaptured() {
  for (char* chunk : device_chunks) cuda->GiveChunk(chunk);
  device_chunks.clear();
  return std::exchange(side, SideMemory());
}

}  // namespace ckpt
