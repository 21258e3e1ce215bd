// Shared by the ways of greedy clustering: block by block (clusters.cpp), from one Gram matrix (sweep.cpp), and of
// texts (similar.cpp).
#pragma once

#include <cfenv>
#include <cstdint>
#include <vector>

#include "common/greedy.h"

namespace bipace {

// Squares of norms inside these limits: products neither overflow nor underflow, and the row is read unscaled.
inline bool readable_in_place(double square) { return square >= 1e-23 && square <= 1e30; }

inline int64_t round_up(int64_t n, int64_t to) { return (n + to - 1) / to * to; }

// Numbers of items by first appearance, equal for equal items; returns how many there are, or -1 as soon as an item has
// the hash of `most` different ones.
template <typename Hash, typename Equal>
int64_t number_equal(int64_t n, int64_t most, const Hash& hash,
                     const Equal& equal,  // (earlier item, item), of one hash
                     int64_t* numbers) {  // [n]
  struct Slot {
    uint64_t hash;
    int64_t item;  // first of its number; -1: free
  };
  size_t size = 16;
  while (size < 2 * static_cast<size_t>(n)) size *= 2;
  std::vector<Slot> table(size, Slot{0, -1});
  int64_t count = 0;
  for (int64_t i = 0; i < n; ++i) {
    const uint64_t own = hash(i);
    int64_t different = 0;
    size_t at = static_cast<size_t>(own) & (size - 1);
    for (; table[at].item >= 0; at = (at + 1) & (size - 1)) {
      if (table[at].hash != own) continue;
      if (equal(table[at].item, i)) break;
      if (++different == most) return -1;
    }
    if (table[at].item < 0) {
      table[at] = {own, i};
      numbers[i] = count++;
    } else {
      numbers[i] = numbers[table[at].item];
    }
  }
  return count;
}

// Renumbers a group's labels by first appearance; returns how many there are.  They number the clusters by seed, and
// records of -1, clusters of their own, come in between.
inline int64_t number_labels(int64_t n, int64_t n_clusters, int64_t* labels) {
  std::vector<int64_t> number(n_clusters, -1);
  int64_t count = 0;
  for (int64_t i = 0; i < n; ++i) {
    int64_t* known = labels[i] < 0 ? nullptr : &number[labels[i]];
    if (known && *known < 0) *known = count++;
    labels[i] = known ? *known : count++;
  }
  return count;
}

// Labels of each group from 0, of which there are counts [G], become labels of the batch.
inline void number_groups(const int64_t* group_offsets, int64_t n_groups, const int64_t* counts, int64_t* labels) {
  int64_t before = 0;
  for (int64_t g = 0; g < n_groups; ++g) {
    for (int64_t i = group_offsets[g]; i < group_offsets[g + 1]; ++i) labels[i] += before;
    before += counts[g];
  }
}

// Callers may have set flush-to-zero on their thread, unlike the pool's threads: this makes the arithmetic the same.
class DefaultFloats {
 public:
  DefaultFloats() {
    std::fegetenv(&saved_);
    std::fesetenv(FE_DFL_ENV);
  }
  ~DefaultFloats() { std::fesetenv(&saved_); }
  DefaultFloats(const DefaultFloats&) = delete;
  DefaultFloats& operator=(const DefaultFloats&) = delete;

 private:
  std::fenv_t saved_;
};

}  // namespace bipace
