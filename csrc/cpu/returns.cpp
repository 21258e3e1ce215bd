#include <cmath>

#include "common/mean.h"
#include "cpu/parallel.h"
#include "cpu/stages.h"

namespace bipace {
namespace {

constexpr int64_t kTrajectoriesPerTask = 256;  // they are short

}  // namespace

void discounted_returns(const double* rewards, const int64_t* step, const int64_t* trajectory_offsets,
                        int64_t n_trajectories, double gamma, float* out, int n_threads) {
  parallel_each(n_trajectories, kTrajectoriesPerTask, n_threads, [&](int64_t t, int) {
    double next = 0.0;  // R of the record after i, unrounded
    for (int64_t i = trajectory_offsets[t + 1] - 1; i >= trajectory_offsets[t]; --i) {
      if (i == trajectory_offsets[t + 1] - 1) {
        next = rewards[i];
      } else {
        const int64_t gap = step ? steps_between(step[i], step[i + 1]) : 1;
        // Equal step numbers are one step recorded twice: its reward counts once.
        if (gap == 1) {
          next = rewards[i] + gamma * next;
        } else if (gap > 1) {
          next = rewards[i] + std::pow(gamma, static_cast<double>(gap)) * next;
        }
      }
      out[i] = static_cast<float>(next);
    }
  });
}

void trajectory_returns(const double* rewards, const int64_t* step, const int64_t* trajectory_offsets,
                        int64_t n_trajectories, float* out, int n_threads) {
  parallel_each(n_trajectories, kTrajectoriesPerTask, n_threads, [&](int64_t t, int) {
    double total = 0.0;
    const int64_t begin = trajectory_offsets[t];
    for (int64_t i = begin; i < trajectory_offsets[t + 1]; ++i) {
      if (i == begin || !step || step[i] != step[i - 1]) total += rewards[i];
    }
    out[t] = static_cast<float>(total);
  });
}

}  // namespace bipace
