// The greedy decisions of Algorithm 1, at a cost that does not depend on D (cpu/clusters.cpp, and the sweep of
// cpu/sweep.cpp).
//
// A centroid is a positive combination of its members, so its similarity to any record follows from known numbers.
// When x_i joins cluster k as its m-th member, with s = S[k, i] and the Gram matrix G of the unit rows,
//
//     a = 1 − 1/m,  b = 1/m,  q = 2ab(1 − s) + b²(1 − G[i,i]),  u = √(1 − q),  d = q/(u(1 + u)) − b/u,  w = b/u
//     S[k, j] += d · S[k, j] + w · G[i, j]          for all records j still to come
//
// and a seed sets S[k, ·] = G[i, ·].  The plain form r(aS + bG) drifts linearly in float32 (1.5e-4 at 8,192 members);
// the increment form does not.
//
// A block of threads takes one group under one ε, panel by panel of 32 records.  S exists for two panels at a time, in
// shared memory: while warp 0 decides a panel's records, the others compute S of the next panel from all known
// decisions and G, which is read once; then all warps add the panel's own decisions.  So S is not stored, a sweep costs
// no memory, and only the 32 columns of a panel are in the chain from one decision to the next.
#pragma once

#include "common/greedy.h"
#include "cuda/intrinsics.h"

namespace bipace {

// Longer groups go by blocks of columns: their Gram matrix exists for those columns alone, [rows, pitch], and what the
// earlier records decided stands in S of each of the block's panels before the scan (similar_to_columns) and in memory.
struct ScanArgs {
  const int64_t* begins;    // [slots] first record of each group
  const int64_t* ends;      // [slots]
  int64_t long_group;       // groups of this length or more are not for this launch
  int64_t first_column;     // of the launch, in the group: a multiple of 128
  int64_t columns;          // of the launch
  const float* gram;        // [slots, rows, columns]: x_i · x_j for i ≤ j
  int64_t rows;             // of a matrix
  const float* reciprocal;  // [M]: 1 / ‖x_i‖
  const uint8_t* kind;      // [M] 0 usable, 1 alone, 2 not taken
  const float* lowest;      // [E]: 1 − ε − τ, or null
  double only_lowest;       // instead, for one ε
  int64_t capacity;         // clusters whose S fits into shared memory; odd
  float* similar;           // [E, slots, far_panels, 32, far_pitch] scratch: S that does not; null where all does
  int64_t far_panels;       // 2, or those of the launch
  int64_t far_pitch;        // odd, and more than there are records
  uint32_t* decisions;      // [E, slots, 6, room]: joined, change, weight; of clusters: leader, members, share
  int64_t room;             // ≥ records of a group
  int32_t* counts;          // [E, slots] clusters so far
  int64_t* first;           // [E, M], written: the record that began the record's cluster; −1: not taken
  int64_t first_stride;     // M
};

namespace scan {

constexpr int kWarps = 16, kThreads = kWarps * gpu::kWarp;
constexpr int kWorkers = kWarps - 1, kWorkerThreads = kWorkers * gpu::kWarp;
constexpr int kWorkerBarrier = 1;
constexpr int kPanel = 32;      // records decided before others follow: a lane each
constexpr int kChunk = 64;      // decisions whose rows of G are brought in together
constexpr int kNowhere = -1;    // instead of a cluster: the record affects no other
constexpr float kSeed = -1.0f;  // d of a record that begins a cluster; no join has it, for a > 0
constexpr int kAtOnce = 4;      // similarities of a lane that stay in registers: 128 clusters

// An int32 that compares as the float32 does: a maximum of integers takes one instruction per warp.
BIPACE_DEVICE int32_t in_order(float value) {
  const int32_t bits = static_cast<int32_t>(gpu::bits_of(value));
  return bits ^ ((bits >> 31) & 0x7FFFFFFF);
}
BIPACE_DEVICE float from_order(int32_t key) {
  return gpu::float_of(static_cast<uint32_t>(key ^ ((key >> 31) & 0x7FFFFFFF)));
}

// The oldest cluster with s ≥ s* − τ, or, where s* < lowest, `count`: a new one.  By a warp.
BIPACE_DEVICE int decide(const float* similar, int count, float lowest) {  // S[·, i]
  const int l = gpu::lane();
  float kept[kAtOnce];
  int32_t best = static_cast<int32_t>(0x80000000u);
#pragma unroll
  for (int c = 0; c < kAtOnce; ++c) {
    const int k = c * gpu::kWarp + l;
    kept[c] = k < count ? similar[k] : -2e30f;
    best = max(best, in_order(kept[c]));
  }
  for (int k = kAtOnce * gpu::kWarp + l; k < count; k += gpu::kWarp) best = max(best, in_order(similar[k]));
  const float most = from_order(gpu::warp_max(best));
  if (!(most >= lowest)) return count;
  const float near = most - static_cast<float>(kBand);
  int oldest = 0x7FFFFFFF;
#pragma unroll
  for (int c = kAtOnce - 1; c >= 0; --c) oldest = kept[c] >= near ? c * gpu::kWarp + l : oldest;
  for (int k = kAtOnce * gpu::kWarp + l; k < count && oldest == 0x7FFFFFFF; k += gpu::kWarp) {
    oldest = similar[k] >= near ? k : oldest;
  }
  return gpu::warp_min(oldest);
}

// S[k, j] after a decision; `before` is not looked at for a seed.
BIPACE_DEVICE float moved(float before, float product, float change, float weight) {
  return change == kSeed ? product : before + (change * before + weight * product);
}

// Of one decision, as it is kept for the panels to come.
struct Decisions {
  int32_t* joined;   // [room] the cluster, or kNowhere
  float* change;     // [room] d, or kSeed
  float* weight;     // [room] w
  int32_t* leader;   // [room] of cluster k: the record of the group that began it
  int32_t* members;  // [room] of cluster k: records
  float* share;  // [room] of cluster k: b of the record that joins next, a division that the chain need not wait for
};

// A chunk of decisions in shared memory, with the rows of G at the panel's columns.
struct Stage {
  float products[kChunk * kPanel];
  int32_t joined[kChunk];
  float change[kChunk], weight[kChunk], reciprocal[kChunk];
};

struct Group {
  const float* gram;  // of column 0: element (i, j) at i · pitch + j
  int64_t pitch;
  const float* reciprocal;  // [n]
  const uint8_t* kind;      // [n]
  int64_t begin;            // its first record
  int n;
  Decisions decided;
};

BIPACE_DEVICE Group group_of(const ScanArgs& a, int64_t slot, int64_t e, int64_t slots) {
  const int64_t begin = a.begins[slot], length = a.ends[slot] - begin;
  uint32_t* const scratch = a.decisions + (e * slots + slot) * 6 * a.room;
  return {a.gram + slot * a.rows * a.columns - a.first_column,
          a.columns,
          a.reciprocal + begin,
          a.kind + begin,
          begin,
          length < a.long_group ? static_cast<int>(length) : 0,
          {reinterpret_cast<int32_t*>(scratch), reinterpret_cast<float*>(scratch + a.room),
           reinterpret_cast<float*>(scratch + 2 * a.room), reinterpret_cast<int32_t*>(scratch + 3 * a.room),
           reinterpret_cast<int32_t*>(scratch + 4 * a.room), reinterpret_cast<float*>(scratch + 5 * a.room)}};
}

// Asks for a chunk: decisions [first, first + rows) and G at the panel's columns.  By `threads` threads, `t` of them
// this.
BIPACE_DEVICE void ask(Stage& stage, const Group& g, int first, int rows, int panel, int t, int threads) {
  for (int i = t; i < rows * (kPanel / 4); i += threads) {
    const int r = i / (kPanel / 4), c = i % (kPanel / 4) * 4;
    gpu::copy_async(stage.products + r * kPanel + c, g.gram + (first + r) * g.pitch + panel + c, 16);
  }
}

// What goes with it; the decisions must have been made.
BIPACE_DEVICE void take_decisions(Stage& stage, const Group& g, int first, int rows, int t, int threads) {
  for (int r = t; r < kChunk; r += threads) {
    const bool inside = r < rows;
    stage.joined[r] = inside ? g.decided.joined[first + r] : kNowhere;
    stage.change[r] = inside ? g.decided.change[first + r] : 0.0f;
    stage.weight[r] = inside ? g.decided.weight[first + r] : 0.0f;
    stage.reciprocal[r] = inside ? g.reciprocal[first + r] : 0.0f;
  }
}

// Applies a chunk's decisions, in order, to S of a panel at clusters [low, high), those with k ≡ worker (mod workers);
// a lane to a column.  S of cluster k stands at k − low.
BIPACE_DEVICE void apply(const Stage& stage, float* similar, int64_t pitch, float reciprocal_j, int worker, int workers,
                         int low, int high) {
  const int l = gpu::lane();
  float* const column = similar + l * pitch - low;
  for (int base = 0; base < kChunk; base += gpu::kWarp) {
    const int k_of_lane = stage.joined[base + l];
    uint32_t mine = gpu::ballot(k_of_lane >= low && k_of_lane < high && k_of_lane % workers == worker);
    int held = kNowhere;  // the cluster whose S is in a register
    float s = 0.0f;
    while (mine) {
      const int r = base + gpu::lowest_bit(mine);
      mine &= mine - 1;
      const int k = stage.joined[r];
      if (k != held) {
        if (held >= 0) column[held] = s;
        held = k;
        s = stage.change[r] == kSeed ? 0.0f : column[k];
      }
      const float product = (stage.products[r * kPanel + l] * stage.reciprocal[r]) * reciprocal_j;
      s = moved(s, product, stage.change[r], stage.weight[r]);
    }
    if (held >= 0) column[held] = s;
  }
}

// All decisions [first, last) on S of a panel, chunk by chunk: the next one is on its way while one is applied.
template <typename Wait>
BIPACE_DEVICE void apply_all(Stage* stages, const Group& g, int first, int last, int panel, float* similar,
                             int64_t pitch, float reciprocal_j, int t, int threads, int low, int high,
                             const Wait& wait) {
  const int chunks = (last - first + kChunk - 1) / kChunk;
  for (int c = -1; c < chunks; ++c) {
    if (c + 1 < chunks) {
      const int from = first + (c + 1) * kChunk, rows = last - from < kChunk ? last - from : kChunk;
      ask(stages[(c + 1) % 2], g, from, rows, panel, t, threads);
      take_decisions(stages[(c + 1) % 2], g, from, rows, t, threads);
    }
    gpu::copy_commit();  // an empty group where there is nothing more, so that their count stays
    if (c < 0) continue;
    gpu::copy_wait<1>();
    wait();
    apply(stages[c % 2], similar, pitch, reciprocal_j, t / gpu::kWarp, threads / gpu::kWarp, low, high);
    wait();  // before the stage is filled anew
  }
  gpu::copy_wait<0>();
}

// Decides a panel's records in order, by warp 0; the number of clusters at its end.
BIPACE_DEVICE int decide_panel(const Group& g, int panel, float* similar, int64_t pitch, int count, float lowest) {
  const int l = gpu::lane(), width = g.n - panel < kPanel ? g.n - panel : kPanel;
  const float reciprocal_l = l < width ? g.reciprocal[panel + l] : 0.0f;
  const int kind_l = l < width ? g.kind[panel + l] : 2;
  const float* row = g.gram + panel * g.pitch + panel + l;
  float next = l < width ? *row : 0.0f;  // of the coming step, so that the chain need not wait for it
  for (int t = 0; t < width; ++t) {
    const float reciprocal_t = gpu::shuffle(reciprocal_l, t);
    const float product = (next * reciprocal_t) * reciprocal_l;
    row += g.pitch;
    next = t + 1 < width && l > t && l < width ? *row : 0.0f;
    int k = kNowhere;
    float change = 0.0f, weight = 0.0f;
    if (gpu::shuffle(kind_l, t) == 0) {
      k = decide(similar + t * pitch, count, lowest);
      const bool joins = k < count;
      if (joins) {
        const int m = g.decided.members[k] + 1;
        const float b = g.decided.share[k];
        const Join<float> step = join(b, similar[t * pitch + k], gpu::shuffle(product, t));
        change = step.change;
        weight = step.weight;
        gpu::sync_warp();  // everybody has read before one lane writes
        if (l == 0) {
          g.decided.members[k] = m;
          g.decided.share[k] = gpu::div_rn(1.0f, static_cast<float>(m + 1));
        }
      } else {
        change = kSeed;
        weight = 1.0f;
        ++count;
        if (l == 0) {
          g.decided.members[k] = 1;
          g.decided.share[k] = 0.5f;
          g.decided.leader[k] = panel + t;
        }
      }
      if (l > t && l < width)
        similar[l * pitch + k] = moved(joins ? similar[l * pitch + k] : 0.0f, product, change, weight);
    }
    if (l == 0) {
      g.decided.joined[panel + t] = k;
      g.decided.change[panel + t] = change;
      g.decided.weight[panel + t] = weight;
    }
    gpu::sync_warp();
  }
  return count;
}

// Where a block keeps S of two panels: in shared memory where all clusters fit, else in memory.
struct Room {
  Stage* stages;  // [3]: two for the decisions before a panel, one for the panel's own
  float* near;    // [2, kPanel, capacity]
  float* far;     // [far_panels, kPanel, far_pitch]
  int64_t capacity, far_panels, far_pitch;
  int* count;  // clusters so far

  // S of the turn-th panel, `known` clusters being there at the beginning of the one before: there may be up to 32 more
  // by that one's end, and 32 more by its own.
  BIPACE_DEVICE bool fits(int known) const { return known + 2 * kPanel <= capacity; }
  BIPACE_DEVICE int64_t pitch(int known) const { return fits(known) ? capacity : far_pitch; }
  BIPACE_DEVICE float* similar(int turn, int known) const {
    return fits(known) ? near + turn % 2 * kPanel * capacity : far + turn % far_panels * kPanel * far_pitch;
  }
};

BIPACE_DEVICE Room room_of(const ScanArgs& a, int64_t slot, int64_t e, int64_t slots, unsigned char* shared) {
  Stage* const stages = reinterpret_cast<Stage*>(shared);
  float* const near = reinterpret_cast<float*>(stages + 3);
  float* const far = a.similar ? a.similar + (e * slots + slot) * a.far_panels * kPanel * a.far_pitch : nullptr;
  int* const count = reinterpret_cast<int*>(near + 2 * kPanel * a.capacity);
  return {stages, near, far, a.capacity, a.far_panels, a.far_pitch, count};
}

// S of the first panel as `before` clusters of earlier columns left it; far from here, where similar_to_columns put it.
BIPACE_DEVICE void begin_with(const Room& room, int turn, int known, int before, int thread, int threads) {
  if (!room.fits(known) || before == 0) return;
  float* const to = room.similar(turn, known);
  const float* const from = room.far + turn * kPanel * room.far_pitch;
  for (int i = thread; i < before * kPanel; i += threads) {
    to[i / before * room.pitch(known) + i % before] = from[i / before * room.far_pitch + i % before];
  }
}

// Decides columns [begin, end) of a group, `before` clusters being there: a panel while S of the next one is made.  By
// a block.
BIPACE_DEVICE void decide_columns(const Group& g, const Room& room, float lowest, int begin, int end, int before) {
  const int t = gpu::thread(), w = gpu::warp(), l = gpu::lane();
  int known_before = before;  // clusters at the beginning of the panel before
  for (int panel = begin; panel < end; panel += kPanel) {
    const int next = panel + kPanel, turn = (panel - begin) / kPanel, known = *room.count;
    float* const now = room.similar(turn, known_before);
    const int64_t now_pitch = room.pitch(known_before);
    float* const similar = room.similar(turn + 1, known);
    const int64_t pitch = room.pitch(known);
    const float reciprocal_next = next + l < g.n ? g.reciprocal[next + l] : 0.0f;
    gpu::sync_block();  // everybody has read the number of clusters
    if (w == 0) {
      const int count = decide_panel(g, panel, now, now_pitch, known, lowest);
      if (l == 0) *room.count = count;
    } else if (next < end) {
      const int worker = t - gpu::kWarp;
      const auto wait = [] { gpu::sync_some(kWorkerBarrier, kWorkerThreads); };
      begin_with(room, turn + 1, known, before, worker, kWorkerThreads);
      ask(room.stages[2], g, panel, kPanel, next, worker, kWorkerThreads);
      wait();
      apply_all(room.stages, g, begin, panel, next, similar, pitch, reciprocal_next, worker, kWorkerThreads, 0,
                0x7FFFFFFF, wait);
    }
    gpu::sync_block();
    if (next < end) {
      take_decisions(room.stages[2], g, panel, kPanel, t, kThreads);
      gpu::sync_block();
      apply(room.stages[2], similar, pitch, reciprocal_next, w, kWarps, 0, 0x7FFFFFFF);
      gpu::sync_block();
    }
    known_before = known;
  }
}

}  // namespace scan
}  // namespace bipace
