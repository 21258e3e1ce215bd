// Gram matrices of groups: a block per tile (gram.h).
#include "cuda/gram.h"

namespace bipace {
namespace {

// Whether the group is for this launch and has such a tile: the same for every thread, and known to be.
template <int high>
BIPACE_DEVICE bool is_there(const gram::TileOf<high>& tile) {
  const int after = (tile.block_j + 1) * gram::kTile;  // the first column after the tile
  return gpu::shuffle(tile.block_j * gram::kTile < tile.n && tile.block_i * high < after, 0);
}

// The block's tile.
template <int high>
BIPACE_DEVICE gram::TileOf<high> tile_of(const GramArgs& a) {
  const int64_t slot = gpu::block_y(), begin = a.begins[slot], length = a.ends[slot] - begin;
  const int n = length < a.long_group ? static_cast<int>(length) : 0;
  gram::TileOf<high> tile{
      a, begin, n, 0, 0, a.gram + slot * a.side * a.side, a.reciprocal + begin, gpu::shared_memory()};
  gram::triangle<high>(gpu::block(), tile.block_i, tile.block_j);
  return tile;
}

}  // namespace

// Blocks of all: (tiles of the longest group, slots).
BIPACE_KERNEL(gram_half, GramArgs, gram::kThreads) {
  const gram::Tile tile = tile_of<gram::kTile>(a);
  if (!is_there(tile)) return;
  if (a.dtype == kBfloat16) {
    gram::multiply_tile<kBfloat16>(tile);
  } else {
    gram::multiply_tile<kFloat16>(tile);
  }
}

BIPACE_KERNEL(gram_single, GramArgs, gram::kThreads) {
  const gram::Tile tile = tile_of<gram::kTile>(a);
  if (is_there(tile)) gram::multiply_tile<kFloat32>(tile);
}

// 16-bit rows by groups of warps: a tall tile takes fewer bytes from the L2 cache for each product than a square one.
BIPACE_KERNEL(gram_tall, GramArgs, gram::kTallThreads) {
#if BIPACE_WARPGROUPS
  const auto tile = tile_of<gram::kTall>(a);
  if (!is_there(tile)) return;
  if (a.dtype == kBfloat16) {
    gram::multiply_tall_tile<kBfloat16>(tile);
  } else {
    gram::multiply_tall_tile<kFloat16>(tile);
  }
#endif
}

}  // namespace bipace
