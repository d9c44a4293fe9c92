#pragma once

#include <pybind11/pybind11.h>

#include <cstdint>
#include <memory>
#include <string>
#include <unordered_map>
#include <vector>

// The part of datastates.formats.quick_pickle that runs once for every object and every tensor of a pickle.
// Knows torch by the names of its attributes only.

namespace ckpt {

// What every tensor of one kind is pickled like, as quick_pickle._kind_of tells it.
struct TensorKind {
  pybind11::object dtype, layout, device;  // decide which kind a tensor is of
  bool ordinary = false;                   // false: torch pickles these
  pybind11::object rebuild, extra;
  pybind11::object storage_dtype, storage_type, location;
  uint64_t itemsize = 1;
};

// One pickling. Needs the GIL throughout.
class TensorPickling {
 public:
  // `plain_types`: types whose objects are no storages. `kind_of(tensor)` and `storage_of(object)` are asked
  // about everything that is met for the first time; `not_plain` is raised for what torch would refuse.
  TensorPickling(const pybind11::sequence& plain_types, pybind11::object kind_of, pybind11::object storage_of,
                 pybind11::object hooks_type, pybind11::object metadata_of, pybind11::object not_plain,
                 int protocol);

  // What the pickler is to call: they keep `self` alive.
  static pybind11::object PersistentId(const std::shared_ptr<TensorPickling>& self);
  static pybind11::object Reducer(const std::shared_ptr<TensorPickling>& self);

  // Of every storage that was described, in the order of their keys.
  pybind11::list storages, addresses, sizes, devices;

  pybind11::object Identify(PyObject* object);
  pybind11::object Reduce(PyObject* tensor);

 private:
  const TensorKind& KindOf(PyObject* tensor);
  pybind11::object Describe(PyObject* storage, const TensorKind& kind);

  std::vector<PyTypeObject*> plain_types_;
  const pybind11::object plain_owner_, kind_of_, storage_of_, hooks_type_, metadata_of_, not_plain_,
      protocol_;
  const pybind11::object slot_;  // stands for the storage of the tensor that was reduced last
  pybind11::object described_;   // what is to be written for it
  std::vector<std::unique_ptr<TensorKind>> kinds_;
  std::unordered_map<uint64_t, pybind11::object> keys_;    // by the storage's identity
  std::unordered_map<uint64_t, pybind11::object> dtypes_;  // by address
};

}  // namespace ckpt
