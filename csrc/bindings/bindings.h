// One registration function per stage; native.cpp calls them all.  Arguments are integers (addresses, sizes) and plain
// Python objects: no tensor type crosses this line, so the module depends on no torch.
#pragma once

#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <cstdint>

#include "common/status.h"

namespace bipace {

namespace py = pybind11;

template <typename T>
T* pointer(uintptr_t address) {
  return reinterpret_cast<T*>(address);
}

inline void raise_if_failed(const Status& status) {
  if (!status.is_ok()) throw std::runtime_error(status.message);
}

void bind_objects(py::module_& m);
void bind_similar(py::module_& m);
void bind_clusters(py::module_& m);

}  // namespace bipace
