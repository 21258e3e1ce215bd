// The tree that ends a panel, for the AVX2 and the AVX-512 tiles; included inside their translation units only.
#include <immintrin.h>

#include <cstdint>

namespace bipace {
namespace {

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

}  // namespace
}  // namespace bipace
