// A value of each record's state, estimated from the returns of the batch, and GAE(lambda) over it (docs/gae.md).
// Everything in float64.  Same bits at any thread count, and for a group by itself as inside any batch, except with
// StepNorm or Share kBatch.  Throws only std::bad_alloc.
#pragma once

#include <cstdint>

#include "cpu/rows.h"

namespace bipace {

constexpr int64_t kCutBlock = 1024;  // records of a block, at most, of a group that is longer than one
constexpr int64_t kLandmarks = 128;

enum class StepNorm : int { kNone = 0, kBatch = 1, kGroup = 2 };

enum class Share : int { kGroup = 0, kBatch = 1 };

// In the order in which Python passes them.
struct ValueKernel {
  double width;    // of exp((cos - 1) / width)
  double horizon;  // in steps: exp(-dt^2 / (2 horizon^2)); 0: no time term
  double noise;    // variance of returns about their value
  double same;     // of Share::kBatch: covariance shared by records of one group
  double inside;   // of Share::kBatch: weight of the same kernel of rows minus the group's mean, inside groups
  double luck;     // variance of what a step adds to the returns of its trajectory up to it
  double gamma;    // the discount of those returns
  double longest;  // usable records of a group that is one block
};

// The group's mean, plus the sum of a cluster's differences from it over its size plus the shrinkage.
void cluster_values(const float* returns,          // [M]
                    const int64_t* labels,         // [M], or null: the group's mean for all
                    const int64_t* group_offsets,  // [G+1]
                    int64_t n_groups, double shrinkage,
                    double* value,  // [M]
                    int n_threads);

// [M, width] rows at unit length, element e with its sign added to element e mod width; NaN for records that are not
// usable and rows without a direction.
void unit_rows(const Rows& rows,
               const int64_t* order,  // [M] row of the record
               int64_t n_records,
               const uint8_t* usable,  // [M] or null: all
               const float* signs,     // [rows.dim] 1 or -1
               int64_t width,
               float* out,              // [M, width]
               const int32_t* weights,  // [rows.dim], of keys
               int64_t* keys,           // [M] of key_of_row, or null
               int n_threads);

// The rows of unit_rows minus the landmarks' mean in the leading directions of the covariance of the landmarks' rows,
// divided by the fourth root of their eigenvalues (relative to the first one); 0 in columns beyond.
void whitened_rows(const float* rows,  // [M, dim]
                   int64_t n_records, int64_t dim,
                   const int64_t* landmarks,  // [n_landmarks] usable records
                   int64_t n_landmarks, int64_t directions,
                   float* out,  // [M, directions]
                   int n_threads);

// Rows minus the mean of the usable ones of their group, or of the batch.
void centred_rows(const float* rows,  // [M, dim]
                  int64_t dim,
                  const int64_t* group_offsets,  // [G+1]
                  int64_t n_groups, Share share,
                  float* out,  // [M, dim]
                  int n_threads);

// kGroup: mean + C (C + N)^-1 (R - mean) over a group's usable records; kBatch: C (C + N)^-1 R over those of all
// groups; the group's mean for the others, whose rows are NaN.  C is K inside blocks (with kBatch, + same + inside
// times the group's kernel), and between them an approximation by landmarks; a group is a block, a longer one several.
// N = luck L L^T + noise I, L_ij = gamma^(t_j - t_i) from a record to itself and the later ones of its trajectory and
// block.  Memory O(n kLandmarks) plus the longest block's square for each thread.
void kernel_values(const float* rows,    // [M, dim] of centred_rows
                   const float* inside,  // [M, dim] likewise by group, or null: `kernel.inside` is 0
                   int64_t dim,
                   const float* returns,          // [M]
                   const int64_t* time,           // [M] step numbers, at least 0
                   const int64_t* group_offsets,  // [G+1]
                   int64_t n_groups,
                   const int64_t* trajectory,  // [M] or null: `kernel.luck` is 0
                   const int64_t* landmarks,   // [n_landmarks] usable records, of kBatch; null: the first ones
                   int64_t n_landmarks, Share share, const ValueKernel* kernel,
                   double* value,  // [M]
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

// K (K + noise I)^-1 A over a group's usable records, K the kernel of kernel_values where the actions are equal and 0
// elsewhere, so that a set of equal keys is computed by itself.  A / (1 + noise) for the others, and where the action
// is not known.
void same_action_advantage(const float* rows,  // [M, dim] of centred_rows
                           int64_t dim,
                           const double* advantage,       // [M]
                           const int64_t* time,           // [M] step numbers, at least 0
                           const int64_t* action_key,     // [M]
                           const int64_t* group_offsets,  // [G+1]
                           int64_t n_groups,
                           const uint8_t* parsed,  // [M] or null: all actions are known
                           const ValueKernel* kernel,
                           double* out,  // [M]
                           int n_threads);

// A over its root mean square of the batch or the group, rounded to float32, saturating.
void normed_advantage(const double* advantage,       // [M]
                      const float* returns,          // [M]
                      const int64_t* group_offsets,  // [G+1]
                      int64_t n_groups, StepNorm step_norm,
                      float* out,  // [M]
                      int n_threads);

}  // namespace bipace
