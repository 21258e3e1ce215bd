// A tile of a group's Gram matrix, from the unnormalised rows: G[i, j] = x_i · x_j for i ≤ j, float32.  By a block.
//
// Products of 16-bit values are exact in float32.  Tensor cores truncate sums beyond float32 (over 3,584
// elements a bias of 5e-6, which norms and products share only in part), so every kSum elements of D begin a new sum,
// and those sums are added with rounding.  The order over D is fixed and the same for every element of a tile, so G[i,
// j] only depends on the two rows, not on their place in a batch.  Norms are the diagonal, so the remaining bias
// cancels.
#include "cuda/arguments.h"
#include "cuda/intrinsics.h"

namespace bipace {
namespace {

// Elements of the fingerprint rows, of any dtype.
enum Dtype : int { kFloat32 = 0, kBfloat16 = 1, kFloat16 = 2 };

// Whether 16 bytes at a time may be read from every row.
BIPACE_DEVICE bool are_aligned(const GramArgs& a) {
  const int size = a.dtype == kFloat32 ? 4 : 2;
  return a.column_stride == 1 && a.row_stride * size % 16 == 0 && reinterpret_cast<uint64_t>(a.x) % 16 == 0;
}

// Bits of element e of the row that begins at `row`; 16-bit values in the low half.
template <int dtype>
BIPACE_DEVICE uint32_t element_bits(const GramArgs& a, int64_t row, int64_t e) {
  const int64_t place = row + e * a.column_stride;
  if (dtype == kFloat32) return static_cast<const uint32_t*>(a.x)[place];
  return static_cast<const uint16_t*>(a.x)[place];
}

template <int dtype>
BIPACE_DEVICE float value_of(uint32_t bits) {
  if (dtype == kFloat32) return gpu::float_of(bits);
  if (dtype == kBfloat16) return gpu::float_of(bits << 16);
  return gpu::from_f16(static_cast<uint16_t>(bits));
}

constexpr int kThreads = 512, kTallThreads = 384;  // of a tile
constexpr int kTile = 128;                         // rows and columns; a tall one has 192 rows
constexpr int kTall = 192;
constexpr int kDepth = 64;  // 16-bit elements of D of a stage: 128 bytes of a row, eight copies of 16
constexpr int kSum = 2;     // stages of one sum
constexpr int kRowBytes = kDepth * 2;
constexpr int kSingleDepth = 16, kSinglePitch = kTile + 4;  // of float32 rows
constexpr int64_t kOutside = -1;                            // in place of a row: there is no such record

// What a tile of so many rows takes.  Stages of a tall one: two are multiplied, two are on their way.
template <int high>
struct Cut {
  static constexpr int kStages = high == kTall ? 4 : 3;
  static constexpr int kThreads = high == kTall ? kTallThreads : bipace::kThreads, kWarps = kThreads / gpu::kWarp;
  static constexpr int kRows = high + kTile;  // of a stage: the tile's rows, then its columns
  static constexpr int kStageBytes = kRows * kRowBytes;
};

// Tile of a group's triangle: columns of blocks, one after another, each from row block 0 down to the diagonal.
template <int high>
BIPACE_DEVICE void triangle(int64_t tile, int& block_i, int& block_j) {
  for (block_j = 0;; ++block_j) {
    const int64_t rows = ((block_j + 1) * kTile + high - 1) / high;
    if (tile < rows) break;
    tile -= rows;
  }
  block_i = static_cast<int>(tile);
}

// Tile (block_i, block_j) of one group.
template <int high>
struct TileOf {
  using Cut = bipace::Cut<high>;
  const GramArgs& a;
  int64_t begin;  // the group's first record
  int n;          // its records
  int block_i, block_j;
  float* out;     // the group's matrix
  float* length;  // [n] 1 / ‖x‖
  unsigned char* room;

  // [kRows], and a bit each; after the stages, of which those of float32 rows are smaller.
  BIPACE_DEVICE int64_t* row() const { return reinterpret_cast<int64_t*>(room + Cut::kStages * Cut::kStageBytes); }
  BIPACE_DEVICE uint32_t* scaled() const { return reinterpret_cast<uint32_t*>(row() + Cut::kRows); }
  BIPACE_DEVICE bool is_scaled(int r) const { return (scaled()[r / gpu::kWarp] >> (r % gpu::kWarp)) & 1u; }
  // The record of a row of a stage.
  BIPACE_DEVICE int record(int r) const { return r < high ? block_i * high + r : block_j * kTile + r - high; }
  BIPACE_DEVICE void write(int64_t at_i, int64_t at_j, float product) const { out[at_i * a.side + at_j] = product; }
};
using Tile = TileOf<kTile>;

// Where each row begins, and which are scaled; registers are short in what follows.
template <int high>
BIPACE_DEVICE void find_rows(const TileOf<high>& tile) {
  const int t = gpu::thread();
  static_assert(Cut<high>::kRows <= Cut<high>::kThreads, "a thread to a row");
  if (t < Cut<high>::kRows) {
    const int record = tile.record(t);
    const bool inside = record < tile.n;
    tile.row()[t] = inside ? tile.a.order[tile.begin + record] * tile.a.row_stride : kOutside;
    const uint32_t some = gpu::ballot(inside && tile.a.scale[tile.begin + record] != 1.0f);
    if (gpu::lane() == 0) tile.scaled()[gpu::warp()] = some;
  }
  gpu::sync_block();
}

// Where 16 bytes of a row stand in it: the eight copies of a row change places from row to row, so that eight rows read
// together lie in different banks.  It is the order in which tensor cores read rows of 128 bytes by themselves.
BIPACE_DEVICE int turned(int row, int copy) { return (copy ^ (row & 7)) << 4; }

// Brings stages of 16-bit rows in, a thread some copies of each.
template <int dtype, int high>
struct Feed {
  using Cut = bipace::Cut<high>;
  static constexpr int kFurther = Cut::kThreads / 8;  // rows from one of a thread's copies to the next, whole eights
  static constexpr int kCopies = (Cut::kRows + kFurther - 1) / kFurther;
  static constexpr int kAlways = high == kTile ? high : Cut::kRows;  // rows that come whatever the tile
  const TileOf<high>& tile;
  const bool aligned, diagonal;
  const int dim, steps, first;

  // Steps come in whole sums of `together`: beyond D there are zeros.
  BIPACE_DEVICE Feed(const TileOf<high>& of, int together)
      : tile(of),
        aligned(are_aligned(of.a)),
        diagonal(high == kTile && of.block_i == of.block_j),  // its columns are its rows, and come once
        dim(static_cast<int>(of.a.dim)),
        steps((dim + together * kDepth - 1) / (together * kDepth) * together),
        first(gpu::thread() / 8 * kRowBytes + turned(gpu::thread() / 8, gpu::thread() % 8)) {}

  // The first row of a stage that is a column of the tile.
  BIPACE_DEVICE int side_j() const { return diagonal ? 0 : high; }

  BIPACE_DEVICE void load(int step, int stage) const {
    if (step < steps) {
      const int t = gpu::thread(), e = step * kDepth + t % 8 * 8, left = (dim - e) * 2;
      const int inside = left >= 16 ? 16 : left > 0 ? left : 0;
      unsigned char* const to = tile.room + stage * Cut::kStageBytes + first;
      const int64_t* const row = tile.row() + t / 8;
      const int last = (diagonal ? high : Cut::kRows) - (Cut::kRows % kFurther ? t / 8 : 0);
      if (aligned) {
#pragma unroll
        for (int c = 0; c < kCopies; ++c) {
          if ((c + 1) * kFurther > kAlways && c * kFurther >= last) break;
          const int64_t at = row[c * kFurther];
          const int bytes = at == kOutside ? 0 : inside;  // zeros, and nothing is read for them
          gpu::copy_async(to + c * kFurther * kRowBytes, static_cast<const uint16_t*>(tile.a.x) + (bytes ? at + e : 0),
                          bytes);
        }
      } else {
#pragma unroll 1
        for (int c = 0; c * kFurther < last; ++c) {
          const int64_t at = row[c * kFurther];
          uint16_t* const element = reinterpret_cast<uint16_t*>(to + c * kFurther * kRowBytes);
#pragma unroll 1
          for (int i = 0; i < 8; ++i) {
            const bool is = at != kOutside && e + i < dim;
            element[i] = is ? static_cast<uint16_t>(element_bits<dtype>(tile.a, at, e + i)) : uint16_t{0};
          }
        }
      }
    }
    gpu::copy_commit();  // an empty group where there is nothing more, so that their count stays
  }
};

// body(i, j) of all rows and columns.
template <int rows, int columns, typename Body>
BIPACE_DEVICE void each(const Body& body) {
#pragma unroll
  for (int i = 0; i < rows; ++i) {
#pragma unroll
    for (int j = 0; j < columns; ++j) body(i, j);
  }
}

// 16-bit rows, on tensor cores: sixteen warps of 32 × 32.
template <int dtype>
BIPACE_DEVICE void multiply_by_warps(const Tile& tile) {
  constexpr int kStages = Cut<kTile>::kStages;
  const Feed<dtype, kTile> feed(tile, 1);
  const int warp_i = gpu::warp() % 4 * 32, warp_j = gpu::warp() / 4 * 32, l = gpu::lane();
  // Warps below the diagonal or beyond the last record bring rows in for the others, and have nothing to multiply.
  const bool busy =
      tile.record(warp_i) < tile.n && tile.record(kTile + warp_j) < tile.n && !(feed.diagonal && warp_j < warp_i);
  float total[8][4] = {}, part[8][4] = {};  // of row part i and column part j: four elements of 4 i + j
  const auto flush = [&]() {
    each<8, 4>([&](int ij, int e) {
      total[ij][e] += part[ij][e];
      part[ij][e] = 0.0f;
    });
  };
  const int row_i = (warp_i + l % 16) * kRowBytes;
  const int row_j = (feed.side_j() + warp_j + l / 16 * 8 + l % 8) * kRowBytes;
#pragma unroll
  for (int step = 0; step < kStages - 1; ++step) feed.load(step, step);
  for (int step = 0, now = 0, next = kStages - 1; step < feed.steps; ++step) {
    gpu::copy_wait<kStages - 2>();
    gpu::sync_block();  // the stage is whole, and everybody is done with the one that is loaded next
    feed.load(step + kStages - 1, next);
    next = now;
    const unsigned char* const stage = tile.room + now * Cut<kTile>::kStageBytes;
    now = now + 1 < kStages ? now + 1 : 0;
    if (!busy) continue;
#pragma unroll
    for (int k = 0; k < kDepth / 16; ++k) {
      uint32_t fa[2][4], fb[2][4];
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        gpu::load_matrices(fa[i], stage + row_i + i * 16 * kRowBytes + turned(l, 2 * k + l / 16));
      }
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        gpu::load_matrices(fb[j], stage + row_j + j * 16 * kRowBytes + turned(l, 2 * k + l / 8 % 2));
      }
      each<2, 4>([&](int i, int j) {
        const uint32_t (&b)[4] = fb[j / 2];
        gpu::multiply_warp<dtype == kBfloat16>(part[4 * i + j], fa[i], b[j % 2 * 2], b[j % 2 * 2 + 1]);
      });
    }
    if (step % kSum == kSum - 1) flush();
  }
  if (!busy) return;
  if (feed.steps % kSum) flush();
  each<8, 4>([&](int ij, int e) {
    tile.write(tile.block_i * kTile + warp_i + ij / 4 * 16 + e / 2 * 8 + l / 4,
               tile.block_j * kTile + warp_j + ij % 4 * 8 + l % 4 * 2 + e % 2, total[ij][e]);
  });
}

// 16-bit rows, on tensor cores that read shared memory by themselves: groups of four warps, 64 rows each; stages ahead.
template <int dtype>
BIPACE_DEVICE void multiply_by_groups(const TileOf<kTall>& tile) {
#if BIPACE_WARPGROUPS
  constexpr int kRows = 64, kMine = kRows * kTile / gpu::kGroup;  // elements of a thread
  constexpr int kStages = Cut<kTall>::kStages, kAhead = kStages - 2;
  const Feed<dtype, kTall> feed(tile, kSum);
  const int group_i = gpu::group() * kRows;
  // Groups below the diagonal or beyond the last record bring rows in for the others, and have nothing to multiply; so
  // no tall tile reaches beyond the matrix.
  const int first_i = tile.record(group_i), first_j = tile.record(kTall);
  const bool busy = gpu::shuffle(first_i < tile.n && first_j < tile.n && first_i < first_j + kTile, 0);
  float total[kMine], part[kMine];
#pragma unroll
  for (int e = 0; e < kMine; ++e) total[e] = part[e] = 0.0f;
  const auto flush = [&]() {
    gpu::products_wait<0>();
    gpu::hold(part);
#pragma unroll
    for (int e = 0; e < kMine; ++e) total[e] += part[e];
  };
#pragma unroll
  for (int step = 0; step < kAhead; ++step) feed.load(step, step);
  for (int sum = 0; sum < feed.steps; sum += kSum) {
#pragma unroll
    for (int s = 0; s < kSum; ++s) {
      const int step = sum + s;
      gpu::copy_wait<kAhead - 1>();
      gpu::show_tensor_cores();
      gpu::products_wait<1>();  // of the step before the last: its stage is loaded next
      gpu::sync_block();        // the stage is whole, and everybody is done with that one
      feed.load(step + kAhead, (step + kAhead) % kStages);
      if (s == 0) flush();  // the sum before, zeros at first
      if (busy) {
        const unsigned char* const stage = tile.room + step % kStages * Cut<kTall>::kStageBytes;
        const uint64_t rows = gpu::described(stage + group_i * kRowBytes);
        const uint64_t columns = gpu::described(stage + kTall * kRowBytes);
        gpu::products_begin(part);
#pragma unroll
        for (int k = 0; k < kDepth / 16; ++k) {
          // 32 bytes, in units of 16: descriptors made anew take more issue slots than the products have cycles.
          gpu::multiply_group<dtype == kBfloat16>(part, rows + 2 * k, columns + 2 * k, s > 0 || k > 0);
        }
        gpu::products_commit();
      }
    }
  }
  flush();
  if (!busy) return;
  // Each warp of a group has sixteen rows; a lane two neighbours of rows lane / 4 and 8 more, every eight columns.
  const int at_i = first_i + gpu::warp() % 4 * 16 + gpu::lane() / 4, at_j = first_j + gpu::lane() % 4 * 2;
#pragma unroll
  for (int e = 0; e < kMine; ++e) tile.write(at_i + e / 2 % 2 * 8, at_j + e / 4 * 8 + e % 2, total[e]);
#endif
}

// Float32 rows, outside the tensor cores: eight rows by four columns to a thread.
BIPACE_DEVICE void multiply_single(const Tile& tile) {
  constexpr int kMine = 8, kTheirs = 4;
  float* const xi = reinterpret_cast<float*>(tile.room);  // [kSingleDepth, kSinglePitch]
  float* const xj = xi + kSingleDepth * kSinglePitch;
  const int t = gpu::thread(), at_i = t / 32 * kMine, at_j = t % 32 * kTheirs;
  float total[kMine][kTheirs] = {}, part[kMine][kTheirs];
  // Four elements of one row of each side: rows t / 4, elements t % 4 · 4 and on.
  const int64_t row_i = tile.row()[t / 4], row_j = tile.row()[kTile + t / 4];
  for (int64_t d = 0; d < tile.a.dim; d += kSingleDepth) {
    gpu::sync_block();
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int e = t % 4 * 4 + i;
      const bool inside = d + e < tile.a.dim;
      const bool is_i = inside && row_i != kOutside, is_j = inside && row_j != kOutside;
      xi[e * kSinglePitch + t / 4] = is_i ? gpu::float_of(element_bits<kFloat32>(tile.a, row_i, d + e)) : 0.0f;
      xj[e * kSinglePitch + t / 4] = is_j ? gpu::float_of(element_bits<kFloat32>(tile.a, row_j, d + e)) : 0.0f;
    }
    gpu::sync_block();
    each<kMine, kTheirs>([&](int i, int j) { part[i][j] = 0.0f; });
#pragma unroll 4
    for (int e = 0; e < kSingleDepth; ++e) {
      const float4 u = *reinterpret_cast<const float4*>(xi + e * kSinglePitch + at_i);
      const float4 w = *reinterpret_cast<const float4*>(xi + e * kSinglePitch + at_i + 4);
      const float4 v = *reinterpret_cast<const float4*>(xj + e * kSinglePitch + at_j);
      const float mine[kMine] = {u.x, u.y, u.z, u.w, w.x, w.y, w.z, w.w}, other[kTheirs] = {v.x, v.y, v.z, v.w};
      each<kMine, kTheirs>([&](int i, int j) { part[i][j] = gpu::fma_rn(mine[i], other[j], part[i][j]); });
    }
    each<kMine, kTheirs>([&](int i, int j) { total[i][j] += part[i][j]; });
  }
  each<kMine, kTheirs>(
      [&](int i, int j) { tile.write(tile.block_i * kTile + at_i + i, tile.block_j * kTile + at_j + j, total[i][j]); });
}

// Pairs with a row of extreme length once more, a warp per pair, by scaled rows.  Nearly always there is none.
template <int dtype, int high>
BIPACE_DEVICE void multiply_scaled(const TileOf<high>& tile) {
  gpu::sync_block();  // what over- or underflowed has been written
  for (int pair = gpu::warp(); pair < high * kTile; pair += Cut<high>::kWarps) {
    const int i = pair / kTile, j = pair % kTile, at_i = tile.record(i), at_j = tile.record(high + j);
    if (at_i > at_j || at_j >= tile.n || !(tile.is_scaled(i) || tile.is_scaled(high + j))) continue;
    const float scale_i = tile.a.scale[tile.begin + at_i], scale_j = tile.a.scale[tile.begin + at_j];
    const int64_t row_i = tile.row()[i], row_j = tile.row()[high + j];
    float sum = 0.0f;
    for (int64_t e = gpu::lane(); e < tile.a.dim; e += gpu::kWarp) {
      const float u = value_of<dtype>(element_bits<dtype>(tile.a, row_i, e)) * scale_i;
      const float v = value_of<dtype>(element_bits<dtype>(tile.a, row_j, e)) * scale_j;
      sum = gpu::fma_rn(u, v, sum);
    }
    for (int mask = gpu::kWarp / 2; mask > 0; mask /= 2) sum += gpu::shuffle_xor(sum, mask);
    if (gpu::lane() == 0) tile.write(at_i, at_j, sum);
  }
}

// Once more what over- or underflowed in a tile, if there is such; then 1 / ‖x‖ of the rows whose squares it holds: by
// a thread each, for a division wherever an element is written would be most of the kernel.
template <int dtype, int high>
BIPACE_DEVICE void finish(const TileOf<high>& tile) {
  uint32_t scaled = 0;
  for (int w = 0; w < Cut<high>::kRows / gpu::kWarp; ++w) scaled |= tile.scaled()[w];
  if (scaled) multiply_scaled<dtype>(tile);
  gpu::sync_block();                                       // all products have been written
  const int64_t i = tile.block_j * kTile + gpu::thread();  // a column
  if (gpu::thread() < kTile && i < tile.n && i / high == tile.block_i) {
    tile.length[i] = gpu::div_rn(1.0f, gpu::sqrt_rn(tile.out[i * tile.a.side + i]));
  }
}

// The block's tile, if the group is for this launch and has such a one.
template <int dtype, int high>
BIPACE_DEVICE void multiply_tile(const GramArgs& a) {
  const int64_t slot = gpu::block_y(), begin = a.begins[slot], length = a.ends[slot] - begin;
  const int n = length < a.long_group ? static_cast<int>(length) : 0;
  TileOf<high> tile{a, begin, n, 0, 0, a.gram + slot * a.side * a.side, a.reciprocal + begin, gpu::shared_memory()};
  triangle<high>(gpu::block(), tile.block_i, tile.block_j);
  const int first = tile.block_j * kTile, after = first + kTile;           // columns
  if (!gpu::shuffle(first < n && tile.block_i * high < after, 0)) return;  // the same for all, and known to be
  find_rows(tile);
  if constexpr (dtype == kFloat32) {
    multiply_single(tile);
  } else if constexpr (high == kTile) {
    multiply_by_warps<dtype>(tile);
  } else {
    multiply_by_groups<dtype>(tile);
  }
  finish<dtype>(tile);
}

template <int high>
BIPACE_DEVICE void multiply_halves(const GramArgs& a) {
  if (a.dtype == kBfloat16) {
    multiply_tile<kBfloat16, high>(a);
  } else {
    multiply_tile<kFloat16, high>(a);
  }
}

}  // namespace

// Blocks of all: (tiles of the longest group, slots).
BIPACE_KERNEL(gram_half, GramArgs, kThreads) { multiply_halves<kTile>(a); }

BIPACE_KERNEL(gram_single, GramArgs, kThreads) { multiply_tile<kFloat32, kTile>(a); }

// A tall tile takes fewer bytes from the L2 cache for each product than a square one.
BIPACE_KERNEL(gram_tall, GramArgs, kTallThreads) {
#if BIPACE_WARPGROUPS
  multiply_halves<kTall>(a);
#endif
}

}  // namespace bipace
