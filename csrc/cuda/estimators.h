// A record's step term: sums of returns over its cluster, in float64 and in processing order, and the terms made from
// them (paper eq. 7 to 9).  The code that walks over a cluster adds its records here.
#pragma once

#include "common/mean.h"
#include "cuda/intrinsics.h"

namespace bipace {

BIPACE_DEVICE double mean_of(double total, int64_t n) { return total / static_cast<double>(n > 1 ? n : 1); }

// Against the mean of the records with another action; if there is none, against that of all other records.
struct DiffPeer {
  int64_t key;
  int32_t n = 0, n_others = 0;
  double others = 0.0, rest = 0.0;

  // `same`: of the same cluster; `self`: the record itself.
  BIPACE_DEVICE void add(bool same, bool self, double value, int64_t their_key) {
    const bool other = same && their_key != key;
    n += same;
    n_others += other;
    others += other ? value : 0.0;
    rest += same && !self ? value : 0.0;
  }
  BIPACE_DEVICE uint8_t branch() const { return n_others > 0 ? kPace : kLeaveOneOut; }
  BIPACE_DEVICE float term(float value) const {
    return centred(value, n_others > 0 ? mean_of(others, n_others) : mean_of(rest, n - 1));
  }
};

// The action's mean against the cluster's; for an action that occurs once, R − the mean of all other records.
struct QStyle {
  int64_t key;
  int32_t n = 0, n_alike = 0;
  double total = 0.0, alike = 0.0, rest = 0.0;

  BIPACE_DEVICE void add(bool same, bool self, double value, int64_t their_key) {
    const bool take = same && their_key == key;
    n += same;
    n_alike += take;
    total += same ? value : 0.0;
    alike += take ? value : 0.0;
    rest += same && !self ? value : 0.0;
  }
  BIPACE_DEVICE uint8_t branch() const { return n_alike > 1 ? kPace : kLeaveOneOut; }
  BIPACE_DEVICE float term(float value) const {
    if (n_alike > 1) return centred(static_cast<float>(mean_of(alike, n_alike)), mean_of(total, n));
    return centred(value, mean_of(rest, n - 1));
  }
};

// Against the cluster's mean, optionally divided by σ + δ: a second walk, of squares.
struct Mean {
  int32_t n = 0;
  double total = 0.0, squares = 0.0;

  BIPACE_DEVICE void add(bool same, double value) {
    n += same;
    total += same ? value : 0.0;
  }
  BIPACE_DEVICE double mean() const { return mean_of(total, n); }
  BIPACE_DEVICE void add_square(bool same, double value, double mean) {
    const double difference = value - mean;
    squares += same ? difference * difference : 0.0;
  }
  BIPACE_DEVICE float term(float value) const { return centred(value, mean()); }
  // If all returns are equal, R − mean is exactly 0, and rounding of σ has no effect.
  BIPACE_DEVICE float scaled_term(float value, double delta, bool unbiased) const {
    return scaled(term(value), sqrt(mean_of(squares, unbiased ? n - 1 : n)), delta);
  }
};

}  // namespace bipace
