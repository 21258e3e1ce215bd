#include "cpu/action_keys.h"

#include <cstring>
#include <vector>

#include "bindings/bindings.h"
#include "bindings/gil.h"
#include "common/xxh64.h"
#include "cpu/greedy.h"
#include "cpu/interrupt.h"

namespace bipace {
namespace {

bool table_holds(const TokenTable& table, int64_t byte_count) {
  bool holds = table.offsets[0] == 0 && table.offsets[table.size] == byte_count;
  for (int64_t v = 0; v < table.size; ++v) holds &= table.offsets[v] <= table.offsets[v + 1];
  return holds;
}

// The flat position of the first valid token id outside the table; -1: there is none.
int64_t token_keys(const py::object& ids, const py::object& mask, Address row_offsets, int64_t n_rows,
                   Address table_offsets, Address table_bytes, std::pair<int64_t, int64_t> table_sizes, int mode,
                   int64_t n, Address keys, Address parsed, int n_threads) {
  const auto read = [&](const py::object& tensor, const void*& data, int& bytes, int64_t& row_stride, int64_t& stride) {
    data = pointer<const void>(tensor.cast<Address>());
    bytes = tensor.attr("element_size")().cast<int>();
    const py::tuple strides = tensor.attr("stride")();
    if (!row_offsets.memory) row_stride = strides[0].cast<int64_t>(), stride = strides[1].cast<int64_t>();
  };
  TokenRows rows{};
  rows.row_offsets = pointer<const int64_t>(row_offsets);
  rows.n_rows = n_rows;
  if (!rows.row_offsets) rows.n_columns = ids.attr("size")(1).cast<int64_t>();
  read(ids, rows.ids, rows.id_bytes, rows.id_row_stride, rows.id_column_stride);
  if (!mask.is_none()) read(mask, rows.mask, rows.mask_bytes, rows.mask_row_stride, rows.mask_column_stride);
  const auto [table_size, byte_count] = table_sizes;
  const TokenTable table{pointer<const int64_t>(table_offsets), pointer<const uint8_t>(table_bytes), table_size};
  // The caller can write to the table's tensors after they were checked; wrong offsets would read out of bounds.
  if (table.offsets && !table_holds(table, byte_count)) {
    throw py::value_error(
        "token_bytes no longer rises from 0 to its number of bytes: its tensors were changed; make it "
        "again by bk.token_bytes(tokenizer).");
  }
  const GilReleased release;
  return hash_token_rows(rows, table, static_cast<KeyMode>(mode), n, pointer<int64_t>(keys), pointer<uint8_t>(parsed),
                         n_threads);
}

Py_ssize_t row_length(PyObject* row) {
  if (PyList_Check(row)) return PyList_GET_SIZE(row);
  if (PyTuple_Check(row)) return PyTuple_GET_SIZE(row);
  throw py::type_error("rows must be lists or tuples");
}

// Copies N rows (lists and tuples) of Python integers to out.  None, or (row, column) of the first item that is not
// a 64-bit integer; column -1: the row's length is not, or no longer, that of its offsets.
py::object flatten_rows(const py::tuple& rows, int64_t n_rows, Address row_offsets, Address out_address, bool bools) {
  const int64_t* offsets = pointer<const int64_t>(row_offsets);
  int64_t* out = pointer<int64_t>(out_address);
  if (PyTuple_GET_SIZE(rows.ptr()) != n_rows) throw py::value_error("rows must be as many as row_offsets has");
  int64_t taken = 0;
  for (int64_t r = 0; r < n_rows; ++r) {
    PyObject* row = PyTuple_GET_ITEM(rows.ptr(), r);
    const int64_t length = offsets[r + 1] - offsets[r];
    if (row_length(row) != length) return py::make_tuple(r, -1);
    for (int64_t i = 0; i < length; ++i) {
      if (++taken % kObjectsBetweenPolls == 0) {
        check_signals();
        if (row_length(row) != length) return py::make_tuple(r, -1);
      }
      PyObject* item = PyList_Check(row) ? PyList_GET_ITEM(row, i) : PyTuple_GET_ITEM(row, i);
      py::object index;
      if (!PyLong_CheckExact(item)) {
        if (!PyIndex_Check(item) || (PyBool_Check(item) && !bools)) return py::make_tuple(r, i);
        const auto held = py::reinterpret_borrow<py::object>(item);
        index = py::reinterpret_steal<py::object>(PyNumber_Index(item));
        if (!index) throw py::error_already_set();
        if (row_length(row) != length) return py::make_tuple(r, -1);  // __index__ may run any code
        item = index.ptr();
      }
      int overflow = 0;
      *out++ = PyLong_AsLongLongAndOverflow(item, &overflow);
      if (overflow) return py::make_tuple(r, i);
    }
  }
  return py::none();
}

// Numbers of objects by first appearance, by Python's hash and equality as of the keys of a dict.  False where one has
// the hash of `most` different ones: it would be compared with all of them.
bool number_objects(const py::tuple& items, uint64_t seed, int64_t most, Address codes) {
  PyObject* const* objects = PySequence_Fast_ITEMS(items.ptr());
  const auto hash = [&](int64_t i) {
    if (i % kObjectsBetweenPolls == 0) check_signals();
    const Py_hash_t own = PyObject_Hash(objects[i]);
    if (own == -1) throw py::error_already_set();
    return xxh64(reinterpret_cast<const uint8_t*>(&own), sizeof own, seed);  // nobody knows its place in the table
  };
  const auto equal = [&](int64_t first, int64_t i) {
    const int same = PyObject_RichCompareBool(objects[first], objects[i], Py_EQ);
    if (same < 0) throw py::error_already_set();
    return same == 1;
  };
  return number_equal(PyTuple_GET_SIZE(items.ptr()), most, hash, equal, pointer<int64_t>(codes)) >= 0;
}

// The same of rows [n, width] of bytes.
bool number_rows(Address rows, int64_t n, int64_t width, uint64_t seed, int64_t most, Address codes) {
  const GilReleased release;
  const uint8_t* bytes = pointer<const uint8_t>(rows);
  int64_t read = 0;
  const auto hash = [&](int64_t i) {
    if ((read += width) > (1 << 20)) read = 0, poll_interrupt();
    return xxh64(bytes + i * width, width, seed);
  };
  const auto equal = [&](int64_t first, int64_t i) {
    return std::memcmp(bytes + first * width, bytes + i * width, width) == 0;
  };
  return number_equal(n, most, hash, equal, pointer<int64_t>(codes)) >= 0;
}

// Bytes of a tuple of str or bytes: a reference to every item keeps them while the GIL is released.  ASCII strings are
// read in place.  Others are encoded into bytes of our own: PyUnicode_AsUTF8 would leave a copy in the caller's strings
// for as long as they live.  Lone surrogates are encoded as Python's "surrogatepass" does.
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

void text_keys(const py::tuple& items, int mode, Address keys, Address parsed, int n_threads) {
  const Texts texts(items);
  const GilReleased release;
  hash_texts(texts.starts(), texts.sizes(), texts.count(), static_cast<KeyMode>(mode), pointer<int64_t>(keys),
             pointer<uint8_t>(parsed), n_threads);
}

}  // namespace

void bind_action_keys(py::module_& m) {
  m.def("token_keys", &token_keys);
  m.def("text_keys", &text_keys);
  m.def("flatten_rows", &flatten_rows);
  m.def("number_objects", &number_objects);
  m.def("number_rows", &number_rows);
}

}  // namespace bipace
