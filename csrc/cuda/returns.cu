// Discounted returns, returns of trajectories, and which trajectories are spoilt (cpu/returns.cpp).
//
// A thread is a trajectory and walks it one step after another as the CPU does: float64, the same operations in the
// same order, so the same float32 comes out.
#include "cuda/intrinsics.h"

namespace bipace {
namespace {

constexpr int kThreads = 32;  // one warp, so that many small blocks spread over the GPU
constexpr int kUnroll = 8;    // steps whose loads are under way together

BIPACE_DEVICE int64_t trajectory() { return gpu::block() * kThreads + gpu::thread(); }

}  // namespace

struct DiscountedReturnsArgs {
  const double* rewards;              // [M]
  const int64_t* step;                // [M], or null: neighbours are one step apart
  const int64_t* trajectory_offsets;  // [T+1]
  int64_t n_trajectories;             // T
  double gamma;
  float* out;  // [M]
};

BIPACE_KERNEL(discounted_returns, DiscountedReturnsArgs, kThreads) {
  const int64_t t = trajectory();
  if (t >= a.n_trajectories) return;
  const int64_t begin = a.trajectory_offsets[t], last = a.trajectory_offsets[t + 1] - 1;
  double next = 0.0;  // R of the record after i, unrounded
  int64_t later = 0;  // its step number
  for (int64_t i = last; i >= begin; i -= kUnroll) {
    double reward[kUnroll];
    int64_t now[kUnroll];
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) {
      const bool inside = i - u >= begin;
      reward[u] = inside ? a.rewards[i - u] : 0.0;
      now[u] = inside && a.step ? a.step[i - u] : later;
    }
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) {
      if (i - u < begin) break;
      if (i - u == last) {
        next = reward[u];
      } else {
        const int64_t gap = a.step ? later - now[u] : 1;
        // Equal step numbers are one step recorded twice: its reward counts once.
        if (gap == 1) {
          next = reward[u] + a.gamma * next;
        } else if (gap > 1) {
          next = reward[u] + pow(a.gamma, static_cast<double>(gap)) * next;
        }
      }
      later = now[u];
      a.out[i - u] = static_cast<float>(next);
    }
  }
}

struct TrajectoryReturnsArgs {
  const double* rewards;              // [M]
  const int64_t* step;                // [M], or null
  const int64_t* trajectory_offsets;  // [T+1]
  int64_t n_trajectories;
  float* out;  // [T]
};

BIPACE_KERNEL(trajectory_returns, TrajectoryReturnsArgs, kThreads) {
  const int64_t t = trajectory();
  if (t >= a.n_trajectories) return;
  double total = 0.0;
  const int64_t begin = a.trajectory_offsets[t];
  for (int64_t i = begin; i < a.trajectory_offsets[t + 1]; ++i) {
    if (i == begin || !a.step || a.step[i] != a.step[i - 1]) total += a.rewards[i];
  }
  a.out[t] = static_cast<float>(total);
}

struct SpoiltTrajectoriesArgs {
  const float* step_return;           // [M]
  const float* trajectory_return;     // [T]
  const uint8_t* bad_record;          // [M] bool, or null
  const int64_t* trajectory_offsets;  // [T+1]
  double limit;
  uint8_t* out;  // [T] bool
};

// One warp per trajectory.
BIPACE_KERNEL(spoilt_trajectories, SpoiltTrajectoriesArgs, kThreads) {
  const int64_t t = gpu::block();
  const float limit = static_cast<float>(a.limit);
  bool bad = !(fabsf(a.trajectory_return[t]) <= limit);  // NaN compares false
  for (int64_t i = a.trajectory_offsets[t] + gpu::lane(); i < a.trajectory_offsets[t + 1]; i += gpu::kWarp) {
    bad |= !(fabsf(a.step_return[i]) <= limit) || (a.bad_record && a.bad_record[i]);
  }
  bad = gpu::any(bad);
  if (gpu::lane() == 0) a.out[t] = bad;
}

}  // namespace bipace
