// HGPO's aggregate of a record's advantages at several depths of history.
#pragma once

#include "common/hd.h"

namespace bipace {

// Σ w_k a_k over the a_k that are not 0, k = 0..depth: w_k = L_k^α / (Σ L^α + δ), L_k = k + 1.  Numerator and
// denominator are divided by the largest L^α, so that no α overflows.  item(k) gives a_k.
template <typename Item>
BIPACE_HD inline float hgpo_aggregate(int64_t depth, double delta, double alpha, const Item& item) {
  double longest = 0.0;
  for (int64_t k = 0; k <= depth; ++k) {
    if (item(k) != 0.0f) longest = static_cast<double>(k + 1);
  }
  if (longest == 0.0) return 0.0f;
  double shares = 0.0, sum = 0.0;
  for (int64_t k = 0; k <= depth; ++k) {
    if (item(k) != 0.0f) shares += pow(static_cast<double>(k + 1) / longest, alpha);
  }
  const double total = shares + delta * pow(longest, -alpha);
  for (int64_t k = 0; k <= depth; ++k) {
    const float value = item(k);
    if (value != 0.0f) sum += pow(static_cast<double>(k + 1) / longest, alpha) / total * static_cast<double>(value);
  }
  return static_cast<float>(sum);
}

}  // namespace bipace
