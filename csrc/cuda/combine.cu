// The total, and everything back in the caller's row order: a thread per row.
#include "cuda/estimators.h"

namespace bipace {
namespace {

constexpr int kThreads = 128;

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
  int64_t n_rows;  // N
  RowResults out;
};

BIPACE_KERNEL(combine, CombineArgs, kThreads) {
  const int64_t row = gpu::block() * kThreads + gpu::thread();
  if (row >= a.n_rows) return;
  const int64_t i = a.source[row];
  if (i < 0 || (a.taken && !a.taken[i])) {
    a.out.nothing(row);
    return;
  }
  const float step = a.step_term[i], episode = a.episode[i];
  const float total = a.total_is_step ? step : total_advantage(episode, step, a.weight);
  a.out.write(row, total, step, episode, a.returns[i], a.labels[i], a.branch[i]);
}

}  // namespace bipace
