// Registration of native functions.  Arguments are addresses, numbers and plain Python objects; no header of torch is
// included, so the module does not depend on one.
#pragma once

#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <cstdint>
#include <string>
#include <type_traits>

#include "cpu/rows.h"

namespace bipace {

namespace py = pybind11;

// The memory of an argument: an integer, an object with data_ptr() (a tensor), or None for a null pointer.
struct Address {
  void* memory;
};

template <typename T>
T* pointer(Address address) {
  return static_cast<T*>(address.memory);
}

// The arguments of native functions as Python passes them: pointers as Address, enums as int, the others as they are.
template <typename T, typename Python>
T native(Python value) {
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
// With rows of fingerprints first: their address, dtype, strides in elements, and D.
template <typename... Arguments>
auto bound(void (*function)(const Rows&, Arguments...)) {
  return [function](Address data, int dtype, int64_t row_stride, int64_t column_stride, int64_t dim,
                    PythonOf<Arguments>... values) {
    const Rows rows{data.memory, static_cast<DType>(dtype), row_stride, column_stride, dim};
    function(rows, native<Arguments>(values)...);
  };
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

void bind_similar(py::module_& m);
void bind_clusters(py::module_& m);

}  // namespace bipace

namespace pybind11::detail {

template <>
struct type_caster<bipace::Address> {
  PYBIND11_TYPE_CASTER(bipace::Address, const_name("address"));
  bool load(handle source, bool) {
    object number = reinterpret_borrow<object>(source);
    if (source.is_none()) number = int_(0);
    if (hasattr(source, "data_ptr")) number = source.attr("data_ptr")();
    if (!PyLong_Check(number.ptr())) return false;
    value.memory = PyLong_AsVoidPtr(number.ptr());
    return value.memory != nullptr || !PyErr_Occurred() || (PyErr_Clear(), false);
  }
};

}  // namespace pybind11::detail
