// Shared by the translation units dot_<set>.cpp: each defines `struct Simd` (16 floats as a value), `struct Doubles` (8
// doubles), includes this, and defines the tiles. Everything is in an unnamed namespace, and no header with inline
// functions of external linkage is included: the linker keeps one copy of such a function for the whole library, which
// might be the one that needs AVX-512.
#include <cstdint>
#include <cstring>

#if defined(__SSE__)
#include <immintrin.h>
#endif

#include "common/half.h"
#include "cpu/dot.h"

namespace bipace {
namespace {

template <int MR, int NR>
void tile(const float* const* a, const float* const* b, int64_t len, const char* ahead, double* const* out);

#if defined(__AVX2__)
// out[m] += sum of lanes of v[m], each as ((v0+v4)+(v2+v6)) + ((v1+v5)+(v3+v7)); v[m] already holds lane l + lane l+8.
template <int MR>
inline __attribute__((always_inline)) void add_sums(const __m256* v,  // [8], zeros from MR on
                                                    double* out) {    // [MR]
  __m256 t[4];
#pragma GCC unroll 4
  for (int m = 0; m < 4; ++m) {
    t[m] = _mm256_add_ps(_mm256_permute2f128_ps(v[m], v[m + 4], 0x20), _mm256_permute2f128_ps(v[m], v[m + 4], 0x31));
  }
  const __m256 u0 = _mm256_add_ps(_mm256_shuffle_ps(t[0], t[1], 0x44), _mm256_shuffle_ps(t[0], t[1], 0xEE));
  const __m256 u1 = _mm256_add_ps(_mm256_shuffle_ps(t[2], t[3], 0x44), _mm256_shuffle_ps(t[2], t[3], 0xEE));
  const __m256 sums = _mm256_add_ps(_mm256_shuffle_ps(u0, u1, 0x88), _mm256_shuffle_ps(u0, u1, 0xDD));
  _mm256_storeu_pd(out, _mm256_add_pd(_mm256_loadu_pd(out), _mm256_cvtps_pd(_mm256_castps256_ps128(sums))));
  if (MR == 8) {
    _mm256_storeu_pd(out + 4, _mm256_add_pd(_mm256_loadu_pd(out + 4), _mm256_cvtps_pd(_mm256_extractf128_ps(sums, 1))));
  }
}
#endif

// Four chunks of sixteen at a time: their sums are independent, so the multiply-adds need not wait for each other.
double fold(const float* const* source, const float* weight, int64_t n, int64_t len, float* target) {
  Simd squares = Simd::zero();
  int64_t e = 0;
  for (; e + 64 <= len; e += 64) {
    Simd sum[4] = {Simd::zero(), Simd::zero(), Simd::zero(), Simd::zero()};
    for (int64_t i = 0; i < n; ++i) {
#pragma GCC unroll 4
      for (int c = 0; c < 4; ++c) sum[c] = Simd::multiply_add(weight[i], Simd::load(source[i] + e + 16 * c), sum[c]);
    }
#pragma GCC unroll 4
    for (int c = 0; c < 4; ++c) {
      Simd::store(sum[c], target + e + 16 * c);
      squares = Simd::add_square(sum[c], squares);
    }
  }
  for (; e < len; e += 16) {
    const int64_t width = len - e < 16 ? len - e : 16;
    Simd sum = Simd::zero();
    for (int64_t i = 0; i < n; ++i) sum = Simd::multiply_add(weight[i], Simd::load(source[i] + e, width), sum);
    Simd::store(sum, target + e, width);
    squares = Simd::add_square(sum, squares);
  }
  return static_cast<double>(Simd::total(squares));
}

void outer(const double* a, int64_t a_stride, const double* b, int64_t b_stride, int64_t depth, double sign,
           double* out, int64_t out_stride) {
  constexpr int kColumns = Doubles::kTogether;  // times eight: fills the registers
  for (int first = 0; first < kOuterB; first += 8 * kColumns) {
    Doubles total[kOuterA][kColumns];
    for (int i = 0; i < kOuterA; ++i) {
      for (int c = 0; c < kColumns; ++c) total[i][c] = Doubles::zero();
    }
    for (int64_t k = 0; k < depth; ++k) {
      Doubles y[kColumns];
      for (int c = 0; c < kColumns; ++c) y[c] = Doubles::load(b + k * b_stride + first + 8 * c);
#pragma GCC unroll 4
      for (int i = 0; i < kOuterA; ++i) {
        const double x = a[k * a_stride + i];
        for (int c = 0; c < kColumns; ++c) total[i][c] = Doubles::multiply_add(x, y[c], total[i][c]);
      }
    }
    for (int i = 0; i < kOuterA; ++i) {
      for (int c = 0; c < kColumns; ++c) Doubles::add_to(total[i][c], sign, out + i * out_stride + first + 8 * c);
    }
  }
}

// The s-th of Simd::kStrips parts of the rows a against all of b: as many sums as fit in registers.
template <int s>
void bundle_strip(const float* a, const float* b, int64_t depth, double* out, int64_t stride) {
  constexpr int kFirst = kBundle * s / Simd::kStrips, kRows = kBundle * (s + 1) / Simd::kStrips - kFirst;
  Simd sum[kRows];
  for (int i = 0; i < kRows; ++i) sum[i] = Simd::zero();
  for (int64_t k = 0; k < depth; ++k) {
    const Simd y = Simd::load(b + k * kBundle);
#pragma GCC unroll 8
    for (int i = 0; i < kRows; ++i) sum[i] = Simd::multiply_add(a[k * kBundle + kFirst + i], y, sum[i]);
  }
#pragma GCC unroll 8
  for (int i = 0; i < kRows; ++i) Simd::add_to(sum[i], out + (kFirst + i) * stride);
}

void bundles(const float* a, const float* b, int64_t depth, double* out, int64_t stride) {
  bundle_strip<0>(a, b, depth, out, stride);
  bundle_strip<1>(a, b, depth, out, stride);
  if constexpr (Simd::kStrips == 3) bundle_strip<2>(a, b, depth, out, stride);
}

void follow(const float* gram, double change, double weight, int64_t n, double* similar) {
  for (int64_t e = 0; e < n; ++e) similar[e] += change * similar[e] + weight * static_cast<double>(gram[e]);
}

void add(const float* x, int64_t len, double* sum) {
  for (int64_t e = 0; e < len; ++e) sum[e] += static_cast<double>(x[e]);
}

double largest(const double* values, int64_t n) {
  double best = values[0];
  int64_t k = 0;
  if (n >= 8) {
    double lane[8];
    for (int l = 0; l < 8; ++l) lane[l] = best;
    for (; k + 8 <= n; k += 8) {
      for (int l = 0; l < 8; ++l) lane[l] = values[k + l] > lane[l] ? values[k + l] : lane[l];
    }
    for (int l = 0; l < 8; ++l) best = lane[l] > best ? lane[l] : best;
  }
  for (; k < n; ++k) best = values[k] > best ? values[k] : best;
  return best;
}

int64_t first_at_least(const double* values, int64_t n, double bound) {
  int64_t k = 0;
  for (bool found = false; k + 8 <= n; k += 8) {  // eight at a time until one is, then which
    for (int l = 0; l < 8; ++l) found |= values[k + l] >= bound;
    if (found) break;
  }
  while (k < n && !(values[k] >= bound)) ++k;
  return k;
}

void add_signed(const float* x, const float* sign, int64_t len, double* sum) {
  for (int64_t e = 0; e < len; ++e) sum[e] += static_cast<double>(sign[e] * x[e]);
}

void exponents(const KernelRow& given, const double* square, const double* reciprocal, const double* time, int64_t n,
               double* product) {
  const KernelRow row = given;  // a copy: the compiler would read `given` again after each store, one at a time
  const bool flat = row.square <= row.flat;
  for (int64_t j = 0; j < n; ++j) {
    double cosine = product[j] * row.reciprocal * reciprocal[j];
    cosine = 2.0 * product[j] >= row.square + square[j] || cosine > 1.0 ? 1.0 : cosine;  // equal rows
    const bool other = square[j] <= row.flat;
    cosine = flat | other ? (flat & other ? 1.0 : 0.0) : cosine;
    const double steps = (time[j] - row.time) * row.inverse;
    product[j] = (cosine - 1.0) * row.rate - steps * steps * 0.5;
  }
}

double product(const double* x, const double* y, int64_t n) {
  double sum[8] = {};
  for (int64_t e = 0; e < n; e += 8) {
    for (int l = 0; l < 8; ++l) sum[l] += x[e + l] * y[e + l];
  }
  return ((sum[0] + sum[4]) + (sum[1] + sum[5])) + ((sum[2] + sum[6]) + (sum[3] + sum[7]));
}

void rotate(double cosine, double sine, int64_t n, double* x, double* y) {
  for (int64_t e = 0; e < n; ++e) {
    const double before = x[e];
    x[e] = cosine * before - sine * y[e];
    y[e] = sine * before + cosine * y[e];
  }
}

void subtract(const double* x, double factor, int64_t n, double* y) {
  for (int64_t e = 0; e < n; ++e) y[e] -= factor * x[e];
}

void divide(double by, int64_t n, double* y) {
  for (int64_t e = 0; e < n; ++e) y[e] /= by;
}

void centre(const float* x, const double* mean, int64_t len, float* out) {
  for (int64_t e = 0; e < len; ++e) out[e] = static_cast<float>(static_cast<double>(x[e]) - mean[e]);
}

void bundle(const float* const* x, int64_t n, int64_t len, float* out) {
  for (int64_t i = 0; i < kBundle; i += 4) {
    int64_t e = 0;
#if defined(__SSE__)
    for (; i + 4 <= n && e + 4 <= len; e += 4) {
      __m128 row[4];
      for (int64_t k = 0; k < 4; ++k) row[k] = _mm_loadu_ps(x[i + k] + e);
      _MM_TRANSPOSE4_PS(row[0], row[1], row[2], row[3]);
      for (int64_t k = 0; k < 4; ++k) _mm_storeu_ps(out + (e + k) * kBundle + i, row[k]);
    }
#endif
    for (; e < len; ++e) {
      for (int64_t k = i; k < i + 4; ++k) out[e * kBundle + k] = k < n ? x[k][e] : 0.0f;
    }
  }
}

// e^x = 2^k e^r with |r| <= ln 2 / 2, e^r by its Taylor series to r^12. Adding kRound leaves k in the low bits of a
// double.
void exponential(double* x, int64_t n) {
  constexpr double kRound = 0x1.8p52, kLog2E = 0x1.71547652b82fep0;
  constexpr double kHigh = 0x1.62e42fee00000p-1, kLow = 0x1.a39ef35793c76p-33;  // ln 2 in two parts
  constexpr double kTaylor[13] = {
      1.0 / 479001600, 1.0 / 39916800, 1.0 / 3628800, 1.0 / 362880, 1.0 / 40320, 1.0 / 5040, 1.0 / 720,
      1.0 / 120,       1.0 / 24,       1.0 / 6,       0.5,          1,           1};
  for (int64_t i = 0; i < n; ++i) {
    const double value = x[i] < -700.0 ? -700.0 : x[i];
    const double shifted = value * kLog2E + kRound, power_of_two = shifted - kRound;
    const double r = (value - power_of_two * kHigh) - power_of_two * kLow;
    double sum = kTaylor[0];
#pragma GCC unroll 12
    for (int k = 1; k < 13; ++k) sum = sum * r + kTaylor[k];
    uint64_t bits, power;
    std::memcpy(&bits, &sum, sizeof bits);
    std::memcpy(&power, &shifted, sizeof power);
    bits += power << 52;
    std::memcpy(&sum, &bits, sizeof bits);
    x[i] = x[i] < -700.0 ? 0.0 : sum;
  }
}

template <typename T>
uint32_t largest_bits_of(const T* source, int64_t len) {
  constexpr T kMask = static_cast<T>(~(T{1} << (sizeof(T) * 8 - 1)));
  T largest = 0;
  for (int64_t e = 0; e < len; ++e) {
    const T bits = source[e] & kMask;
    largest = bits > largest ? bits : largest;
  }
  return largest;
}

uint32_t largest_bits(const void* source, DType dtype, int64_t len) {
  if (dtype == DType::kFloat32) return largest_bits_of(static_cast<const uint32_t*>(source), len);
  return largest_bits_of(static_cast<const uint16_t*>(source), len);
}

// Sixteen lanes of h = rotl(h ^ word, 13) * odd.  The rotation lets high bits (signs, exponents) reach the low ones.
template <typename T>
uint64_t hash_of(const T* source, int64_t len) {
  constexpr T kMask = static_cast<T>(~(T{1} << (sizeof(T) * 8 - 1)));
  uint32_t lane[16];
  for (uint32_t l = 0; l < 16; ++l) lane[l] = 0x9E3779B1u * (l + 1);
  const auto step = [](uint32_t h, T bits) {
    const uint32_t x = h ^ ((bits & kMask) ? static_cast<uint32_t>(bits) : 0u);
    return ((x << 13) | (x >> 19)) * 0x85EBCA77u;
  };
  int64_t e = 0;
  for (; e + 16 <= len; e += 16) {
    for (int64_t l = 0; l < 16; ++l) lane[l] = step(lane[l], source[e + l]);
  }
  for (int64_t l = 0; e + l < len; ++l) lane[l] = step(lane[l], source[e + l]);
  uint64_t h = static_cast<uint64_t>(len);
  for (const uint32_t part : lane) {
    h = (h ^ part) * 0x9E3779B97F4A7C15ull;
    h ^= h >> 32;
  }
  return h;
}

uint64_t hash(const void* source, DType dtype, int64_t len) {
  if (dtype == DType::kFloat32) return hash_of(static_cast<const uint32_t*>(source), len);
  return hash_of(static_cast<const uint16_t*>(source), len);
}

template <typename T, typename Signed>
uint64_t weighted_of(const T* source, int64_t len, const int32_t* a, const int32_t* b) {
  constexpr T kMask = static_cast<T>(~(T{1} << (sizeof(T) * 8 - 1)));
  uint64_t sum = 0;
  for (int64_t e = 0; e < len; ++e) {
    const int32_t bits = source[e] & kMask ? static_cast<Signed>(source[e]) : 0;
    const auto above = static_cast<uint64_t>(int64_t{bits} * b[e]) << (32 - 8 * sizeof(T));
    sum += static_cast<uint64_t>(int64_t{bits} * a[e]) + (above >> 31 << 31);
  }
  return sum;
}

uint64_t weighted(const void* source, DType dtype, int64_t len, const int32_t* a, const int32_t* b) {
  if (dtype == DType::kFloat32) return weighted_of<uint32_t, int32_t>(static_cast<const uint32_t*>(source), len, a, b);
  return weighted_of<uint16_t, int16_t>(static_cast<const uint16_t*>(source), len, a, b);
}

void convert(const void* source, DType dtype, int64_t len, float factor, float* target) {
  if (dtype == DType::kFloat32) {
    const float* x = static_cast<const float*>(source);
    for (int64_t e = 0; e < len; ++e) target[e] = factor * x[e];
  } else if (dtype == DType::kBfloat16) {
    const uint16_t* x = static_cast<const uint16_t*>(source);
    for (int64_t e = 0; e < len; ++e) target[e] = factor * bf16_to_float(x[e]);
  } else {
    const uint16_t* x = static_cast<const uint16_t*>(source);
    int64_t e = 0;
#if defined(__F16C__)
    for (; e + 8 <= len; e += 8) {
      const __m128i bits = _mm_loadu_si128(reinterpret_cast<const __m128i*>(x + e));
      _mm256_storeu_ps(target + e, _mm256_mul_ps(_mm256_set1_ps(factor), _mm256_cvtph_ps(bits)));
    }
#endif
    for (; e < len; ++e) target[e] = factor * f16_to_float(x[e]);
  }
}

constexpr DotKernels kernels_of(const char* name) {
  return {
      name,           {{tile<4, 1>, tile<4, 2>, tile<4, 3>}, {tile<8, 1>, tile<8, 2>, tile<8, 3>}},
      fold,           outer,
      subtract,       divide,
      product,        rotate,
      bundles,        add,
      add_signed,     centre,
      bundle,         largest,
      first_at_least, follow,
      exponents,      exponential,
      convert,        largest_bits,
      hash,           weighted,
  };
}

}  // namespace
}  // namespace bipace
