// A value of each record's state, estimated from the returns of the batch, and GAE(lambda) over it: the formulas are in
// bipace_kernels/backends/contract.py (Critic), the shapes by name in stages.h.  Everything in float64.  Same bits at
// any thread count, and for a group by itself as inside any batch, except with StepNorm or Share kBatch.  Throws only
// std::bad_alloc.
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

// labels may be null: the group's mean for all.
void cluster_values(const float* returns, const int64_t* labels, const int64_t* group_offsets, int64_t n_groups,
                    double shrinkage, double* value, int n_threads);

// out [M, width]: rows at unit length, element e times signs[e] added to element e mod width; NaN for records that are
// not usable and rows without a direction.  keys [M] of key_of_row by `weights`, or null.
void unit_rows(const Rows& rows, const int64_t* order, int64_t n_records, const uint8_t* usable, const float* signs,
               int64_t width, float* out, const int32_t* weights, int64_t* keys, int n_threads);

// out [M, directions] of rows [M, dim] of unit_rows; landmarks [n_landmarks]: usable records.
void whitened_rows(const float* rows, int64_t n_records, int64_t dim, const int64_t* landmarks, int64_t n_landmarks,
                   int64_t directions, float* out, int n_threads);

// out and rows [M, dim].
void centred_rows(const float* rows, int64_t dim, const int64_t* group_offsets, int64_t n_groups, Share share,
                  float* out, int n_threads);

// rows, inside [M, dim] of centred_rows; inside, trajectory and landmarks may be null: `kernel.inside` is 0,
// `kernel.luck` is 0, the first records or evenly spaced ones are taken.  A group is a block, a longer one several; C
// is K inside blocks (with kBatch, + same + inside times the group's kernel), and between them an approximation by
// landmarks.  Memory O(n kLandmarks) plus the longest block's square for each thread.
void kernel_values(const float* rows, const float* inside, int64_t dim, const float* returns, const int64_t* time,
                   const int64_t* group_offsets, int64_t n_groups, const int64_t* trajectory, const int64_t* landmarks,
                   int64_t n_landmarks, Share share, const ValueKernel* kernel, double* value, int n_threads);

// out [M]; truncated may be null: none was, and is read on a trajectory's last step.
void gae_advantage(const double* rewards, const double* value, const int64_t* step, const int64_t* trajectory_offsets,
                   int64_t n_trajectories, const uint8_t* truncated, double gamma, double gae_lambda, double* out,
                   int n_threads);

// out [M]; rows [M, dim] of centred_rows; parsed may be null: all actions are known.  A set of equal keys is computed
// by itself.
void same_action_advantage(const float* rows, int64_t dim, const double* advantage, const int64_t* time,
                           const int64_t* action_key, const int64_t* group_offsets, int64_t n_groups,
                           const uint8_t* parsed, const ValueKernel* kernel, double* out, int n_threads);

// out [M].
void normed_advantage(const double* advantage, const float* returns, const int64_t* group_offsets, int64_t n_groups,
                      StepNorm step_norm, float* out, int n_threads);

}  // namespace bipace
