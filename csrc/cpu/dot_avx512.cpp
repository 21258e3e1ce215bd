#include "cpu/dot.h"

#if defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512DQ__) && defined(__AVX512VL__)

#include <immintrin.h>

namespace bipace {
namespace {

struct Simd {
  static constexpr int kStrips = 2;
  __m512 v;

  static Simd zero() { return {_mm512_setzero_ps()}; }
  static Simd load(const float* x) { return {_mm512_loadu_ps(x)}; }
  static Simd load(const float* x, int64_t width) { return {_mm512_maskz_loadu_ps(mask(width), x)}; }
  static Simd multiply_add(float w, Simd x, Simd sum) { return {_mm512_fmadd_ps(_mm512_set1_ps(w), x.v, sum.v)}; }
  static Simd add_square(Simd x, Simd sum) { return {_mm512_fmadd_ps(x.v, x.v, sum.v)}; }
  static void store(Simd x, float* to) { _mm512_storeu_ps(to, x.v); }
  static void store(Simd x, float* to, int64_t width) { _mm512_mask_storeu_ps(to, mask(width), x.v); }
  static void add_to(Simd x, double* to) {
    const __m256 high = _mm512_extractf32x8_ps(x.v, 1);
    _mm512_storeu_pd(to, _mm512_add_pd(_mm512_loadu_pd(to), _mm512_cvtps_pd(_mm512_castps512_ps256(x.v))));
    _mm512_storeu_pd(to + 8, _mm512_add_pd(_mm512_loadu_pd(to + 8), _mm512_cvtps_pd(high)));
  }
  static float total(Simd x) {
    const __m256 eight = _mm256_add_ps(_mm512_castps512_ps256(x.v), _mm512_extractf32x8_ps(x.v, 1));
    const __m128 four = _mm_add_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
    const __m128 two = _mm_add_ps(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(_mm_add_ss(two, _mm_movehdup_ps(two)));
  }

 private:
  static __mmask16 mask(int64_t width) { return static_cast<__mmask16>((1u << width) - 1); }
};

struct Doubles {
  static constexpr int kTogether = 2;
  __m512d v;

  static Doubles zero() { return {_mm512_setzero_pd()}; }
  static Doubles load(const double* x) { return {_mm512_loadu_pd(x)}; }
  static Doubles multiply_add(double w, Doubles x, Doubles sum) {
    return {_mm512_fmadd_pd(_mm512_set1_pd(w), x.v, sum.v)};
  }
  static void add_to(Doubles x, double sign, double* to) {
    _mm512_storeu_pd(to, _mm512_fmadd_pd(_mm512_set1_pd(sign), x.v, _mm512_loadu_pd(to)));
  }
};

}  // namespace
}  // namespace bipace

#include "cpu/dot_kernels.h"

namespace bipace {
namespace {

// One step of a tile: 8 + 3 loads, 24 fused multiply-adds.
template <int MR, int NR, typename Load>
inline __attribute__((always_inline)) void step(__m512 (&acc)[MR][NR], const float* const (&a)[MR],
                                                const float* const (&b)[NR], const Load& load) {
  __m512 y[NR];
#pragma GCC unroll 3
  for (int n = 0; n < NR; ++n) y[n] = load(b[n]);
#pragma GCC unroll 8
  for (int m = 0; m < MR; ++m) {
    __m512 x = load(a[m]);
    asm("" : "+v"(x));  // in a register: the compiler would load it again for each of the NR products
#pragma GCC unroll 3
    for (int n = 0; n < NR; ++n) acc[m][n] = _mm512_fmadd_ps(x, y[n], acc[m][n]);
  }
}

template <int MR, int NR>
void tile(const float* const* a, const float* const* b, int64_t len, const char* ahead, double* const* out) {
  __m512 acc[MR][NR];
  const float* pa[MR];
  const float* pb[NR];
#pragma GCC unroll 8
  for (int m = 0; m < MR; ++m) pa[m] = a[m];
#pragma GCC unroll 3
  for (int n = 0; n < NR; ++n) pb[n] = b[n];
#pragma GCC unroll 8
  for (int m = 0; m < MR; ++m) {
#pragma GCC unroll 3
    for (int n = 0; n < NR; ++n) acc[m][n] = _mm512_setzero_ps();
  }
  int64_t e = 0;
  for (; e + 16 <= len; e += 16) {
    __builtin_prefetch(ahead + 4 * e, 0, 2);
    step(acc, pa, pb, [e](const float* p) { return _mm512_loadu_ps(p + e); });
  }
  if (e < len) {
    const __mmask16 mask = static_cast<__mmask16>((1u << (len - e)) - 1);
    step(acc, pa, pb, [e, mask](const float* p) { return _mm512_maskz_loadu_ps(mask, p + e); });
  }
#pragma GCC unroll 3
  for (int n = 0; n < NR; ++n) {
    __m256 half[8];
#pragma GCC unroll 8
    for (int m = 0; m < 8; ++m) {
      half[m] = m < MR
                    ? _mm256_add_ps(_mm512_castps512_ps256(acc[m % MR][n]), _mm512_extractf32x8_ps(acc[m % MR][n], 1))
                    : _mm256_setzero_ps();
    }
    add_sums<MR>(half, out[n]);
  }
}

constexpr DotKernels kKernels = kernels_of("avx512");

}  // namespace

const DotKernels* dot_avx512() { return &kKernels; }

}  // namespace bipace

#else

namespace bipace {
const DotKernels* dot_avx512() { return nullptr; }
}  // namespace bipace

#endif
