#include <algorithm>

#include "common/mean.h"
#include "cpu/parallel.h"
#include "cpu/stages.h"

namespace bipace {

void episode_advantage(const float* episode_return, const int64_t* trajectory_offsets,
                       const int64_t* group_trajectories, int64_t n_groups, bool over_steps, bool divide, bool lone_raw,
                       double delta, float* out, int n_threads) {
  parallel_for(n_groups, n_threads, [&](int64_t g, int) {
    const int64_t begin = group_trajectories[g], end = group_trajectories[g + 1];
    const int64_t first = trajectory_offsets[begin];
    MeanSigma stats{0.0, 1.0};
    const int64_t n = over_steps ? trajectory_offsets[end] - first : end - begin;
    if (n == 0) return;  // nothing to write
    if (over_steps) {
      // The population is the step records; walk trajectories and repeat each return as often as it has steps.
      int64_t t = begin;
      stats = mean_and_sigma(n, true, [&](int64_t i) {
        if (i == 0) t = begin;
        while (first + i >= trajectory_offsets[t + 1]) ++t;
        return episode_return[t];
      });
    } else {
      stats = mean_and_sigma(n, true, [&](int64_t i) { return episode_return[begin + i]; });
    }
    for (int64_t t = begin; t < end; ++t) {
      float advantage = 0.0f;
      double sigma = 1.0;
      if (n > 1) {
        advantage = centred(episode_return[t], stats.mean);
        sigma = stats.sigma;
      } else if (lone_raw) {
        advantage = episode_return[t];
      }
      if (divide) advantage = scaled(advantage, sigma, delta);
      std::fill(out + trajectory_offsets[t], out + trajectory_offsets[t + 1], advantage);
    }
  });
}

}  // namespace bipace
