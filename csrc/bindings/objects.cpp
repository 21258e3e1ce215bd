// Numbers Python objects and rows of bytes by first appearance.
#include <cstring>
#include <string>
#include <string_view>
#include <vector>

#include "bindings/bindings.h"
#include "bindings/gil.h"

namespace bipace {
namespace {

// Open addressing over byte strings in place.  Two keys are equal when tag and bytes are.
class ByteNumbers {
 public:
  explicit ByteNumbers(int64_t n) {
    size_t capacity = 16;
    while (capacity < 2 * static_cast<size_t>(n)) capacity *= 2;
    slots_.resize(capacity, {0, -1});
    mask_ = capacity - 1;
  }

  int64_t number(std::string_view bytes, int tag) {
    const size_t hash = std::hash<std::string_view>()(bytes);
    for (size_t at = hash & mask_;; at = (at + 1) & mask_) {
      Slot& slot = slots_[at];
      if (slot.code < 0) {
        slot = {hash, static_cast<int64_t>(keys_.size())};
        keys_.push_back({bytes, tag});
        return slot.code;
      }
      if (slot.hash == hash) {
        const Key& key = keys_[static_cast<size_t>(slot.code)];
        if (key.tag == tag && key.bytes == bytes) return slot.code;
      }
    }
  }

  int64_t size() const { return static_cast<int64_t>(keys_.size()); }

 private:
  struct Slot {
    size_t hash;
    int64_t code;  // -1: free
  };
  struct Key {
    std::string_view bytes;
    int tag;
  };
  std::vector<Slot> slots_;
  std::vector<Key> keys_;
  size_t mask_;
};

// The storage of an exact str or bytes; false for anything else.  The tag keeps texts of different width apart (equal
// texts have equal width) and bytes apart from text.
bool storage(PyObject* object, std::string_view* bytes, int* tag) {
  if (PyUnicode_CheckExact(object)) {
#if PY_VERSION_HEX < 0x030C0000
    if (PyUnicode_READY(object) != 0) throw py::error_already_set();
#endif
    *tag = static_cast<int>(PyUnicode_KIND(object));
    *bytes = {static_cast<const char*>(PyUnicode_DATA(object)),
              static_cast<size_t>(PyUnicode_GET_LENGTH(object)) * static_cast<size_t>(*tag)};
    return true;
  }
  if (PyBytes_CheckExact(object)) {
    *tag = 0;
    *bytes = {PyBytes_AS_STRING(object), static_cast<size_t>(PyBytes_GET_SIZE(object))};
    return true;
  }
  return false;
}

constexpr int64_t kObjectsBetweenPolls = 1 << 16;  // some milliseconds

[[noreturn]] void raise_unhashable(const std::string& name, Py_ssize_t row, PyObject* object) {
  const std::string text =
      name + "[" + std::to_string(row) + "] must be hashable, got " + std::string(Py_TYPE(object)->tp_name) +
      "; convert it to a tuple or to text (json.dumps(value, sort_keys=True)), an image to an array";
  py::raise_from(PyExc_TypeError, text.c_str());
  throw py::error_already_set();
}

// codes [N] of a tuple; returns the number of distinct objects.  Where all are str or bytes their storage is
// compared, which is Python's equality and leaves their hashes uncomputed; else a dict decides.  Objects of array_types
// are replaced by array_key(object).
int64_t number_objects(const py::tuple& values, int64_t n, uintptr_t out, const py::object& array_types,
                       const py::object& array_key, const std::string& name) {
  check_count(values, n);
  int64_t* codes = pointer<int64_t>(out);  // [N]
  {
    ByteNumbers numbers(n);
    int64_t i = 0;
    std::string_view bytes;
    int tag = 0;
    for (; i < n && storage(PyTuple_GET_ITEM(values.ptr(), i), &bytes, &tag); ++i) {
      codes[i] = numbers.number(bytes, tag);
    }
    if (i == n) return numbers.size();
  }
  const py::dict seen;
  PyTypeObject* last_type = nullptr;
  bool is_array = false;
  for (int64_t i = 0; i < n; ++i) {
    PyObject* object = PyTuple_GET_ITEM(values.ptr(), i);
    if (i % kObjectsBetweenPolls == 0 && PyErr_CheckSignals() != 0) throw py::error_already_set();
    if (Py_TYPE(object) != last_type) {
      const int answer = PyObject_IsInstance(object, array_types.ptr());
      if (answer < 0) throw py::error_already_set();
      is_array = answer != 0;
      last_type = Py_TYPE(object);
    }
    py::object key = is_array ? array_key(py::handle(object), name, i) : py::reinterpret_borrow<py::object>(object);
    const py::int_ next(PyDict_GET_SIZE(seen.ptr()));
    PyObject* code = PyDict_SetDefault(seen.ptr(), key.ptr(), next.ptr());  // borrowed
    if (code == nullptr) {
      if (PyErr_ExceptionMatches(PyExc_TypeError)) {
        py::error_already_set failure;
        if (PyObject_Hash(key.ptr()) == -1 && PyErr_Occurred()) raise_unhashable(name, i, object);
        throw failure;
      }
      throw py::error_already_set();
    }
    codes[i] = PyLong_AsLongLong(code);
  }
  return PyDict_GET_SIZE(seen.ptr());
}

// codes [N] of the rows of a contiguous array, compared by their bytes; returns the number of distinct rows.
int64_t number_rows(uintptr_t rows, int64_t n, int64_t row_bytes, uintptr_t out) {
  const char* data = pointer<const char>(rows);  // [N, row_bytes]
  int64_t* codes = pointer<int64_t>(out);        // [N]
  const GilReleased release;
  ByteNumbers numbers(n);
  for (int64_t i = 0; i < n; ++i) {
    codes[i] = numbers.number({data + i * row_bytes, static_cast<size_t>(row_bytes)}, 0);
  }
  return numbers.size();
}

}  // namespace

void bind_objects(py::module_& m) {
  m.def("number_objects", &number_objects);
  m.def("number_rows", &number_rows);
}

}  // namespace bipace
