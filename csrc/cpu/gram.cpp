#include "cpu/gram.h"

#include <algorithm>
#include <cmath>
#include <memory>

#include "cpu/greedy.h"

namespace bipace {

double square_of(const Rows& rows, const DotKernels& dot, ScaledRow row) {
  float buffer[kPanel];
  const int64_t panel = panel_length(rows.dim);
  double square[4] = {};
  double* const out[1] = {square};
  for (int64_t first = 0; first < rows.dim; first += panel) {
    const int64_t len = std::min(panel, rows.dim - first);
    const float* x = read_panel(rows, dot, row, first, len, buffer);
    const float* a[4] = {x, x, x, x};
    dot.tile[0][0](a, &x, len, reinterpret_cast<const char*>(x), out);
  }
  return square[0];
}

double measure(const Rows& rows, const DotKernels& dot, ScaledRow& row) {
  double square = square_of(rows, dot, row);
  if (!readable_in_place(square)) {
    const uint32_t bits = largest_bits(rows, dot, row.row);
    if (bits == 0 || bits >= infinity_bits(rows.dtype)) return 0.0;
    row.factor = scale_factor(rows.dtype, bits);
    square = square_of(rows, dot, row);
  }
  return 1.0 / std::sqrt(square);
}

void multiply_rows(const Rows& rows, const DotKernels& dot, const ScaledRow* wanted_a, int64_t n, const Rows& rows_b,
                   const ScaledRow* wanted_b, int64_t width, bool diagonal, double (*products)[kGramBlock]) {
  const int64_t panel = panel_length(rows.dim);
  const std::unique_ptr<float[]> buffer(new float[static_cast<size_t>(2 * kGramBlock * panel)]);
  for (int64_t j = 0; j < width; ++j) std::fill(products[j], products[j] + kGramBlock, 0.0);
  const float* a[kGramBlock + kTileA];
  const float* b[kGramBlock];
  for (int64_t first = 0; first < rows.dim; first += panel) {
    const int64_t len = std::min(panel, rows.dim - first);
    read_panels(rows, dot, wanted_a, n, first, len, buffer.get(), panel, a);
    read_panels(rows_b, dot, wanted_b, width, first, len, buffer.get() + kGramBlock * panel, panel, b);
    std::fill(a + n, a + n + kTileA, a[n - 1]);  // an incomplete tile repeats its last row
    for (int64_t i = 0; i < n; i += kTileA) {
      for (int64_t j = diagonal ? i / kTileB * kTileB : 0; j < width; j += kTileB) {
        double* out[kTileB];
        for (int64_t w = 0; w < kTileB; ++w) out[w] = products[std::min(j + w, width - 1)] + i;
        const int64_t columns = std::min<int64_t>(kTileB, width - j);
        dot.tile[n - i > 4 ? 1 : 0][columns - 1](a + i, b + j, len, reinterpret_cast<const char*>(b[j]), out);
      }
    }
  }
}

}  // namespace bipace
