#include "tensor_pickling.h"

#include <utility>

namespace py = pybind11;

namespace ckpt {
namespace {

constexpr const char* kCapsule = "datastates.TensorPickling";

py::object Steal(PyObject* object) {
  if (object == nullptr) throw py::error_already_set();
  return py::reinterpret_steal<py::object>(object);
}

// A name that is looked up in many objects.
class Name {
 public:
  explicit Name(const char* text) : text_(PyUnicode_InternFromString(text)) {}

  py::object Of(PyObject* object) const { return Steal(PyObject_GetAttr(object, text_)); }
  py::object Call(PyObject* object) const { return Steal(PyObject_CallMethodNoArgs(object, text_)); }
  py::object Call(PyObject* object, PyObject* argument) const {
    return Steal(PyObject_CallMethodOneArg(object, text_, argument));
  }

 private:
  PyObject* const text_;  // lives as long as the process
};

struct Names {
  Name dict{"__dict__"}, backward_hooks{"_backward_hooks"}, is_nested{"is_nested"},
      reduce_ex{"__reduce_ex__"};
  Name dtype{"dtype"}, layout{"layout"}, device{"device"}, untyped_storage{"untyped_storage"};
  Name storage_offset{"storage_offset"}, size{"size"}, stride{"stride"}, requires_grad{"requires_grad"};
  Name data_ptr{"data_ptr"}, nbytes{"nbytes"}, cdata{"_cdata"};
  py::object storage = Steal(PyUnicode_InternFromString("storage"));  // as a constant of Python code is
};

const Names& Of() {
  static const Names* const names = new Names();
  return *names;
}

bool True(const py::object& value) {
  const int truth = PyObject_IsTrue(value.ptr());
  if (truth < 0) throw py::error_already_set();
  return truth != 0;
}

bool Equal(const py::object& a, const py::object& b) {
  if (a.is(b)) return true;
  const int equal = PyObject_RichCompareBool(a.ptr(), b.ptr(), Py_EQ);
  if (equal < 0) throw py::error_already_set();
  return equal != 0;
}

uint64_t Unsigned(const py::object& number) {
  const uint64_t value = PyLong_AsUnsignedLongLong(number.ptr());
  if (value == static_cast<uint64_t>(-1) && PyErr_Occurred()) throw py::error_already_set();
  return value;
}

// The pickler calls these some twenty times for each tensor: plain C functions, not pybind11's.
template <py::object (TensorPickling::*Method)(PyObject*)>
PyObject* Call(PyObject* capsule, PyObject* object) {
  auto* const self = static_cast<std::shared_ptr<TensorPickling>*>(PyCapsule_GetPointer(capsule, kCapsule));
  if (self == nullptr) return nullptr;
  try {
    return ((*self).get()->*Method)(object).release().ptr();
  } catch (py::error_already_set& error) {
    error.restore();
  } catch (const std::exception& error) {
    PyErr_SetString(PyExc_RuntimeError, error.what());
  }
  return nullptr;
}

py::object Function(const std::shared_ptr<TensorPickling>& self, PyMethodDef* method) {
  const auto destroy = [](PyObject* capsule) {
    delete static_cast<std::shared_ptr<TensorPickling>*>(PyCapsule_GetPointer(capsule, kCapsule));
  };
  const py::object capsule =
      Steal(PyCapsule_New(new std::shared_ptr<TensorPickling>(self), kCapsule, destroy));
  return Steal(PyCFunction_New(method, capsule.ptr()));
}

PyMethodDef persistent_id = {"persistent_id", &Call<&TensorPickling::Identify>, METH_O, nullptr};
PyMethodDef reduce = {"reduce", &Call<&TensorPickling::Reduce>, METH_O, nullptr};

}  // namespace

TensorPickling::TensorPickling(const py::sequence& plain_types, py::object kind_of, py::object storage_of,
                               py::object hooks_type, py::object metadata_of, py::object not_plain,
                               int protocol)
    : plain_owner_(plain_types),
      kind_of_(std::move(kind_of)),
      storage_of_(std::move(storage_of)),
      hooks_type_(std::move(hooks_type)),
      metadata_of_(std::move(metadata_of)),
      not_plain_(std::move(not_plain)),
      protocol_(py::int_(protocol)),
      slot_(Steal(PyObject_CallNoArgs(reinterpret_cast<PyObject*>(&PyBaseObject_Type)))) {
  for (const auto type : plain_types) plain_types_.push_back(reinterpret_cast<PyTypeObject*>(type.ptr()));
}

py::object TensorPickling::PersistentId(const std::shared_ptr<TensorPickling>& self) {
  return Function(self, &persistent_id);
}

py::object TensorPickling::Reducer(const std::shared_ptr<TensorPickling>& self) {
  return Function(self, &reduce);
}

py::object TensorPickling::Identify(PyObject* object) {
  PyTypeObject* const type = Py_TYPE(object);
  for (PyTypeObject* const plain : plain_types_) {
    if (type == plain) return py::none();
  }
  if (object == slot_.ptr() && described_) return std::move(described_);
  const py::object found = Steal(PyObject_CallOneArg(storage_of_.ptr(), object));
  if (found.is_none()) return found;
  TensorKind kind;
  const auto facts = py::cast<py::tuple>(found);
  kind.storage_dtype = facts[1];
  kind.storage_type = facts[2];
  kind.location = facts[3];
  kind.itemsize = py::cast<uint64_t>(facts[4]);
  return Describe(py::object(facts[0]).ptr(), kind);
}

py::object TensorPickling::Reduce(PyObject* tensor) {
  const Names& of = Of();
  if (True(of.dict.Of(tensor)) || True(of.backward_hooks.Of(tensor)) || True(of.is_nested.Of(tensor)) ||
      True(Steal(PyObject_CallOneArg(metadata_of_.ptr(), tensor)))) {
    return of.reduce_ex.Call(tensor, protocol_.ptr());
  }
  const TensorKind& kind = KindOf(tensor);
  if (!kind.ordinary) return of.reduce_ex.Call(tensor, protocol_.ptr());
  described_ = Describe(of.untyped_storage.Call(tensor).ptr(), kind);
  const py::object size = of.size.Call(tensor);
  const py::object ordinary = Steal(
      PyTuple_Pack(6, slot_.ptr(), of.storage_offset.Call(tensor).ptr(),
                   Steal(PySequence_Tuple(size.ptr())).ptr(), of.stride.Call(tensor).ptr(),
                   of.requires_grad.Of(tensor).ptr(), Steal(PyObject_CallNoArgs(hooks_type_.ptr())).ptr()));
  const py::object arguments = Steal(PySequence_Concat(ordinary.ptr(), kind.extra.ptr()));
  return Steal(PyTuple_Pack(2, kind.rebuild.ptr(), arguments.ptr()));
}

const TensorKind& TensorPickling::KindOf(PyObject* tensor) {
  const Names& of = Of();
  const py::object dtype = of.dtype.Of(tensor), layout = of.layout.Of(tensor), device = of.device.Of(tensor);
  for (const auto& kind : kinds_) {
    if (kind->dtype.is(dtype) && kind->layout.is(layout) && Equal(kind->device, device)) return *kind;
  }
  auto kind = std::make_unique<TensorKind>();
  kind->dtype = dtype;
  kind->layout = layout;
  kind->device = device;
  const py::object learned = Steal(PyObject_CallOneArg(kind_of_.ptr(), tensor));
  if (!learned.is_none()) {
    const auto facts = py::cast<py::tuple>(learned);
    kind->ordinary = true;
    kind->rebuild = facts[0];
    kind->extra = facts[1];
    kind->storage_dtype = facts[2];
    kind->storage_type = facts[3];
    kind->location = facts[4];
    kind->itemsize = py::cast<uint64_t>(facts[5]);
  }
  kinds_.push_back(std::move(kind));
  return *kinds_.back();
}

// What torch's persistent_id answers for a storage.
py::object TensorPickling::Describe(PyObject* storage, const TensorKind& kind) {
  const Names& of = Of();
  const py::object address = of.data_ptr.Call(storage), nbytes = of.nbytes.Call(storage);
  const uint64_t place = Unsigned(address);
  if (place != 0 && !dtypes_.try_emplace(place, kind.storage_dtype).first->second.is(kind.storage_dtype)) {
    PyErr_SetNone(not_plain_.ptr());
    throw py::error_already_set();
  }
  py::object& key = keys_[Unsigned(of.cdata.Of(storage))];
  if (!key) {
    // One object for all uses, made as torch makes it: a pickle refers to the first use of an object.
    key = Steal(PyObject_Str(py::int_(keys_.size() - 1).ptr()));
    storages.append(py::handle(storage));
    addresses.append(address);
    sizes.append(nbytes);
    devices.append(of.device.Of(storage));
  }
  const py::object elements = Steal(PyLong_FromUnsignedLongLong(Unsigned(nbytes) / kind.itemsize));
  return Steal(PyTuple_Pack(5, of.storage.ptr(), kind.storage_type.ptr(), key.ptr(), kind.location.ptr(),
                            elements.ptr()));
}

}  // namespace ckpt
