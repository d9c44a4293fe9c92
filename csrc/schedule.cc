#include "schedule.h"

#include <algorithm>

namespace ckpt {

void Schedule::Add(const std::shared_ptr<Ticket>& ticket) {
  ticket->number = ++last_number_;
  tickets_.push_back(ticket);
  NoteStaged(ticket.get());
}

void NoteStaged(Ticket* ticket) {
  if (ticket->state != TicketState::kStaging || ticket->filled < ticket->blocks.size()) return;
  ticket->state = TicketState::kStaged;
  ticket->stats["stage_s"] = Seconds(Clock::now() - ticket->submitted);
}

bool Schedule::TakeFill(uint64_t last, FillJob* job) {
  for (const auto& ticket : tickets_) {
    if (ticket->number > last) return false;
    if (ticket->state != TicketState::kStaging || ticket->next_ordered == ticket->blocks.size()) continue;
    const bool taken = TakeFillOf(ticket, job);
    NoteStarved(ticket.get(), !taken);
    return taken;  // never on to a later ticket
  }
  return false;
}

bool Schedule::TakeFillOf(const std::shared_ptr<Ticket>& ticket, FillJob* job) {
  const auto waiting = [&](size_t block) { return ticket->blocks[block].state == BlockState::kWaiting; };
  auto& eager = ticket->next_eager;
  while (eager < ticket->eager_blocks.size() && !waiting(ticket->eager_blocks[eager])) ++eager;
  const bool has_eager = eager < ticket->eager_blocks.size();
  if (has_eager && cache_->free_count() >= 2) return Assign(ticket, ticket->eager_blocks[eager], job);
  if (cache_->free_count() >= 1) return Assign(ticket, ticket->next_ordered, job);
  return false;
}

bool Schedule::Assign(const std::shared_ptr<Ticket>& ticket, size_t block, FillJob* job) {
  ticket->blocks[block].slot = cache_->Take();
  ticket->blocks[block].state = BlockState::kFilling;
  ++ticket->fillers;
  auto& next = ticket->next_ordered;
  while (next < ticket->blocks.size() && ticket->blocks[next].state != BlockState::kWaiting) ++next;
  *job = {ticket, block};
  return true;
}

void Schedule::NoteStarved(Ticket* ticket, bool starved) {
  const bool was_starved = ticket->starved_since != Clock::time_point{};
  if (starved == was_starved) return;
  if (starved) {
    ticket->starved_since = Clock::now();
  } else {
    ticket->stats["cache_wait_s"] += Seconds(Clock::now() - ticket->starved_since);
    ticket->starved_since = {};
  }
}

void Schedule::FinishFill(const FillJob& job) {
  Ticket& ticket = *job.ticket;
  Block& block = ticket.blocks[job.block];
  --ticket.fillers;
  block.state = BlockState::kFilled;
  if (block.eager) --ticket.eager_left;
  ++ticket.filled;
  NoteStaged(&ticket);
}

bool Schedule::TakeSeal(const std::shared_ptr<Ticket>& ticket, size_t* block) {
  if (ticket->failed || ticket->sealing || ticket->next_seal == ticket->blocks.size()) return false;
  if (ticket->blocks[ticket->next_seal].state != BlockState::kFilled) return false;
  ticket->sealing = true;
  *block = ticket->next_seal;
  return true;
}

void Schedule::FinishSeal(Ticket* ticket) {
  ticket->blocks[ticket->next_seal++].state = BlockState::kSealed;
  ticket->sealing = false;
}

std::shared_ptr<Ticket> Schedule::Writing() const {
  for (const auto& ticket : tickets_) {
    if (!ticket->failed && !ticket->all_durable()) return ticket;
  }
  return nullptr;
}

bool Schedule::TakeWrite(Ticket* ticket, size_t* block) {
  if (ticket->next_write == ticket->files[ticket->write_file].end_block) return false;
  Block& next = ticket->blocks[ticket->next_write];
  if (next.state != BlockState::kSealed) return false;
  next.state = BlockState::kWriting;
  *block = ticket->next_write++;
  return true;
}

void Schedule::FinishWrite(Ticket* ticket, size_t block) {
  ticket->blocks[block].state = BlockState::kWritten;
  GiveMemory(&ticket->blocks[block]);
}

std::shared_ptr<Ticket> Schedule::TakeCleanUp() const {
  for (const auto& ticket : tickets_) {
    if (ticket->failed && ticket->fillers == 0 && !ticket->sealing) return ticket;
  }
  return nullptr;
}

std::shared_ptr<Ticket> Schedule::TakePublish() const {
  for (const auto& ticket : tickets_) {
    const bool staged = ticket->state == TicketState::kStaged;
    if (staged && ticket->approved && ticket->all_durable()) return ticket;
  }
  return nullptr;
}

void Schedule::Retire(Ticket* ticket) {
  for (auto& block : ticket->blocks) GiveMemory(&block);
  ticket->DropCaptured();
  ticket->cuda.reset();
  ticket->over = true;
  const auto is_it = [&](const std::shared_ptr<Ticket>& other) { return other.get() == ticket; };
  tickets_.erase(std::find_if(tickets_.begin(), tickets_.end(), is_it));
}

void Schedule::GiveMemory(Block* block) {
  if (block->slot < 0) return;
  cache_->Give(block->slot);
  block->slot = -1;
}

void Schedule::Fail(Ticket* ticket, const Status& error) {
  if (ticket->over || ticket->publishing || ticket->failed) return;
  ticket->failed = true;
  ticket->state = TicketState::kFailed;
  ticket->error = error;
}

}  // namespace ckpt
