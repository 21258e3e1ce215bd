#include "cpu/dot.h"

#if defined(__AVX2__) && defined(__FMA__) && defined(__F16C__)

#include <immintrin.h>

namespace bipace {
namespace {

__m256i mask_of(int64_t width) {
  return _mm256_cmpgt_epi32(_mm256_set1_epi32(static_cast<int>(width)), _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7));
}

struct Simd {
  static constexpr int kStrips = 3;
  __m256 low, high;

  static Simd zero() { return {_mm256_setzero_ps(), _mm256_setzero_ps()}; }
  static Simd load(const float* x) { return {_mm256_loadu_ps(x), _mm256_loadu_ps(x + 8)}; }
  static Simd load(const float* x, int64_t width) {
    return {_mm256_maskload_ps(x, mask_of(width)),
            width > 8 ? _mm256_maskload_ps(x + 8, mask_of(width - 8)) : _mm256_setzero_ps()};
  }
  static Simd multiply_add(float w, Simd x, Simd sum) {
    const __m256 f = _mm256_set1_ps(w);
    return {_mm256_fmadd_ps(f, x.low, sum.low), _mm256_fmadd_ps(f, x.high, sum.high)};
  }
  static Simd add_square(Simd x, Simd sum) {
    return {_mm256_fmadd_ps(x.low, x.low, sum.low), _mm256_fmadd_ps(x.high, x.high, sum.high)};
  }
  static void store(Simd x, float* to) {
    _mm256_storeu_ps(to, x.low);
    _mm256_storeu_ps(to + 8, x.high);
  }
  static void store(Simd x, float* to, int64_t width) {
    _mm256_maskstore_ps(to, mask_of(width), x.low);
    if (width > 8) _mm256_maskstore_ps(to + 8, mask_of(width - 8), x.high);
  }
  static void add_to(Simd x, double* to) {
    add_to(x.low, to);
    add_to(x.high, to + 8);
  }
  static void add_to(__m256 x, double* to) {
    const __m256d low = _mm256_cvtps_pd(_mm256_castps256_ps128(x));
    const __m256d high = _mm256_cvtps_pd(_mm256_extractf128_ps(x, 1));
    _mm256_storeu_pd(to, _mm256_add_pd(_mm256_loadu_pd(to), low));
    _mm256_storeu_pd(to + 4, _mm256_add_pd(_mm256_loadu_pd(to + 4), high));
  }
  static float total(Simd x) {
    const __m256 eight = _mm256_add_ps(x.low, x.high);
    const __m128 four = _mm_add_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
    const __m128 two = _mm_add_ps(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(_mm_add_ss(two, _mm_movehdup_ps(two)));
  }
};

struct Doubles {
  static constexpr int kTogether = 1;
  __m256d low, high;

  static Doubles zero() { return {_mm256_setzero_pd(), _mm256_setzero_pd()}; }
  static Doubles load(const double* x) { return {_mm256_loadu_pd(x), _mm256_loadu_pd(x + 4)}; }
  static Doubles multiply_add(double w, Doubles x, Doubles sum) {
    const __m256d f = _mm256_set1_pd(w);
    return {_mm256_fmadd_pd(f, x.low, sum.low), _mm256_fmadd_pd(f, x.high, sum.high)};
  }
  static void add_to(Doubles x, double sign, double* to) {
    const __m256d f = _mm256_set1_pd(sign);
    _mm256_storeu_pd(to, _mm256_fmadd_pd(f, x.low, _mm256_loadu_pd(to)));
    _mm256_storeu_pd(to + 4, _mm256_fmadd_pd(f, x.high, _mm256_loadu_pd(to + 4)));
  }
};

}  // namespace
}  // namespace bipace

#include "cpu/dot_kernels.h"

namespace bipace {
namespace {

// Lanes 8 * half to 8 * half + 7 of the sixteen partial sums of a 4 x NR tile: 16 registers only hold one half at a
// time.
template <int NR>
inline void half_tile(const float* const* a, const float* const* b, int64_t len, const char* ahead, int half,
                      __m256 (&acc)[4][NR]) {
  for (int m = 0; m < 4; ++m) {
    for (int n = 0; n < NR; ++n) acc[m][n] = _mm256_setzero_ps();
  }
  const float* pa[4];
  const float* pb[NR];
  for (int m = 0; m < 4; ++m) pa[m] = a[m] + 8 * half;
  for (int n = 0; n < NR; ++n) pb[n] = b[n] + 8 * half;
  int64_t e = 0;
  for (; e + 16 <= len; e += 16) {
    if (half == 0) __builtin_prefetch(ahead + 4 * e, 0, 2);
    __m256 y[NR];
    for (int n = 0; n < NR; ++n) y[n] = _mm256_loadu_ps(pb[n] + e);
    for (int m = 0; m < 4; ++m) {
      const __m256 x = _mm256_loadu_ps(pa[m] + e);
      for (int n = 0; n < NR; ++n) acc[m][n] = _mm256_fmadd_ps(x, y[n], acc[m][n]);
    }
  }
  if (e + 8 * half < len) {
    const __m256i mask = mask_of(len - e - 8 * half);
    __m256 y[NR];
    for (int n = 0; n < NR; ++n) y[n] = _mm256_maskload_ps(pb[n] + e, mask);
    for (int m = 0; m < 4; ++m) {
      const __m256 x = _mm256_maskload_ps(pa[m] + e, mask);
      for (int n = 0; n < NR; ++n) acc[m][n] = _mm256_fmadd_ps(x, y[n], acc[m][n]);
    }
  }
}

template <int MR, int NR>
void tile(const float* const* a, const float* const* b, int64_t len, const char* ahead, double* const* out) {
  __m256 sum[NR][8];
  for (int m0 = 0; m0 < MR; m0 += 4) {
    __m256 acc[4][NR];
    half_tile<NR>(a + m0, b, len, ahead, 0, acc);
    for (int m = 0; m < 4; ++m) {
      for (int n = 0; n < NR; ++n) sum[n][m0 + m] = acc[m][n];
    }
    half_tile<NR>(a + m0, b, len, ahead, 1, acc);
    for (int m = 0; m < 4; ++m) {
      for (int n = 0; n < NR; ++n) sum[n][m0 + m] = _mm256_add_ps(sum[n][m0 + m], acc[m][n]);
    }
  }
  for (int n = 0; n < NR; ++n) {
    for (int m = MR; m < 8; ++m) sum[n][m] = _mm256_setzero_ps();
    add_sums<MR>(sum[n], out[n]);
  }
}

constexpr DotKernels kKernels = kernels_of("avx2");

}  // namespace

const DotKernels* dot_avx2() { return &kKernels; }

}  // namespace bipace

#else

namespace bipace {
const DotKernels* dot_avx2() { return nullptr; }
}  // namespace bipace

#endif
