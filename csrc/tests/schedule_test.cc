#include "../schedule.h"

#include "../capture.h"
#include "support.h"

namespace ckpt::test {
namespace {

struct Fixture {
  explicit Fixture(size_t slots) {
    CHECK(HostCache::Create(Env::Default(), slots * kPage, kPage, &cache).ok());
    schedule = std::make_unique<Schedule>(cache.get());
  }

  std::shared_ptr<Ticket> Add(size_t blocks, std::vector<size_t> eager = {}) {
    auto ticket = std::make_shared<Ticket>();
    ticket->files.resize(1);
    FileImage image;
    image.size = blocks * kPage;
    image.memory.push_back({0, 1, image.size, 0, kHostDevice, true, "part"});
    CHECK(FilePlan::Make(image, kPage, &ticket->files[0].plan).ok());
    MakeBlocks(kPage, ticket.get());
    for (const size_t block : eager) ticket->blocks[block].eager = true;
    ticket->eager_left = eager.size();
    ticket->eager_blocks = std::move(eager);
    schedule->Add(ticket);
    return ticket;
  }

  // The next block of any ticket, or -1.
  int Take(FillJob* job) { return schedule->TakeFill(~uint64_t{0}, job) ? static_cast<int>(job->block) : -1; }

  // Fills, seals and writes whatever can be; returns the order in which blocks were taken.
  std::vector<std::pair<uint64_t, size_t>> RunAll() {
    std::vector<std::pair<uint64_t, size_t>> order;
    for (bool progress = true; progress;) {
      progress = false;
      FillJob job;
      while (Take(&job) >= 0) {
        order.emplace_back(job.ticket->number, job.block);
        schedule->FinishFill(job);
        progress = true;
      }
      for (const auto& ticket : schedule->tickets()) {
        size_t block;
        while (schedule->TakeSeal(ticket, &block)) schedule->FinishSeal(ticket.get());
      }
      while (const auto ticket = schedule->Writing()) {
        size_t block;
        if (!schedule->TakeWrite(ticket.get(), &block)) break;
        schedule->FinishWrite(ticket.get(), block);
        progress = true;
        if (ticket->next_write == ticket->blocks.size()) ++ticket->write_file;
      }
    }
    return order;
  }

  std::unique_ptr<HostCache> cache;
  std::unique_ptr<Schedule> schedule;
};

}  // namespace

TEST(EagerBlocksGoFirstThenFileOrder) {
  Fixture fixture(8);
  fixture.Add(5, {2, 4});
  const auto order = fixture.RunAll();
  const std::vector<std::pair<uint64_t, size_t>> expected{{1, 2}, {1, 4}, {1, 0}, {1, 1}, {1, 3}};
  CHECK(order == expected);
}

TEST(ALaterSaveNeverOvertakesAnEarlierOne) {
  Fixture fixture(3);
  const auto first = fixture.Add(4);
  const auto second = fixture.Add(2, {0, 1});
  FillJob job;
  for (int i = 0; i < 3; ++i) CHECK(fixture.Take(&job) == i && job.ticket == first);
  CHECK(fixture.Take(&job) == -1);  // the first save's last block waits for memory, so the second waits too
  CHECK(second->next_ordered == 0);
}

TEST(EagerBlocksCannotLockUpASmallCache) {
  for (size_t slots = 2; slots < 6; ++slots) {
    Fixture fixture(slots);
    fixture.Add(20, {3, 4, 5, 10, 11, 12, 13, 19});
    fixture.Add(20, {19});
    fixture.Add(20, {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16, 17, 18, 19});
    CHECK(fixture.RunAll().size() == 60);
    CHECK(fixture.cache->free_count() == slots);
  }
}

TEST(AFailedSaveGivesItsMemoryBack) {
  Fixture fixture(4);
  const auto ticket = fixture.Add(4);
  FillJob job;
  CHECK(fixture.Take(&job) == 0);
  CHECK(fixture.schedule->TakeCleanUp() == nullptr);
  fixture.schedule->Fail(ticket.get(), Status::Error("write", "x", EIO));
  CHECK(fixture.schedule->TakeCleanUp() == nullptr);  // a block is being filled
  CHECK(!ticket->quiet());
  fixture.schedule->FinishFill(job);
  CHECK(ticket->quiet());
  CHECK(fixture.Take(&job) == -1);
  CHECK(fixture.schedule->TakeCleanUp() == ticket);
  fixture.schedule->Retire(ticket.get());
  CHECK(fixture.cache->free_count() == 4);
  CHECK(fixture.schedule->idle());
}

TEST(TheFirstErrorStays) {
  Fixture fixture(4);
  const auto ticket = fixture.Add(1);
  fixture.schedule->Fail(ticket.get(), Status::Error("write", "x", EIO));
  fixture.schedule->Fail(ticket.get(), Status::Error("cancel", "", ECANCELED));
  CHECK(ticket->error.operation() == "write");
}

TEST(NothingIsPublishedBeforeItIsApproved) {
  Fixture fixture(4);
  const auto ticket = fixture.Add(2);
  fixture.RunAll();
  CHECK(ticket->all_durable());
  CHECK(fixture.schedule->TakePublish() == nullptr);
  ticket->approved = true;
  CHECK(fixture.schedule->TakePublish() == ticket);
}

TEST(BlocksGivenBackLastAreTakenFirst) {
  Fixture fixture(4);
  const int first = fixture.cache->Take();
  fixture.cache->Give(first);
  CHECK(fixture.cache->Take() == first);
}

}  // namespace ckpt::test
