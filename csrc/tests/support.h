#pragma once

#include <cstdint>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "../engine.h"
#include "check.h"

namespace ckpt::test {

// A directory that goes with its owner. $CKPT_TEST_DIR says where; the default is the working directory.
class Directory {
 public:
  Directory() {
    const char* base = std::getenv("CKPT_TEST_DIR");
    std::string name = std::string(base != nullptr ? base : ".") + "/ckpt-test-XXXXXX";
    CHECK(mkdtemp(name.data()) != nullptr);
    path_ = name;
  }
  ~Directory() { std::filesystem::remove_all(path_); }

  std::string operator/(const std::string& name) const { return path_ + "/" + name; }
  std::vector<std::string> Names() const {
    std::vector<std::string> names;
    for (const auto& entry : std::filesystem::directory_iterator(path_))
      names.push_back(entry.path().filename());
    return names;
  }

 private:
  std::string path_;
};

// Whether files in the tests' directories can be written past the page cache.
inline bool DirectWorks() {
  const Directory directory;
  const int fd = Env::Default()->Create(directory / "probe");
  CHECK(fd >= 0);
  const bool works = Env::Default()->SetDirect(fd, true) >= 0;
  Env::Default()->Close(fd);
  return works;
}

inline std::string ReadAll(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  CHECK(file.good());
  return {std::istreambuf_iterator<char>(file), std::istreambuf_iterator<char>()};
}

inline std::string RandomBytes(size_t size, uint32_t seed) {
  std::mt19937 random(seed);
  std::string bytes(size, '\0');
  for (auto& byte : bytes) byte = static_cast<char>(random());
  return bytes;
}

// An image that is one part, of the memory of `bytes`.
inline FileImage ImageOf(const std::string& bytes, bool still, const std::string& name = "part") {
  FileImage image;
  image.size = bytes.size();
  MemoryPart part{};
  part.address = reinterpret_cast<uint64_t>(bytes.data());
  part.size = bytes.size();
  part.device = kHostDevice;
  part.still = still;
  part.name = name;
  image.memory.push_back(part);
  return image;
}

inline PendingFile FileOf(const Directory& directory, const std::string& name, const std::string& bytes,
                          bool still = true) {
  return {ImageOf(bytes, still, name), directory / (name + ".tmp"), directory / name};
}

// An engine that is closed at the end of the test.
class TestEngine {
 public:
  explicit TestEngine(Env* env = Env::Default(), size_t blocks = 4, size_t block_bytes = 64 << 10,
                      int threads = 2) {
    EngineOptions options;
    options.cache_bytes = blocks * block_bytes;
    options.block_bytes = block_bytes;
    options.threads = threads;
    options.env = env;
    const char* driver = std::getenv("CKPT_TEST_CUDA");
    if (driver != nullptr) options.cuda_library = driver;
    const Status status = Engine::Open(options, &engine_);
    if (!status.ok()) std::fprintf(stderr, "%s: %s\n", status.operation().c_str(), status.text().c_str());
    CHECK(status.ok());
  }
  ~TestEngine() { engine_->Close(Clock::now() + std::chrono::seconds(60)); }

  Engine* operator->() const { return engine_.get(); }

  std::shared_ptr<Ticket> Submit(std::vector<PendingFile> files) const {
    std::shared_ptr<Ticket> ticket;
    CHECK(engine_->Submit(std::move(files), &ticket).ok());
    CHECK(engine_->AwaitEager(ticket, Soon()));
    return ticket;
  }
  TicketView Finish(const std::shared_ptr<Ticket>& ticket) const {
    engine_->Approve(ticket);
    CHECK(engine_->AwaitStaged(ticket, Soon(), true));
    CHECK(engine_->AwaitOver(ticket, Soon()));
    return engine_->Look(ticket);
  }
  TicketView Save(std::vector<PendingFile> files) const { return Finish(Submit(std::move(files))); }

  // Far enough that only a thread that hangs gets there.
  static Clock::time_point Soon() { return Clock::now() + std::chrono::seconds(60); }

 private:
  std::shared_ptr<Engine> engine_;
};

}  // namespace ckpt::test
