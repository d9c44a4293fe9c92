#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "status.h"

namespace ckpt {

// The CUDA driver library, found at run time: its interface is stable across CUDA versions, so one build
// serves machines with and without a GPU. All the engine asks of it is to copy device memory to the host,
// behind the work of a stream.
//
// Each device gets one copy stream of our own, in its primary context (the one that torch uses). Copies are
// queued on it and happen in order. Safe to use from any thread; no call changes the calling thread's current
// context.
class Cuda {
 public:
  // A point in a device's copy stream: reached when everything queued before it is done.
  struct Mark {
    int device;
    void* event;
  };

  // Loads `library` ("libcuda.so.1") and the functions used here.
  static Status Open(const std::string& library, std::unique_ptr<Cuda>* cuda);
  ~Cuda();

  // Makes all later copies from `device` wait for the work that is queued on `stream` now.
  Status Follow(int device, uint64_t stream);

  // Queues a copy of `size` bytes to the host. Where the host memory is not pinned the driver may wait for
  // it.
  Status Copy(int device, uint64_t source, char* to, size_t size);

  // Queues a copy of `count` pieces of `width` bytes, each `pitch` bytes after the one before, to `to` back
  // to back.
  Status CopySpots(int device, uint64_t source, size_t pitch, size_t width, size_t count, char* to);

  // Marks the end of the queue as it is now. Every mark is handed to Release once.
  Status PutMark(int device, Mark* mark);
  Status Wait(const Mark& mark);
  Status Query(const Mark& mark, bool* reached);
  void Release(const Mark& mark);

  // Page-locks host memory (a multiple of pages), so that copies to it run at full speed in the background.
  Status Pin(char* memory, size_t size);
  void Unpin(char* memory);

  // Page-locked memory of kChunk bytes. What is given back is kept for the next save.
  static constexpr size_t kChunk = 1 << 20;
  Status TakeChunk(char** chunk);
  void GiveChunk(char* chunk);

 private:
  struct Driver;  // the library and its functions
  struct Device {
    void* context;
    void* stream;
  };
  class Current;  // a device's context, made current for a scope

  explicit Cuda(std::unique_ptr<Driver> driver);
  Status Find(int device, Device* found);
  Status OpenDevice(int device, Device* opened);
  Status Check(int result, const char* operation) const;
  // Any device that was used: the context for what belongs to none.
  bool AnyDevice(Device* device);

  const std::unique_ptr<Driver> driver_;
  std::mutex mutex_;
  std::map<int, Device> devices_;
  std::vector<char*> chunks_;  // free ones
  std::vector<char*> all_chunks_;
};

}  // namespace ckpt
