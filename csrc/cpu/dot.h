// The arithmetic of the cosine clusters, once per instruction set, chosen at run time.
//
// One fixed order for every inner product: 16 float32 partial sums, element e of a panel goes to
// partial sum e mod 16 by a fused multiply-add; each panel is reduced by a fixed tree (l with l + 8, then l + 4, l + 2,
// l + 1) and the panels are summed in float64.  So a result depends on the two rows, their length and the instruction
// set, never on the tile, the block, the thread or the alignment; a product of two rows is off by at most
// (kPanel / 16 + 4) * 2^-24 = 1.9e-6 of |x| |y| for any length, one tenth of that in practice.
// "avx2" and "avx512" give the same bits; "baseline" multiplies and adds in two steps and gives others.
#pragma once

#include <cstdint>

namespace bipace {

constexpr int64_t kPanel = 448;  // at most

// Elements per panel for rows of dim: as long as allowed (each panel's end costs a tree) and nearly equal.
static inline int64_t panel_length(int64_t dim) {
  const int64_t panels = (dim + kPanel - 1) / kPanel;
  return panels == 0 ? kPanel : ((dim + panels - 1) / panels + 15) / 16 * 16;
}

constexpr int kBundle = 16;  // rows stored interleaved, element by element
constexpr int kOuterA = 4;   // of a tile of float64 products
constexpr int kOuterB = 16;
constexpr int kTileA = 8;  // rows of a tile on the long side
constexpr int kTileB = 3;  // and on the block's side: 24 accumulators, 3 + 1 operands of 32 registers

enum class DType : int { kFloat32 = 0, kBfloat16 = 1, kFloat16 = 2 };

// A centred row x and the critic's kernel.
struct KernelRow {
  double square, reciprocal;  // |x|^2 and 1 / |x|
  double time;
  double flat;     // up to this squared length a row counts as the mean
  double rate;     // 1 / width
  double inverse;  // 1 / horizon, or 0
};

struct DotKernels {
  const char* name;

  // out[n][m] += a_m . b_n over len <= kPanel elements.  tile[0] takes 4 rows a and tile[1] takes 8;
  // tile[.][n - 1] takes n rows b.  Meanwhile the len floats at `ahead` are prefetched; any address is allowed.
  using Tile = void (*)(const float* const* a, const float* const* b, int64_t len, const char* ahead,
                        double* const* out);
  Tile tile[2][kTileB];
  // The one for `rows` rows a and `columns` rows b, of which it takes at most kTileA and kTileB.
  Tile tile_of(int64_t rows, int64_t columns) const {
    return tile[rows > 4][(columns < kTileB ? columns : kTileB) - 1];
  }

  // target = sum of weight_i * source_i by fused multiply-adds in that order, over n rows of len, one of which target
  // may be; returns |target|^2, summed as by a tile.
  double (*fold)(const float* const* source, const float* weight, int64_t n, int64_t len, float* target);

  // out[i][j] += sign * the sum over k < depth of a[k][i] b[k][j] in order, by fused multiply-adds, in float64, for
  // i < kOuterA and j < kOuterB; sign is 1 or -1.
  void (*outer)(const double* a, int64_t a_stride, const double* b, int64_t b_stride, int64_t depth, double sign,
                double* out, int64_t out_stride);

  // y -= factor * x and y /= by, element by element; the former in two steps.
  void (*subtract)(const double* x, double factor, int64_t n, double* y);
  void (*divide)(double by, int64_t n, double* y);

  // x . y in eight sums, n a multiple of eight; (x, y) turned by an angle: in two steps, the same bits in every set.
  double (*product)(const double* x, const double* y, int64_t n);
  void (*rotate)(double cosine, double sine, int64_t n, double* x, double* y);

  // out[i][j] += a_i . b_j of two bundles of depth; each product is one float32 sum in order, by fused multiply-adds.
  void (*bundles)(const float* a, const float* b, int64_t depth, double* out, int64_t stride);

  // sum[e] += x[e], sum[e] += sign[e] * x[e] with signs of 1 and -1, and out[e] = float(x[e] - mean[e]) with one
  // rounding, for e < len: the same bits in every set.
  void (*add)(const float* x, int64_t len, double* sum);
  void (*add_signed)(const float* x, const float* sign, int64_t len, double* sum);
  void (*centre)(const float* x, const double* mean, int64_t len, float* out);

  // out[e][i] = x_i[e] for n rows of len, 0 for the rest of the bundle; out is [len, kBundle].
  void (*bundle)(const float* const* x, int64_t n, int64_t len, float* out);

  // Of n >= 1 values: the largest, and the first index with values[i] >= bound, n if there is none.
  double (*largest)(const double* values, int64_t n);
  int64_t (*first_at_least)(const double* values, int64_t n, double bound);

  // similar[e] += change * similar[e] + weight * gram[e] for e < n, in two steps: the same bits in every set.
  void (*follow)(const float* gram, double change, double weight, int64_t n, double* similar);

  // The logarithm of the critic's kernel in place of the products of a row with others.
  void (*exponents)(const KernelRow& row, const double* square, const double* reciprocal, const double* time, int64_t n,
                    double* product);  // [n] as the three before

  // x[i] = e^x[i] for x[i] <= 0 and i < n, to 5e-16 of it; exactly 1 for 0, and 0 below -700.
  void (*exponential)(double* x, int64_t n);

  // Of len contiguous elements: target = factor * source, exact in float32 for a power of two; the largest bit pattern
  // without its sign (0 only for zeros, monotonic in |x|, NaN above infinity above the rest); 64 bits of the bits, and
  // the part of a row's schema.state_keys, whose a and b these are; both with -0.0 counted as 0.0.
  void (*convert)(const void* source, DType dtype, int64_t len, float factor, float* target);
  uint32_t (*largest_bits)(const void* source, DType dtype, int64_t len);
  uint64_t (*hash)(const void* source, DType dtype, int64_t len);
  uint64_t (*weighted)(const void* source, DType dtype, int64_t len, const int32_t* a, const int32_t* b);
};

// The best set of this machine under the cap.
const DotKernels& dot_kernels();

// Caps the set from now on: "baseline", "avx2" or "avx512".  False for an unknown name.
bool set_isa(const char* name);

// One per translation unit; null if the compiler lacks the instructions.
const DotKernels* dot_baseline();
const DotKernels* dot_avx2();
const DotKernels* dot_avx512();

}  // namespace bipace
