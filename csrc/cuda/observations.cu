// Partitions by what was observed: the first record of the group with the same code, and codes of histories.
#include "cuda/intrinsics.h"

namespace bipace {
namespace {

constexpr int kThreads = 128;
constexpr int kWarps = kThreads / gpu::kWarp;
constexpr int kUnroll = 4;                       // words of 32 records whose loads are under way together
constexpr int64_t kTile = kUnroll * gpu::kWarp;  // earlier records compared with between two loads

BIPACE_DEVICE int64_t least(int64_t x, int64_t y) { return x < y ? x : y; }

}  // namespace

struct FirstEqualArgs {
  const int64_t* codes;          // [M]
  const int64_t* group_offsets;  // [G+1]
  const uint8_t* taken;          // [M] bool, or null: all are
  int64_t* first;                // [M] the first record of the group with the record's code; -1: it has none
  int64_t blocks;                // of a group
  int64_t negative_is_none;      // whether a negative code is none
};

// A lane is a record; a warp walks from the group's beginning to its own records, by itself.  With few codes it ends
// after the first words; all codes different, n² / 2 comparisons of a group cost less than sorting it up to tens of
// thousands of records (by count of instructions).
BIPACE_KERNEL(first_equal, FirstEqualArgs, kThreads) {
  int64_t* tile = reinterpret_cast<int64_t*>(gpu::shared_memory()) + gpu::warp() * kTile;
  const int64_t group = gpu::block() / a.blocks;
  const int64_t begin = a.group_offsets[group], end = a.group_offsets[group + 1];
  const int64_t ours = begin + (gpu::block() % a.blocks * kWarps + gpu::warp()) * gpu::kWarp;
  if (ours >= end) return;  // the whole warp
  const int64_t stop = least(end, ours + gpu::kWarp), own = ours + gpu::lane();
  const auto counts = [&](int64_t i, int64_t code) {
    return i < stop && (!a.taken || a.taken[i]) && !(a.negative_is_none && code < 0);
  };
  const int64_t code = own < stop ? a.codes[own] : 0;
  int64_t found = -1;
  bool searches = counts(own, code);
  for (int64_t start = begin; start < stop && gpu::any(searches); start += kTile) {
    uint32_t there[kUnroll];  // which of the words' records have a code
    int64_t theirs[kUnroll];
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) {
      const int64_t i = start + u * gpu::kWarp + gpu::lane();
      theirs[u] = i < stop ? a.codes[i] : 0;
    }
    gpu::sync_warp();  // all have read the tile before
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) {
      tile[u * gpu::kWarp + gpu::lane()] = theirs[u];
      there[u] = gpu::ballot(counts(start + u * gpu::kWarp + gpu::lane(), theirs[u]));
    }
    gpu::sync_warp();
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) {
      if (!gpu::any(searches)) break;
      uint32_t equal = 0;
#pragma unroll
      for (int j = 0; j < gpu::kWarp; ++j) equal |= static_cast<uint32_t>(tile[u * gpu::kWarp + j] == code) << j;
      equal &= there[u];
      if (searches && equal) {
        found = start + u * gpu::kWarp + gpu::lowest_bit(equal);
        searches = false;
      }
    }
  }
  if (own < stop) a.first[own] = found;
}

struct EarlierStepArgs {
  const int64_t* step;                // [M], or null: each record is a step
  const int64_t* trajectory_offsets;  // [T+1]
  int64_t* earlier;  // [M] the first record of the step before the record's in its trajectory; -1: none
};

// A warp is a trajectory.
BIPACE_KERNEL(earlier_step, EarlierStepArgs, gpu::kWarp) {
  const int64_t begin = a.trajectory_offsets[gpu::block()], end = a.trajectory_offsets[gpu::block() + 1];
  const uint32_t up_to_own = 0xFFFFFFFFu >> (31 - gpu::lane());
  int64_t last = -1, before = -1;  // first records of the step begun last before the word, and of the one before it
  for (int64_t start = begin; start < end; start += kTile) {
    bool begins[kUnroll];
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) {
      const int64_t i = start + u * gpu::kWarp + gpu::lane();
      // A step recorded twice stands in later histories once, by its first record.
      begins[u] = i < end && (i == begin || !a.step || a.step[i] != a.step[i - 1]);
    }
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) {
      const int64_t word = start + u * gpu::kWarp, i = word + gpu::lane();
      const auto two_newest = [&](uint32_t bits, int64_t& newest, int64_t& second) {
        const int high = gpu::highest_bit(bits), next = high < 0 ? -1 : gpu::highest_bit(bits ^ (1u << high));
        newest = high < 0 ? last : word + high;
        second = high < 0 ? before : next < 0 ? last : word + next;
      };
      const uint32_t steps = gpu::ballot(begins[u]);
      int64_t newest, second;
      two_newest(steps & up_to_own, newest, second);
      if (i < end) a.earlier[i] = second;
      two_newest(steps, newest, second);
      last = newest;
      before = second;
    }
  }
}

struct PairHistoriesArgs {
  const int64_t* earlier;  // [M]
  const int64_t* shorter;  // [M] first record with the record's history of one step less
  const int64_t* own;      // [M] first record with the record's code
  int64_t* pairs;          // [M] one integer for (shorter history a step earlier, own code); -1: no such history
  int64_t m;
};

BIPACE_KERNEL(pair_histories, PairHistoriesArgs, kThreads) {
  const int64_t i = gpu::block() * kThreads + gpu::thread();
  if (i >= a.m) return;
  const int64_t before = a.earlier[i], code = a.own[i];
  const int64_t history = before >= 0 ? a.shorter[before] : -1;
  // Both are below m, and m² below 2⁶³ for any batch under 3 · 10⁹ records.
  a.pairs[i] = history >= 0 && code >= 0 ? history * a.m + code : -1;
}

}  // namespace bipace
