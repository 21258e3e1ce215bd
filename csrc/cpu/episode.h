// The episode advantage A_ep.
#pragma once

#include <cstdint>

namespace bipace {

void episode_advantage(const float* episode_return,        // [T]
                       const int64_t* trajectory_offsets,  // [T+1]
                       const int64_t* group_trajectories,  // [G+1]
                       int64_t n_groups,
                       bool over_steps,  // population: the group's step records instead of its trajectories
                       bool divide,      // by σ + δ
                       bool lone_raw,    // a population of one keeps its return instead of 0
                       double delta,
                       float* out,  // [M]
                       int n_threads);

}  // namespace bipace
