#include "cpu/observations.h"

#include <algorithm>
#include <cstddef>
#include <vector>

#include "cpu/interrupt.h"
#include "cpu/keyed_hash.h"

namespace bipace {
namespace {

constexpr int64_t kItemsBetweenPolls = 1 << 16;  // some milliseconds

// body(i) for each i in [begin, end).  Polls where i passes a multiple, outside the inner loop: inside it costs a
// fifth.
template <typename Body>
void polled(int64_t begin, int64_t end, const Body& body) {
  for (int64_t i = begin; i < end;) {
    const int64_t stop = std::min(end, (i / kItemsBetweenPolls + 1) * kItemsBetweenPolls);
    for (; i < stop; ++i) body(i);
    if (i % kItemsBetweenPolls == 0) poll_interrupt();
  }
}

// Numbers pairs of integers by first appearance: open addressing, cleared per group by shrinking to the group's size.
class PairNumbers {
 public:
  void reset(int64_t capacity) {
    size_t size = 16;
    while (size < static_cast<size_t>(capacity) * 2) size *= 2;
    slots_.assign(size, Slot{0, 0, -1});
    mask_ = size - 1;
  }
  // The number of (a, b): its existing number, else next, which is then taken.
  int64_t number(int64_t a, int64_t b, int64_t& next) {
    for (size_t at = hash(a, b) & mask_;; at = (at + 1) & mask_) {
      Slot& slot = slots_[at];
      ++looked_;
      if (slot.label < 0) {
        slot = {a, b, next++};
        return slot.label;
      }
      if (slot.a == a && slot.b == b) return slot.label;
    }
  }
  int64_t looked() const { return looked_; }

 private:
  struct Slot {
    int64_t a, b, label;
  };
  size_t hash(int64_t a, int64_t b) const {
    uint64_t h = (static_cast<uint64_t>(a) ^ key_.first) * 0x9E3779B97F4A7C15u ^
                 ((static_cast<uint64_t>(b) ^ key_.second) * 0xC2B2AE3D27D4EB4Fu + 0x632BE59BD9B4E019u);
    h ^= h >> 32;
    h *= 0xD6E8FEB86659FD93u;
    return static_cast<size_t>(h ^ (h >> 32));
  }
  std::vector<Slot> slots_;
  size_t mask_ = 0;
  int64_t looked_ = 0;
  const HashKey key_ = hash_key();
};

}  // namespace

int64_t cluster_exact(const int64_t* codes, const int64_t* group_offsets, int64_t n_groups, int64_t* labels) {
  PairNumbers numbers;
  int64_t next = 0;
  for (int64_t g = 0; g < n_groups; ++g) {
    numbers.reset(group_offsets[g + 1] - group_offsets[g]);
    polled(group_offsets[g], group_offsets[g + 1], [&](int64_t i) { labels[i] = numbers.number(codes[i], 0, next); });
  }
  return numbers.looked();
}

int64_t cluster_history(const int64_t* codes, const int64_t* step, const int64_t* trajectory_offsets,
                        int64_t n_trajectories, const int64_t* group_offsets, int64_t n_groups, int64_t depth,
                        int64_t* labels) {
  const int64_t n_records = group_offsets[n_groups];
  // earlier[i]: first record of the step before i's in its trajectory, -1 at the beginning.  A step recorded twice
  // is in later histories once.
  std::vector<int64_t> earlier(static_cast<size_t>(n_records), -1);
  for (int64_t t = 0; t < n_trajectories; ++t) {
    int64_t current = trajectory_offsets[t], before = -1;
    polled(trajectory_offsets[t], trajectory_offsets[t + 1], [&](int64_t i) {
      if (i > trajectory_offsets[t] && !(step && step[i] == step[i - 1])) {
        before = current;
        current = i;
      }
      earlier[static_cast<size_t>(i)] = before;
    });
  }
  // The tuple of the last k codes is the pair (tuple of the last k − 1 codes one step earlier, own code).
  PairNumbers numbers;
  for (int64_t k = 1; k <= depth; ++k) {
    int64_t* row = labels + (k - 1) * n_records;
    const int64_t* shorter = row - n_records;
    int64_t next = 0;
    for (int64_t g = 0; g < n_groups; ++g) {
      numbers.reset(group_offsets[g + 1] - group_offsets[g]);
      polled(group_offsets[g], group_offsets[g + 1], [&](int64_t i) {
        int64_t prefix = 0;
        if (k > 1) {
          const int64_t e = earlier[static_cast<size_t>(i)];
          prefix = e < 0 ? -1 : shorter[e];
        }
        row[i] = prefix < 0 ? -1 : numbers.number(prefix, codes[i], next);
      });
    }
  }
  return numbers.looked();
}

}  // namespace bipace
