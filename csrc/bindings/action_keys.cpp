#include "cpu/action_keys.h"

#include <optional>
#include <tuple>

#include "bindings/bindings.h"
#include "bindings/texts.h"
#include "common/xxh64.h"

namespace bipace {
namespace {

using Array = std::tuple<uintptr_t, int, std::vector<int64_t>>;  // address, bytes an item, strides in items

// None, or (row, column, id) of the first valid token id that the table does not hold.
py::object token_keys(const Array& ids, const std::optional<Array>& mask, uintptr_t row_offsets, int64_t n_rows,
                      int64_t n_columns, uintptr_t table_offsets, uintptr_t table_bytes, int64_t table_size, int mode,
                      int64_t n, uintptr_t keys, uintptr_t parsed, int n_threads) {
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
  const TokenTable table{pointer<const int64_t>(table_offsets), pointer<const uint8_t>(table_bytes), table_size};
  TokenOutside outside;
  {
    py::gil_scoped_release release;
    outside = hash_token_rows(rows, table, static_cast<KeyMode>(mode), n, pointer<int64_t>(keys),
                              pointer<uint8_t>(parsed), n_threads);
  }
  if (outside.row < 0) return py::none();
  return py::make_tuple(outside.row, outside.column, outside.id);
}

void text_keys(const py::sequence& items, int mode, uintptr_t keys, uintptr_t parsed, int n_threads) {
  const Texts texts(items);
  py::gil_scoped_release release;
  hash_texts(texts.starts(), texts.sizes(), texts.count(), static_cast<KeyMode>(mode), pointer<int64_t>(keys),
             pointer<uint8_t>(parsed), n_threads);
}

}  // namespace

void bind_action_keys(py::module_& m) {
  m.def("token_keys", &token_keys);
  m.def("text_keys", &text_keys);
  m.def("xxh64", [](const py::bytes& data, uint64_t seed) {
    const std::string_view view(data);
    return xxh64(reinterpret_cast<const uint8_t*>(view.data()), static_cast<int64_t>(view.size()), seed);
  });
}

}  // namespace bipace
