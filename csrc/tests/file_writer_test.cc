#include "../file_writer.h"

#include <cstring>

#include "../host_cache.h"
#include "fault_env.h"
#include "support.h"

namespace ckpt::test {
namespace {

constexpr size_t kBlock = 16 * kPage;

// Writes `bytes` in blocks, two at a time, as the persister would.
Status WriteFile(Env* env, IoMode mode, const std::string& path, const std::string& bytes) {
  FileWriter writer(env, mode, 2);
  Status status = writer.Open(path);
  const size_t padded = (bytes.size() + kPage - 1) / kPage * kPage;
  std::unique_ptr<char, void (*)(void*)> memory(static_cast<char*>(std::aligned_alloc(kPage, padded + kPage)),
                                                std::free);
  std::memset(memory.get(), 0, padded);
  std::memcpy(memory.get(), bytes.data(), bytes.size());
  uint64_t tag;
  for (size_t at = 0; status.ok() && at < bytes.size(); at += kBlock) {
    if (writer.full()) status = writer.WaitOne(&tag);
    if (status.ok()) writer.Start(memory.get() + at, std::min(kBlock, bytes.size() - at), at, at);
  }
  while (writer.in_flight() > 0) {
    const Status waited = writer.WaitOne(&tag);
    if (status.ok()) status = waited;
  }
  return status.ok() ? writer.Finish(bytes.size()) : status;
}

void CheckWrites(Env* env, IoMode mode, size_t size = 5 * kBlock + 1234) {
  const Directory directory;
  const std::string bytes = RandomBytes(size, 4);
  const Status status = WriteFile(env, mode, directory / "file", bytes);
  CHECK(status.ok());
  CHECK(ReadAll(directory / "file") == bytes);
}

Status Failure(Env* env, IoMode mode = IoMode::kAuto) {
  const Directory directory;
  return WriteFile(env, mode, directory / "file", RandomBytes(3 * kBlock, 5));
}

}  // namespace

TEST(EveryWayOfWritingGivesTheSameBytes) {
  FaultEnv env;
  for (const bool ring : {true, false}) {
    env.use_ring = ring;
    for (const IoMode mode : {IoMode::kAuto, IoMode::kBuffered}) {
      for (const size_t size : {size_t{0}, size_t{1}, kPage, kBlock, kBlock + 1, 7 * kBlock - 1}) {
        CheckWrites(&env, mode, size);
      }
    }
  }
}

TEST(ShortWritesAreContinued) {
  FaultEnv env;
  for (const bool ring : {true, false}) {
    env.use_ring = ring;
    env.largest_write = 3 * kPage;
    CheckWrites(&env, IoMode::kAuto);
    env.largest_write = 1000;
    CheckWrites(&env, IoMode::kBuffered, kBlock);
  }
}

TEST(AShortWriteThatEndsOffThePageIsContinuedAtThePage) {
  FaultEnv env;
  env.use_ring = false;
  env.largest_write = 2 * kPage + 512;
  CheckWrites(&env, IoMode::kAuto);
}

TEST(InterruptedWritesAreTriedAgain) {
  FaultEnv env;
  env.SetFault(AtWrite(2, -EINTR, false));
  CheckWrites(&env, IoMode::kAuto);
  env.SetFault(AtWrite(2, -EAGAIN, false));
  CheckWrites(&env, IoMode::kAuto);
}

TEST(WhereTheFileSystemRefusesDirectWritesThePageCacheIsUsed) {
  FaultEnv env;
  env.SetFault(At("direct", 1, -EINVAL));
  CheckWrites(&env, IoMode::kAuto);
}

TEST(WhereOnlyTheFirstWritesTellThePageCacheIsUsedAsWell) {
  if (!DirectWorks()) return;
  for (const bool ring : {true, false}) {
    FaultEnv env;
    env.use_ring = ring;
    env.SetFault([direct = true](const std::string& call) mutable {
      if (call == "buffered") direct = false;
      return direct && (call == "ringresult" || call == "pwrite") ? -EINVAL : 0;
    });
    CheckWrites(&env, IoMode::kAuto);
  }
}

TEST(ARingThatTakesNoWritesIsDoneWithout) {
  FaultEnv env;
  env.SetFault(At("ringresult", 1, -EINVAL));
  CheckWrites(&env, IoMode::kAuto);
  env.SetFault(At("ringwrite", 1, -EBUSY));
  CheckWrites(&env, IoMode::kAuto);
}

TEST(DirectMeansDirect) {
  FaultEnv env;
  env.SetFault(At("direct", 1, -EINVAL));
  CHECK(Failure(&env, IoMode::kDirect).operation() == "open with O_DIRECT");
}

TEST(AFullDiskIsAnErrorThatNamesTheFile) {
  FaultEnv env;
  env.SetFault(AtWrite(2, -ENOSPC));
  const Status status = Failure(&env);
  CHECK(status.operation() == "write");
  CHECK(status.error() == ENOSPC);
  CHECK(status.path().find("/file") != std::string::npos);
  CHECK(status.text() == "No space left on device");
}

TEST(WritesThatGetNowhereAreAnError) {
  FaultEnv env;
  env.use_ring = false;
  env.largest_write = 0;
  CHECK(Failure(&env).error() == EIO);
}

TEST(EveryStepOfWritingReportsItsError) {
  for (const auto& [call, operation] : std::vector<std::pair<std::string, std::string>>{
           {"create", "open"}, {"datasync", "fdatasync"}, {"pwrite", "write"}}) {
    FaultEnv env;
    env.use_ring = false;
    env.SetFault(At(call, 1, -EIO));
    const Status status = Failure(&env);
    CHECK(status.operation() == operation);
    CHECK(status.error() == EIO);
  }
}

TEST(ALeftoverOfTheSameNameIsReplaced) {
  const Directory directory;
  const std::string old(100000, 'o');
  CHECK(WriteFile(Env::Default(), IoMode::kAuto, directory / "file", old).ok());
  CHECK(WriteFile(Env::Default(), IoMode::kAuto, directory / "file", "new").ok());
  CHECK(ReadAll(directory / "file") == "new");
}

}  // namespace ckpt::test
