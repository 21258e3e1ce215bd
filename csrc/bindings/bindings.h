// Registration of native functions.  Arguments are tensors, of which Python's methods are called, numbers and plain
// Python objects; no header of torch is included, so the module does not depend on one.
#pragma once

#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <cstdint>
#include <string>
#include <type_traits>

#include "cpu/rows.h"

namespace bipace {

namespace py = pybind11;

// The memory of an argument: a tensor, an address, or None for a null pointer.
struct Address {
  void* memory;
};

template <typename T>
T* pointer(Address address) {
  return static_cast<T*>(address.memory);
}

// The arguments of native functions as Python passes them: pointers as Address, enums as int, the others as they are.
template <typename T, typename Python>
T native(const Python& value) {
  if constexpr (std::is_pointer_v<T>) {
    return static_cast<T>(value.memory);
  } else {
    return static_cast<T>(value);
  }
}
template <typename T>
using PythonOf = std::conditional_t<std::is_pointer_v<T>, Address, std::conditional_t<std::is_enum_v<T>, int, T>>;

// A native function for m.def().
template <typename Result, typename... Arguments>
auto bound(Result (*function)(Arguments...)) {
  return [function](PythonOf<Arguments>... values) { return function(native<Arguments>(values)...); };
}

constexpr int64_t kObjectsBetweenPolls = 1 << 16;  // some milliseconds

// The address of a tensor's memory.  FakeTensors and wrappers, such as DTensor, have none and give 0.
inline void* memory_of(py::handle tensor) {
  void* memory = PyLong_AsVoidPtr(py::object(tensor.attr("data_ptr")()).ptr());
  if (memory == nullptr && tensor.attr("numel")().cast<int64_t>() != 0) {
    throw py::type_error(
        "tensors must have memory, got a " + py::str(py::type::of(tensor).attr("__name__")).cast<std::string>() +
        " without; pass plain tensors, e.g. of DTensor.full_tensor(), and call outside of FakeTensorMode.");
  }
  return memory;
}

// poll_interrupt() where the GIL is held; a signal's handler may run any Python code.
inline void check_signals() {
  if (PyErr_CheckSignals() != 0) throw py::error_already_set();
}

}  // namespace bipace

namespace pybind11::detail {

template <>
struct type_caster<bipace::Address> {
  PYBIND11_TYPE_CASTER(bipace::Address, const_name("tensor"));
  bool load(handle source, bool) {
    if (source.is_none()) {
      value.memory = nullptr;
      return true;
    }
    if (!PyLong_Check(source.ptr())) {
      if (!hasattr(source, "data_ptr")) return false;
      value.memory = bipace::memory_of(source);
      return true;
    }
    value.memory = PyLong_AsVoidPtr(source.ptr());
    return value.memory != nullptr || !PyErr_Occurred() || (PyErr_Clear(), false);
  }
};

// A tensor [N, D] of float32, bfloat16 or float16.
template <>
struct type_caster<bipace::Rows> {
  PYBIND11_TYPE_CASTER(bipace::Rows, const_name("matrix"));
  bool load(handle source, bool) {
    const std::string dtype = str(source.attr("dtype"));
    const tuple stride = source.attr("stride")();
    value.data = bipace::memory_of(source);
    value.dtype = dtype == "torch.float32"    ? bipace::DType::kFloat32
                  : dtype == "torch.bfloat16" ? bipace::DType::kBfloat16
                                              : bipace::DType::kFloat16;
    value.row_stride = stride[0].cast<int64_t>();
    value.column_stride = stride[1].cast<int64_t>();
    value.dim = source.attr("size")(1).cast<int64_t>();
    return true;
  }
};

}  // namespace pybind11::detail
