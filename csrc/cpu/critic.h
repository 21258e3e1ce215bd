// A value of each record's state, estimated from the returns of the batch, and GAE(lambda) over it (docs/gae.md).
// Everything in float64.  Same bits at any thread count, and for a group by itself as inside any batch, except with
// StepNorm or Share kBatch.  Throws only std::bad_alloc.
#pragma once

#include <cstdint>

#include "cpu/rows.h"

namespace bipace {

constexpr int64_t kLongestBlock = 2048;  // usable records of a group that is one block
constexpr int64_t kCutBlock = 1024;      // of a block, at most, of a longer group
constexpr int64_t kLandmarks = 128;

enum class StepNorm : int { kNone = 0, kBatch = 1, kGroup = 2 };

enum class Share : int { kGroup = 0, kBatch = 1 };

struct ValueKernel {
  double width;    // of exp((cos - 1) / width)
  double horizon;  // in steps: exp(-dt^2 / (2 horizon^2)); 0: no time term
  double noise;    // variance of returns about their value
  double same;     // of Share::kBatch: covariance shared by records of one group
};

// The group's mean, plus the sum of a cluster's differences from it over its size plus the shrinkage.
void cluster_values(const float* returns,          // [M]
                    const int64_t* labels,         // [M], or null: the group's mean for all
                    const int64_t* group_offsets,  // [G+1]
                    int64_t n_groups, double shrinkage,
                    double* value,  // [M]
                    int n_threads);

// kGroup: mean + C (C + noise I)^-1 (R - mean) over a group's usable records; kBatch: C (C + noise I)^-1 R over those
// of all groups.  The group's mean for the others.  C is K inside blocks (with kBatch, + same), and between them an
// approximation by kLandmarks records; a group is a block, one longer than kLongestBlock several.  Memory
// O(n kLandmarks) plus the longest block's square for each thread.  Where `products` is not null, n (n + 1) / 2 numbers
// of each group of n <= kLongestBlock records are left there, for same_action_advantage.
void kernel_values(const Rows& rows,
                   const int64_t* order,          // [M] row of the record
                   const float* returns,          // [M]
                   const int64_t* time,           // [M] step numbers, at least 0
                   const int64_t* group_offsets,  // [G+1]
                   int64_t n_groups,
                   const uint8_t* usable,     // [M] or null: all
                   const int64_t* landmarks,  // [n_landmarks] usable records, of kBatch; null: the first ones
                   int64_t n_landmarks, Share share, ValueKernel kernel,
                   double* value,     // [M]
                   double* products,  // null, or written
                   int n_threads);

// delta + gamma lambda A of the next step, by step numbers; means over the records of equal step number.
void gae_advantage(const double* rewards,              // [M]
                   const double* value,                // [M]
                   const int64_t* step,                // [M] or null: neighbours are one step apart
                   const int64_t* trajectory_offsets,  // [T+1]
                   int64_t n_trajectories,
                   const uint8_t* truncated,  // [M] or null: none; read on a trajectory's last step
                   double gamma, double gae_lambda,
                   double* out,  // [M]
                   int n_threads);

// K (K + noise I)^-1 A over a group's usable records, K the kernel of kernel_values (kGroup) where the actions are
// equal and 0 elsewhere, so that a set of equal keys is computed by itself.  A / (1 + noise) for the others, and where
// the action is not known.
void same_action_advantage(const Rows& rows,
                           const int64_t* order,          // [M] row of the record
                           const double* advantage,       // [M]
                           const int64_t* time,           // [M] step numbers, at least 0
                           const int64_t* action_key,     // [M]
                           const int64_t* group_offsets,  // [G+1]
                           int64_t n_groups,
                           const uint8_t* usable,  // [M] or null: all
                           const uint8_t* parsed,  // [M] or null: all actions are known
                           double width, double horizon, double noise,
                           double* products,  // null, or of kernel_values: the same bits without reading the rows
                           double* out,       // [M]
                           int n_threads);

// A over its root mean square of the batch or the group, rounded to float32, saturating.
void normed_advantage(const double* advantage,       // [M]
                      const float* returns,          // [M]
                      const int64_t* group_offsets,  // [G+1]
                      int64_t n_groups, StepNorm step_norm,
                      float* out,  // [M]
                      int n_threads);

}  // namespace bipace
