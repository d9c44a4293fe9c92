#include "cuda_driver.h"

#include <dlfcn.h>

namespace ckpt {
namespace {

// The types and numbers below are those of the driver's binary interface.
using CUresult = int;
using CUdevice = int;
using CUdeviceptr = unsigned long long;
using CUcontext = void*;
using CUstream = void*;
using CUevent = void*;

constexpr CUresult kNotReady = 600;
constexpr unsigned kStreamNonBlocking = 1;
constexpr unsigned kEventBlockingSync = 1;
constexpr unsigned kEventDisableTiming = 2;
constexpr unsigned kRegisterPortable = 1;
constexpr unsigned kAllocPortable = 1;
constexpr unsigned kMemoryHost = 1;
constexpr unsigned kMemoryDevice = 2;

struct CopySpotsArguments {  // CUDA_MEMCPY2D
  size_t source_x = 0, source_y = 0;
  unsigned source_type = 0;
  const void* source_host = nullptr;
  CUdeviceptr source_device = 0;
  void* source_array = nullptr;
  size_t source_pitch = 0;
  size_t to_x = 0, to_y = 0;
  unsigned to_type = 0;
  void* to_host = nullptr;
  CUdeviceptr to_device = 0;
  void* to_array = nullptr;
  size_t to_pitch = 0;
  size_t width = 0;
  size_t height = 0;
};

}  // namespace

struct Cuda::Driver {
  void* library = nullptr;
  CUresult (*Init)(unsigned);
  CUresult (*DeviceGet)(CUdevice*, int);
  CUresult (*DevicePrimaryCtxRetain)(CUcontext*, CUdevice);
  CUresult (*CtxPushCurrent)(CUcontext);
  CUresult (*CtxPopCurrent)(CUcontext*);
  CUresult (*StreamCreate)(CUstream*, unsigned);
  CUresult (*StreamWaitEvent)(CUstream, CUevent, unsigned);
  CUresult (*EventCreate)(CUevent*, unsigned);
  CUresult (*EventRecord)(CUevent, CUstream);
  CUresult (*EventQuery)(CUevent);
  CUresult (*EventSynchronize)(CUevent);
  CUresult (*EventDestroy)(CUevent);
  CUresult (*MemcpyDtoHAsync)(void*, CUdeviceptr, size_t, CUstream);
  CUresult (*Memcpy2DAsync)(const CopySpotsArguments*, CUstream);
  CUresult (*MemHostRegister)(void*, size_t, unsigned);
  CUresult (*MemHostUnregister)(void*);
  CUresult (*MemHostAlloc)(void**, size_t, unsigned);
  CUresult (*MemFreeHost)(void*);
  CUresult (*GetErrorName)(CUresult, const char**);
  CUresult (*GetErrorString)(CUresult, const char**);

  std::string missing;  // the first function that the library has not

  template <typename Function>
  void Load(const char* name, Function* function) {
    *function = reinterpret_cast<Function>(dlsym(library, name));
    if (*function == nullptr && missing.empty()) missing = name;
  }

  void LoadAll() {
    Load("cuInit", &Init);
    Load("cuDeviceGet", &DeviceGet);
    Load("cuDevicePrimaryCtxRetain", &DevicePrimaryCtxRetain);
    Load("cuCtxPushCurrent_v2", &CtxPushCurrent);
    Load("cuCtxPopCurrent_v2", &CtxPopCurrent);
    Load("cuStreamCreate", &StreamCreate);
    Load("cuStreamWaitEvent", &StreamWaitEvent);
    Load("cuEventCreate", &EventCreate);
    Load("cuEventRecord", &EventRecord);
    Load("cuEventQuery", &EventQuery);
    Load("cuEventSynchronize", &EventSynchronize);
    Load("cuEventDestroy_v2", &EventDestroy);
    Load("cuMemcpyDtoHAsync_v2", &MemcpyDtoHAsync);
    Load("cuMemcpy2DAsync_v2", &Memcpy2DAsync);
    Load("cuMemHostRegister_v2", &MemHostRegister);
    Load("cuMemHostUnregister", &MemHostUnregister);
    Load("cuMemHostAlloc", &MemHostAlloc);
    Load("cuMemFreeHost", &MemFreeHost);
    Load("cuGetErrorName", &GetErrorName);
    Load("cuGetErrorString", &GetErrorString);
  }
};

class Cuda::Current {
 public:
  Current(const Cuda& cuda, const Device& device) : driver_(*cuda.driver_) {
    status_ = cuda.Check(driver_.CtxPushCurrent(device.context), "cuCtxPushCurrent");
  }
  ~Current() {
    CUcontext context;
    if (status_.ok()) driver_.CtxPopCurrent(&context);
  }
  const Status& status() const { return status_; }

 private:
  const Driver& driver_;
  Status status_;
};

Status Cuda::Open(const std::string& library, std::unique_ptr<Cuda>* cuda) {
  auto driver = std::make_unique<Driver>();
  driver->library = dlopen(library.c_str(), RTLD_NOW | RTLD_LOCAL);
  if (driver->library == nullptr) {
    const char* reason = dlerror();
    return Status::Error("load", library, 0, reason == nullptr ? "no such library" : reason);
  }
  driver->LoadAll();
  if (!driver->missing.empty()) return Status::Error("load", library, 0, "it has no " + driver->missing);
  cuda->reset(new Cuda(std::move(driver)));
  return (*cuda)->Check((*cuda)->driver_->Init(0), "cuInit");
}

Cuda::Cuda(std::unique_ptr<Driver> driver) : driver_(std::move(driver)) {}

// The library stays loaded, and the primary contexts with their streams stay retained: they are the
// process's, and at its end the driver may be gone before we are.
Cuda::~Cuda() {
  Device device;
  if (!AnyDevice(&device)) return;
  const Current current(*this, device);
  if (!current.status().ok()) return;
  for (char* chunk : all_chunks_) driver_->MemFreeHost(chunk);
}

Status Cuda::Check(int result, const char* operation) const {
  if (result == 0) return {};
  const char* name = nullptr;
  const char* text = nullptr;
  driver_->GetErrorName(result, &name);
  driver_->GetErrorString(result, &text);
  std::string reason = name == nullptr ? "CUDA error " + std::to_string(result) : std::string(name);
  if (text != nullptr) reason += std::string(": ") + text;
  return Status::Error(operation, "", 0, reason);
}

Status Cuda::Find(int device, Device* found) {
  std::lock_guard<std::mutex> lock(mutex_);
  const auto known = devices_.find(device);
  if (known != devices_.end()) {
    *found = known->second;
    return {};
  }
  const Status status = OpenDevice(device, found);
  if (status.ok()) devices_[device] = *found;
  return status;
}

Status Cuda::OpenDevice(int device, Device* opened) {
  CUdevice handle;
  Status status = Check(driver_->DeviceGet(&handle, device), "cuDeviceGet");
  if (!status.ok()) return status;
  status = Check(driver_->DevicePrimaryCtxRetain(&opened->context, handle), "cuDevicePrimaryCtxRetain");
  if (!status.ok()) return status;
  const Current current(*this, *opened);
  if (!current.status().ok()) return current.status();
  return Check(driver_->StreamCreate(&opened->stream, kStreamNonBlocking), "cuStreamCreate");
}

bool Cuda::AnyDevice(Device* device) {
  std::lock_guard<std::mutex> lock(mutex_);
  if (devices_.empty()) return false;
  *device = devices_.begin()->second;
  return true;
}

Status Cuda::Follow(int device, uint64_t stream) {
  Device found;
  Status status = Find(device, &found);
  if (!status.ok()) return status;
  const Current current(*this, found);
  if (!current.status().ok()) return current.status();
  CUevent event;
  status = Check(driver_->EventCreate(&event, kEventDisableTiming), "cuEventCreate");
  if (!status.ok()) return status;
  status = Check(driver_->EventRecord(event, reinterpret_cast<CUstream>(stream)), "cuEventRecord");
  if (status.ok()) status = Check(driver_->StreamWaitEvent(found.stream, event, 0), "cuStreamWaitEvent");
  driver_->EventDestroy(event);  // its resources live until it is reached
  return status;
}

Status Cuda::Copy(int device, uint64_t source, char* to, size_t size) {
  Device found;
  const Status status = Find(device, &found);
  if (!status.ok()) return status;
  const Current current(*this, found);
  if (!current.status().ok()) return current.status();
  return Check(driver_->MemcpyDtoHAsync(to, source, size, found.stream), "cuMemcpyDtoHAsync");
}

Status Cuda::CopySpots(int device, uint64_t source, size_t pitch, size_t width, size_t count, char* to) {
  Device found;
  const Status status = Find(device, &found);
  if (!status.ok()) return status;
  const Current current(*this, found);
  if (!current.status().ok()) return current.status();
  CopySpotsArguments arguments;
  arguments.source_type = kMemoryDevice;
  arguments.source_device = source;
  arguments.source_pitch = pitch;
  arguments.to_type = kMemoryHost;
  arguments.to_host = to;
  arguments.to_pitch = width;
  arguments.width = width;
  arguments.height = count;
  return Check(driver_->Memcpy2DAsync(&arguments, found.stream), "cuMemcpy2DAsync");
}

Status Cuda::PutMark(int device, Mark* mark) {
  Device found;
  Status status = Find(device, &found);
  if (!status.ok()) return status;
  const Current current(*this, found);
  if (!current.status().ok()) return current.status();
  mark->device = device;
  status =
      Check(driver_->EventCreate(&mark->event, kEventDisableTiming | kEventBlockingSync), "cuEventCreate");
  if (!status.ok()) return status;
  status = Check(driver_->EventRecord(mark->event, found.stream), "cuEventRecord");
  if (!status.ok()) driver_->EventDestroy(mark->event);
  return status;
}

Status Cuda::Wait(const Mark& mark) {
  Device found;
  const Status status = Find(mark.device, &found);
  if (!status.ok()) return status;
  const Current current(*this, found);
  if (!current.status().ok()) return current.status();
  return Check(driver_->EventSynchronize(mark.event), "cuEventSynchronize");
}

Status Cuda::Query(const Mark& mark, bool* reached) {
  *reached = true;
  Device found;
  const Status status = Find(mark.device, &found);
  if (!status.ok()) return status;
  const Current current(*this, found);
  if (!current.status().ok()) return current.status();
  const CUresult result = driver_->EventQuery(mark.event);
  *reached = result != kNotReady;
  return *reached ? Check(result, "cuEventQuery") : Status();
}

void Cuda::Release(const Mark& mark) {
  Device found;
  if (!Find(mark.device, &found).ok()) return;
  const Current current(*this, found);
  driver_->EventDestroy(mark.event);
}

Status Cuda::Pin(char* memory, size_t size) {
  Device device;
  if (!AnyDevice(&device)) return {};
  const Current current(*this, device);
  if (!current.status().ok()) return current.status();
  return Check(driver_->MemHostRegister(memory, size, kRegisterPortable), "cuMemHostRegister");
}

void Cuda::Unpin(char* memory) {
  Device device;
  if (!AnyDevice(&device)) return;
  const Current current(*this, device);
  if (current.status().ok()) driver_->MemHostUnregister(memory);
}

Status Cuda::TakeChunk(char** chunk) {
  Device device;
  if (!AnyDevice(&device)) return Status::Error("cuMemHostAlloc", "", 0, "no device was used yet");
  std::lock_guard<std::mutex> lock(mutex_);
  if (!chunks_.empty()) {
    *chunk = chunks_.back();
    chunks_.pop_back();
    return {};
  }
  const Current current(*this, device);
  if (!current.status().ok()) return current.status();
  void* memory = nullptr;
  const Status status = Check(driver_->MemHostAlloc(&memory, kChunk, kAllocPortable), "cuMemHostAlloc");
  if (!status.ok()) return status;
  *chunk = static_cast<char*>(memory);
  all_chunks_.push_back(*chunk);
  return {};
}

void Cuda::GiveChunk(char* chunk) {
  std::lock_guard<std::mutex> lock(mutex_);
  chunks_.push_back(chunk);
}

}  // namespace ckpt
