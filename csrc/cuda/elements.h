// Elements of the fingerprint rows, of any dtype.
#pragma once

#include "cuda/arguments.h"
#include "cuda/intrinsics.h"

namespace bipace {

enum Dtype : int { kFloat32 = 0, kBfloat16 = 1, kFloat16 = 2 };

// Whether 16 bytes at a time may be read from every row.
BIPACE_DEVICE bool are_aligned(const GramArgs& a) {
  const int size = a.dtype == kFloat32 ? 4 : 2;
  return a.column_stride == 1 && a.row_stride * size % 16 == 0 && reinterpret_cast<uint64_t>(a.x) % 16 == 0;
}

// Bits of element e of the row that begins at `row`; 16-bit values in the low half.
template <int dtype>
BIPACE_DEVICE uint32_t element_bits(const GramArgs& a, int64_t row, int64_t e) {
  const int64_t place = row + e * a.column_stride;
  if (dtype == kFloat32) return static_cast<const uint32_t*>(a.x)[place];
  return static_cast<const uint16_t*>(a.x)[place];
}

template <int dtype>
BIPACE_DEVICE float value_of(uint32_t bits) {
  if (dtype == kFloat32) return gpu::float_of(bits);
  if (dtype == kBfloat16) return gpu::float_of(bits << 16);
  return gpu::from_f16(static_cast<uint16_t>(bits));
}

}  // namespace bipace
