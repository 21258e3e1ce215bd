// Products of fingerprint rows: squared lengths by the fixed-order kernels of dot.h, and Gram matrices of rows that are
// copied into bundles first, which is quicker where a whole matrix is wanted.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "cpu/rows.h"

namespace bipace {

// Sets the factor by which a row is read; returns 1 / norm of the scaled row, 0 for a row without a direction.
double measure(const Rows& rows, const DotKernels& dot, ScaledRow& row);

// out[j * stride + i] += a_i . b_j for n rows a and `width` rows b; of the same rows, only for i up to the end of j's
// tile. stride is at least n rounded up to kTileA.
void multiply_rows(const Rows& rows, const DotKernels& dot, const ScaledRow* a, int64_t n, const ScaledRow* b,
                   int64_t width, double* out, int64_t stride);

// Rows of float32, kBundle of them interleaved: element e of row i is at [i / kBundle][e][i % kBundle].  After the last
// row come rows of zeros.
struct Bundles {
  int64_t n = 0, dim = 0;
  std::vector<float> data;

  void resize(int64_t size, int64_t new_dim) {
    n = size;
    dim = new_dim;
    data.resize(count() * dim * kBundle);
  }
  int64_t count() const { return (n + kBundle - 1) / kBundle; }
  float* at(int64_t bundle, int64_t element) { return data.data() + (bundle * dim + element) * kBundle; }
  const float* at(int64_t bundle, int64_t element) const { return data.data() + (bundle * dim + element) * kBundle; }
};

// Bundles of some of the rows [., dim].
void fill_bundles(const DotKernels& dot, const float* rows, int64_t dim, const int64_t* wanted, int64_t n,
                  Bundles& out);

// out[i][j] += a_i . b_j, with whole bundles of rows and columns; for the same rows twice only bundles with
// i <= j. A product depends on its two rows and on the instruction set: float32 sums over kBundleDepth elements, in
// order, are summed in float64.
void multiply(const DotKernels& dot, const Bundles& a, const Bundles& b, double* out, int64_t stride);

}  // namespace bipace
