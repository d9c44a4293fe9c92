#include "../engine.h"

#include <sys/mman.h>

#include <atomic>
#include <cstring>
#include <thread>

#include "../crc32.h"
#include "fault_env.h"
#include "support.h"

namespace ckpt::test {
namespace {

// A save that a fault has ended: the error is in the ticket, no file and no temporary is left.
Status FailedSave(FaultEnv* env, bool approve = true) {
  const Directory directory;
  const std::string bytes = RandomBytes(1'000'000, 6);
  const TestEngine engine(env);
  const auto ticket = engine.Submit({FileOf(directory, "a", bytes), FileOf(directory, "b", bytes)});
  if (approve) engine->Approve(ticket);
  CHECK(engine->AwaitStaged(ticket, TestEngine::Soon(), true));
  CHECK(engine->AwaitOver(ticket, TestEngine::Soon()));
  const TicketView view = engine->Look(ticket);
  CHECK(view.state == TicketState::kFailed);
  env->SetFault({});
  for (const auto& name : directory.Names()) CHECK(name.find(".tmp") == std::string::npos);
  // The engine goes on.
  CHECK(engine.Save({FileOf(directory, "c", bytes)}).state == TicketState::kPersisted);
  CHECK(ReadAll(directory / "c") == bytes);
  return view.error;
}

}  // namespace

TEST(FilesLargerThanTheCacheStreamThrough) {
  const Directory directory;
  const std::string a = RandomBytes(3'000'001, 7);
  const std::string b = RandomBytes(700'000, 8);
  const TestEngine engine(Env::Default(), 2);
  const TicketView view = engine.Save(
      {FileOf(directory, "a", a), FileOf(directory, "b", b, false), FileOf(directory, "empty", "")});
  CHECK(view.state == TicketState::kPersisted);
  CHECK(ReadAll(directory / "a") == a);
  CHECK(ReadAll(directory / "b") == b);
  CHECK(ReadAll(directory / "empty").empty());
  CHECK(view.files.size() == 3);
  CHECK(view.files[0].crc32 == Crc32(0, a.data(), a.size()));
  CHECK(view.files[1].size == b.size());
}

TEST(ManySavesFromManyThreadsAllArrive) {
  const Directory directory;
  const TestEngine engine(Env::Default(), 3, 64 << 10, 3);
  std::vector<std::thread> threads;
  for (int i = 0; i < 4; ++i) {
    threads.emplace_back([&, i] {
      for (int j = 0; j < 8; ++j) {
        const std::string name = std::to_string(i) + "-" + std::to_string(j);
        const std::string bytes =
            RandomBytes(static_cast<size_t>(100'000 + 37'123 * j), static_cast<uint32_t>(10 * i + j));
        const TicketView view = engine.Save({FileOf(directory, name, bytes, j % 2 == 0)});
        CHECK(view.state == TicketState::kPersisted);
        CHECK(ReadAll(directory / name) == bytes);
      }
    });
  }
  for (auto& thread : threads) thread.join();
}

TEST(SavesCanceledAtAnyMomentLeaveNothing) {
  const Directory directory;
  const TestEngine engine(Env::Default(), 3);
  const std::string bytes = RandomBytes(2'000'000, 9);
  for (int i = 0; i < 30; ++i) {
    const auto ticket = engine.Submit({FileOf(directory, "a", bytes)});
    std::thread helper([&] { CHECK(engine->AwaitStaged(ticket, TestEngine::Soon(), true)); });
    if (i % 3 == 1) std::this_thread::sleep_for(std::chrono::microseconds(100 * i));
    if (i % 3 == 2) CHECK(engine->AwaitStaged(ticket, TestEngine::Soon(), true));
    engine->Cancel(ticket, "no longer wanted");
    CHECK(engine->AwaitOver(ticket, TestEngine::Soon()));
    helper.join();
    CHECK(engine->Look(ticket).error.text() == "no longer wanted");
    CHECK(directory.Names().empty());
  }
}

TEST(FilesGetTheirNamesOnlyWhenAllAreDurableAndTheDirectoryFollows) {
  FaultEnv env;
  std::vector<std::string> calls;
  env.SetFault([&calls](const std::string& call) {
    if (call == "create" || call == "datasync" || call == "rename" || call == "syncdir")
      calls.push_back(call);
    return 0;
  });
  const Directory directory;
  const std::string bytes = RandomBytes(200'000, 17);
  {
    const TestEngine engine(&env);
    engine.Save({FileOf(directory, "a", bytes), FileOf(directory, "b", bytes)});
  }
  const std::vector<std::string> expected{"create", "datasync", "create", "datasync",
                                          "rename", "rename",   "syncdir"};
  CHECK(calls == expected);
}

TEST(ALaterSaveIsWrittenAfterAnEarlierOne) {
  FaultEnv env;
  std::vector<std::string> calls;
  env.SetFault([&calls](const std::string& call) {
    if (call == "create" || call == "datasync") calls.push_back(call);
    return 0;
  });
  const Directory directory;
  const std::string bytes = RandomBytes(500'000, 18);
  {
    const TestEngine engine(&env, 3);
    std::vector<std::shared_ptr<Ticket>> tickets;
    for (const char* name : {"a", "b", "c"})
      tickets.push_back(engine.Submit({FileOf(directory, name, bytes)}));
    for (const auto& ticket : tickets) CHECK(engine.Finish(ticket).state == TicketState::kPersisted);
  }
  const std::vector<std::string> expected{"create", "datasync", "create", "datasync", "create", "datasync"};
  CHECK(calls == expected);
}

TEST(EveryFaultOfTheDiskFailsTheSaveAlone) {
  const auto check = [](bool ring, FaultEnv::Fault fault, const std::string& operation) {
    FaultEnv env;
    env.use_ring = ring;
    env.SetFault(std::move(fault));
    const Status status = FailedSave(&env);
    CHECK(status.operation() == operation);
    CHECK(status.error() == EIO);
    CHECK(!status.path().empty());
  };
  for (const bool ring : {true, false}) {
    for (const int nth : {1, 5, 20}) check(ring, AtWrite(nth, -EIO), "write");
    for (const int nth : {1, 2}) {
      check(ring, At("create", nth, -EIO), "open");
      check(ring, At("datasync", nth, -EIO), "fdatasync");
      check(ring, At("rename", nth, -EIO), "rename");
    }
    check(ring, At("syncdir", 1, -EIO), "fsync");
    if (DirectWorks()) check(ring, At("truncate", 1, -EIO), "truncate");
  }
}

TEST(MemoryThatCannotBeHadFailsTheSaveAlone) {
  FaultEnv env;
  env.SetFault(At("commit", 3, -ENOMEM));
  const Status status = FailedSave(&env);
  CHECK(status.operation() == "allocate");
  CHECK(status.error() == ENOMEM);
}

TEST(WhereTheKernelForbidsReadingMemoryPlainCopiesDo) {
  for (const int error : {-EPERM, -ENOSYS}) {
    FaultEnv env;
    env.SetFault(At("readmemory", 1, error));
    const Directory directory;
    const std::string bytes = RandomBytes(500'000, 11);
    const TestEngine engine(&env);
    CHECK(engine.Save({FileOf(directory, "a", bytes)}).state == TicketState::kPersisted);
    CHECK(ReadAll(directory / "a") == bytes);
  }
}

// Holds every write until told otherwise, so that a test can look at the moment before.
class HoldingEnv : public FaultEnv {
 public:
  HoldingEnv() { use_ring = false; }
  int64_t Pwrite(int fd, const void* data, size_t size, uint64_t offset) override {
    while (hold) std::this_thread::sleep_for(std::chrono::microseconds(100));
    return FaultEnv::Pwrite(fd, data, size, offset);
  }
  std::atomic<bool> hold{true};
};

// Where the kernel forbids it, memory that goes away cannot be survived.
bool ReadMemoryWorks() {
  char from = 1;
  char to = 0;
  const iovec source{&from, 1};
  const iovec target{&to, 1};
  return Env::Default()->ReadMemory(&target, 1, &source, 1) == 1;
}

TEST(MemoryThatChangesOrGoesAwayFailsTheSaveAndIsNamed) {
  for (const bool unmap : {false, true}) {
    if (unmap && !ReadMemoryWorks()) continue;
    HoldingEnv env;
    const Directory directory;
    const TestEngine engine(&env, 2, 64 << 10, 1);
    const size_t size = 4 << 20;
    void* memory = mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    CHECK(memory != MAP_FAILED);
    std::memset(memory, 1, size);
    const std::string steady = RandomBytes(300'000, 12);
    FileImage image;
    image.size = size;
    image.memory.push_back({0, reinterpret_cast<uint64_t>(memory), size, 0, kHostDevice, true, "moving"});
    const auto ticket = engine.Submit({FileOf(directory, "steady", steady),
                                       {std::move(image), directory / "moving.tmp", directory / "moving"}});
    if (unmap) {
      munmap(memory, size);
    } else {
      std::memset(memory, 2, size);
    }
    env.hold = false;
    const TicketView view = engine.Finish(ticket);
    CHECK(view.state == TicketState::kFailed);
    CHECK(view.error.operation() == "snapshot");
    CHECK(view.error.error() == (unmap ? EFAULT : 0));
    CHECK(view.torn == std::vector<std::string>{"moving"});
    CHECK(directory.Names().empty());
    if (!unmap) munmap(memory, size);
  }
}

TEST(AWaitWithADeadlineEndsThoughTheDiskHangs) {
  HoldingEnv env;
  const Directory directory;
  const TestEngine engine(&env, 2, 64 << 10, 1);
  const std::string bytes = RandomBytes(1 << 20, 13);
  const auto ticket = engine.Submit({FileOf(directory, "a", bytes)});
  CHECK(!engine->AwaitStaged(ticket, Clock::now() + std::chrono::milliseconds(20), true));
  CHECK(!engine->AwaitOver(ticket, Clock::now() + std::chrono::milliseconds(20)));
  engine->Cancel(ticket, "the disk hangs");
  CHECK(engine->AwaitStaged(ticket, TestEngine::Soon(),
                            true));  // the memory is free although the write still hangs
  CHECK(engine->Look(ticket).state == TicketState::kFailed);
  env.hold = false;
  CHECK(engine->AwaitOver(ticket, TestEngine::Soon()));
  CHECK(directory.Names().empty());
}

TEST(ASaveThatWaitsForApprovalHoldsUpNobody) {
  const Directory directory;
  const std::string bytes = RandomBytes(1 << 20, 14);
  const TestEngine engine(Env::Default(), 2);
  const auto first = engine.Submit({FileOf(directory, "first", bytes)});
  CHECK(engine.Save({FileOf(directory, "second", bytes)}).state == TicketState::kPersisted);
  CHECK(engine->Look(first).state == TicketState::kStaged);
  CHECK(!std::filesystem::exists(directory / "first"));
  CHECK(engine.Finish(first).state == TicketState::kPersisted);
}

TEST(ClosingGivesUpWhatIsNotApprovedAndRefusesWhatComesLater) {
  const Directory directory;
  const std::string bytes = RandomBytes(1 << 20, 15);
  const TestEngine engine;
  const auto ticket = engine.Submit({FileOf(directory, "a", bytes)});
  CHECK(!engine->Close(Clock::now()));
  CHECK(engine->Look(ticket).error.operation() == "close");
  CHECK(directory.Names().empty());
  std::shared_ptr<Ticket> late;
  CHECK(engine->Submit({FileOf(directory, "b", bytes)}, &late).operation() == "submit");
}

TEST(ClosingWaitsForWhatIsApproved) {
  const Directory directory;
  const std::string bytes = RandomBytes(1 << 20, 16);
  const TestEngine engine(Env::Default(), 2);
  const auto ticket = engine.Submit({FileOf(directory, "a", bytes)});
  engine->Approve(ticket);
  CHECK(engine->Close(TestEngine::Soon()));
  CHECK(engine->Look(ticket).state == TicketState::kPersisted);
  CHECK(ReadAll(directory / "a") == bytes);
}

}  // namespace ckpt::test
