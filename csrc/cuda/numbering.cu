// Dense cluster numbers by first appearance.
//
// A partition names each record's cluster by the record that began it.  That record's number is the count of beginners
// before it: within its block of records, then over the blocks' totals.  All in integers, so no order matters.
#include "cuda/intrinsics.h"

namespace bipace {
namespace {

constexpr int kThreads = 256;
constexpr int kWarps = kThreads / gpu::kWarp;
constexpr int kUnroll = 4;                          // records of a thread whose loads are under way together
constexpr int64_t kPerWarp = gpu::kWarp * kUnroll;  // records of a warp, side by side
constexpr int64_t kChunk = kThreads * kUnroll;      // records looked at between two barriers

// The sum of what the warps before this one have, and of what all have; `room` has a place for each.
BIPACE_DEVICE int32_t of_warps_before(int32_t mine, int32_t* room, int32_t& all) {
  if (gpu::lane() == 0) room[gpu::warp()] = mine;
  gpu::sync_block();
  int32_t before = 0;
  all = 0;
#pragma unroll
  for (int w = 0; w < kWarps; ++w) {
    before += w < gpu::warp() ? room[w] : 0;
    all += room[w];
  }
  gpu::sync_block();
  return before;
}

}  // namespace

struct RankBeginnersArgs {
  const int64_t* first;  // [E, M] the record that began the record's cluster
  int32_t* rank;         // [E, M] beginners before the record in its block
  int32_t* totals;       // [E, blocks] beginners in each block
  int64_t n;             // M
  int64_t blocks;        // of each row
  int64_t per_block;     // records of a block, a multiple of kChunk
};

BIPACE_KERNEL(rank_beginners, RankBeginnersArgs, kThreads) {
  int32_t* room = reinterpret_cast<int32_t*>(gpu::shared_memory());  // [kWarps]
  const int64_t row = gpu::block() / a.blocks * a.n, begin = gpu::block() % a.blocks * a.per_block;
  const int64_t end = begin + a.per_block < a.n ? begin + a.per_block : a.n;
  const uint32_t lanes_before = (1u << gpu::lane()) - 1;
  int32_t counted = 0;
  for (int64_t chunk = begin; chunk < end; chunk += kChunk) {
    const int64_t mine = chunk + gpu::warp() * kPerWarp + gpu::lane();
    int64_t beginner[kUnroll];
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) {
      const int64_t i = mine + u * gpu::kWarp;
      beginner[u] = i < end ? a.first[row + i] : -1;
    }
    int32_t rank[kUnroll], in_warp = 0;
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) {
      const uint32_t begins = gpu::ballot(beginner[u] == mine + u * gpu::kWarp);
      rank[u] = in_warp + gpu::count_bits(begins & lanes_before);
      in_warp += gpu::count_bits(begins);
    }
    int32_t in_chunk;
    const int32_t before = counted + of_warps_before(in_warp, room, in_chunk);
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) {
      const int64_t i = mine + u * gpu::kWarp;
      if (i < end) a.rank[row + i] = before + rank[u];
    }
    counted += in_chunk;
  }
  if (gpu::thread() == 0) a.totals[gpu::block()] = counted;
}

struct NumberClustersArgs {
  const int64_t* first;   // [E, M]
  const int32_t* rank;    // [E, M] by rank_beginners, as totals
  const int32_t* totals;  // [E, blocks]
  int64_t* labels;        // [E, M]; -1 where first is
  int64_t n;
  int64_t blocks;
  int64_t per_block;
};

BIPACE_KERNEL(number_clusters, NumberClustersArgs, kThreads) {
  int32_t* room = reinterpret_cast<int32_t*>(gpu::shared_memory());  // [kWarps]
  int32_t* before_block = room + kWarps;                             // [blocks] beginners in the blocks before it
  const int64_t which = gpu::block() / a.blocks, block = gpu::block() % a.blocks, row = which * a.n;
  int32_t counted = 0;
  for (int64_t start = 0; start <= block; start += kThreads) {  // a beginner never stands in a later block
    const int64_t b = start + gpu::thread();
    const int32_t own = b < block ? a.totals[which * a.blocks + b] : 0;
    int32_t sum = own;
#pragma unroll
    for (int by = 1; by < gpu::kWarp; by *= 2) {
      const int32_t other = gpu::shuffle_up(sum, by);
      sum += gpu::lane() >= by ? other : 0;
    }
    int32_t in_all;
    const int32_t before = of_warps_before(gpu::shuffle(sum, gpu::kWarp - 1), room, in_all);
    if (b <= block) before_block[b] = counted + before + sum - own;
    counted += in_all;
  }
  gpu::sync_block();
  const int64_t begin = block * a.per_block, end = begin + a.per_block < a.n ? begin + a.per_block : a.n;
  for (int64_t chunk = begin + gpu::thread(); chunk < end; chunk += kChunk) {
    int64_t beginner[kUnroll];
    int32_t rank[kUnroll];
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) {
      const int64_t i = chunk + u * kThreads;
      beginner[u] = i < end ? a.first[row + i] : -1;
    }
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) rank[u] = beginner[u] >= 0 ? a.rank[row + beginner[u]] : 0;
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) {
      const int64_t i = chunk + u * kThreads;
      if (i >= end) break;
      a.labels[row + i] = beginner[u] >= 0 ? before_block[beginner[u] / a.per_block] + rank[u] : -1;
    }
  }
}

}  // namespace bipace
