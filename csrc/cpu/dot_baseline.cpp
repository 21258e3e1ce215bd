// For any machine: the same order as the other sets, in vectors of four, which all our compilers support.
#include <cstring>

#include "cpu/dot.h"

namespace bipace {
namespace {

struct Simd {
  static constexpr int kStrips = 3;
  float v[16];

  static Simd zero() { return {}; }
  static Simd load(const float* x, int64_t width = 16) {
    Simd out = {};
    for (int64_t l = 0; l < width; ++l) out.v[l] = x[l];
    return out;
  }
  static Simd multiply_add(float w, const Simd& x, Simd sum) {
    for (int l = 0; l < 16; ++l) sum.v[l] += w * x.v[l];
    return sum;
  }
  static Simd add_square(const Simd& x, Simd sum) {
    for (int l = 0; l < 16; ++l) sum.v[l] += x.v[l] * x.v[l];
    return sum;
  }
  static void store(const Simd& x, float* to, int64_t width = 16) {
    for (int64_t l = 0; l < width; ++l) to[l] = x.v[l];
  }
  static void add_to(const Simd& x, double* to) {
    for (int l = 0; l < 16; ++l) to[l] += static_cast<double>(x.v[l]);
  }
  static float total(Simd x) {
    for (int half = 8; half > 0; half /= 2) {
      for (int l = 0; l < half; ++l) x.v[l] += x.v[l + half];
    }
    return x.v[0];
  }
};

struct Doubles {
  static constexpr int kTogether = 1;
  double v[8];

  static Doubles zero() { return {}; }
  static Doubles load(const double* x) {
    Doubles out;
    std::memcpy(out.v, x, sizeof out.v);
    return out;
  }
  static Doubles multiply_add(double w, const Doubles& x, Doubles sum) {
    for (int l = 0; l < 8; ++l) sum.v[l] += w * x.v[l];
    return sum;
  }
  static void add_to(const Doubles& x, double sign, double* to) {
    for (int l = 0; l < 8; ++l) to[l] += sign * x.v[l];
  }
};

}  // namespace
}  // namespace bipace

#include "cpu/dot_kernels.h"

namespace bipace {
namespace {

typedef float Four __attribute__((vector_size(16)));

inline Four load(const float* x) {
  Four v;
  std::memcpy(&v, x, sizeof v);
  return v;
}

template <int MR, int NR>
void tile(const float* const* a, const float* const* b, int64_t len, const char* ahead, double* const* out) {
  for (int64_t e = 0; e < len; e += 16) __builtin_prefetch(ahead + 4 * e, 0, 2);
  for (int m = 0; m < MR; ++m) {
    Four acc[NR][4] = {};
    int64_t e = 0;
    for (; e + 16 <= len; e += 16) {
      for (int q = 0; q < 4; ++q) {
        const Four x = load(a[m] + e + 4 * q);
        for (int n = 0; n < NR; ++n) acc[n][q] += x * load(b[n] + e + 4 * q);
      }
    }
    for (int n = 0; n < NR; ++n) {
      Simd lanes;
      std::memcpy(lanes.v, acc[n], sizeof lanes.v);
      for (int64_t l = 0; e + l < len; ++l) lanes.v[l] += a[m][e + l] * b[n][e + l];
      out[n][m] += static_cast<double>(Simd::total(lanes));
    }
  }
}

constexpr DotKernels kKernels = kernels_of("baseline");

}  // namespace

const DotKernels* dot_baseline() { return &kKernels; }

}  // namespace bipace
