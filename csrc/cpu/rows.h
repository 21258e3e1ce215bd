// Rows of a fingerprint matrix as the caller stores them: any strides, float32, bfloat16 or float16; never copied
// whole.
#pragma once

#include <cstdint>

#include "cpu/dot.h"

namespace bipace {

struct Rows {
  const void* data;  // [N, dim]
  DType dtype;
  int64_t row_stride;  // in elements, as all strides here
  int64_t column_stride;
  int64_t dim;

  int64_t item_size() const { return dtype == DType::kFloat32 ? 4 : 2; }
  const char* at(int64_t row, int64_t column) const {
    return static_cast<const char*>(data) + (row * row_stride + column * column_stride) * item_size();
  }
  bool contiguous() const { return column_stride == 1 || dim == 1; }
};

// A row and the power of two that prevents overflow and underflow of its norm and products.
struct ScaledRow {
  int64_t row;
  float factor;  // 1: unscaled
};

// Elements [first, first + len) of a row as float32: the row itself where it can be read in place, else `buffer`.
const float* read_panel(const Rows& rows, const DotKernels& dot, ScaledRow row, int64_t first, int64_t len,
                        float* buffer);  // [len]

// The same for several rows; `buffer` holds stride floats per row.  Columns stored apart are read column by column, so
// that neighbouring rows share the cache lines.
void read_panels(const Rows& rows, const DotKernels& dot, const ScaledRow* wanted, int64_t n, int64_t first,
                 int64_t len, float* buffer, int64_t stride, const float** panels);

// The largest |x| of a row as a bit pattern of its dtype without the sign.
uint32_t largest_bits(const Rows& rows, const DotKernels& dot, int64_t row);

// Bit pattern of infinity: a row is finite where largest_bits is below it.
inline uint32_t infinity_bits(DType dtype) {
  return dtype == DType::kFloat32 ? 0x7F800000u : dtype == DType::kBfloat16 ? 0x7F80u : 0x7C00u;
}

// The power of two that brings a largest |x| near 1, limited to float32's range.
float scale_factor(DType dtype, uint32_t bits);

// Equal as given, -0.0 counted as 0.0 (rows without NaN).
bool equal_rows(const Rows& rows, int64_t a, int64_t b);

uint64_t hash_row(const Rows& rows, const DotKernels& dot, int64_t row);

// schema.state_keys of a row; weights [2, dim] of schema.key_weights.
int64_t key_of_row(const Rows& rows, const DotKernels& dot, int64_t row, const int32_t* weights);

}  // namespace bipace
