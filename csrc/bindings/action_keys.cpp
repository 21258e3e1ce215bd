#include "cpu/action_keys.h"

#include <optional>
#include <tuple>

#include "bindings/bindings.h"
#include "bindings/gil.h"
#include "bindings/texts.h"
#include "common/xxh64.h"

namespace bipace {
namespace {

using Array = std::tuple<Address, int, std::vector<int64_t>>;  // address, bytes an item, strides in items

bool table_holds(const TokenTable& table, int64_t byte_count) {
  bool holds = table.offsets[0] == 0 && table.offsets[table.size] == byte_count;
  for (int64_t v = 0; v < table.size; ++v) holds &= table.offsets[v] <= table.offsets[v + 1];
  return holds;
}

// None, or (row, column, id) of the first valid token id outside the table.
py::object token_keys(const Array& ids, const std::optional<Array>& mask, Address row_offsets, int64_t n_rows,
                      int64_t n_columns, Address table_offsets, Address table_bytes,
                      std::pair<int64_t, int64_t> table_sizes, int mode, int64_t n, Address keys, Address parsed,
                      int n_threads) {
  const auto& [id_address, id_bytes, id_strides] = ids;
  TokenRows rows{};
  rows.ids = pointer<const void>(id_address);
  rows.id_bytes = id_bytes;
  rows.row_offsets = pointer<const int64_t>(row_offsets);
  rows.n_rows = n_rows;
  rows.n_columns = n_columns;
  if (!rows.row_offsets) rows.id_row_stride = id_strides.at(0), rows.id_column_stride = id_strides.at(1);
  if (mask) {
    const auto& [mask_address, mask_bytes, mask_strides] = *mask;
    rows.mask = pointer<const void>(mask_address);
    rows.mask_bytes = mask_bytes;
    if (!rows.row_offsets) rows.mask_row_stride = mask_strides.at(0), rows.mask_column_stride = mask_strides.at(1);
  }
  const auto [table_size, byte_count] = table_sizes;
  const TokenTable table{pointer<const int64_t>(table_offsets), pointer<const uint8_t>(table_bytes), table_size};
  // The caller can write to the table's tensors after they were checked; wrong offsets would read out of bounds.
  if (table.offsets && !table_holds(table, byte_count)) {
    throw py::value_error(
        "token_bytes no longer rises from 0 to its number of bytes: its tensors were changed; make it "
        "again by bk.token_bytes(tokenizer).");
  }
  TokenOutside outside;
  {
    const GilReleased release;
    outside = hash_token_rows(rows, table, static_cast<KeyMode>(mode), n, pointer<int64_t>(keys),
                              pointer<uint8_t>(parsed), n_threads);
  }
  if (outside.row < 0) return py::none();
  return py::make_tuple(outside.row, outside.column, outside.id);
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
  check_count(rows, n_rows);
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

void text_keys(const py::tuple& items, int64_t n, int mode, Address keys, Address parsed, int n_threads) {
  check_count(items, n);
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
  m.def("xxh64", [](const py::bytes& data, uint64_t seed) {
    const std::string_view view(data);
    return xxh64(reinterpret_cast<const uint8_t*>(view.data()), static_cast<int64_t>(view.size()), seed);
  });
}

}  // namespace bipace
