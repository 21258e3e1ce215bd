// Means and deviations as every backend computes them: float64 sums in processing order over float32 values.
#pragma once

#include "common/hd.h"

namespace bipace {

// Source of a step term: a single record in the cluster, the estimator's rule, or the mean of all others.
enum Branch : uint8_t { kSingleton = 0, kPace = 1, kLeaveOneOut = 2 };

// later − earlier, for any step numbers: a difference beyond 64 bits wraps around, where a signed one is undefined.
BIPACE_HD inline int64_t steps_between(int64_t earlier, int64_t later) {
  return static_cast<int64_t>(static_cast<uint64_t>(later) - static_cast<uint64_t>(earlier));
}

// R − mean as a float32 difference, the mean rounded to float32 once: equal returns give exactly 0.
BIPACE_HD inline float centred(float value, double mean) { return value - static_cast<float>(mean); }

// The difference divided by σ + δ, rounded to float32 once more.
BIPACE_HD inline float scaled(float difference, double sigma, double delta) {
  return static_cast<float>(static_cast<double>(difference) / (sigma + delta));
}

struct MeanSigma {
  double mean;
  double sigma;  // two-pass about the unrounded mean; exactly 0 where all values are equal
};

// value(i) for i in [0, n), n ≥ 1.
template <typename Value>
BIPACE_HD MeanSigma mean_and_sigma(int64_t n, bool unbiased, const Value& value) {
  double sum = 0.0;
  float low = value(0), high = low;
  for (int64_t i = 0; i < n; ++i) {
    const float v = value(i);
    sum += static_cast<double>(v);
    low = v < low ? v : low;
    high = v > high ? v : high;
  }
  const double mean = sum / static_cast<double>(n);
  if (low == high) return {mean, 0.0};
  double squares = 0.0;
  for (int64_t i = 0; i < n; ++i) {
    const double d = static_cast<double>(value(i)) - mean;
    squares += d * d;
  }
  return {mean, sqrt(squares / static_cast<double>(unbiased ? n - 1 : n))};
}

// An error-free running total (two-sum): total − part keeps the small addends that a plain float64 total would lose,
// so the mean of the others is right for every mixture of magnitudes, at O(1) per record.
struct ExactSum {
  double high = 0.0, low = 0.0;

  BIPACE_HD void add(double x) {
    const double sum = high + x;
    const double virtual_x = sum - high;
    low += (high - (sum - virtual_x)) + (x - virtual_x);
    high = sum;
  }
  BIPACE_HD double minus(const ExactSum& part) const {
    ExactSum rest = *this;
    rest.add(-part.high);
    return rest.high + (rest.low - part.low);
  }
};

}  // namespace bipace
