// Method: G = X X^T of the group's unit rows by the fixed-order kernels of dot.h, each product rounded to float32 once.
// The greedy scan does not need the vectors: the similarities of a single record are its row of G, and when x_i joins
// cluster k as member m with s = S[k, i], the row of S is updated (greedy.h),
//
//     S[k, j] += d S[k, j] + (b/u) G[i, j]   for all records j still to come,
//
// in float64: sums in float32 would not change where many members move a centroid by less than a rounding.
#include "cpu/sweep.h"

#include <algorithm>
#include <memory>
#include <vector>

#include "cpu/clusters.h"
#include "cpu/gram.h"
#include "cpu/greedy.h"
#include "cpu/parallel.h"

namespace bipace {
namespace {

constexpr int64_t kGramFloats = kLongestSweep * kLongestSweep;  // Gram matrices held at a time: 64 MiB
constexpr int64_t kBlock = 96;  // rows of a task's square of G: two panels of them fit a cache of 512 KB

int64_t round_up(int64_t n, int64_t to) { return (n + to - 1) / to * to; }

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

// ---- the Gram matrices ---------------------------------------------------------------------------------------------

struct Square {
  Group* group;
  int64_t i, j;  // first rows, i <= j
};

// One square of a Gram matrix and its mirror image.
void multiply_square(const Rows& rows, const DotKernels& dot, const Square& at) {
  const Group& group = *at.group;
  const int64_t n = std::min(kBlock, group.size() - at.i), width = std::min(kBlock, group.size() - at.j);
  const int64_t panel = panel_length(rows.dim);
  const std::unique_ptr<float[]> buffer(new float[static_cast<size_t>(2 * kBlock * panel)]);
  double products[kBlock][kBlock] = {};  // [j, i]
  const float* a[kBlock + kTileA];
  const float* b[kBlock];
  for (int64_t first = 0; first < rows.dim; first += panel) {
    const int64_t len = std::min(panel, rows.dim - first);
    read_panels(rows, dot, group.rows.data() + at.i, n, first, len, buffer.get(), panel, a);
    read_panels(rows, dot, group.rows.data() + at.j, width, first, len, buffer.get() + kBlock * panel, panel, b);
    std::fill(a + n, a + n + kTileA, a[n - 1]);  // an incomplete tile repeats its last row
    for (int64_t i = 0; i < n; i += kTileA) {
      for (int64_t j = at.i == at.j ? i / kTileB * kTileB : 0; j < width; j += kTileB) {
        double* out[kTileB];
        for (int64_t w = 0; w < kTileB; ++w) out[w] = products[std::min(j + w, width - 1)] + i;
        const int64_t columns = std::min<int64_t>(kTileB, width - j);
        dot.tile[n - i > 4 ? 1 : 0][columns - 1](a + i, b + j, len, reinterpret_cast<const char*>(b[j]), out);
      }
    }
  }
  for (int64_t j = 0; j < width; ++j) {
    for (int64_t i = 0; i < (at.i == at.j ? j + 1 : n); ++i) {
      const int64_t p = at.i + i, q = at.j + j;
      const double r = group.reciprocal[static_cast<size_t>(p)] * group.reciprocal[static_cast<size_t>(q)];
      group.gram[p * group.stride + q] = group.gram[q * group.stride + p] = static_cast<float>(products[j][i] * r);
    }
  }
}

// ---- the scan ------------------------------------------------------------------------------------------------------

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
    for (int64_t i = 0; i < group.size(); ++i) {
      labels[group.position[static_cast<size_t>(i)]] = decide(group, dot, i);
    }
    return number(labels, group.length);
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
      similar_[k] =
          cluster.at < 0 ? static_cast<double>(gram[cluster.first]) : rows_[static_cast<size_t>(cluster.at + i)];
    }
    const double best = clusters ? dot.largest(similar_.data(), clusters) : 0.0;
    if (clusters == 0 || !(best >= lowest_)) {
      clusters_.push_back({i, -1, 1});
      return clusters;
    }
    const int64_t k = dot.first_at_least(similar_.data(), clusters, best - kBand);
    Cluster& cluster = clusters_[static_cast<size_t>(k)];
    if (cluster.at < 0) {
      cluster.at = moved_++ * stride_;
      const size_t needed = static_cast<size_t>(moved_ * stride_);
      if (rows_.size() < needed) rows_.resize(needed);
      const float* own = group.gram + cluster.first * group.stride;
      std::copy(own + i + 1, own + group.size(), rows_.begin() + cluster.at + i + 1);
    }
    const double share = 1.0 / static_cast<double>(++cluster.members);
    const Join<double> step = join(share, similar_[static_cast<size_t>(k)], 1.0);
    dot.follow(gram + i + 1, step.change, step.weight, group.size() - i - 1, rows_.data() + cluster.at + i + 1);
    return k;
  }

  // Clusters are already numbered by seed; records without a cluster come in between.
  int64_t number(int64_t* labels, int64_t length) {
    renumber_.assign(clusters_.size(), -1);
    int64_t count = 0;
    for (int64_t i = 0; i < length; ++i) {
      if (labels[i] < 0) {
        labels[i] = count++;
        continue;
      }
      int64_t& found = renumber_[static_cast<size_t>(labels[i])];
      if (found < 0) found = count++;
      labels[i] = found;
    }
    return count;
  }

  double lowest_ = 0.0;
  std::vector<Cluster> clusters_;
  std::vector<double> similar_;  // [K] of the current record
  std::vector<double> rows_;     // [moved_, stride_] of S
  int64_t moved_ = 0, stride_ = 0;
  std::vector<int64_t> renumber_;
};

// ---- all of it -----------------------------------------------------------------------------------------------------

class Sweep {
 public:
  Sweep(const Rows& rows, const int64_t* order, const uint8_t* usable, int n_threads)
      : rows_(rows), dot_(dot_kernels()), order_(order), usable_(usable), n_threads_(std::max(n_threads, 1)) {
    scans_.resize(static_cast<size_t>(n_threads_));
  }

  // Scans the groups under epsilons; writes labels(group, e) and counts(group, e).
  template <typename Labels, typename Count>
  void run(std::vector<Group>& groups, const std::vector<double>& epsilons, const Labels& labels, const Count& count) {
    for (size_t first = 0; first < groups.size();) {
      size_t last = first;
      int64_t floats = 0;
      for (; last < groups.size(); ++last) {
        const int64_t more = groups[last].length * row_stride(groups[last].length);
        if (last > first && floats + more > kGramFloats) break;
        floats += more;
      }
      multiply(groups.data() + first, groups.data() + last, floats);
      const int64_t n_epsilons = static_cast<int64_t>(epsilons.size());
      parallel_for(static_cast<int64_t>(last - first) * n_epsilons, n_threads_, [&](int64_t task, int at) {
        const DefaultFloats floats_mode;
        const Group& group = groups[first + static_cast<size_t>(task / n_epsilons)];
        const int64_t e = task % n_epsilons;
        count(group, e) =
            scans_[static_cast<size_t>(at)].run(group, dot_, epsilons[static_cast<size_t>(e)], labels(group, e));
      });
      first = last;
    }
  }

 private:
  void multiply(Group* first, Group* last, int64_t floats) {
    if (floats > room_) {
      gram_.reset();
      gram_.reset(new float[static_cast<size_t>(floats)]);
      room_ = floats;
    }
    parallel_for(last - first, n_threads_, [&](int64_t g, int) {
      const DefaultFloats floats_mode;
      take_part(first[g]);
    });
    float* gram = gram_.get();
    std::vector<Square> squares;
    for (Group* group = first; group < last; ++group) {
      group->stride = row_stride(group->length);
      group->gram = gram;
      gram += group->length * group->stride;
      for (int64_t i = 0; i < group->size(); i += kBlock) {
        for (int64_t j = i; j < group->size(); j += kBlock) squares.push_back({group, i, j});
      }
    }
    parallel_for(static_cast<int64_t>(squares.size()), n_threads_, [&](int64_t task, int) {
      const DefaultFloats floats_mode;
      multiply_square(rows_, dot_, squares[static_cast<size_t>(task)]);
    });
  }

  void take_part(Group& group) {
    for (int64_t i = 0; i < group.length; ++i) {
      if (usable_ && !usable_[group.begin + i]) continue;
      ScaledRow row{order_[group.begin + i], 1.0f};
      const double reciprocal = measure(rows_, dot_, row);
      if (reciprocal == 0.0) continue;  // no direction: a cluster of its own
      group.rows.push_back(row);
      group.position.push_back(i);
      group.reciprocal.push_back(reciprocal);
    }
  }

  const Rows& rows_;
  const DotKernels& dot_;
  const int64_t* order_;
  const uint8_t* usable_;
  const int n_threads_;
  std::unique_ptr<float[]> gram_;
  int64_t room_ = 0;  // floats in gram_
  std::vector<Scan> scans_;
};

}  // namespace

void cluster_sweep(const Rows& rows, const int64_t* order, const int64_t* group_offsets, int64_t n_groups,
                   const uint8_t* usable, const double* epsilons, int64_t n_epsilons, int n_threads, int64_t* labels) {
  const int64_t n_records = group_offsets[n_groups];
  std::vector<Group> groups;
  std::vector<int64_t> longer;
  for (int64_t g = 0; g < n_groups; ++g) {
    const int64_t length = group_offsets[g + 1] - group_offsets[g];
    if (length > kLongestSweep) {
      longer.push_back(g);
    } else if (length > 0) {
      groups.push_back({g, group_offsets[g], length, {}, {}, {}});
    }
  }
  std::vector<double> from_gram;
  std::vector<int64_t> place;  // their e
  for (int64_t e = 0; e < n_epsilons; ++e) {
    if (epsilons[e] != 0.0) {
      from_gram.push_back(epsilons[e]);
      place.push_back(e);
    } else {
      cluster_cosine(rows, order, group_offsets, n_groups, usable, epsilons[e], n_threads, labels + e * n_records);
    }
  }
  if (from_gram.empty()) return;
  std::vector<int64_t> counts(static_cast<size_t>(n_epsilons * n_groups), 0);
  const auto labels_of = [&](int64_t begin, int64_t e) {
    return labels + place[static_cast<size_t>(e)] * n_records + begin;
  };
  const auto count_of = [&](int64_t g, int64_t e) -> int64_t& { return counts[static_cast<size_t>(e * n_groups + g)]; };
  Sweep(rows, order, usable, n_threads)
      .run(
          groups, from_gram, [&](const Group& group, int64_t e) { return labels_of(group.begin, e); },
          [&](const Group& group, int64_t e) -> int64_t& { return count_of(group.index, e); });
  for (const int64_t g : longer) {
    const int64_t begin = group_offsets[g], alone[2] = {0, group_offsets[g + 1] - begin};
    for (int64_t e = 0; e < static_cast<int64_t>(from_gram.size()); ++e) {
      int64_t* own = labels_of(begin, e);
      cluster_cosine(rows, order + begin, alone, 1, usable ? usable + begin : nullptr,
                     from_gram[static_cast<size_t>(e)], n_threads, own);
      count_of(g, e) = *std::max_element(own, own + alone[1]) + 1;
    }
  }
  for (int64_t e = 0; e < static_cast<int64_t>(from_gram.size()); ++e) {
    int64_t before = 0;
    for (int64_t g = 0; g < n_groups; ++g) {
      int64_t* own = labels_of(group_offsets[g], e);
      for (int64_t i = 0; i < group_offsets[g + 1] - group_offsets[g]; ++i) own[i] += before;
      before += count_of(g, e);
    }
  }
}

}  // namespace bipace
