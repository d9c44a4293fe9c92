#include <pybind11/pybind11.h>

#include "crc32.h"

namespace py = pybind11;

namespace {

uint32_t PyCrc32(const py::buffer& data, uint32_t value) {
  Py_buffer view;
  if (PyObject_GetBuffer(data.ptr(), &view, PyBUF_SIMPLE) != 0) throw py::error_already_set();
  uint32_t crc;
  {
    py::gil_scoped_release release;
    crc = ckpt::Crc32(value, view.buf, static_cast<size_t>(view.len));
  }
  PyBuffer_Release(&view);
  return crc;
}

}  // namespace

PYBIND11_MODULE(_native, module) {
  module.def("crc32", &PyCrc32, py::arg("data"), py::arg("value") = 0);
  module.def("crc32_combine", &ckpt::Crc32Combine);
}
