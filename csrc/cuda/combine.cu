// The total, and everything back in the caller's row order: a thread per row.
#include "cuda/intrinsics.h"

namespace bipace {
namespace {

constexpr int kThreads = 128;
constexpr double kLargestFloat = 3.4028234663852886e38;
constexpr int64_t kNoCluster = -1;
constexpr uint8_t kSingletonBranch = 0;

}  // namespace

struct CombineArgs {
  const float* episode;    // [M]
  const float* step_term;  // [M]
  const float* returns;    // [M]
  const int64_t* labels;   // [M]
  const uint8_t* branch;   // [M]
  const int64_t* source;   // [N] the record whose results the row gets; -1: none
  const uint8_t* taken;    // [M] bool, or null: all are
  double weight;
  int64_t total_is_step;
  int64_t n_rows;        // N
  float* advantage_out;  // [N], as all that follow
  float* step_out;
  float* episode_out;
  float* returns_out;
  int64_t* cluster_out;
  uint8_t* branch_out;
};

BIPACE_KERNEL(combine, CombineArgs, kThreads) {
  const int64_t row = gpu::block() * kThreads + gpu::thread();
  if (row >= a.n_rows) return;
  const int64_t i = a.source[row];
  float advantage = 0.0f, step = 0.0f, episode = 0.0f, value = 0.0f;
  int64_t cluster = kNoCluster;
  uint8_t branch = kSingletonBranch;
  if (i >= 0 && (!a.taken || a.taken[i])) {
    step = a.step_term[i];
    episode = a.episode[i];
    value = a.returns[i];
    cluster = a.labels[i];
    branch = a.branch[i];
    if (a.total_is_step) {
      advantage = step;
    } else if (a.weight == 0.0) {
      advantage = episode;  // adding 0 would turn -0.0 into 0.0
    } else {
      const double total = static_cast<double>(episode) + a.weight * static_cast<double>(step);
      advantage = static_cast<float>(fmin(fmax(total, -kLargestFloat), kLargestFloat));
    }
  }
  a.advantage_out[row] = advantage;
  a.step_out[row] = step;
  a.episode_out[row] = episode;
  a.returns_out[row] = value;
  a.cluster_out[row] = cluster;
  a.branch_out[row] = branch;
}

}  // namespace bipace
