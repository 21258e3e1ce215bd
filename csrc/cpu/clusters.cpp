// Method: records are processed in blocks of B.  For a block, one fixed-order kernel gives S[k, j] = c_k . x_j for all
// centroids and the Gram matrix G[i, j] of the block itself, whose diagonal holds the norms.  All decisions of the
// block follow from those numbers: when x_i joins cluster k as member m with s = S[k, i],
//
//     a = 1 - 1/m,  b = 1/m,  q = 2ab(1 - s),  u = |a c + b x| = sqrt(1 - q),  d = q/(u(1 + u)) - b/u,
//     S[k, j] += d S[k, j] + (b/u) G[i, j]   for the records j still to come,
//
// in float64, and a seed sets S[k, .] = G[i, .].  Written as an increment it does not drift.  At the end of the block
// the vectors are updated: c_k becomes the combination of the old c_k and its new members.
#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <limits>
#include <memory>
#include <new>
#include <numeric>
#include <vector>

#include "cpu/gram.h"
#include "cpu/greedy.h"
#include "cpu/interrupt.h"
#include "cpu/parallel.h"
#include "cpu/stages.h"

namespace bipace {
namespace {

constexpr double kGuard = 1e-5;  // more than the error of the bounds below
constexpr int kChecks = 3;       // points in D where hopeless products end

struct Free {
  void operator()(float* p) const { std::free(p); }
};
using Floats = std::unique_ptr<float[], Free>;

Floats allocate(int64_t n) {
  const size_t bytes = (n * sizeof(float) + 63) / 64 * 64;
  float* p = static_cast<float*>(std::aligned_alloc(64, bytes));
  if (!p) throw std::bad_alloc();
  return Floats(p);
}

struct Cluster {
  ScaledRow row;        // its first member
  double reciprocal;    // 1 / true norm of the centroid as stored, or of the scaled row
  int32_t first, last;  // members in the current block, linked by Block::next_; -1: none
  int64_t members = 1;
  float* centroid = nullptr;  // near unit length; null: the centroid is the row
  float rest[kChecks] = {};   // share of the norm beyond each checkpoint, rounded up
};

// Records per block: enough to reuse loaded data, few enough that G stays small compared with S (measured on an EPYC
// with AVX-512, D = 3584).  It only depends on the group's earlier records, or its result would depend on the batch.
int64_t block_size(int64_t clusters) {
  const int64_t size = clusters < 96 ? 12 : 18;
  const int64_t fits = (int64_t{2} << 20) / 8 / (clusters + 2 * size);  // S within 2 MB
  return std::max<int64_t>(1, std::min(size, fits));
}

// One group's clustering.  The buffers are reused from group to group.
class GroupClusters {
 public:
  GroupClusters(const Rows& rows, const DotKernels& dot, double epsilon)
      : rows_(rows), dot_(dot), lowest_(1.0 - epsilon - kBand), panel_(panel_length(rows.dim)) {
    panels_ = (rows.dim + panel_ - 1) / panel_;
    hopeless_ = lowest_ - kBand - kGuard;
    // Three eighths, a half and three quarters of D; a short D is not worth it.
    const int64_t at[kChecks] = {(3 * panels_ + 7) / 8, (panels_ + 1) / 2, (3 * panels_ + 3) / 4};
    for (int c = 0; c < kChecks; ++c) check_panel_[c] = panels_ >= 4 ? at[c] : 0;
  }

  // labels [end - begin] of the group's records, from 0 by first appearance; returns how many.
  int64_t run(const int64_t* order, const uint8_t* usable, int64_t n, int n_threads, int64_t* labels) {
    n_threads_ = n_threads;
    idle_ = 0;
    first_block_ = true;
    clusters_.clear();
    moved_ = 0;
    for (int64_t i = 0; i < n; ++i) labels[i] = -1;
    int64_t next = 0;
    while (next < n) {
      const int64_t wanted = block_size(static_cast<int64_t>(clusters_.size()));
      block_.clear();
      position_.clear();
      for (; next < n && static_cast<int64_t>(block_.size()) < wanted; ++next) {
        if (usable && !usable[next]) continue;
        block_.push_back({order[next], 1.0f});
        position_.push_back(next);
      }
      if (block_.empty()) break;
      soon_.assign(order + next, order + std::min(n, next + wanted));
      poll_interrupt();
      run_block(labels);
    }
    return number_labels(n, static_cast<int64_t>(clusters_.size()), labels);
  }

 private:
  double* row_of(int64_t j) { return products_.data() + j * stride_; }

  // products_[j, gram_ + i] = x_i . x_j for i <= j (and some others).
  void multiply_block() {
    const int64_t n = static_cast<int64_t>(block_.size()), clusters = static_cast<int64_t>(clusters_.size());
    gram_ = round_up(clusters + n, kTileA);
    stride_ = gram_ + round_up(n, kTileA);
    products_.assign(n * stride_, 0.0);
    rest_.resize(n * kChecks);
    const Floats buffer = allocate(n * panel_);
    std::vector<const float*> x(n);
    Ahead ahead{*this, 0};
    for (int64_t p = 0; p < panels_; ++p) {
      const int64_t first = p * panel_, len = std::min(panel_, rows_.dim - first);
      if (first_block_ && p + 1 < panels_) {
        for (const ScaledRow& row : block_) {
          for (int64_t e = 0; e < panel_; e += 16) __builtin_prefetch(rows_.at(row.row, first + panel_) + 4 * e);
        }
      }
      read_panels(rows_, dot_, block_.data(), n, first, len, buffer.get(), panel_, x.data());
      for (int64_t start = 0; start < n; start += kTileA) {
        const int64_t count = std::min<int64_t>(kTileA, n - start);
        const float* a[kTileA];
        for (int64_t m = 0; m < kTileA; ++m) a[m] = x[start + std::min(m, count - 1)];
        // The lower triangle: rows j from the tile's first record on.
        for (int64_t j = start / kTileB * kTileB; j < n; j += kTileB) {
          double* out[kTileB];
          for (int64_t i = 0; i < kTileB; ++i) out[i] = row_of(std::min(j + i, n - 1)) + gram_ + start;
          dot_.tile_of(count, n - j)(a, x.data() + j, len, ahead.next(), out);
        }
      }
      for (int check = 0; check < kChecks; ++check) {
        if (p + 1 != check_panel_[check]) continue;
        for (int64_t j = 0; j < n; ++j) rest_[j * kChecks + check] = row_of(j)[gram_ + j];
      }
    }
    fetched_ = ahead.at;
    first_block_ = false;
  }

  // products_[j, k] = c_k . x_j / (|c_k| |x_j|) for the clusters.  If a whole tile turns out hopeless halfway (the
  // part summed so far plus the product of the remaining norms is below every decision), the bound replaces the
  // product, see `finish`.
  void multiply_centroids() {
    const int64_t n = static_cast<int64_t>(block_.size()), clusters = static_cast<int64_t>(clusters_.size());
    const int64_t tiles = (clusters + kTileA - 1) / kTileA;
    bounded_.assign(tiles * n, 0);
    // If bounding skipped hardly anything, it is disabled for some blocks.
    const bool bounding = tiles > 1 && check_panel_[0] > 0 && idle_ == 0;
    if (idle_ > 0) --idle_;
    const int64_t parts =
        n_threads_ > 1 && clusters * n * rows_.dim > 4'000'000 ? std::min<int64_t>(tiles, 4 * n_threads_) : 1;
    parallel_for(parts, n_threads_, [&](int64_t part, int) {
      const DefaultFloats floats;
      multiply_tiles(part * tiles / parts, (part + 1) * tiles / parts, bounding, fetched_ + part * n * panels_ / parts);
    });
    if (bounding && std::count(bounded_.begin(), bounded_.end(), 1) * 10 < tiles * n) idle_ = 8;
  }

  void multiply_tiles(int64_t first_tile, int64_t last_tile, bool bounding, int64_t fetched) {
    const int64_t n = static_cast<int64_t>(block_.size()), clusters = static_cast<int64_t>(clusters_.size());
    const Floats b_buffer = allocate(n * panel_), a_buffer = allocate(kTileA * panel_);
    std::vector<const float*> b(n);
    std::vector<int64_t> left(n);
    Ahead ahead{*this, fetched};
    for (int64_t p = 0; p < panels_; ++p) {
      const int64_t first = p * panel_, len = std::min(panel_, rows_.dim - first);
      int check = bounding ? 0 : kChecks;
      while (check < kChecks && p + 1 != check_panel_[check]) ++check;
      read_panels(rows_, dot_, block_.data(), n, first, len, b_buffer.get(), panel_, b.data());
      for (int64_t t = first_tile; t < last_tile; ++t) {
        uint8_t* bounded = bounded_.data() + t * n;
        int64_t open = 0;
        for (int64_t j = 0; j < n; ++j) {
          if (!bounded[j]) left[open++] = j;
        }
        if (open == 0) continue;
        const int64_t start = t * kTileA, count = std::min<int64_t>(kTileA, clusters - start);
        const float* a[kTileA];
        for (int64_t m = 0; m < count; ++m) {
          const Cluster& cluster = clusters_[start + m];
          a[m] = cluster.centroid ? cluster.centroid + first
                                  : read_panel(rows_, dot_, cluster.row, first, len, a_buffer.get() + m * panel_);
        }
        for (int64_t m = count; m < kTileA; ++m) a[m] = a[count - 1];  // an incomplete tile repeats its last row
        for (int64_t i = 0; i < open; i += kTileB) {
          const int64_t width = std::min<int64_t>(kTileB, open - i);
          const float* x[kTileB];
          double* out[kTileB];
          for (int64_t w = 0; w < width; ++w) {
            const int64_t j = left[i + w];
            x[w] = b[j];
            out[w] = row_of(j) + start;
          }
          dot_.tile_of(count, width)(a, x, len, ahead.next(), out);
        }
        if (check == kChecks) continue;
        for (int64_t i = 0; i < open; ++i) {
          const int64_t j = left[i];
          bounded[j] = bound(start, count, j, check);
        }
      }
    }
    for (int64_t t = first_tile; t < last_tile; ++t) {
      const int64_t start = t * kTileA, end = std::min(start + kTileA, clusters);
      for (int64_t j = 0; j < n; ++j) {
        if (bounded_[t * n + j]) continue;
        double* out = row_of(j);
        const double r = reciprocal_[j];
        for (int64_t k = start; k < end; ++k) out[k] *= r * clusters_[k].reciprocal;
      }
    }
  }

  // True where every product of x_j with a tile's centroids is bound to stay below all decisions; the bounds then
  // replace the partial sums.
  bool bound(int64_t start, int64_t count, int64_t j, int check) {
    double bounds[kTileA];
    const double r = reciprocal_[j], rest = rest_[j * kChecks + check];
    double* part = row_of(j) + start;
    for (int64_t m = 0; m < count; ++m) {
      const Cluster& cluster = clusters_[start + m];
      bounds[m] = part[m] * r * cluster.reciprocal + rest * static_cast<double>(cluster.rest[check]);
      if (!(bounds[m] < hopeless_)) return false;
    }
    std::copy(bounds, bounds + count, part);
    return true;
  }

  // If joins of the block have raised a bound to where it matters: computes the product itself, up to date.
  double finish(int64_t k, int64_t j) {
    const Cluster& cluster = clusters_[k];
    float buffer[2][kPanel];
    double product[4] = {};
    double* const out[1] = {product};
    for (int64_t p = 0; p < panels_; ++p) {
      const int64_t first = p * panel_, len = std::min(panel_, rows_.dim - first);
      const float* c =
          cluster.centroid ? cluster.centroid + first : read_panel(rows_, dot_, cluster.row, first, len, buffer[0]);
      const float* a[4] = {c, c, c, c};
      const float* x = read_panel(rows_, dot_, block_[j], first, len, buffer[1]);
      dot_.tile_of(1, 1)(a, &x, len, reinterpret_cast<const char*>(x), out);
    }
    double similar = product[0] * (reciprocal_[j] * cluster.reciprocal);
    for (int32_t i = cluster.first; i >= 0; i = next_[i]) {
      similar += change_[i] * similar + weight_[i] * row_of(j)[gram_ + i];
    }
    return similar;
  }

  // The rows of the next block, prefetched by the tiles of this one a panel at a time: the hardware prefetcher cannot
  // follow that many rows.
  struct Ahead {
    const GroupClusters& own;
    int64_t at;
    const char* next() {
      const int64_t i = at / own.panels_, p = at % own.panels_;
      ++at;
      if (i >= static_cast<int64_t>(own.soon_.size())) return own.rows_.at(own.block_[0].row, 0);
      return own.rows_.at(own.soon_[i], p * own.panel_);
    }
  };

  // Norms from the Gram matrix's diagonal.  False if a row had to be scaled: then everything is recomputed.
  bool take_norms() {
    reciprocal_.resize(block_.size());
    bool complete = true;
    for (size_t j = 0; j < block_.size(); ++j) {
      const double square = row_of(static_cast<int64_t>(j))[gram_ + static_cast<int64_t>(j)];
      reciprocal_[j] = 1.0 / std::sqrt(square);
      if (readable_in_place(square) || block_[j].factor != 1.0f) continue;
      if (measure(rows_, dot_, block_[j]) == 0.0) block_[j].row = -1;  // no direction: a cluster of its own
      complete = complete && block_[j].row >= 0 && block_[j].factor == 1.0f;
    }
    for (size_t j = block_.size(); j-- > 0;) {
      if (block_[j].row >= 0) continue;
      block_.erase(block_.begin() + static_cast<int64_t>(j));
      position_.erase(position_.begin() + static_cast<int64_t>(j));
    }
    return complete;
  }

  void normalise_block() {
    for (size_t j = 0; j < block_.size(); ++j) {
      const double r = reciprocal_[j];
      double* gram = row_of(static_cast<int64_t>(j)) + gram_;
      for (size_t i = 0; i < j; ++i) gram[i] *= r * reciprocal_[i];
      for (size_t c = 0; c < kChecks; ++c) rest_[j * kChecks + c] = rest_of(rest_[j * kChecks + c] * r * r);
    }
  }

  // The rest of a unit vector's norm after `part` of its square; never too small.
  static double rest_of(double part) { return std::sqrt(std::max(0.0, 1.0 - part) + 4e-6); }

  void run_block(int64_t* labels) {
    multiply_block();
    while (!take_norms()) {
      if (block_.empty()) return;
      multiply_block();
    }
    normalise_block();
    multiply_centroids();
    const int64_t n = static_cast<int64_t>(block_.size());
    next_.assign(block_.size(), -1);
    change_.assign(block_.size(), 0.0);
    weight_.assign(block_.size(), 0.0);
    touched_.clear();
    clusters_before_ = static_cast<int64_t>(clusters_.size());
    for (int64_t j = 0; j < n; ++j) decide(j, labels[position_[j]]);
    move_centroids();
  }

  void decide(int64_t j, int64_t& label) {
    const int64_t clusters = static_cast<int64_t>(clusters_.size()), n = static_cast<int64_t>(block_.size());
    const double* similar = row_of(j);
    const double best = clusters ? dot_.largest(similar, clusters) : 0.0;
    if (clusters == 0 || !(best >= lowest_)) {
      const double* rest = rest_.data() + j * kChecks;
      const int32_t own = static_cast<int32_t>(j);
      clusters_.push_back({block_[j], reciprocal_[j], own, own});
      for (int c = 0; c < kChecks; ++c) clusters_.back().rest[c] = static_cast<float>(rest[c]);
      label = clusters;
      touched_.push_back(clusters);
      for (int64_t i = j + 1; i < n; ++i) row_of(i)[clusters] = row_of(i)[gram_ + j];
      return;
    }
    const int64_t k = dot_.first_at_least(similar, clusters, best - kBand);
    Cluster& cluster = clusters_[k];
    label = k;
    const auto [d, w] = join(1.0 / static_cast<double>(++cluster.members), similar[k], 1.0);
    if (cluster.last < 0) {
      cluster.first = static_cast<int32_t>(j);
      touched_.push_back(k);
    } else {
      next_[cluster.last] = static_cast<int32_t>(j);
    }
    cluster.last = static_cast<int32_t>(j);
    change_[j] = d;
    weight_[j] = w;
    const uint8_t* bounded = k < clusters_before_ ? bounded_.data() + k / kTileA * n : nullptr;
    for (int64_t i = j + 1; i < n; ++i) {
      double* row = row_of(i);
      row[k] += d * row[k] + w * row[gram_ + j];  // a bound stays a bound
      if (bounded && row[k] >= hopeless_ && bounded[i]) row[k] = finish(k, i);
    }
  }

  struct Sum {
    int64_t cluster;
    float* target;
    int64_t begin, end;  // in sources_ and weights_
  };

  void move_centroids() {
    sums_.clear();
    sources_.clear();
    weights_.clear();
    for (const int64_t k : touched_) {
      Cluster& cluster = clusters_[k];
      const bool seeded = k >= clusters_before_;
      if (cluster.first >= 0 && !(seeded && cluster.first == cluster.last)) {
        const int64_t begin = static_cast<int64_t>(sources_.size());
        double keep = cluster.reciprocal;
        for (int32_t j = seeded ? next_[cluster.first] : cluster.first; j >= 0; j = next_[j]) {
          const double decay = 1.0 + change_[j];
          keep *= decay;
          for (size_t i = begin; i < weights_.size(); ++i) {
            weights_[i] = static_cast<float>(static_cast<double>(weights_[i]) * decay);
          }
          sources_.push_back(block_[j]);
          weights_.push_back(static_cast<float>(weight_[j] * reciprocal_[j]));
        }
        // The old centroid, or the row that replaces it, comes last: the small terms are summed first, and a long
        // cluster accumulates at most one rounding of its centroid per block.
        sources_.push_back(cluster.row);
        weights_.push_back(static_cast<float>(keep));
        float* target = cluster.centroid;
        if (!target && moved_ == centroids_.size()) centroids_.push_back(allocate(rows_.dim));
        if (!target) target = centroids_[moved_++].get();
        sums_.push_back({k, target, begin, static_cast<int64_t>(sources_.size())});
      }
      cluster.first = cluster.last = -1;
    }
    const int64_t n = static_cast<int64_t>(sums_.size());
    squares_.resize(n * panels_);
    const bool split = n_threads_ > 1 && static_cast<int64_t>(sources_.size()) * rows_.dim > 400'000;
    const int64_t parts = split ? std::min<int64_t>(panels_, 2 * n_threads_) : 1;
    parallel_for(parts, n_threads_, [&](int64_t part, int) {
      const DefaultFloats floats;
      add_panels(part * panels_ / parts, (part + 1) * panels_ / parts);
    });
    for (size_t i = 0; i < sums_.size(); ++i) {
      const double* squares = squares_.data() + static_cast<int64_t>(i) * panels_;
      Cluster& cluster = clusters_[sums_[i].cluster];
      double square = 0.0, part[kChecks] = {};
      for (int64_t p = 0; p < panels_; ++p) {
        square += squares[p];
        for (int c = 0; c < kChecks; ++c) part[c] = p + 1 == check_panel_[c] ? square : part[c];
      }
      cluster.centroid = sums_[i].target;
      cluster.reciprocal = 1.0 / std::sqrt(square);
      for (int c = 0; c < kChecks; ++c) cluster.rest[c] = static_cast<float>(rest_of(part[c] / square));
    }
  }

  void add_panels(int64_t first_panel, int64_t last_panel) {
    const Floats buffer = allocate((static_cast<int64_t>(block_.size()) + 1) * panel_);
    std::vector<const float*> x(block_.size() + 1);
    for (int64_t p = first_panel; p < last_panel; ++p) {
      const int64_t first = p * panel_, len = std::min(panel_, rows_.dim - first);
      for (size_t i = 0; i < sums_.size(); ++i) {
        const Sum& sum = sums_[i];
        const Cluster& cluster = clusters_[sum.cluster];
        const int64_t n = sum.end - sum.begin, rows = cluster.centroid ? n - 1 : n;
        read_panels(rows_, dot_, sources_.data() + sum.begin, rows, first, len, buffer.get(), panel_, x.data());
        if (rows < n) x[rows] = cluster.centroid + first;
        squares_[i * panels_ + p] = dot_.fold(x.data(), weights_.data() + sum.begin, n, len, sum.target + first);
      }
    }
  }

  const Rows& rows_;
  const DotKernels& dot_;
  const double lowest_;  // a best similarity below this seeds
  double hopeless_;      // a similarity below this affects no decision, even after joins
  const int64_t panel_;  // elements
  int64_t panels_;
  int64_t check_panel_[kChecks];   // panels before each checkpoint; 0: none
  std::vector<Floats> centroids_;  // of clusters that have moved, kept for the thread's next group
  size_t moved_ = 0;
  int n_threads_ = 1;
  std::vector<Cluster> clusters_;
  int64_t clusters_before_ = 0;  // the block

  // of the block: its rows, their records in the group, 1 / norm
  std::vector<ScaledRow> block_;
  std::vector<int64_t> position_;
  std::vector<int64_t> soon_;  // rows of the next block, or nearly
  std::vector<double> reciprocal_;
  std::vector<double> products_;  // [n, stride_]: S[., j] with room for seeds, then G[., j] from gram_ on
  int64_t stride_ = 0, gram_ = 0;
  std::vector<double> rest_;      // [n, kChecks] as Cluster::rest
  std::vector<uint8_t> bounded_;  // [tiles of clusters, n]: products_ holds bounds
  int64_t fetched_ = 0;
  int idle_ = 0;  // blocks to go without bounding
  bool first_block_ = true;
  // of its joins: the next member of the same cluster, d, b/u
  std::vector<int32_t> next_;
  std::vector<double> change_, weight_;
  std::vector<int64_t> touched_;

  std::vector<Sum> sums_;
  std::vector<ScaledRow> sources_;
  std::vector<float> weights_;
  std::vector<double> squares_;
};

int64_t cluster_equal(const Rows& rows, const DotKernels& dot, const int64_t* order, const uint8_t* usable, int64_t n,
                      int64_t* labels) {
  std::vector<int64_t> chosen, numbers(n);
  for (int64_t i = 0; i < n; ++i) {
    labels[i] = -1;
    if (!usable || usable[i]) chosen.push_back(i);
  }
  const int64_t count = number_equal(
      static_cast<int64_t>(chosen.size()), n, [&](int64_t i) { return hash_row(rows, dot, order[chosen[i]]); },
      [&](int64_t i, int64_t j) { return equal_rows(rows, order[chosen[i]], order[chosen[j]]); }, numbers.data());
  for (size_t i = 0; i < chosen.size(); ++i) labels[chosen[i]] = numbers[i];
  return number_labels(n, count, labels);
}

// Number of the longest groups that are processed one after another with all threads, before the others run with one
// thread per group: chosen for the shortest total time, counting a shared group as a quarter slower for its waits.
int64_t shared_groups(const std::vector<int64_t>& lengths,  // [G] longest first
                      int n_threads) {
  const int64_t n_groups = static_cast<int64_t>(lengths.size());
  if (n_threads <= 1) return 0;
  double rest = 0.0;
  for (const int64_t length : lengths) rest += static_cast<double>(length);
  int64_t best = 0;
  double best_time = std::numeric_limits<double>::infinity(), shared_time = 0.0;
  for (int64_t shared = 0; shared <= std::min<int64_t>(n_groups, 2 * n_threads); ++shared) {
    // The others, one per thread: an even share, or k groups of which the shortest is the (k n_threads)-th.
    double time = rest / n_threads;
    for (int64_t k = 1, g = shared; g < n_groups; ++k, g += n_threads) {
      time = std::max(time, static_cast<double>(k * lengths[g]));
    }
    if (shared_time + time < best_time) best = shared, best_time = shared_time + time;
    if (shared == n_groups) break;
    const double next = static_cast<double>(lengths[shared]);
    shared_time += 1.25 * next / n_threads;
    rest -= next;
  }
  return best;
}

}  // namespace

void scan_rows(const Rows& rows, const int64_t* order, int64_t n_records, int n_threads, uint8_t* state) {
  const DotKernels& dot = dot_kernels();
  parallel_each(n_records, (int64_t{1} << 18) / std::max<int64_t>(1, rows.dim) + 1, n_threads, [&](int64_t i, int) {
    const uint32_t bits = largest_bits(rows, dot, order[i]);
    state[i] = bits >= infinity_bits(rows.dtype) ? 1 : bits == 0 ? 2 : 0;
  });
}

void cluster_cosine(const Rows& rows, const int64_t* order, const int64_t* group_offsets, int64_t n_groups,
                    const uint8_t* usable, double epsilon, int n_threads, int64_t* labels) {
  const DotKernels& dot = dot_kernels();
  std::vector<int64_t> by_length(n_groups), count(n_groups, 0);
  std::iota(by_length.begin(), by_length.end(), 0);
  const auto length = [&](int64_t g) { return group_offsets[g + 1] - group_offsets[g]; };
  std::stable_sort(by_length.begin(), by_length.end(), [&](int64_t g, int64_t h) { return length(g) > length(h); });
  n_threads = std::max(n_threads, 1);

  std::vector<std::unique_ptr<GroupClusters>> worker(n_threads);
  const auto run = [&](int64_t rank, int at, int threads_inside) {
    const int64_t g = by_length[rank], begin = group_offsets[g];
    const uint8_t* group_usable = usable ? usable + begin : nullptr;
    int64_t& clusters = count[g];
    if (epsilon == 0.0) {
      clusters = cluster_equal(rows, dot, order + begin, group_usable, length(g), labels + begin);
      return;
    }
    const DefaultFloats floats;
    auto& own = worker[at];
    if (!own) own = std::make_unique<GroupClusters>(rows, dot, epsilon);
    clusters = own->run(order + begin, group_usable, length(g), threads_inside, labels + begin);
  };
  std::vector<int64_t> lengths;
  for (const int64_t g : by_length) lengths.push_back(length(g));
  const int64_t shared = epsilon == 0.0 ? 0 : shared_groups(lengths, n_threads);
  for (int64_t rank = 0; rank < shared; ++rank) run(rank, 0, n_threads);
  parallel_for(n_groups - shared, n_threads, [&](int64_t task, int at) { run(shared + task, at, 1); });

  number_groups(group_offsets, n_groups, count.data(), labels);
}

}  // namespace bipace
