// Algorithm 1 as it stands, with the centroids as vectors, for ε so wide (above 1.87) that two rows pointing almost
// opposite ways may join: what is left of them decides where the centroid points, and a recurrence over products would
// carry their errors many times over.  D is in the chain and everything is float64; no call that anybody makes for its
// result comes here.
#include "cuda/elements.h"

namespace bipace {

struct WideArgs {
  Rows rows;
  const float* scale;            // [M]
  const uint8_t* kind;           // [M] 0 usable, 1 alone, 2 not taken
  const int64_t* group_offsets;  // [G+1]
  int64_t first_group;           // of the launch
  int64_t longest;               // records that there is room for
  double lowest;                 // 1 − ε − τ
  double* centroids;             // [groups, longest, D] scratch
  double* similar;               // [groups, longest] scratch
  int64_t* members;              // [groups, 2, longest] scratch: records of a cluster, the one that began it
  int64_t* first;                // [M], written: the record that began the record's cluster; −1: not taken
};

namespace {

constexpr int kThreads = 256, kWarps = kThreads / gpu::kWarp;
constexpr double kBand = 1e-5, kSmallest = 1e-3;

// The sum over the block, in one order, known to every thread.
BIPACE_DEVICE double block_sum(double value, double* of_warps) {
  for (int mask = gpu::kWarp / 2; mask > 0; mask /= 2) value += gpu::shuffle_xor(value, mask);
  gpu::sync_block();  // the last sum has been read
  if (gpu::lane() == 0) of_warps[gpu::warp()] = value;
  gpu::sync_block();
  double total = 0.0;
  for (int w = 0; w < kWarps; ++w) total += of_warps[w];
  return total;
}

template <int dtype>
BIPACE_DEVICE void cluster_group(const WideArgs& a) {
  double* const of_warps = reinterpret_cast<double*>(gpu::shared_memory());
  const int64_t slot = gpu::block(), dim = a.rows.dim;
  const int64_t begin = a.group_offsets[a.first_group + slot], end = a.group_offsets[a.first_group + slot + 1];
  double* const centroids = a.centroids + slot * a.longest * dim;
  double* const similar = a.similar + slot * a.longest;
  int64_t* const members = a.members + slot * 2 * a.longest;
  int64_t* const leader = members + a.longest;
  const int t = gpu::thread();
  int64_t count = 0;
  for (int64_t i = begin; i < end; ++i) {
    if (a.kind[i] != 0) {
      if (t == 0) a.first[i] = a.kind[i] == 2 ? -1 : i;
      continue;
    }
    const int64_t row = a.rows.at(i);
    const double scale = static_cast<double>(a.scale[i]);
    const auto element = [&](int64_t e) {
      return static_cast<double>(value_of<dtype>(element_bits<dtype>(a.rows, row, e))) * scale;
    };
    double sum = 0.0;
    for (int64_t e = t; e < dim; e += kThreads) sum += element(e) * element(e);
    const double norm = sqrt(block_sum(sum, of_warps));
    double best = -2e300;
    for (int64_t k = 0; k < count; ++k) {
      sum = 0.0;
      for (int64_t e = t; e < dim; e += kThreads) sum += centroids[k * dim + e] * element(e);
      const double s = block_sum(sum, of_warps) / norm;
      if (t == 0) similar[k] = s;
      best = s > best ? s : best;
    }
    gpu::sync_block();
    int64_t k = count;
    if (best >= a.lowest) {
      for (k = 0; similar[k] < best - kBand; ++k) {
      }
    }
    double* const c = centroids + k * dim;
    if (k == count) {
      for (int64_t e = t; e < dim; e += kThreads) c[e] = element(e) / norm;
      if (t == 0) {
        members[k] = 1;
        leader[k] = i;
      }
      ++count;
    } else {
      const double m = static_cast<double>(members[k] + 1);
      sum = 0.0;
      for (int64_t e = t; e < dim; e += kThreads) {
        const double v = c[e] + (element(e) / norm - c[e]) / m;
        sum += v * v;
      }
      const double length = sqrt(block_sum(sum, of_warps));
      if (length >= kSmallest) {
        for (int64_t e = t; e < dim; e += kThreads) c[e] = (c[e] + (element(e) / norm - c[e]) / m) / length;
      }
      if (t == 0) ++members[k];
    }
    gpu::sync_block();
    if (t == 0) a.first[i] = leader[k];
  }
}

}  // namespace

// A block per group.
BIPACE_KERNEL(cluster_wide, WideArgs, kThreads) {
  if (a.rows.dtype == kFloat32) {
    cluster_group<kFloat32>(a);
  } else if (a.rows.dtype == kBfloat16) {
    cluster_group<kBfloat16>(a);
  } else {
    cluster_group<kFloat16>(a);
  }
}

}  // namespace bipace
