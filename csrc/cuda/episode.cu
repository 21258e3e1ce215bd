// The episode term: a block per group.
#include "common/mean.h"
#include "cuda/intrinsics.h"

namespace bipace {
namespace {

constexpr int kThreads = 128;
constexpr int kWarps = kThreads / gpu::kWarp;

}  // namespace

struct EpisodeAdvantageArgs {
  const float* episode_return;        // [T]
  const int64_t* trajectory_offsets;  // [T+1]
  const int64_t* group_trajectories;  // [G+1]
  const uint8_t* spoilt;              // [T] bool, or null: none is
  float* out;                         // [M]
  double delta;
  int64_t over_steps;  // population: the group's step records instead of its trajectories
  int64_t divide;      // by σ + δ
  int64_t lone_raw;    // a population of one keeps its return instead of 0
};

// Every warp does the sums, so that none waits for another; then they share the writing.
BIPACE_KERNEL(episode_advantage, EpisodeAdvantageArgs, kThreads) {
  const int64_t begin = a.group_trajectories[gpu::block()], end = a.group_trajectories[gpu::block() + 1];
  // Lane u has trajectory start + u: its return, and its weight in the population: 1, or its length; 0: it does not
  // count.
  float value = 0.0f;
  int64_t weight = 0, first = 0, last = 0;
  const auto load = [&](int64_t start) {
    const int64_t t = start + gpu::lane();
    const bool inside = t < end;
    value = inside ? a.episode_return[t] : 0.0f;
    first = inside ? a.trajectory_offsets[t] : 0;
    last = inside ? a.trajectory_offsets[t + 1] : 0;
    weight = inside && !(a.spoilt && a.spoilt[t]) ? (a.over_steps ? last - first : 1) : 0;
  };
  // Adds up one trajectory after another, as the CPU: a spoilt one, weight 0, then changes no bit for the others.
  double n = 0.0, total = 0.0, mean = 0.0, squares = 0.0;
  const auto add_up = [&](bool deviations) {
    for (int64_t start = begin; start < end; start += gpu::kWarp) {
      load(start);
      const int count = static_cast<int>(end - start < gpu::kWarp ? end - start : gpu::kWarp);
      for (int u = 0; u < count; ++u) {
        const double v = static_cast<double>(gpu::shuffle(value, u));
        const int64_t steps = gpu::shuffle(weight, u);
        if (steps == 0) continue;
        const double w = static_cast<double>(steps);
        if (deviations) {
          squares += (v - mean) * (v - mean) * w;
        } else {
          n += w;
          total += v * w;  // a trajectory's steps all have its return: exact, 24 bits of R and less than 29 of length
        }
      }
    }
  };
  add_up(false);
  const bool lone = n < 2.0;
  mean = n > 0.0 ? total / n : 0.0;
  if (a.divide && !lone) add_up(true);
  // Where all returns are equal, R - mean is exactly 0, and no rounding of σ shows.
  const double sigma = lone ? 1.0 : sqrt(squares / (n - 1.0));
  for (int64_t start = begin; start < end; start += gpu::kWarp) {
    load(start);
    float advantage = lone ? (a.lone_raw ? value : 0.0f) : centred(value, mean);
    if (a.divide) advantage = scaled(advantage, sigma, a.delta);
    if (weight == 0) advantage = 0.0f;
    const int count = static_cast<int>(end - start < gpu::kWarp ? end - start : gpu::kWarp);
    for (int u = gpu::warp(); u < count; u += kWarps) {
      const float theirs = gpu::shuffle(advantage, u);
      const int64_t stop = gpu::shuffle(last, u);
      for (int64_t i = gpu::shuffle(first, u) + gpu::lane(); i < stop; i += gpu::kWarp) a.out[i] = theirs;
    }
  }
}

}  // namespace bipace
