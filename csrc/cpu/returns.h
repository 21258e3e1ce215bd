// Discounted returns-to-go and trajectory returns.
#pragma once

#include <cstdint>

namespace bipace {

void discounted_returns(const double* rewards,              // [M]
                        const int64_t* step,                // [M] or nullptr: neighbours are one step apart
                        const int64_t* trajectory_offsets,  // [T+1]
                        int64_t n_trajectories, double gamma,
                        float* out,  // [M]
                        int n_threads);

void trajectory_returns(const double* rewards,              // [M]
                        const int64_t* step,                // [M] or nullptr
                        const int64_t* trajectory_offsets,  // [T+1]
                        int64_t n_trajectories,
                        float* out,  // [T]
                        int n_threads);

}  // namespace bipace
