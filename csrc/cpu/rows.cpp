#include "cpu/rows.h"

#include <algorithm>
#include <cmath>
#include <cstring>

#include "common/half.h"

namespace bipace {
namespace {

constexpr int64_t kGather = 256;  // elements gathered at a time from columns stored apart

template <typename T>
void gather(const Rows& rows, int64_t row, int64_t first, int64_t len, T* out) {
  const T* x = reinterpret_cast<const T*>(rows.at(row, first));
  for (int64_t e = 0; e < len; ++e) out[e] = x[e * rows.column_stride];
}

// Calls use(source, len) on consecutive contiguous pieces of a row.
template <typename Use>
void pieces(const Rows& rows, int64_t row, const Use& use) {
  if (rows.contiguous()) {
    use(static_cast<const void*>(rows.at(row, 0)), rows.dim);
    return;
  }
  uint32_t buffer[kGather];
  for (int64_t first = 0; first < rows.dim; first += kGather) {
    const int64_t len = std::min(kGather, rows.dim - first);
    if (rows.item_size() == 4) {
      gather(rows, row, first, len, buffer);
    } else {
      gather(rows, row, first, len, reinterpret_cast<uint16_t*>(buffer));
    }
    use(static_cast<const void*>(buffer), len);
  }
}

float element(const Rows& rows, int64_t row, int64_t column) {
  const char* at = rows.at(row, column);
  if (rows.dtype == DType::kFloat32) {
    float value;
    std::memcpy(&value, at, sizeof value);
    return value;
  }
  uint16_t bits;
  std::memcpy(&bits, at, sizeof bits);
  return rows.dtype == DType::kBfloat16 ? bf16_to_float(bits) : f16_to_float(bits);
}

template <typename T>
bool equal_strided(const Rows& rows, int64_t a, int64_t b) {
  constexpr T kMask = static_cast<T>(~(T{1} << (sizeof(T) * 8 - 1)));
  const T* x = reinterpret_cast<const T*>(rows.at(a, 0));
  const T* y = reinterpret_cast<const T*>(rows.at(b, 0));
  const int64_t stride = rows.column_stride;
  for (int64_t e = 0; e < rows.dim; ++e) {
    const T p = x[e * stride], q = y[e * stride];
    if (p != q && ((p | q) & kMask) != 0) return false;
  }
  return true;
}

}  // namespace

const float* read_panel(const Rows& rows, const DotKernels& dot, ScaledRow row, int64_t first, int64_t len,
                        float* buffer) {
  const char* source = rows.at(row.row, first);
  if (rows.contiguous()) {
    if (rows.dtype == DType::kFloat32 && row.factor == 1.0f) return reinterpret_cast<const float*>(source);
    dot.convert(source, rows.dtype, len, row.factor, buffer);
    return buffer;
  }
  for (int64_t e = 0; e < len; ++e) buffer[e] = row.factor * element(rows, row.row, first + e);
  return buffer;
}

void read_panels(const Rows& rows, const DotKernels& dot, const ScaledRow* wanted, int64_t n, int64_t first,
                 int64_t len, float* buffer, int64_t stride, const float** panels) {
  if (rows.contiguous()) {
    for (int64_t i = 0; i < n; ++i) panels[i] = read_panel(rows, dot, wanted[i], first, len, buffer + i * stride);
    return;
  }
  for (int64_t i = 0; i < n; ++i) panels[i] = buffer + i * stride;
  for (int64_t e = 0; e < len; ++e) {
    for (int64_t i = 0; i < n; ++i) buffer[i * stride + e] = wanted[i].factor * element(rows, wanted[i].row, first + e);
  }
}

uint32_t largest_bits(const Rows& rows, const DotKernels& dot, int64_t row) {
  uint32_t bits = 0;
  pieces(rows, row,
         [&](const void* source, int64_t len) { bits = std::max(bits, dot.largest_bits(source, rows.dtype, len)); });
  return bits;
}

float scale_factor(DType dtype, uint32_t bits) {
  const uint16_t half = static_cast<uint16_t>(bits);
  const float largest = dtype == DType::kFloat32    ? float_from_bits(bits)
                        : dtype == DType::kBfloat16 ? bf16_to_float(half)
                                                    : f16_to_float(half);
  // Clamped to where the factor itself is a normal number; the smallest denormal then becomes 2^-29, which is safe.
  return std::ldexp(1.0f, std::clamp(-std::ilogb(largest), -120, 120));
}

bool equal_rows(const Rows& rows, int64_t a, int64_t b) {
  if (rows.contiguous() && std::memcmp(rows.at(a, 0), rows.at(b, 0), rows.dim * rows.item_size()) == 0) return true;
  return rows.item_size() == 4 ? equal_strided<uint32_t>(rows, a, b) : equal_strided<uint16_t>(rows, a, b);
}

uint64_t hash_row(const Rows& rows, const DotKernels& dot, int64_t row) {
  uint64_t h = 0;
  pieces(rows, row,
         [&](const void* source, int64_t len) { h = (h ^ dot.hash(source, rows.dtype, len)) * 0x9E3779B97F4A7C15ull; });
  return h ^ (h >> 29);
}

int64_t key_of_row(const Rows& rows, const DotKernels& dot, int64_t row, const int32_t* weights) {
  uint64_t sum = 0;
  pieces(rows, row, [&](const void* source, int64_t len) {
    sum += dot.weighted(source, rows.dtype, len, weights, weights + rows.dim);
    weights += len;
  });
  return static_cast<int64_t>(sum);
}

}  // namespace bipace
