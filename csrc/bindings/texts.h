// Bytes of a tuple of str or bytes, readable while the GIL is released.
#pragma once

#include <vector>

#include "bindings/bindings.h"

namespace bipace {

// Holds a reference to every item, so the bytes stay valid while the GIL is released.  ASCII
// strings are read in place.  Others are encoded into bytes of our own: PyUnicode_AsUTF8 would leave a copy in the
// caller's strings for as long as they live.  Lone surrogates are encoded as Python's "surrogatepass" does.
class Texts {
 public:
  explicit Texts(const py::tuple& items) {
    const auto n = static_cast<size_t>(PyTuple_GET_SIZE(items.ptr()));
    held_.reserve(n);
    starts_.reserve(n);
    sizes_.reserve(n);
    for (size_t i = 0; i < n; ++i) {
      if (i % kObjectsBetweenPolls == 0) check_signals();
      add(py::reinterpret_borrow<py::object>(PyTuple_GET_ITEM(items.ptr(), static_cast<Py_ssize_t>(i))));
    }
  }
  const uint8_t* const* starts() const { return starts_.data(); }
  const int64_t* sizes() const { return sizes_.data(); }
  int64_t count() const { return static_cast<int64_t>(starts_.size()); }

 private:
  void add(py::object item) {
    if (PyUnicode_Check(item.ptr())) {
      if (PyUnicode_IS_COMPACT_ASCII(item.ptr())) {
        push(PyUnicode_DATA(item.ptr()), PyUnicode_GET_LENGTH(item.ptr()));
        held_.push_back(std::move(item));
        return;
      }
      PyObject* encoded = PyUnicode_AsEncodedString(item.ptr(), "utf-8", "surrogatepass");
      if (!encoded) throw py::error_already_set();
      item = py::reinterpret_steal<py::object>(encoded);
    }
    if (!PyBytes_Check(item.ptr())) throw py::type_error("expected str or bytes");
    push(PyBytes_AS_STRING(item.ptr()), PyBytes_GET_SIZE(item.ptr()));
    held_.push_back(std::move(item));
  }
  void push(const void* start, Py_ssize_t size) {
    starts_.push_back(static_cast<const uint8_t*>(start));
    sizes_.push_back(static_cast<int64_t>(size));
  }

  std::vector<py::object> held_;
  std::vector<const uint8_t*> starts_;
  std::vector<int64_t> sizes_;
};

}  // namespace bipace
