// The two decisions of the greedy clustering and the update of similarities by a join, shared by all backends (the CUDA
// scan takes the hardware's own root and divisions: join_quickly in cuda/clusters.cu).
#pragma once

#include "common/hd.h"

namespace bipace {

constexpr double kBand = 1e-5;  // tau of the two decisions

template <typename T>
struct Join {
  T change, weight;  // c . y becomes c . y + change (c . y) + weight (x . y)
};

// x joins as member m the unit centroid c: b = 1/m, s = c . x, own = x . x, 1 up to rounding.  With a = 1 - b the new
// centroid is (a c + b x) / u, u^2 = 1 - q.  Epsilon is 1 at most, so s > -tau and u > 0.7.
template <typename T>
BIPACE_HD inline Join<T> join(T b, T s, T own) {
  constexpr T kOne = 1, kTwo = 2;
  const T q = kTwo * (kOne - b) * b * (kOne - s) + b * b * (kOne - own), u = static_cast<T>(sqrt(kOne - q));
  return {q / (u * (kOne + u)) - b / u, b / u};
}

}  // namespace bipace
