// The Python module datastates.engine._native. Thin: it turns Python's objects into the engine's and releases
// the GIL for everything else. datastates/engine/engine.py is the face that people use.

#include <pybind11/pybind11.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstring>

#include "crc32.h"
#include "engine.h"
#include "tensor_pickling.h"

namespace py = pybind11;

namespace ckpt {
namespace {

// A wait on the main thread looks for signals (Ctrl-C) this often; what it waits for wakes it at once.
constexpr auto kSignalCheck = std::chrono::milliseconds(50);

Clock::time_point DeadlineAfter(double seconds) {
  constexpr double kForever = 1e9;
  if (!(seconds < kForever)) return Clock::time_point::max();
  return Clock::now() +
         std::chrono::duration_cast<Clock::duration>(std::chrono::duration<double>(std::max(seconds, 0.0)));
}

// Calls `wait`, a wait until a deadline without the GIL, in slices between which Python sees its signals.
template <typename Wait>
bool WaitInterruptibly(Clock::time_point deadline, Wait wait) {
  for (;;) {
    const auto slice = std::min(deadline, Clock::now() + kSignalCheck);
    {
      const py::gil_scoped_release release;
      if (wait(slice)) return true;
    }
    if (PyErr_CheckSignals() != 0) throw py::error_already_set();
    if (slice == deadline) return false;
  }
}

// Reads attributes of Python objects without making a string of the name each time: an image may have many
// thousand parts.
class Attribute {
 public:
  explicit Attribute(const char* name) : name_(PyUnicode_InternFromString(name)) {}

  py::object Of(PyObject* object) const {
    PyObject* value = PyObject_GetAttr(object, name_);
    if (value == nullptr) throw py::error_already_set();
    return py::reinterpret_steal<py::object>(value);
  }
  uint64_t Unsigned(PyObject* object) const {
    const uint64_t number = PyLong_AsUnsignedLongLong(Of(object).ptr());
    if (number == static_cast<uint64_t>(-1) && PyErr_Occurred()) throw py::error_already_set();
    return number;
  }
  int Int(PyObject* object) const {
    const long number = PyLong_AsLong(Of(object).ptr());
    if (number == -1 && PyErr_Occurred()) throw py::error_already_set();
    return static_cast<int>(number);
  }
  bool Bool(PyObject* object) const { return PyObject_IsTrue(Of(object).ptr()) == 1; }
  std::string String(PyObject* object) const { return py::cast<std::string>(Of(object)); }
  // A file name as the system wants it.
  std::string Path(PyObject* object) const {
    PyObject* bytes = nullptr;
    if (!PyUnicode_FSConverter(Of(object).ptr(), &bytes)) throw py::error_already_set();
    return std::string(py::reinterpret_steal<py::bytes>(bytes));
  }

  // Calls `each` with every item of the sequence that the attribute holds.
  template <typename Each>
  void ForEach(PyObject* object, Each each) const {
    const py::object sequence =
        py::reinterpret_steal<py::object>(PySequence_Fast(Of(object).ptr(), "expected a list"));
    if (!sequence) throw py::error_already_set();
    const Py_ssize_t count = PySequence_Fast_GET_SIZE(sequence.ptr());
    for (Py_ssize_t i = 0; i < count; ++i) each(PySequence_Fast_GET_ITEM(sequence.ptr(), i));
  }

 private:
  PyObject* const name_;  // lives as long as the process
};

struct Attributes {
  Attribute image{"image"}, temporary{"temporary"}, final_path{"final"};
  Attribute size{"size"}, literals{"literals"}, memory{"memory"}, checksums{"checksums"}, digests{"digests"};
  Attribute offset{"offset"}, data{"data"}, address{"address"}, nbytes{"nbytes"}, still{"still"},
      name{"name"};
  Attribute device{"device"}, stream{"stream"}, start{"start"}, end{"end"}, ranges{"ranges"};
};

Range ReadRange(PyObject* pair) {
  const auto range = py::cast<std::pair<uint64_t, uint64_t>>(py::handle(pair));
  return {range.first, range.second};
}

FileImage ReadImage(const Attributes& get, PyObject* object) {
  FileImage image;
  image.size = get.size.Unsigned(object);
  get.literals.ForEach(object, [&](PyObject* part) {
    const py::object data = get.data.Of(part);
    if (!PyBytes_Check(data.ptr())) throw py::type_error("the data of a Literal must be bytes");
    const auto size = static_cast<uint64_t>(PyBytes_GET_SIZE(data.ptr()));
    image.literals.push_back({get.offset.Unsigned(part), PyBytes_AS_STRING(data.ptr()), size});
  });
  get.memory.ForEach(object, [&](PyObject* part) {
    MemoryPart memory;
    memory.offset = get.offset.Unsigned(part);
    memory.address = get.address.Unsigned(part);
    memory.size = get.nbytes.Unsigned(part);
    memory.stream = get.stream.Unsigned(part);
    memory.device = get.device.Int(part);
    memory.still = get.still.Bool(part);
    memory.name = get.name.String(part);
    image.memory.push_back(std::move(memory));
  });
  get.checksums.ForEach(object, [&](PyObject* part) {
    image.checksums.push_back(
        {get.offset.Unsigned(part), {get.start.Unsigned(part), get.end.Unsigned(part)}});
  });
  get.digests.ForEach(object, [&](PyObject* part) {
    DigestPart digest{get.offset.Unsigned(part), {}};
    get.ranges.ForEach(part, [&](PyObject* pair) { digest.ranges.push_back(ReadRange(pair)); });
    image.digests.push_back(std::move(digest));
  });
  return image;
}

std::vector<PendingFile> ReadFiles(const py::sequence& files) {
  static const Attributes* const get = new Attributes();
  std::vector<PendingFile> pending;
  for (const auto file : files) {
    const py::object image = get->image.Of(file.ptr());
    pending.push_back(
        {ReadImage(*get, image.ptr()), get->temporary.Path(file.ptr()), get->final_path.Path(file.ptr())});
  }
  return pending;
}

py::str PathString(const std::string& path) {
  return py::reinterpret_steal<py::str>(
      PyUnicode_DecodeFSDefaultAndSize(path.data(), static_cast<Py_ssize_t>(path.size())));
}

// None, or (operation, path, errno, text).
py::object ErrorTuple(const Status& status) {
  if (status.ok()) return py::none();
  return py::make_tuple(status.operation(), PathString(status.path()), status.error(), status.text());
}

const char* StateName(TicketState state) {
  switch (state) {
    case TicketState::kStaging:
      return "staging";
    case TicketState::kStaged:
      return "staged";
    case TicketState::kPersisted:
      return "persisted";
    case TicketState::kFailed:
      break;
  }
  return "failed";
}

class PyTicket {
 public:
  PyTicket(std::shared_ptr<Engine> engine, std::shared_ptr<Ticket> ticket)
      : engine_(std::move(engine)), ticket_(std::move(ticket)) {}

  bool AwaitEager() {
    return WaitInterruptibly(DeadlineAfter(1e18),
                             [&](auto until) { return engine_->AwaitEager(ticket_, until); });
  }
  bool AwaitStaged(double seconds, bool help) {
    return WaitInterruptibly(DeadlineAfter(seconds),
                             [&](auto until) { return engine_->AwaitStaged(ticket_, until, help); });
  }
  bool AwaitOver(double seconds) {
    return WaitInterruptibly(DeadlineAfter(seconds),
                             [&](auto until) { return engine_->AwaitOver(ticket_, until); });
  }
  void Approve() {
    const py::gil_scoped_release release;
    engine_->Approve(ticket_);
  }
  void Cancel(const std::string& reason) {
    const py::gil_scoped_release release;
    engine_->Cancel(ticket_, reason);
  }

  py::str State() { return StateName(Look().state); }
  bool Quiet() { return Look().quiet; }
  py::object Error() { return ErrorTuple(Look().error); }
  py::list Torn() {
    py::list names;
    for (const auto& name : Look().torn) names.append(name);
    return names;
  }
  py::list Files() {
    py::list files;
    for (const auto& file : Look().files)
      files.append(py::make_tuple(PathString(file.path), file.size, file.crc32));
    return files;
  }
  py::dict Stats() {
    py::dict stats;
    for (const auto& [name, value] : Look().stats) stats[py::str(name)] = value;
    return stats;
  }

 private:
  TicketView Look() {
    const py::gil_scoped_release release;
    return engine_->Look(ticket_);
  }

  const std::shared_ptr<Engine> engine_;
  const std::shared_ptr<Ticket> ticket_;
};

class PyEngine {
 public:
  PyEngine(size_t cache_bytes, size_t block_bytes, int threads, bool pin, const std::string& io,
           const std::string& cuda_library)
      : pid_(getpid()) {
    EngineOptions options;
    options.cache_bytes = cache_bytes;
    options.block_bytes = block_bytes;
    options.threads = threads;
    options.pin = pin;
    options.io = io == "direct" ? IoMode::kDirect : io == "buffered" ? IoMode::kBuffered : IoMode::kAuto;
    options.cuda_library = cuda_library;
    const Status status = Engine::Open(options, &engine_);
    if (!status.ok()) {
      PyErr_SetString(PyExc_OSError,
                      (status.operation() + " " + status.path() + ": " + status.text()).c_str());
      throw py::error_already_set();
    }
  }

  // In a forked child there are no threads to end and no cache to free.
  ~PyEngine() {
    if (engine_ == nullptr || getpid() != pid_) return;
    const py::gil_scoped_release release;
    engine_->Close(Clock::now());
  }

  // (a ticket, None) or (None, an error).
  py::tuple Submit(const py::sequence& files) {
    std::vector<PendingFile> pending = ReadFiles(files);
    std::shared_ptr<Ticket> ticket;
    Status status;
    {
      const py::gil_scoped_release release;
      status = engine_->Submit(std::move(pending), &ticket);
    }
    if (!status.ok()) return py::make_tuple(py::none(), ErrorTuple(status));
    return py::make_tuple(py::cast(new PyTicket(engine_, ticket), py::return_value_policy::take_ownership),
                          py::none());
  }

  bool Close(double seconds) {
    WaitInterruptibly(DeadlineAfter(seconds), [&](auto until) { return engine_->Drain(until); });
    const py::gil_scoped_release release;
    return engine_->Close(Clock::now());
  }

 private:
  const pid_t pid_;
  std::shared_ptr<Engine> engine_;
};

uint32_t PyCrc32(const py::buffer& data, uint32_t value, bool portable) {
  Py_buffer view;
  if (PyObject_GetBuffer(data.ptr(), &view, PyBUF_SIMPLE) != 0) throw py::error_already_set();
  uint32_t crc;
  {
    const py::gil_scoped_release release;
    const auto size = static_cast<size_t>(view.len);
    crc = portable ? Crc32Portable(value, view.buf, size) : Crc32(value, view.buf, size);
  }
  PyBuffer_Release(&view);
  return crc;
}

// Whether the host memory at any of the addresses begins with `start`.
bool BeginsWith(const py::list& addresses, const std::string& start) {
  for (const auto address : addresses) {
    const auto* const memory = static_cast<const char*>(PyLong_AsVoidPtr(address.ptr()));
    if (memory == nullptr) throw py::value_error("an address must be a number other than 0");
    if (std::memcmp(memory, start.data(), start.size()) == 0) return true;
  }
  return false;
}

}  // namespace
}  // namespace ckpt

PYBIND11_MODULE(_native, module) {
  using namespace ckpt;
  module.attr("PAGE") = kPage;
  module.def(
      "crc32", [](const py::buffer& data, uint32_t value) { return PyCrc32(data, value, false); },
      py::arg("data"), py::arg("value") = 0,
      "The CRC-32 of a buffer, continued from `value`; as zlib.crc32.");
  module.def(
      "crc32_portable", [](const py::buffer& data, uint32_t value) { return PyCrc32(data, value, true); },
      py::arg("data"), py::arg("value") = 0, "The same without help from the processor.");
  module.def("crc32_combine", &Crc32Combine, py::arg("a"), py::arg("b"), py::arg("len_b"),
             "The CRC-32 of A followed by B, from the CRC-32 of each and the length of B in bytes.");
  module.def("crc32_path", &Crc32Path, "How crc32 works here: pclmulqdq, armv8-crc or portable.");

  module.def(
      "begins_with", &BeginsWith, py::arg("addresses"), py::arg("start"),
      "Whether the host memory at any of the addresses begins with these bytes; each must have as many.");

  py::class_<PyEngine>(module, "Engine")
      .def(py::init<size_t, size_t, int, bool, const std::string&, const std::string&>(),
           py::arg("cache_bytes"), py::arg("block_bytes"), py::arg("threads"), py::arg("pin"), py::arg("io"),
           py::arg("cuda_library"))
      .def("submit", &PyEngine::Submit, py::arg("files"))
      .def("close", &PyEngine::Close, py::arg("seconds"));

  py::class_<PyTicket>(module, "Ticket")
      .def("await_eager", &PyTicket::AwaitEager)
      .def("await_staged", &PyTicket::AwaitStaged, py::arg("seconds"), py::arg("help"))
      .def("await_over", &PyTicket::AwaitOver, py::arg("seconds"))
      .def("approve", &PyTicket::Approve)
      .def("cancel", &PyTicket::Cancel, py::arg("reason"))
      .def_property_readonly("state", &PyTicket::State)
      .def_property_readonly("quiet", &PyTicket::Quiet)
      .def_property_readonly("error", &PyTicket::Error)
      .def_property_readonly("torn", &PyTicket::Torn)
      .def_property_readonly("files", &PyTicket::Files)
      .def_property_readonly("stats", &PyTicket::Stats);

  py::class_<TensorPickling, std::shared_ptr<TensorPickling>>(module, "TensorPickling")
      .def(py::init<py::sequence, py::object, py::object, py::object, py::object, py::object, int>(),
           py::arg("plain_types"), py::arg("kind_of"), py::arg("storage_of"), py::arg("hooks_type"),
           py::arg("metadata_of"), py::arg("not_plain"), py::arg("protocol"))
      .def_property_readonly("persistent_id", &TensorPickling::PersistentId)
      .def_property_readonly("reduce", &TensorPickling::Reducer)
      .def_readonly("storages", &TensorPickling::storages)
      .def_readonly("addresses", &TensorPickling::addresses)
      .def_readonly("sizes", &TensorPickling::sizes)
      .def_readonly("devices", &TensorPickling::devices);
}
