// Against the stand-in driver library that $CKPT_TEST_CUDA names: its device memory is host memory.

#include <dlfcn.h>

#include <cstring>
#include <thread>

#include "../snapshot.h"
#include "support.h"

namespace ckpt::test {
namespace {

// The stand-in's own functions; absent where the tests run without one.
class StandIn {
 public:
  StandIn() {
    const char* path = std::getenv("CKPT_TEST_CUDA");
    library_ = path == nullptr ? nullptr : dlopen(path, RTLD_NOW);
  }
  bool there() const { return library_ != nullptr; }
  template <typename Result, typename... Arguments>
  Result Call(const char* name, Arguments... arguments) const {
    return reinterpret_cast<Result (*)(Arguments...)>(dlsym(library_, name))(arguments...);
  }

 private:
  void* library_;
};

PendingFile OnDevice(const Directory& directory, const std::string& name, const std::string& bytes,
                     bool still, void* stream, int device = 0) {
  PendingFile file = FileOf(directory, name, bytes, still);
  file.image.memory[0].device = device;
  file.image.memory[0].stream = reinterpret_cast<uint64_t>(stream);
  return file;
}

}  // namespace

TEST(PartsOnDevicesAreCopiedBehindTheWorkOfTheirStream) {
  const StandIn cuda;
  if (!cuda.there()) return;
  const Directory directory;
  const TestEngine engine(Env::Default(), 4, 64 << 10, 2);
  void* const stream = cuda.Call<void*>("standin_stream");
  std::string large(1'500'000, '\0');
  const std::string host = RandomBytes(300'000, 20);
  for (int save = 1; save <= 10; ++save) {
    cuda.Call<void>("standin_hold", stream, 1);
    cuda.Call<void>("standin_fill", stream, static_cast<void*>(large.data()), save, large.size());
    const auto ticket = engine.Submit({OnDevice(directory, "large", large, true, stream),
                                       OnDevice(directory, "other", host, true, nullptr, 1),
                                       FileOf(directory, "host", host, true)});
    cuda.Call<void>("standin_hold", stream, 0);
    CHECK(engine.Finish(ticket).state == TicketState::kPersisted);
    CHECK(ReadAll(directory / "large") == std::string(large.size(), static_cast<char>(save)));
    CHECK(ReadAll(directory / "other") == host);
    CHECK(ReadAll(directory / "host") == host);
  }
}

TEST(PartsOnDevicesThatWillNotHoldStillAreCopiedAtTheSave) {
  const StandIn cuda;
  if (!cuda.there()) return;
  const Directory directory;
  const TestEngine engine(Env::Default(), 4, 64 << 10, 2);
  std::string large(3'000'000, 'a');
  std::string small(10'000, 'b');
  const auto ticket = engine.Submit({OnDevice(directory, "large", large, false, nullptr),
                                     OnDevice(directory, "small", small, false, nullptr)});
  std::memset(large.data(), 'x', large.size());
  std::memset(small.data(), 'x', small.size());
  CHECK(engine.Finish(ticket).state == TicketState::kPersisted);
  CHECK(ReadAll(directory / "large") == std::string(large.size(), 'a'));
  CHECK(ReadAll(directory / "small") == std::string(small.size(), 'b'));
}

TEST(AnyCallToTheDriverMayFail) {
  const StandIn cuda;
  if (!cuda.there()) return;
  const std::string bytes = RandomBytes(1'000'000, 21);
  for (const char* function : {"cuInit", "cuDeviceGet", "cuDevicePrimaryCtxRetain", "cuCtxPushCurrent_v2",
                               "cuStreamCreate", "cuStreamWaitEvent", "cuEventCreate", "cuEventRecord",
                               "cuMemHostAlloc", "cuMemcpyDtoHAsync_v2", "cuMemcpy2DAsync_v2"}) {
    for (const int nth : {1, 5}) {
      const Directory directory;
      const TestEngine engine(Env::Default(), 4, 64 << 10, 2);
      cuda.Call<void>("standin_fail", function, nth, 700);
      const auto ticket = engine.Submit(
          {OnDevice(directory, "a", bytes, true, nullptr), OnDevice(directory, "b", bytes, false, nullptr)});
      const TicketView view = engine.Finish(ticket);
      cuda.Call<void>("standin_fail", function, 0, 0);
      const bool failed = view.state == TicketState::kFailed;
      CHECK(failed || view.state == TicketState::kPersisted);
      if (nth == 1) CHECK(failed);
      if (failed)
        CHECK(view.error.text() == "CUDA_ERROR_ILLEGAL_ADDRESS: an illegal memory access was encountered");
      if (!failed) CHECK(ReadAll(directory / "a") == bytes);
    }
  }
  CHECK(cuda.Call<int>("standin_live_events") == 0);
  CHECK(cuda.Call<int>("standin_registered") == 0);
}

}  // namespace ckpt::test
