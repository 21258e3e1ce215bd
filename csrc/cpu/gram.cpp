#include "cpu/gram.h"

#include <algorithm>
#include <cmath>
#include <memory>

#include "cpu/greedy.h"
#include "cpu/interrupt.h"

namespace bipace {
namespace {

constexpr int64_t kBundleDepth = 192;  // elements per float32 sum
constexpr int64_t kBlock = 4;          // bundles per side: both sides fit a cache of 512 KB

// By the tile of the clusters' Gram matrices.
double square_of(const Rows& rows, const DotKernels& dot, ScaledRow row) {
  float buffer[kPanel];
  const int64_t panel = panel_length(rows.dim);
  double square[4] = {};
  double* const out[1] = {square};
  for (int64_t first = 0; first < rows.dim; first += panel) {
    const int64_t len = std::min(panel, rows.dim - first);
    const float* x = read_panel(rows, dot, row, first, len, buffer);
    const float* a[4] = {x, x, x, x};
    dot.tile_of(1, 1)(a, &x, len, reinterpret_cast<const char*>(x), out);
  }
  return square[0];
}

}  // namespace

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

void multiply_rows(const Rows& rows, const DotKernels& dot, const ScaledRow* a, int64_t n, const ScaledRow* b,
                   int64_t width, double* out, int64_t stride) {
  const int64_t panel = panel_length(rows.dim);
  const std::unique_ptr<float[]> buffer(new float[(n + width) * panel]);
  std::vector<const float*> x(n + kTileA), y(width);
  for (int64_t first = 0; first < rows.dim; first += panel) {
    const int64_t len = std::min(panel, rows.dim - first);
    read_panels(rows, dot, a, n, first, len, buffer.get(), panel, x.data());
    read_panels(rows, dot, b, width, first, len, buffer.get() + n * panel, panel, y.data());
    std::fill(x.begin() + n, x.end(), x[n - 1]);  // an incomplete tile repeats its last row
    for (int64_t i = 0; i < n; i += kTileA) {
      for (int64_t j = a == b ? i / kTileB * kTileB : 0; j < width; j += kTileB) {
        double* to[kTileB];
        for (int64_t w = 0; w < kTileB; ++w) to[w] = out + std::min(j + w, width - 1) * stride + i;
        dot.tile_of(n - i, width - j)(x.data() + i, y.data() + j, len, reinterpret_cast<const char*>(y[j]), to);
      }
    }
  }
}

void fill_bundles(const DotKernels& dot, const float* rows, int64_t dim, const int64_t* wanted, int64_t n,
                  Bundles& out) {
  out.resize(n, dim);
  for (int64_t first = 0; first < n; first += kBundle) {
    const float* row[kBundle];
    const int64_t height = std::min<int64_t>(kBundle, n - first);
    for (int64_t i = 0; i < height; ++i) row[i] = rows + wanted[first + i] * dim;
    dot.bundle(row, height, dim, out.at(first / kBundle, 0));
  }
}

void multiply(const DotKernels& dot, const Bundles& a, const Bundles& b, double* out, int64_t stride) {
  const bool same = &a == &b;
  for (int64_t top = 0; top < a.count(); top += kBlock) {
    poll_interrupt();
    for (int64_t left = same ? top : 0; left < b.count(); left += kBlock) {
      const int64_t bottom = std::min(a.count(), top + kBlock), right = std::min(b.count(), left + kBlock);
      for (int64_t e = 0; e < a.dim; e += kBundleDepth) {
        const int64_t depth = std::min(kBundleDepth, a.dim - e);
        for (int64_t i = top; i < bottom; ++i) {
          for (int64_t j = same && top == left ? i : left; j < right; ++j) {
            dot.bundles(a.at(i, e), b.at(j, e), depth, out + i * kBundle * stride + j * kBundle, stride);
          }
        }
      }
    }
  }
}

}  // namespace bipace
