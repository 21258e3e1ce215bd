// Sums and maxima over the threads of a block, in one fixed order: every thread gets the same bits.
#pragma once

#include "cuda/intrinsics.h"

namespace bipace {
namespace gpu {

constexpr int kMostWarps = 32;

// op(x, y) over all threads' values; `room` has a place for each warp.  A barrier at its beginning and one inside.
template <typename T, typename Op>
BIPACE_DEVICE T over_block(T value, T* room, const Op& op) {
#pragma unroll
  for (int mask = kWarp / 2; mask > 0; mask /= 2) value = op(value, shuffle_xor(value, mask));
  sync_block();  // the room may still be read
  if (lane() == 0) room[warp()] = value;
  sync_block();
  T all = room[0];
  for (int w = 1; w < threads() / kWarp; ++w) all = op(all, room[w]);
  return all;
}

template <typename T>
BIPACE_DEVICE T block_sum(T value, T* room) {
  return over_block(value, room, [](T x, T y) { return x + y; });
}
template <typename T>
BIPACE_DEVICE T block_max(T value, T* room) {
  return over_block(value, room, [](T x, T y) { return x > y ? x : y; });
}

}  // namespace gpu
}  // namespace bipace
