// The Gram matrix of every group, from the rows as they are: G[i, j] = x_i · x_j for i ≤ j, float32.
//
// Products of 16-bit values are exact in float32.  Tensor cores cut off what they add beyond float32 (over 3,584
// elements a bias of 5e-6, which norms and products share only in part), so every kSum elements of D begin a new sum,
// and those sums are added with rounding.  The order over D is fixed and the same for every element of a tile, so G[i,
// j] depends on the two rows alone, not on where they lie in a batch.  Norms are the diagonal: what is left of the bias
// cancels.
#include "cuda/elements.h"

namespace bipace {

struct GramArgs {
  Rows rows;
  const int64_t* begins;  // [slots] first record of each group
  const int64_t* ends;    // [slots]
  int64_t long_group;     // groups of this length or more are not for this launch
  int64_t first_column;   // of the launch, in the group; a multiple of 128
  int64_t columns;        // of the launch; a multiple of 128
  int64_t n_rows;         // of a matrix: up to the last column; a multiple of 128
  float* gram;            // [slots, n_rows, columns], written for i ≤ j, and wherever a tile reaches
  float* reciprocal;      // [M], written at the launch's columns: 1 / ‖x_i‖
};

struct GramScaledArgs {
  GramArgs gram;
  const float* scale;  // [M]: powers of two, 1 for nearly all
};

namespace {

// A tile is kTileI × kTileJ, of eight warps of 32 × 32.  128 × 64 and not 128 × 128: 16 groups of 400 records are then
// 256 tiles, which two blocks per multiprocessor take at once on an H100; by count, not measured.
constexpr int kTileI = 128, kTileJ = 64, kTileRows = kTileI + kTileJ;
constexpr int kThreads = 256;
constexpr int kDepth = 64;  // elements of D of a stage: 128 bytes of a row, eight copies of 16
constexpr int kStages = 3;  // 24 KB each
constexpr int kSum = 2;     // stages of one sum
constexpr int kRowBytes = kDepth * 2, kStageBytes = kTileRows * kRowBytes;
constexpr int kCopies = kTileRows * 8 / kThreads;

// Tile of a group's triangle: columns of blocks of kTileJ, one after another, each from row block 0 down to the
// diagonal (row block b of 128 meets column block c of 64 where b ≤ c / 2), so that no tile below it is launched.  A
// launch that begins at a later column begins at a later tile.
BIPACE_DEVICE void triangle(int64_t tile, int64_t first_column, int& block_i, int& block_j) {
  // Column blocks 2m and 2m + 1 have m + 1 tiles each: m (m + 1) tiles before them.
  const int64_t before = first_column / kTileI;
  tile += before * (before + 1);
  int64_t m = static_cast<int64_t>((sqrtf(4.0f * static_cast<float>(tile) + 1.0f) - 1.0f) * 0.5f);
  while (m > 0 && m * (m + 1) > tile) --m;
  while ((m + 1) * (m + 2) <= tile) ++m;
  const int64_t rest = tile - m * (m + 1);
  block_j = static_cast<int>(2 * m + rest / (m + 1));
  block_i = static_cast<int>(rest % (m + 1));
}

// Where 16 bytes of a row stand in a stage; the eight copies of a row change places from row to row, so that eight rows
// read together by load_matrices lie in different banks.
BIPACE_DEVICE int place_of(int row, int copy) { return row * kRowBytes + ((copy ^ (row & 7)) << 4); }

template <int dtype>
BIPACE_DEVICE void multiply(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  if (dtype == kBfloat16) {
    gpu::multiply_bf16(c, a, b0, b1);
  } else {
    gpu::multiply_f16(c, a, b0, b1);
  }
}

template <int dtype>
BIPACE_DEVICE void gram_tile(const GramArgs& a, int64_t begin, int n, int block_i, int block_j, float* out,
                             float* length) {
  unsigned char* const stages = gpu::shared_memory();
  const int t = gpu::thread(), copy = t % 8;
  const bool aligned = a.rows.aligned();
  // Rows beyond the last repeat it, so that nothing below needs a mask; nobody reads what comes of them.  Where each
  // row begins stands in shared memory: registers are short here.
  int64_t* const row = reinterpret_cast<int64_t*>(stages + kStages * kStageBytes);  // [kTileRows]
  if (t < kTileRows) {
    const int record = t < kTileI ? block_i * kTileI + t : block_j * kTileJ + t - kTileI;
    row[t] = a.rows.at(begin + (record < n ? record : n - 1));
  }
  gpu::sync_block();
  const int64_t steps = (a.rows.dim + kDepth - 1) / kDepth;
  const auto load = [&](int64_t step) {
    if (step < steps) {
      unsigned char* const stage = stages + step % kStages * kStageBytes;
      const int64_t e = step * kDepth + copy * 8;
      const int64_t left = (a.rows.dim - e) * 2;
      const int bytes = left >= 16 ? 16 : left > 0 ? static_cast<int>(left) : 0;
#pragma unroll
      for (int c = 0; c < kCopies; ++c) {
        const int r = t / 8 + c * (kThreads / 8);
        unsigned char* const to = stage + place_of(r, copy);
        if (aligned) {
          const int64_t from = row[r] + (bytes ? e : 0);
          gpu::copy_async(to, static_cast<const uint16_t*>(a.rows.x) + from, bytes);
        } else {
          uint16_t* const element = reinterpret_cast<uint16_t*>(to);
          for (int i = 0; i < 8; ++i) {
            element[i] =
                2 * i < bytes ? static_cast<uint16_t>(element_bits<dtype>(a.rows, row[r], e + i)) : uint16_t{0};
          }
        }
      }
    }
    gpu::copy_commit();  // an empty group where there is nothing more, so that their count stays
  };

  const int warp_i = gpu::warp() % 4 * 32, warp_j = gpu::warp() / 4 * 32, l = gpu::lane();
  float total[2][4][4], part[2][4][4];
#pragma unroll
  for (int i = 0; i < 2; ++i) {
#pragma unroll
    for (int j = 0; j < 4; ++j) {
#pragma unroll
      for (int e = 0; e < 4; ++e) total[i][j][e] = part[i][j][e] = 0.0f;
    }
  }
  const auto flush = [&]() {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
#pragma unroll
      for (int j = 0; j < 4; ++j) {
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          total[i][j][e] += part[i][j][e];
          part[i][j][e] = 0.0f;
        }
      }
    }
  };
#pragma unroll
  for (int step = 0; step < kStages - 1; ++step) load(step);
  for (int64_t step = 0; step < steps; ++step) {
    gpu::copy_wait<kStages - 2>();
    gpu::sync_block();  // the stage is whole, and everybody is done with the one that is loaded next
    load(step + kStages - 1);
    const unsigned char* const stage = stages + step % kStages * kStageBytes;
#pragma unroll
    for (int k = 0; k < kDepth / 16; ++k) {
      uint32_t fa[2][4], fb[2][4];
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        gpu::load_matrices(fa[i], stage + place_of(warp_i + i * 16 + l % 16, 2 * k + l / 16));
      }
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        gpu::load_matrices(fb[j], stage + place_of(kTileI + warp_j + j * 16 + l / 16 * 8 + l % 8, 2 * k + l / 8 % 2));
      }
#pragma unroll
      for (int i = 0; i < 2; ++i) {
#pragma unroll
        for (int j = 0; j < 4; ++j) multiply<dtype>(part[i][j], fa[i], fb[j / 2][j % 2 * 2], fb[j / 2][j % 2 * 2 + 1]);
      }
    }
    if (step % kSum == kSum - 1) flush();
  }
  if (steps % kSum) flush();
  gpu::copy_wait<0>();

#pragma unroll
  for (int i = 0; i < 2; ++i) {
#pragma unroll
    for (int j = 0; j < 4; ++j) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int64_t at_i = block_i * kTileI + warp_i + i * 16 + half * 8 + l / 4;
        const int64_t at_j = block_j * kTileJ + warp_j + j * 8 + l % 4 * 2;
        float* const to = out + at_i * a.columns + at_j - a.first_column;
        to[0] = total[i][j][2 * half];
        to[1] = total[i][j][2 * half + 1];
        if (at_i == at_j && at_i < n) length[at_i] = gpu::div_rn(1.0f, gpu::sqrt_rn(total[i][j][2 * half]));
        if (at_i == at_j + 1 && at_i < n) length[at_i] = gpu::div_rn(1.0f, gpu::sqrt_rn(total[i][j][2 * half + 1]));
      }
    }
  }
}

// The group of this block, 0 records where it is not for this launch; its matrix; and its 1 / ‖x‖.
BIPACE_DEVICE int find_group(const GramArgs& a, int64_t& begin, float*& out, float*& length) {
  const int64_t slot = gpu::block_y();
  begin = a.begins[slot];
  const int64_t n = a.ends[slot] - begin;
  out = a.gram + slot * a.n_rows * a.columns;
  length = a.reciprocal + begin;
  return n < a.long_group ? static_cast<int>(n) : 0;
}

}  // namespace

// 16-bit rows, on tensor cores.  Blocks: (tiles of the longest group, slots).
BIPACE_RESIDENT_KERNEL(gram_half, GramArgs, kThreads, 2) {
  int64_t begin;
  float *out, *length;
  int block_i, block_j;
  triangle(gpu::block(), a.first_column, block_i, block_j);
  const int n = find_group(a, begin, out, length);
  if (block_j * kTileJ >= n) return;
  if (a.rows.dtype == kBfloat16) {
    gram_tile<kBfloat16>(a, begin, n, block_i, block_j, out, length);
  } else {
    gram_tile<kFloat16>(a, begin, n, block_i, block_j, out, length);
  }
}

namespace {

// Float32 rows, outside the tensor cores: a tile of 64 × 64, four by four elements to a thread.
constexpr int kTile = 64, kSingleDepth = 16, kSinglePitch = kTile + 4;

}  // namespace

// Blocks: (tiles of 64 × 64 of all rows and the launch's columns, slots); those below the diagonal end at once.
BIPACE_KERNEL(gram_single, GramArgs, kThreads) {
  int64_t begin;
  float *out, *length;
  const int tiles = static_cast<int>(a.columns / kTile);
  const int block_i = static_cast<int>(gpu::block() / tiles);
  const int block_j = static_cast<int>(a.first_column / kTile + gpu::block() % tiles);
  const int n = find_group(a, begin, out, length);
  if (block_i > block_j || block_j * kTile >= n) return;
  float* const xi = reinterpret_cast<float*>(gpu::shared_memory());  // [kSingleDepth, kSinglePitch]
  float* const xj = xi + kSingleDepth * kSinglePitch;
  const int t = gpu::thread(), at_i = t / 16 * 4, at_j = t % 16 * 4;
  float total[4][4] = {}, part[4][4];
  // Four elements of one row of each side: rows t / 4, elements t % 4 · 4 and on.
  const int record_i = block_i * kTile + t / 4, record_j = block_j * kTile + t / 4;
  const int64_t row_i = a.rows.at(begin + (record_i < n ? record_i : n - 1));
  const int64_t row_j = a.rows.at(begin + (record_j < n ? record_j : n - 1));
  for (int64_t d = 0; d < a.rows.dim; d += kSingleDepth) {
    gpu::sync_block();
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int e = t % 4 * 4 + i;
      const bool inside = d + e < a.rows.dim;
      xi[e * kSinglePitch + t / 4] = inside ? gpu::float_of(element_bits<kFloat32>(a.rows, row_i, d + e)) : 0.0f;
      xj[e * kSinglePitch + t / 4] = inside ? gpu::float_of(element_bits<kFloat32>(a.rows, row_j, d + e)) : 0.0f;
    }
    gpu::sync_block();
#pragma unroll
    for (int i = 0; i < 4; ++i) {
#pragma unroll
      for (int j = 0; j < 4; ++j) part[i][j] = 0.0f;
    }
#pragma unroll
    for (int e = 0; e < kSingleDepth; ++e) {
      const float4 u = *reinterpret_cast<const float4*>(xi + e * kSinglePitch + at_i);
      const float4 v = *reinterpret_cast<const float4*>(xj + e * kSinglePitch + at_j);
      const float mine[4] = {u.x, u.y, u.z, u.w}, other[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
      for (int i = 0; i < 4; ++i) {
#pragma unroll
        for (int j = 0; j < 4; ++j) part[i][j] = gpu::fma_rn(mine[i], other[j], part[i][j]);
      }
    }
#pragma unroll
    for (int i = 0; i < 4; ++i) {
#pragma unroll
      for (int j = 0; j < 4; ++j) total[i][j] += part[i][j];
    }
  }
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const int64_t to_i = block_i * kTile + at_i + i;
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const int64_t to_j = block_j * kTile + at_j + j;
      out[to_i * a.columns + to_j - a.first_column] = total[i][j];
      if (to_i == to_j && to_i < n) length[to_i] = gpu::div_rn(1.0f, gpu::sqrt_rn(total[i][j]));
    }
  }
}

namespace {

template <int dtype>
BIPACE_DEVICE void scaled_products(const GramScaledArgs& s, int64_t begin, int i, int n, float* out, float* length) {
  const GramArgs& a = s.gram;
  const float scale_i = s.scale[begin + i];
  const int64_t row_i = a.rows.at(begin + i), last_column = a.first_column + a.columns;
  for (int other = 0; other < n; ++other) {
    const int from = other < i ? other : i, to = other < i ? i : other;
    if (to < a.first_column || to >= last_column) continue;
    const float scale_j = s.scale[begin + other];
    if (other < i && scale_j != 1.0f) continue;  // pairs of two such rows belong to the earlier one
    const int64_t row_j = a.rows.at(begin + other);
    float sum = 0.0f;
    for (int64_t e = gpu::lane(); e < a.rows.dim; e += gpu::kWarp) {
      const float u = value_of<dtype>(element_bits<dtype>(a.rows, row_i, e)) * scale_i;
      const float v = value_of<dtype>(element_bits<dtype>(a.rows, row_j, e)) * scale_j;
      sum = gpu::fma_rn(u, v, sum);
    }
    for (int mask = gpu::kWarp / 2; mask > 0; mask /= 2) sum += gpu::shuffle_xor(sum, mask);
    if (gpu::lane() != 0) continue;
    out[from * a.columns + to - a.first_column] = sum;
    if (other == i) length[i] = gpu::div_rn(1.0f, gpu::sqrt_rn(sum));
  }
}

}  // namespace

// Pairs with a row of extreme length once more, a warp per record: in the first launch they over- or underflowed.
// Nearly always there is none, and the blocks end after a look at the scales.  Blocks: (n_rows / 8, slots).
BIPACE_KERNEL(gram_scaled, GramScaledArgs, kThreads) {
  int64_t begin;
  float *out, *length;
  const int n = find_group(a.gram, begin, out, length);
  const int i = static_cast<int>(gpu::block()) * (kThreads / gpu::kWarp) + gpu::warp();
  if (i >= n || a.scale[begin + i] == 1.0f) return;
  if (a.gram.rows.dtype == kFloat32) {
    scaled_products<kFloat32>(a, begin, i, n, out, length);
  } else {
    scaled_products<kBfloat16>(a, begin, i, n, out, length);  // no square of a float16 over- or underflows
  }
}

}  // namespace bipace
