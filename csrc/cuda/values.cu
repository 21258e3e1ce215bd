// The step term: Q̂(s, a) - V̂(s) and its relatives, over all pairs inside a cluster.
//
// A thread is a record; it walks over the records of its group and sums the returns of its cluster, of its action,
// or of the others, in float64 and in processing order.  So each sum equals that of the reference, without sorting,
// hashing or atomics, and without contributions from other clusters.  In long groups the records are first sorted by
// label (stably, so that the order of the sums stays the same) and a block only walks over its own clusters.
#include "common/hgpo.h"
#include "common/mean.h"
#include "cuda/arguments.h"
#include "cuda/intrinsics.h"

namespace bipace {
namespace {

constexpr int kThreads = 64;  // at 400 records per group, small blocks fill more of the GPU than large ones
constexpr int kUnroll = 2;    // records that a thread brings to shared memory at a time
constexpr int kTile = kThreads * kUnroll;
constexpr int kTogether = 8;  // records whose comparisons go side by side
constexpr int32_t kNobody = -2;

// Records in shared memory.
struct Tile {
  int64_t key[kTile];
  double value[kTile];
  int32_t label[kTile];  // 32 bits tell a batch's clusters apart
};

// The first place of a label or a higher one among sorted labels; lanes look at 32 places at a time.
BIPACE_DEVICE int64_t first_place(const int64_t* labels, int64_t m, int64_t label) {
  int64_t low = 0, high = m;
  while (low < high) {
    const int64_t apart = (high - low + gpu::kWarp - 1) / gpu::kWarp, at = low + gpu::lane() * apart;
    const int below = gpu::count_bits(gpu::ballot(at < high && labels[at] < label));
    if (below == 0) break;
    const int64_t next = low + below * apart;
    low = next - apart + 1;
    high = next < high ? next : high;
  }
  return low;
}

struct Walk {
  const StepTermArgs& a;
  const int64_t* labels;  // [M], this row's, as order
  const int64_t* order;
  int64_t place, low, high;  // own place; places [low, high) hold all clusters of the block
  int64_t record;
  int32_t label;
  float value;

  BIPACE_DEVICE explicit Walk(const StepTermArgs& args) : a(args) {
    const int64_t row = gpu::block() / a.blocks / a.segments * a.m, block = gpu::block() % a.blocks * kThreads;
    labels = a.labels + row;
    order = a.order ? a.order + row : nullptr;
    const int64_t group = gpu::block() / a.blocks % a.segments;
    low = order ? 0 : a.group_offsets[group];
    high = order ? a.m : a.group_offsets[group + 1];
    place = low + block + gpu::thread();
    const bool live = place < high;
    label = live ? static_cast<int32_t>(labels[place]) : kNobody;
    record = !live ? 0 : order ? order[place] : place;
    value = live ? a.returns[record] : 0.0f;
    if (low + block >= high) {
      high = low;
    } else if (order) {
      const int64_t end = block + kThreads < a.m ? block + kThreads : a.m;
      const int64_t lowest = labels[block], highest = labels[end - 1];
      high = first_place(labels, a.m, highest + 1);
      low = first_place(labels, a.m, lowest > 0 ? lowest : 0);
    }
  }

  // each(place, whether of the same cluster, return, key), in processing order.
  template <typename Each>
  BIPACE_DEVICE void over(const Each& each) const {
    Tile& tile = *reinterpret_cast<Tile*>(gpu::shared_memory());
    int64_t theirs[kUnroll], their_key[kUnroll];
    float their_value[kUnroll];
    const auto load = [&](int64_t start) {
#pragma unroll
      for (int u = 0; u < kUnroll; ++u) {
        const int64_t at = start + u * kThreads + gpu::thread();
        const bool inside = at < high;
        const int64_t who = !inside ? 0 : order ? order[at] : at;
        theirs[u] = inside ? labels[at] : kNobody - 1;
        their_value[u] = inside ? a.returns[who] : 0.0f;
        their_key[u] = inside && a.action_key ? a.action_key[who] : 0;
      }
    };
    load(low);
    for (int64_t start = low; start < high; start += kTile) {
      gpu::sync_block();  // all are done with the tile before
#pragma unroll
      for (int u = 0; u < kUnroll; ++u) {
        const int at = u * kThreads + gpu::thread();
        tile.label[at] = static_cast<int32_t>(theirs[u]);
        tile.value[at] = static_cast<double>(their_value[u]);
        tile.key[at] = their_key[u];
      }
      gpu::sync_block();
      load(start + kTile);  // under way while the tile is worked on
      const int count = static_cast<int>(high - start < kTile ? high - start : kTile);
      for (int j = 0; j < count; j += kTogether) {
#pragma unroll
        for (int k = j; k < j + kTogether; ++k) each(start + k, tile.label[k] == label, tile.value[k], tile.key[k]);
      }
    }
  }

  BIPACE_DEVICE void write(int64_t n, float term, uint8_t kind) const {
    if (label == kNobody) return;
    const bool alone = n < 2 || label < 0;
    const int64_t at = labels - a.labels + record;
    a.step[at] = alone ? 0.0f : term;
    a.branch[at] = alone ? kSingleton : kind;
  }
};

BIPACE_DEVICE double mean_of(double total, int64_t n) { return total / static_cast<double>(n > 1 ? n : 1); }

// q_style: the mean of the records with the same action (`alike`) against the cluster's.  diff_peer: the record against
// the mean of those with another action.  Where there are none, the record itself apart: against all others.
template <bool alike>
BIPACE_DEVICE void step_of_actions(const StepTermArgs& a) {
  const Walk walk(a);
  const int64_t own_key = walk.label == kNobody ? 0 : a.action_key[walk.record];
  int32_t n = 0, n_chosen = 0;
  double total = 0.0, chosen = 0.0, rest = 0.0;
  walk.over([&](int64_t place, bool same, double value, int64_t key) {
    const bool take = same && (key == own_key) == alike;
    n += same;
    n_chosen += take;
    total += same ? value : 0.0;
    chosen += take ? value : 0.0;
    rest += same && place != walk.place ? value : 0.0;
  });
  const bool has_peers = n_chosen > (alike ? 1 : 0);
  const float term = alike && has_peers
                         ? centred(static_cast<float>(mean_of(chosen, n_chosen)), mean_of(total, n))
                         : centred(walk.value, has_peers ? mean_of(chosen, n_chosen) : mean_of(rest, n - 1));
  walk.write(n, term, has_peers ? kPace : kLeaveOneOut);
}

}  // namespace

// The record against its cluster's mean, optionally divided by σ + δ: a second walk, of squares.
BIPACE_KERNEL(step_mean, StepTermArgs, kThreads) {
  const Walk walk(a);
  int32_t n = 0;
  double total = 0.0, squares = 0.0;
  walk.over([&](int64_t, bool same, double value, int64_t) {
    n += same;
    total += same ? value : 0.0;
  });
  const double mean = mean_of(total, n);
  float term = centred(walk.value, mean);
  if (a.divide) {
    walk.over([&](int64_t, bool same, double value, int64_t) {
      const double difference = value - mean;
      squares += same ? difference * difference : 0.0;
    });
    // If all returns are equal, R − mean is exactly 0, and rounding of σ has no effect.
    term = scaled(term, sqrt(mean_of(squares, a.unbiased ? n - 1 : n)), a.delta);
  }
  walk.write(n, term, kPace);
}

BIPACE_KERNEL(step_diff_peer, StepTermArgs, kThreads) { step_of_actions<false>(a); }

BIPACE_KERNEL(step_q_style, StepTermArgs, kThreads) { step_of_actions<true>(a); }

BIPACE_KERNEL(aggregate_depths, AggregateDepthsArgs, kThreads) {
  const int64_t i = gpu::block() * kThreads + gpu::thread();
  if (i >= a.m) return;
  int64_t deepest = 0;
  for (int64_t k = 1; k <= a.depth; ++k) {
    if (a.company[(k - 1) * a.m + i] != kSingleton) deepest = k;
  }
  a.advantage[i] = hgpo_aggregate(a.depth, a.delta, a.alpha, [&](int64_t k) {
    return k > 0 ? a.term[(k - 1) * a.m + i] : a.episode_advantage ? a.episode_advantage[i] : 0.0f;
  });
  a.deepest[i] = deepest;
  a.branch[i] = deepest > 0 ? kPace : kSingleton;
}

}  // namespace bipace
