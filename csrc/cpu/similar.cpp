#include <algorithm>
#include <cmath>
#include <string_view>
#include <unordered_map>
#include <utility>
#include <vector>

#include "cpu/greedy.h"
#include "cpu/interrupt.h"
#include "cpu/parallel.h"
#include "cpu/stages.h"

namespace bipace {
namespace {

// difflib drops an element from its index of b when b has at least this many elements and more than 1 % + 1 are equal.
constexpr int32_t kPopularMinimum = 200;
constexpr int64_t kWorkBetweenPolls = 1 << 20;  // some milliseconds

// The ratio by the same operations as in Python, so that comparing it with a threshold gives the same result.
double ratio_of(int64_t matches, int64_t total) {
  return total == 0 ? 1.0 : 2.0 * static_cast<double>(matches) / static_cast<double>(total);
}

// The fewest matches m with ratio_of(m, total) >= similarity.  The ratio never decreases as m grows, even rounded, so
// integer comparisons with m decide exactly as Python's comparison of doubles does.
int64_t matches_needed(double similarity, int64_t total) {
  if (total == 0) return 0;
  int64_t m = static_cast<int64_t>(std::floor(similarity * static_cast<double>(total) * 0.5));
  while (m > 0 && ratio_of(m - 1, total) >= similarity) --m;
  while (ratio_of(m, total) < similarity) ++m;
  return m;
}

struct Count {
  int32_t symbol, count;
};

// The matcher's data for a cluster's first member; built once per cluster.
struct Index {
  std::vector<int32_t> text;       // [len] symbols
  std::vector<Count> counts;       // distinct symbols, popular ones included
  std::vector<int32_t> begin;      // [distinct + 1] slices of positions; empty for popular symbols
  std::vector<int32_t> positions;  // increasing inside a slice
};

struct Region {
  int32_t a_low, a_high, b_low, b_high;

  int64_t bound() const { return std::min(a_high - a_low, b_high - b_low); }
};

// Scratch of one thread.  Code points become small consecutive symbols, renumbered in each group; all tables are
// zero between uses, and only the entries that were used are cleared.
class Matcher {
 public:
  // The symbols of a text.
  void encode(const Text& text, std::vector<int32_t>& out) {
    out.resize(text.size);
    if (text.width == 1) {
      encode_as<uint8_t>(text, out.data());
    } else if (text.width == 2) {
      encode_as<uint16_t>(text, out.data());
    } else {
      encode_as<uint32_t>(text, out.data());
    }
  }

  // Forgets the symbols: memory then follows the largest group's alphabet, not the batch's.
  void next_group() {
    for (const uint32_t point : points_) symbol_of_[point] = 0;
    points_.clear();
  }

  // Ends the use of `a`.
  Index index(std::vector<int32_t> text) {
    set_a({});
    Index out;
    out.text = std::move(text);
    for (const int32_t s : out.text) {
      if (count_[s]++ == 0) out.counts.push_back({s, 0});
    }
    const int32_t n = static_cast<int32_t>(out.text.size());
    const int32_t most = n >= kPopularMinimum ? n / 100 + 1 : n;
    out.begin.reserve(out.counts.size() + 1);
    int32_t total = 0;
    for (Count& c : out.counts) {
      c.count = count_[c.symbol];
      count_[c.symbol] = 0;
      out.begin.push_back(total);
      slice_[c.symbol] = {total, c.count <= most};
      if (c.count <= most) total += c.count;
    }
    out.begin.push_back(total);
    out.positions.resize(total);
    for (int32_t j = 0; j < n; ++j) {
      Slice& slice = slice_[out.text[j]];
      if (slice.end) out.positions[slice.begin++] = j;
    }
    for (const Count& c : out.counts) slice_[c.symbol] = {0, 0};
    return out;
  }

  // Makes `a` the left side of the calls that follow.
  void set_a(const std::vector<int32_t>& a) {
    for (const int32_t s : a_) count_[s] = 0;
    count_.resize(std::max(count_.size(), points_.size()));
    slice_.resize(count_.size());
    a_ = a;
    for (const int32_t s : a_) ++count_[s];
  }

  // Σ over symbols of the smaller count: an upper bound of any matching.
  int64_t common(const Index& b) const {
    int64_t total = 0;
    for (const Count& c : b.counts) total += std::min(c.count, count_[c.symbol]);
    return total;
  }

  // Matched symbols of a and b.  Stops early, with any number of the right side, once at least `enough` are found or
  // fewer than `needed` can be.
  int64_t matches(const Index& b, int64_t enough, int64_t needed) {
    for (size_t k = 0; k < b.counts.size(); ++k) slice_[b.counts[k].symbol] = {b.begin[k], b.begin[k + 1]};
    const size_t width = b.text.size() + 1;
    if (row_.size() < width) {
      row_.resize(width);
      last_.resize(width);
    }
    int64_t found = 0;
    regions_.clear();
    regions_.push_back({0, static_cast<int32_t>(a_.size()), 0, static_cast<int32_t>(b.text.size())});
    int64_t open = regions_.back().bound();
    while (!regions_.empty() && found < enough && found + open >= needed) {
      const Region r = regions_.back();
      regions_.pop_back();
      open -= r.bound();
      const Block block = longest(b, r);
      if (block.size == 0) continue;
      found += block.size;
      const Region left{r.a_low, block.a, r.b_low, block.b};
      const Region right{block.a + block.size, r.a_high, block.b + block.size, r.b_high};
      for (const Region& side : {left, right}) {
        if (side.bound() == 0) continue;
        regions_.push_back(side);
        open += side.bound();
      }
    }
    for (const Count& c : b.counts) slice_[c.symbol] = {0, 0};
    return found;
  }

 private:
  struct Slice {
    int32_t begin, end;
  };
  struct Block {
    int32_t a, b, size;
  };

  template <typename T>
  void encode_as(const Text& text, int32_t* out) {
    const T* points = static_cast<const T*>(text.data);
    for (int64_t i = 0; i < text.size; ++i) {
      const uint32_t point = points[i];
      if (point >= symbol_of_.size()) symbol_of_.resize(point < 256 ? 256 : static_cast<size_t>(point) + 1);
      int32_t& symbol = symbol_of_[point];  // from 1; 0: not seen in this group
      if (symbol == 0) {
        points_.push_back(point);
        symbol = static_cast<int32_t>(points_.size());
      }
      out[i] = symbol - 1;
    }
  }

  // The longest run of indexed (not popular) symbols common to both sides of the region, the earliest in a and then the
  // earliest in b, extended over equal neighbours; with no such run, the extension starts at the region's low
  // corner, where it can only go up.
  Block longest(const Index& b, const Region& r) {
    Block best{r.a_low, r.b_low, 0};
    const int64_t most = r.bound();
    int32_t first = 0, stop = 0;  // the positions that hold nonzero lengths in last_
    for (int32_t i = r.a_low; i < r.a_high; ++i) {
      const Slice slice = slice_[a_[i]];
      int32_t p = slice.begin;
      int32_t end = slice.end;
      if (p < end && b.positions[p] < r.b_low) {
        p = static_cast<int32_t>(std::lower_bound(b.positions.begin() + p, b.positions.begin() + end, r.b_low) -
                                 b.positions.begin());
      }
      if ((work_ += end - p + 1) > kWorkBetweenPolls) {
        work_ = 0;
        poll_interrupt();
      }
      const int32_t row_first = p;
      for (; p < end; ++p) {
        const int32_t j = b.positions[p];
        if (j >= r.b_high) break;
        const int32_t k = last_[j] + 1;  // last_[j], row_[j]: the run that ends before position j
        row_[j + 1] = k;
        if (k > best.size) best = {i - k + 1, j - k + 1, k};
      }
      for (int32_t q = first; q < stop; ++q) last_[b.positions[q] + 1] = 0;
      std::swap(row_, last_);
      first = row_first;
      stop = p;
      if (best.size == most) break;  // a later run would have to be longer
    }
    for (int32_t q = first; q < stop; ++q) last_[b.positions[q] + 1] = 0;
    while (best.a > r.a_low && best.b > r.b_low && a_[best.a - 1] == b.text[best.b - 1]) {
      --best.a;
      --best.b;
      ++best.size;
    }
    while (best.a + best.size < r.a_high && best.b + best.size < r.b_high &&
           a_[best.a + best.size] == b.text[best.b + best.size]) {
      ++best.size;
    }
    return best;
  }

  std::vector<int32_t> symbol_of_;  // [highest code point + 1]
  std::vector<uint32_t> points_;    // the group's alphabet
  std::vector<int32_t> count_;      // [alphabet] of a_
  std::vector<Slice> slice_;        // [alphabet] of the current b
  std::vector<int32_t> a_;
  std::vector<int32_t> row_, last_;  // [len b + 1]
  std::vector<Region> regions_;
  int64_t work_ = 0;  // pairs of positions since the last poll
};

constexpr int64_t kTextsBetweenPolls = 16;

// Labels of one group from 0; returns the number of clusters.
int64_t cluster_group(Matcher& matcher, const Text* texts, int64_t n, double similarity, int64_t* labels) {
  matcher.next_group();
  std::vector<Index> clusters;
  // An equal earlier text has the same label: the clusters older than its own refuse it again, and its own accepts
  // it again (equal texts have ratio 1, with or without popular elements, since their best run is on the diagonal and
  // extends over everything).  One table per width: CPython stores equal strings in equal width.
  std::unordered_map<std::string_view, int64_t> seen[3];
  std::vector<int32_t> a;
  for (int64_t i = 0; i < n; ++i) {
    if (i % kTextsBetweenPolls == 0) poll_interrupt();  // pairs that are refused by their lengths reach no other poll
    const Text& text = texts[i];
    const std::string_view bytes(static_cast<const char*>(text.data), text.size * text.width);
    const auto [entry, fresh] = seen[text.width >> 1].try_emplace(bytes, static_cast<int64_t>(clusters.size()));
    if (!fresh) {
      labels[i] = entry->second;
      continue;
    }
    matcher.encode(text, a);
    matcher.set_a(a);
    size_t c = 0;
    for (; c < clusters.size(); ++c) {
      const Index& b = clusters[c];
      const int64_t b_size = static_cast<int64_t>(b.text.size());
      const int64_t needed = matches_needed(similarity, text.size + b_size);
      if (std::min(text.size, b_size) < needed || matcher.common(b) < needed) continue;
      if (matcher.matches(b, needed, needed) >= needed) break;
    }
    if (c == clusters.size()) clusters.push_back(matcher.index(a));
    labels[i] = entry->second = static_cast<int64_t>(c);
  }
  return static_cast<int64_t>(clusters.size());
}

}  // namespace

void cluster_similar(const Text* texts, const int64_t* group_offsets, int64_t n_groups, double similarity,
                     int n_threads, int64_t* labels) {
  std::vector<Matcher> matchers(std::max(n_threads, 1));
  std::vector<int64_t> counts(n_groups);
  parallel_for(n_groups, n_threads, [&](int64_t g, int worker) {
    const int64_t low = group_offsets[g], high = group_offsets[g + 1];
    counts[g] = cluster_group(matchers[worker], texts + low, high - low, similarity, labels + low);
  });
  number_groups(group_offsets, n_groups, counts.data(), labels);
}

}  // namespace bipace
