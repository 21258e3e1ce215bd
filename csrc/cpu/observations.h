// Partitions of codes (numbers of equal observations) inside each prompt group.
#pragma once

#include <cstdint>

namespace bipace {

void cluster_exact(const int64_t* codes,          // [M]
                   const int64_t* group_offsets,  // [G+1]
                   int64_t n_groups,
                   int64_t* labels);  // [M] dense over the batch, by first appearance

void cluster_history(const int64_t* codes,               // [M]
                     const int64_t* step,                // [M] or nullptr
                     const int64_t* trajectory_offsets,  // [T+1]
                     int64_t n_trajectories,
                     const int64_t* group_offsets,  // [G+1]
                     int64_t n_groups, int64_t depth,
                     int64_t* labels);  // [depth, M]; row k-1: clusters by the last k codes, -1 if there are fewer

}  // namespace bipace
