#pragma once

#include <atomic>
#include <cstddef>
#include <string>
#include <vector>

#include "cuda_driver.h"
#include "env.h"
#include "host_cache.h"
#include "status.h"
#include "ticket.h"

namespace ckpt {

// Copies memory into blocks of the host cache, checksums it, and looks for torn parts. Takes no lock: many
// threads may fill different blocks at once, also of one file.
class Stager {
 public:
  Stager(Env* env, HostCache* cache) : env_(env), cache_(cache) {}

  // Fills a block of which nothing is on a device. Memory that is no longer there is an error of operation
  // "snapshot", and the part's index is added to `torn`, as are those of parts that changed since the save.
  Status Fill(Ticket* ticket, const Block& block, std::vector<uint32_t>* torn);

  // Fills a block that has bytes from devices: Begin copies what is on the host and queues the rest; once all
  // marks are reached, End does what is left.
  Status Begin(Cuda* cuda, Ticket* ticket, const Block& block, std::vector<Cuda::Mark>* marks,
               std::vector<uint32_t>* torn);
  void End(Ticket* ticket, const Block& block, std::vector<uint32_t>* torn);

  // The names of all watched parts of the ticket whose memory differs from its sample now, or is gone.
  std::vector<std::string> ChangedParts(Cuda* cuda, Ticket* ticket);

 private:
  class Gather;

  Status CopyHost(const Ticket& ticket, const FilePlan& plan, const Block& block, uint64_t begin,
                  uint64_t end, std::vector<uint32_t>* torn);
  void Compare(const Ticket& ticket, const FilePlan& plan, const Block& block, std::vector<uint32_t>* torn);
  void ClearPadding(const Block& block);
  bool HostPartChanged(const MemoryPart& part, uint64_t seed);
  bool DevicePartChanged(Cuda* cuda, const MemoryPart& part, char* spots);

  Env* const env_;
  HostCache* const cache_;
  std::atomic<bool> may_read_memory_{true};  // false: the kernel does not let us, so plain copies have to do
};

}  // namespace ckpt
