// The step advantage A_S: means over clusters and over equal actions inside them.
#pragma once

#include <vector>

#include "common/mean.h"

namespace bipace {

// Records by cluster, each cluster in processing order.
struct Members {
  std::vector<int64_t> offsets;  // [C+1]
  std::vector<int64_t> records;  // [M], those of a cluster
};

Members members_of(const int64_t* labels,  // [M] from -1 (none) to C - 1
                   int64_t n_records, int64_t n_clusters);

enum class Estimator { kMean, kDiffPeer, kQStyle };

void step_advantage(const float* returns,   // [M]
                    const int64_t* labels,  // [M] cluster of each record, in [0, C)
                    int64_t n_records, int64_t n_clusters,
                    const int64_t* action_key,  // [M]; nullptr for kMean
                    Estimator estimator, bool divide, double delta,
                    float* step,      // [M] zeros, as they stay for records without peers
                    uint8_t* branch,  // [M] kSingleton, likewise
                    int n_threads);

void hgpo_advantage(const float* returns,         // [M]
                    const int64_t* depth_labels,  // [depth, M]; -1: fewer observations than the depth
                    int64_t depth, int64_t n_records,
                    const float* episode_advantage,  // [M]
                    bool divide, double delta, double alpha, bool base_group,
                    float* advantage,  // [M]
                    int64_t* deepest,  // [M] deepest depth at which the record has peers; 0: none
                    uint8_t* branch,   // [M]
                    int n_threads);

}  // namespace bipace
