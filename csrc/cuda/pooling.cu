// States out of a block's output: gather, pooling, unit norm and rounding in one launch, a block per state.
//
// A thread holds 8 neighbouring columns in float64 registers, so up to 8,192 columns (4,096 of float32) the block's
// output is read once, where it is, and nothing of its size is ever made; of longer rows a state of unit length reads
// its tokens twice. Sums go in the order of the tokens, as on the CPU: the bits depend on the state's own tokens only.
#include "common/half.h"
#include "cuda/block.h"
#include "cuda/elements.h"

namespace bipace {
namespace {

constexpr int kMostThreads = 1024;
constexpr int kColumns = 8;  // of a thread: 16 bytes of 16-bit values
constexpr int64_t kLast = 0;

// Eight neighbours of a row, as they lie in memory.
template <int dtype>
struct Eight {
  static constexpr int kSize = dtype == kFloat32 ? 4 : 2;
  uint4 words[kSize / 2];

  // Those from item `at` on, of which `there` exist.  whole: the eight are neighbours in memory, exist all or none, and
  // begin at a multiple of 16 bytes.
  BIPACE_DEVICE void load(const void* data, int64_t at, int64_t stride, int64_t there, bool whole) {
    uint32_t word[4 * kSize / 2] = {};
    const char* from = static_cast<const char*>(data) + at * kSize;
    if (whole) {
#pragma unroll
      for (int i = 0; i < kSize / 2; ++i) {
        words[i] = there > 0 ? reinterpret_cast<const uint4*>(from)[i] : uint4{0, 0, 0, 0};
      }
      return;
    }
#pragma unroll
    for (int e = 0; e < kColumns; ++e, from += stride * kSize) {
      if (e >= there) continue;
      word[kSize == 4 ? e : e / 2] |= kSize == 4 ? *reinterpret_cast<const uint32_t*>(from)
                                                 : static_cast<uint32_t>(*reinterpret_cast<const uint16_t*>(from))
                                                       << 16 * (e % 2);
    }
#pragma unroll
    for (int i = 0; i < kSize / 2; ++i) {
      words[i] = uint4{word[4 * i], word[4 * i + 1], word[4 * i + 2], word[4 * i + 3]};
    }
  }
  BIPACE_DEVICE float operator[](int e) const {
    const int place = kSize == 4 ? e : e / 2;
    const uint4& four = words[place / 4];
    const uint32_t bits = place % 4 == 0 ? four.x : place % 4 == 1 ? four.y : place % 4 == 2 ? four.z : four.w;
    return value_of<dtype>(kSize == 4 ? bits : bits >> (16 * (e % 2)) & 0xFFFFu);
  }
};

}  // namespace

struct PoolRowsArgs {
  const void* hidden;    // [batches, tokens, dim]
  const int64_t* batch;  // [n]
  const int64_t* first;  // [n]
  const int64_t* last;   // [n]
  const float* query;    // [n, heads, width], or null: no attention
  const void* key;       // [batches, tokens, key_heads, width]
  float* scores;         // [n, 2, tokens] room for the scores of one head, and for the weights
  void* out;             // [n, dim]
  int64_t batches, tokens, dim;
  int64_t batch_stride, token_stride, column_stride;
  int64_t key_batch_stride, key_token_stride, key_head_stride, key_column_stride;
  int64_t heads, heads_per_key, width;
  int64_t key_chunks;             // whether all rows of a key are whole chunks of 16 bytes
  int64_t hidden_chunks;          // likewise
  int64_t out_dtype, out_chunks;  // likewise
  int64_t pooling;
  int64_t unit;
  double scale, softcap;
};

namespace {

template <int dtype>
BIPACE_DEVICE float score_of(const PoolRowsArgs& a, const float* query, int64_t key) {
  float part[kColumns] = {};
  for (int64_t e = 0; e < a.width; e += kColumns) {
    Eight<dtype> k;
    k.load(a.key, key + e * a.key_column_stride, a.key_column_stride, a.width - e, a.key_chunks != 0);
#pragma unroll
    for (int l = 0; l < kColumns; ++l) part[l] = gpu::fma_rn(e + l < a.width ? query[e + l] : 0.0f, k[l], part[l]);
  }
  return ((part[0] + part[4]) + (part[2] + part[6])) + ((part[1] + part[5]) + (part[3] + part[7]));
}

// Softmax of the state's scores over its prompt, mean over the heads, in float32.  A token stays with its thread until
// all weights are there.
template <int dtype>
BIPACE_DEVICE void attention_weights(const PoolRowsArgs& a, int64_t state, int64_t from, int64_t length, float* room) {
  float *score = a.scores + 2 * state * a.tokens, *weight = score + a.tokens;
  const float scale = static_cast<float>(a.scale), softcap = static_cast<float>(a.softcap);
  for (int64_t h = 0; h < a.heads; ++h) {
    const float* query = a.query + (state * a.heads + h) * a.width;
    const int64_t own = from + h / a.heads_per_key * a.key_head_stride;
    float most = gpu::float_of(0xFF800000u);  // minus infinity
    for (int64_t t = gpu::thread(); t < length; t += gpu::threads()) {
      float s = score_of<dtype>(a, query, own + t * a.key_token_stride) * scale;
      if (softcap != 0.0f) s = softcap * tanhf(s / softcap);
      score[t] = s;
      most = s > most ? s : most;
    }
    most = gpu::block_max(most, room);
    float total = 0.0f;
    for (int64_t t = gpu::thread(); t < length; t += gpu::threads()) total += expf(score[t] - most);
    const float share = 1.0f / (gpu::block_sum(total, room) * static_cast<float>(a.heads));
    for (int64_t t = gpu::thread(); t < length; t += gpu::threads()) {
      weight[t] = (h > 0 ? weight[t] : 0.0f) + expf(score[t] - most) * share;
    }
  }
  gpu::sync_block();
}

// One state; kUnroll tokens' loads are under way together: 32 bytes of a thread, by count enough to fill the memory's
// pipe.
template <int dtype, int kUnroll>
BIPACE_DEVICE void pool(const PoolRowsArgs& a) {
  double* room = reinterpret_cast<double*>(gpu::shared_memory());  // [kMostWarps]
  const int64_t state = gpu::block(), b = a.batch[state], last = a.last[state];
  const int64_t first = a.pooling == kLast ? last : a.first[state];
  const bool inside = b >= 0 && b < a.batches && first >= 0 && last < a.tokens && first <= last;
  const int64_t length = inside ? last - first + 1 : 0;  // a state that is not there reads nothing
  const bool weighted = a.query && inside;
  if (weighted) {
    attention_weights<dtype>(a, state, b * a.key_batch_stride + first * a.key_token_stride, length,
                             reinterpret_cast<float*>(room));
  }
  const float* weight = weighted ? a.scores + (2 * state + 1) * a.tokens : nullptr;
  const int64_t token = b * a.batch_stride + first * a.token_stride;

  double sum[kColumns];
  const auto sum_up = [&](int64_t column) {
    const int64_t there = a.dim - column;
#pragma unroll
    for (int e = 0; e < kColumns; ++e) sum[e] = 0.0;
    for (int64_t t = 0; t < length; t += kUnroll) {
      Eight<dtype> x[kUnroll];
#pragma unroll
      for (int u = 0; u < kUnroll; ++u) {
        const int64_t at = token + (t + u) * a.token_stride + column * a.column_stride;
        x[u].load(a.hidden, at, a.column_stride, t + u < length ? there : 0, a.hidden_chunks != 0);
      }
#pragma unroll
      for (int u = 0; u < kUnroll; ++u) {
        if (t + u >= length) break;
        const double w = weight ? static_cast<double>(weight[t + u]) : 1.0;
#pragma unroll
        for (int e = 0; e < kColumns; ++e) sum[e] += w * static_cast<double>(x[u][e]);
      }
    }
  };
  const int64_t mine = gpu::thread() * kColumns, apart = static_cast<int64_t>(gpu::threads()) * kColumns;
  double factor = weight || length == 0 ? 1.0 : 1.0 / static_cast<double>(length);
  if (a.unit) {
    double squares = 0.0;
    for (int64_t column = mine; column < a.dim; column += apart) {
      sum_up(column);
#pragma unroll
      for (int e = 0; e < kColumns; ++e) squares += sum[e] * sum[e];
    }
    const double norm = sqrt(gpu::block_sum(squares, room));
    factor = norm > 0.0 ? 1.0 / norm : 0.0;  // NaN and infinity stay to be seen, as NaN
  }
  for (int64_t column = mine; column < a.dim; column += apart) {
    if (!a.unit || a.dim > apart) sum_up(column);
    uint32_t bits[kColumns];
#pragma unroll
    for (int e = 0; e < kColumns; ++e) {
      const float value = static_cast<float>(sum[e] * factor);
      bits[e] = a.out_dtype == kFloat32    ? gpu::bits_of(value)
                : a.out_dtype == kBfloat16 ? float_to_bf16(value)
                                           : float_to_f16(value);
    }
    const int64_t at = state * a.dim + column;
    if (a.out_chunks) {
      uint4* to = reinterpret_cast<uint4*>(static_cast<char*>(a.out) + at * (a.out_dtype == kFloat32 ? 4 : 2));
      if (a.out_dtype == kFloat32) {
        to[0] = uint4{bits[0], bits[1], bits[2], bits[3]};
        to[1] = uint4{bits[4], bits[5], bits[6], bits[7]};
      } else {
        to[0] =
            uint4{bits[0] | bits[1] << 16, bits[2] | bits[3] << 16, bits[4] | bits[5] << 16, bits[6] | bits[7] << 16};
      }
    } else {
#pragma unroll
      for (int e = 0; e < kColumns; ++e) {
        if (column + e >= a.dim) break;
        if (a.out_dtype == kFloat32) {
          static_cast<uint32_t*>(a.out)[at + e] = bits[e];
        } else {
          static_cast<uint16_t*>(a.out)[at + e] = static_cast<uint16_t>(bits[e]);
        }
      }
    }
  }
}

}  // namespace

// At 1,024 threads there would be 64 registers to each, one too few on sm_100.
BIPACE_KERNEL(pool_float32, PoolRowsArgs, kMostThreads / 2) { pool<kFloat32, 1>(a); }
BIPACE_KERNEL(pool_bfloat16, PoolRowsArgs, kMostThreads) { pool<kBfloat16, 2>(a); }
BIPACE_KERNEL(pool_float16, PoolRowsArgs, kMostThreads) { pool<kFloat16, 2>(a); }

}  // namespace bipace
