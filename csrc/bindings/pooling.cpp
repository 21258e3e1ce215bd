#include "cpu/pooling.h"

#include <optional>
#include <tuple>

#include "bindings/bindings.h"

namespace bipace {
namespace {

// (address, dtype, batches, tokens, dim, batch_stride, token_stride, column_stride)
using TokensTuple = std::tuple<uintptr_t, int, int64_t, int64_t, int64_t, int64_t, int64_t, int64_t>;
// (query address, heads, keys, key_heads, head_dim, scale, softcap)
using AttentionTuple = std::tuple<uintptr_t, int64_t, TokensTuple, int64_t, int64_t, double, double>;

Tokens tokens_of(const TokensTuple& t) {
  const auto& [data, dtype, batches, tokens, dim, batch_stride, token_stride, column_stride] = t;
  return {pointer<const void>(data),
          static_cast<DType>(dtype),
          batches,
          tokens,
          dim,
          batch_stride,
          token_stride,
          column_stride};
}

void pool(const TokensTuple& hidden, uintptr_t batch, uintptr_t first, uintptr_t last, int64_t n, int pooling,
          const std::optional<AttentionTuple>& attention, bool unit, int n_threads, int out_dtype, uintptr_t out) {
  Attention scores{};
  if (attention) {
    const auto& [query, heads, keys, key_heads, head_dim, scale, softcap] = *attention;
    scores = {pointer<const float>(query), heads, tokens_of(keys), key_heads, head_dim, scale, softcap};
  }
  py::gil_scoped_release release;
  pool_rows(tokens_of(hidden), pointer<const int64_t>(batch), pointer<const int64_t>(first),
            pointer<const int64_t>(last), n, static_cast<Pooling>(pooling), attention ? &scores : nullptr, unit,
            n_threads, static_cast<DType>(out_dtype), pointer<void>(out));
}

}  // namespace

void bind_pooling(py::module_& m) { m.def("pool_rows", &pool); }

}  // namespace bipace
