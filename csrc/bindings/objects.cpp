// Numbers Python objects and rows of bytes by first appearance.
#include <algorithm>
#include <string>
#include <string_view>
#include <vector>

#include "bindings/bindings.h"
#include "bindings/gil.h"
#include "cpu/interrupt.h"
#include "cpu/keyed_hash.h"
#include "cpu/observations.h"

namespace bipace {
namespace {

struct Key {
  std::string_view bytes;
  int tag;
};

constexpr int64_t kBlock = 32;  // keys whose hashes are computed at a time

// Open addressing over byte strings in place.  Two keys are equal when tag and bytes are.
class ByteNumbers {
 public:
  explicit ByteNumbers(int64_t n) {
    size_t capacity = 16;
    while (capacity < 2 * static_cast<size_t>(n)) capacity *= 2;
    slots_.resize(capacity, {0, -1});
    mask_ = capacity - 1;
  }

  // Slots are fetched for the whole block before the first is looked at: waiting for memory takes most of the time.
  void number(const Key* keys,   // [n]
              int64_t n,         // at most kBlock
              int64_t* codes) {  // [n]
    size_t hashes[kBlock];
    for (int64_t i = 0; i < n; ++i) {
      const std::string_view bytes = keys[i].bytes;
      hashes[i] = siphash(reinterpret_cast<const uint8_t*>(bytes.data()), static_cast<int64_t>(bytes.size()), key_);
      __builtin_prefetch(&slots_[hashes[i] & mask_]);
      work_ += static_cast<int64_t>(bytes.size()) + kWorkPerKey;
    }
    for (int64_t i = 0; i < n; ++i) codes[i] = number(keys[i], hashes[i]);
  }
  int64_t looked() const { return looked_; }
  // Whether it is time to ask for signals: every 2^16 short keys, or every few megabytes.  Then starts anew.
  bool worked() {
    if (work_ < kWorkBetweenPolls) return false;
    work_ = 0;
    return true;
  }

 private:
  static constexpr int64_t kWorkPerKey = 64;                             // in bytes that could be hashed instead
  static constexpr int64_t kWorkBetweenPolls = kWorkPerKey * (1 << 16);  // some milliseconds
  struct Slot {
    size_t hash;
    int64_t code;  // -1: free
  };
  int64_t number(const Key& key, size_t hash) {
    for (size_t at = hash & mask_;; at = (at + 1) & mask_) {
      Slot& slot = slots_[at];
      ++looked_;
      if (slot.code < 0) {
        slot = {hash, static_cast<int64_t>(keys_.size())};
        keys_.push_back(key);
        return slot.code;
      }
      if (slot.hash == hash) {
        const Key& found = keys_[static_cast<size_t>(slot.code)];
        if (found.tag == key.tag && found.bytes == key.bytes) return slot.code;
      }
    }
  }

  std::vector<Slot> slots_;
  std::vector<Key> keys_;
  size_t mask_;
  int64_t looked_ = 0, work_ = 0;
  const HashKey key_ = hash_key();
};

// The storage of an exact str or bytes; false for anything else.  The tag keeps texts of different width apart (equal
// texts have equal width) and bytes apart from text.
bool storage(PyObject* object, Key* key) {
  if (PyUnicode_CheckExact(object)) {
#if PY_VERSION_HEX < 0x030C0000
    if (PyUnicode_READY(object) != 0) throw py::error_already_set();
#endif
    key->tag = static_cast<int>(PyUnicode_KIND(object));
    key->bytes = {static_cast<const char*>(PyUnicode_DATA(object)),
                  static_cast<size_t>(PyUnicode_GET_LENGTH(object)) * static_cast<size_t>(key->tag)};
    return true;
  }
  if (PyBytes_CheckExact(object)) {
    *key = {{PyBytes_AS_STRING(object), static_cast<size_t>(PyBytes_GET_SIZE(object))}, 0};
    return true;
  }
  return false;
}

[[noreturn]] void raise_unhashable(const std::string& name, Py_ssize_t row, PyObject* object) {
  const std::string text =
      name + "[" + std::to_string(row) + "] must be hashable, got " + std::string(Py_TYPE(object)->tp_name) +
      "; convert it to a tuple or to text (json.dumps(value, sort_keys=True)), an image to an array";
  py::raise_from(PyExc_TypeError, text.c_str());
  throw py::error_already_set();
}

// Writes the values to codes [N] if all are exact ints of 64 bits.  If some are larger, all become texts in `texts`.
bool plain_ints(const py::tuple& values, int64_t n, int64_t* codes, py::tuple* texts) {
  bool fit = true;
  for (int64_t i = 0; i < n; ++i) {
    if (i % kObjectsBetweenPolls == 0) check_signals();
    PyObject* object = PyTuple_GET_ITEM(values.ptr(), i);
    if (!PyLong_CheckExact(object)) return false;
    int overflow = 0;
    codes[i] = PyLong_AsLongLongAndOverflow(object, &overflow);
    fit = fit && overflow == 0;
  }
  if (fit) return n > 0;
  *texts = py::tuple(n);
  for (int64_t i = 0; i < n; ++i) {
    if (i % kObjectsBetweenPolls == 0) check_signals();
    PyObject* text = PyNumber_ToBase(PyTuple_GET_ITEM(values.ptr(), i), 16);
    if (text == nullptr) throw py::error_already_set();
    PyTuple_SET_ITEM(texts->ptr(), i, text);
  }
  return false;
}

// codes [N] of a tuple; returns how many slots of its hash table it looked at, or 0 where a dict decided.  Texts and
// bytes are compared by their storage, which is Python's equality and leaves their hashes uncomputed, and ints by
// value; neither can be chosen to collide, as Python's hashes of ints can.  Where the tuple holds others too, a dict
// decides.  Objects of array_types are replaced by array_key(object).
int64_t number_objects(const py::tuple& values, int64_t n, uintptr_t out, const py::object& array_types,
                       const py::object& array_key, const std::string& name) {
  check_count(values, n);
  int64_t* codes = pointer<int64_t>(out);  // [N]
  py::tuple alike = values;
  if (plain_ints(values, n, codes, &alike)) {
    const int64_t whole[] = {0, n};
    const GilReleased release;
    return cluster_exact(codes, whole, 1, codes);  // reads a code before it writes the label in its place
  }
  {
    ByteNumbers numbers(n);
    Key block[kBlock];
    bool stored = true;
    for (int64_t i = 0; i < n && stored; i += kBlock) {
      const int64_t size = std::min(kBlock, n - i);
      for (int64_t k = 0; k < size && stored; ++k) stored = storage(PyTuple_GET_ITEM(alike.ptr(), i + k), &block[k]);
      if (stored) numbers.number(block, size, codes + i);
      if (numbers.worked()) check_signals();
    }
    if (stored) return numbers.looked();
  }
  const py::dict seen;
  PyTypeObject* last_type = nullptr;
  bool is_array = false;
  for (int64_t i = 0; i < n; ++i) {
    PyObject* object = PyTuple_GET_ITEM(values.ptr(), i);
    if (i % kObjectsBetweenPolls == 0) check_signals();
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
  return 0;
}

// codes [N] of the rows of a contiguous array, compared by their bytes; returns how many slots of its hash table it
// looked at.
int64_t number_rows(uintptr_t rows, int64_t n, int64_t row_bytes, uintptr_t out) {
  const char* data = pointer<const char>(rows);  // [N, row_bytes]
  int64_t* codes = pointer<int64_t>(out);        // [N]
  const GilReleased release;
  ByteNumbers numbers(n);
  Key block[kBlock];
  for (int64_t i = 0; i < n; i += kBlock) {
    const int64_t size = std::min(kBlock, n - i);
    for (int64_t k = 0; k < size; ++k) block[k] = {{data + (i + k) * row_bytes, static_cast<size_t>(row_bytes)}, 0};
    numbers.number(block, size, codes + i);
    if (numbers.worked()) poll_interrupt();
  }
  return numbers.looked();
}

}  // namespace

void bind_objects(py::module_& m) {
  m.def("number_objects", &number_objects);
  m.def("number_rows", &number_rows);
  m.def("siphash", [](const py::bytes& data, uint64_t first, uint64_t second) {
    const std::string_view view(data);
    return siphash(reinterpret_cast<const uint8_t*>(view.data()), static_cast<int64_t>(view.size()), {first, second});
  });
}

}  // namespace bipace
