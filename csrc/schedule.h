#pragma once

#include <cstdint>
#include <deque>
#include <limits>
#include <memory>

#include "host_cache.h"
#include "status.h"
#include "ticket.h"

namespace ckpt {

// A block that a thread is to fill.
struct FillJob {
  std::shared_ptr<Ticket> ticket;
  size_t block = 0;
};

// Which block gets memory next, which is sealed next, which is written next. Decisions only: no I/O, no
// copying, no waiting. Every call needs the engine's mutex.
//
// Blocks get memory ticket by ticket: none of a later ticket before all of an earlier one have it. Within a
// ticket eager blocks go first, then file order. Blocks are sealed and written in file order. So that this
// cannot lock up, a block that jumps the queue never takes the last free memory: the block that everything
// else waits for can always have it, and once it is written its memory is free again.
class Schedule {
 public:
  explicit Schedule(HostCache* cache) : cache_(cache) {}

  // Takes a ticket in; the first one submitted is served first. Its plans, blocks and eager blocks must be
  // complete.
  void Add(const std::shared_ptr<Ticket>& ticket);
  bool idle() const { return tickets_.empty(); }
  const std::deque<std::shared_ptr<Ticket>>& tickets() const { return tickets_; }

  // The next block to fill of tickets up to number `last`; it has memory when this returns true.
  bool TakeFill(uint64_t last, FillJob* job);
  // The job's bytes are in the cache, or the attempt is over because the ticket failed.
  void FinishFill(const FillJob& job);

  // The next block that can be sealed, if it is nobody's yet: the caller seals it outside the mutex, then
  // FinishSeal.
  bool TakeSeal(const std::shared_ptr<Ticket>& ticket, size_t* block);
  void FinishSeal(Ticket* ticket);

  // The ticket whose files are to be written now, or null.
  std::shared_ptr<Ticket> Writing() const;
  // The next block of its file at write_file, if that is sealed.
  bool TakeWrite(Ticket* ticket, size_t* block);
  void FinishWrite(Ticket* ticket, size_t block);

  // A failed ticket that nobody works on any more: its memory can go back and its files can be deleted.
  std::shared_ptr<Ticket> TakeCleanUp() const;
  // A ticket whose files may get their own names.
  std::shared_ptr<Ticket> TakePublish() const;
  // Nothing more will happen to the ticket; its memory is free.
  void Retire(Ticket* ticket);

  // From now on nothing more is staged or written for the ticket. Of several errors the first one stays. No
  // effect once it is over or its files are getting their names.
  void Fail(Ticket* ticket, const Status& error);

 private:
  bool TakeFillOf(const std::shared_ptr<Ticket>& ticket, FillJob* job);
  bool Assign(const std::shared_ptr<Ticket>& ticket, size_t block, FillJob* job);
  void GiveMemory(Block* block);
  static void NoteStarved(Ticket* ticket, bool starved);

  HostCache* const cache_;
  std::deque<std::shared_ptr<Ticket>> tickets_;
  uint64_t last_number_ = 0;
};

// Ends the staging of a ticket whose every block is filled.
void NoteStaged(Ticket* ticket);

}  // namespace ckpt
