// One registration function per stage; native.cpp calls them all.  Arguments are integers (addresses, sizes) and plain
// Python objects: no tensor type crosses this line, so the module depends on no torch.
#pragma once

#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <cstdint>
#include <string>

#include "common/status.h"

namespace bipace {

namespace py = pybind11;

template <typename T>
T* pointer(uintptr_t address) {
  return reinterpret_cast<T*>(address);
}

// Python sequences are passed as exact tuples of the expected length: no other code can change a tuple while it is
// read, and no subclass can have a wrong __len__.
inline void check_count(const py::tuple& items, int64_t n) {
  if (PyTuple_GET_SIZE(items.ptr()) != n) {
    throw py::value_error("a sequence must have " + std::to_string(n) + " items, got " +
                          std::to_string(PyTuple_GET_SIZE(items.ptr())) + "; it changed while it was read");
  }
}

constexpr int64_t kObjectsBetweenPolls = 1 << 16;  // some milliseconds

// poll_interrupt() where the GIL is held; a signal's handler may run any Python code.
inline void check_signals() {
  if (PyErr_CheckSignals() != 0) throw py::error_already_set();
}

inline void raise_if_failed(const Status& status) {
  if (!status.is_ok()) throw std::runtime_error(status.message);
}

void bind_objects(py::module_& m);
void bind_similar(py::module_& m);
void bind_clusters(py::module_& m);

}  // namespace bipace
