// Gram matrices of groups, or of some columns of them: a block per tile (gram.h).
#include "cuda/gram.h"

namespace bipace {
namespace {

// False where the group is not for this launch, or has no such tile: the same for every thread, and known to be.
BIPACE_DEVICE bool find_tile(const GramArgs& a, int& block_i, int& block_j, int64_t& begin, int& n) {
  gram::triangle(gpu::block() + gram::tiles_before(a.first_column / gram::kTile), block_i, block_j);
  begin = a.begins[gpu::block_y()];
  const int64_t length = a.ends[gpu::block_y()] - begin;
  n = length < a.long_group ? static_cast<int>(length) : 0;
  return gpu::shuffle(block_j * gram::kTile < n, 0);
}

BIPACE_DEVICE gram::Tile tile_of(const GramArgs& a, int block_i, int block_j, int64_t begin, int n) {
  return {a,
          begin,
          n,
          block_i,
          block_j,
          a.gram + gpu::block_y() * a.n_rows * a.columns,
          a.reciprocal + begin,
          gpu::shared_memory()};
}

}  // namespace

// Blocks of both: (tiles of the launch's columns in the longest group, slots).
BIPACE_KERNEL(gram_half, GramArgs, gram::kThreads) {
  int block_i, block_j, n;
  int64_t begin;
  if (find_tile(a, block_i, block_j, begin, n)) gram::multiply_tile_half(tile_of(a, block_i, block_j, begin, n));
}

BIPACE_KERNEL(gram_single, GramArgs, gram::kThreads) {
  int block_i, block_j, n;
  int64_t begin;
  if (find_tile(a, block_i, block_j, begin, n)) gram::multiply_tile<kFloat32>(tile_of(a, block_i, block_j, begin, n));
}

}  // namespace bipace
