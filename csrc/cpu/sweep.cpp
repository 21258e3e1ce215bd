// Method: G = X X^T of the group's unit rows by the fixed-order kernels of dot.h, each product rounded to float32 once.
// The greedy scan does not need the vectors: the similarities of a single record are its row of G, and when x_i joins
// cluster k as member m with s = S[k, i], the row of S is updated (greedy.h),
//
//     S[k, j] += d S[k, j] + (b/u) G[i, j]   for all records j still to come,
//
// in float64: sums in float32 would not change where many members move a centroid by less than a rounding.
#include <algorithm>
#include <memory>
#include <vector>

#include "cpu/gram.h"
#include "cpu/greedy.h"
#include "cpu/parallel.h"
#include "cpu/stages.h"

namespace bipace {
namespace {

constexpr int64_t kGramFloats = kLongestSweep * kLongestSweep;  // Gram matrices held at a time: 64 MiB
constexpr int64_t kBlock = 96;  // rows of a task's square of G: two panels of them fit a cache of 512 KB

// Between the starts of two rows: never a multiple of 4 KB, or neighbouring rows would share the sets of the cache.
int64_t row_stride(int64_t n) { return round_up(n, 16) % 512 == 0 ? round_up(n, 16) + 16 : round_up(n, 16); }

// The records of a group that take part.
struct Group {
  int64_t index, begin, length;  // number in the batch, first record, records
  std::vector<ScaledRow> rows;
  std::vector<int64_t> position;   // in the group
  std::vector<double> reciprocal;  // 1 / norm
  float* gram = nullptr;           // [n, stride]
  int64_t stride = 0;

  int64_t size() const { return static_cast<int64_t>(rows.size()); }
};

struct Square {
  Group* group;
  int64_t i, j;  // first rows, i <= j
};

// One square of a Gram matrix and its mirror image.
void multiply_square(const Rows& rows, const DotKernels& dot, const Square& at) {
  const Group& group = *at.group;
  const int64_t n = std::min(kBlock, group.size() - at.i), width = std::min(kBlock, group.size() - at.j);
  double products[kBlock * kBlock] = {};  // [j, i]
  multiply_rows(rows, dot, group.rows.data() + at.i, n, group.rows.data() + at.j, width, products, kBlock);
  for (int64_t j = 0; j < width; ++j) {
    for (int64_t i = 0; i < (at.i == at.j ? j + 1 : n); ++i) {
      const int64_t p = at.i + i, q = at.j + j;
      const double r = group.reciprocal[p] * group.reciprocal[q];
      group.gram[p * group.stride + q] = group.gram[q * group.stride + p] =
          static_cast<float>(products[j * kBlock + i] * r);
    }
  }
}

// Scratch of one thread, kept from scan to scan.
class Scan {
 public:
  // labels [length] of the group's records, from 0 by first appearance; returns how many.
  int64_t run(const Group& group, const DotKernels& dot, double epsilon, int64_t* labels) {
    clusters_.clear();
    moved_ = 0;
    stride_ = row_stride(group.size());
    lowest_ = 1.0 - epsilon - kBand;
    std::fill(labels, labels + group.length, int64_t{-1});
    for (int64_t i = 0; i < group.size(); ++i) labels[group.position[i]] = decide(group, dot, i);
    return number_labels(group.length, static_cast<int64_t>(clusters_.size()), labels);
  }

 private:
  struct Cluster {
    int64_t first;  // its first member
    int64_t at;     // its row of S in rows_; -1: a single member, so S is the member's row of G
    int64_t members;
  };

  int64_t decide(const Group& group, const DotKernels& dot, int64_t i) {
    const int64_t clusters = static_cast<int64_t>(clusters_.size());
    const float* gram = group.gram + i * group.stride;
    similar_.resize(clusters_.size());
    for (size_t k = 0; k < clusters_.size(); ++k) {
      const Cluster& cluster = clusters_[k];
      similar_[k] = cluster.at < 0 ? static_cast<double>(gram[cluster.first]) : rows_[cluster.at + i];
    }
    const double best = clusters ? dot.largest(similar_.data(), clusters) : 0.0;
    if (clusters == 0 || !(best >= lowest_)) {
      clusters_.push_back({i, -1, 1});
      return clusters;
    }
    const int64_t k = dot.first_at_least(similar_.data(), clusters, best - kBand);
    Cluster& cluster = clusters_[k];
    if (cluster.at < 0) {
      cluster.at = moved_++ * stride_;
      const size_t needed = static_cast<size_t>(moved_ * stride_);
      if (rows_.size() < needed) rows_.resize(needed);
      const float* own = group.gram + cluster.first * group.stride;
      std::copy(own + i + 1, own + group.size(), rows_.begin() + cluster.at + i + 1);
    }
    const double share = 1.0 / static_cast<double>(++cluster.members);
    const Join<double> step = join(share, similar_[k], 1.0);
    dot.follow(gram + i + 1, step.change, step.weight, group.size() - i - 1, rows_.data() + cluster.at + i + 1);
    return k;
  }

  double lowest_ = 0.0;
  std::vector<Cluster> clusters_;
  std::vector<double> similar_;  // [K] of the current record
  std::vector<double> rows_;     // [moved_, stride_] of S
  int64_t moved_ = 0, stride_ = 0;
};

void take_part(const Rows& rows, const DotKernels& dot, const int64_t* order, const uint8_t* usable, Group& group) {
  for (int64_t i = 0; i < group.length; ++i) {
    if (usable && !usable[group.begin + i]) continue;
    ScaledRow row{order[group.begin + i], 1.0f};
    const double reciprocal = measure(rows, dot, row);
    if (reciprocal == 0.0) continue;  // no direction: a cluster of its own
    group.rows.push_back(row);
    group.position.push_back(i);
    group.reciprocal.push_back(reciprocal);
  }
}

// The Gram matrices of some groups, one after the other in `gram`.
void multiply_groups(const Rows& rows, const DotKernels& dot, Group* first, Group* last, int n_threads, float* gram) {
  std::vector<Square> squares;
  for (Group* group = first; group < last; ++group) {
    group->stride = row_stride(group->length);
    group->gram = gram;
    gram += group->length * group->stride;
    for (int64_t i = 0; i < group->size(); i += kBlock) {
      for (int64_t j = i; j < group->size(); j += kBlock) squares.push_back({group, i, j});
    }
  }
  parallel_for(static_cast<int64_t>(squares.size()), n_threads, [&](int64_t task, int) {
    const DefaultFloats floats;
    multiply_square(rows, dot, squares[task]);
  });
}

}  // namespace

void cluster_sweep(const Rows& rows, const int64_t* order, const int64_t* group_offsets, int64_t n_groups,
                   const uint8_t* usable, const double* epsilons, int64_t n_epsilons, int n_threads, int64_t* labels) {
  const DotKernels& dot = dot_kernels();
  n_threads = std::max(n_threads, 1);
  const int64_t n_records = group_offsets[n_groups];
  std::vector<int64_t> counts(n_epsilons * n_groups, 0);  // [E, G]
  std::vector<Group> groups;
  for (int64_t g = 0; g < n_groups; ++g) {
    const int64_t begin = group_offsets[g], alone[2] = {0, group_offsets[g + 1] - begin};
    if (0 < alone[1] && alone[1] <= kLongestSweep) groups.push_back({g, begin, alone[1], {}, {}, {}});
    for (int64_t e = 0; e < n_epsilons && alone[1] > kLongestSweep; ++e) {
      if (epsilons[e] == 0.0) continue;
      int64_t* own = labels + e * n_records + begin;
      cluster_cosine(rows, order + begin, alone, 1, usable ? usable + begin : nullptr, epsilons[e], n_threads, own);
      counts[e * n_groups + g] = *std::max_element(own, own + alone[1]) + 1;
    }
  }
  if (std::all_of(epsilons, epsilons + n_epsilons, [](double epsilon) { return epsilon == 0.0; })) groups.clear();
  std::vector<Scan> scans(n_threads);
  std::unique_ptr<float[]> gram;
  int64_t room = 0;  // floats in gram
  for (size_t first = 0, last; first < groups.size(); first = last) {
    int64_t floats = 0;
    for (last = first; last < groups.size(); ++last) {
      const int64_t more = groups[last].length * row_stride(groups[last].length);
      if (last > first && floats + more > kGramFloats) break;
      floats += more;
    }
    if (floats > room) {
      gram.reset();
      gram.reset(new float[floats]);
      room = floats;
    }
    const int64_t n = static_cast<int64_t>(last - first);
    parallel_for(n, n_threads, [&](int64_t task, int) {
      const DefaultFloats default_floats;
      take_part(rows, dot, order, usable, groups[first + task]);
    });
    multiply_groups(rows, dot, groups.data() + first, groups.data() + last, n_threads, gram.get());
    parallel_for(n * n_epsilons, n_threads, [&](int64_t task, int worker) {
      const DefaultFloats default_floats;
      const Group& group = groups[first + task / n_epsilons];
      const int64_t e = task % n_epsilons;
      if (epsilons[e] == 0.0) return;
      int64_t* own = labels + e * n_records + group.begin;
      counts[e * n_groups + group.index] = scans[worker].run(group, dot, epsilons[e], own);
    });
  }
  for (int64_t e = 0; e < n_epsilons; ++e) {
    int64_t* own = labels + e * n_records;
    if (epsilons[e] == 0.0) {
      cluster_cosine(rows, order, group_offsets, n_groups, usable, 0.0, n_threads, own);
    } else {
      number_groups(group_offsets, n_groups, counts.data() + e * n_groups, own);
    }
  }
}

}  // namespace bipace
