#include <algorithm>
#include <vector>

#include "cpu/interrupt.h"
#include "cpu/stages.h"

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

// Codes [n] in [0, n), equal exactly where the given ones are.  Sorted where they are not so already: nobody can choose
// codes that make a sort slow, as they could for a hash table.
std::vector<int64_t> small_codes(const int64_t* codes, int64_t n) {
  std::vector<int64_t> out(codes, codes + n);
  if (std::all_of(out.begin(), out.end(), [n](int64_t code) { return code >= 0 && code < n; })) return out;
  std::vector<int64_t> sorted(out);
  int64_t compared = 0;
  std::sort(sorted.begin(), sorted.end(), [&](int64_t a, int64_t b) {
    if (++compared % (1 << 20) == 0) poll_interrupt();
    return a < b;
  });
  polled(0, n, [&](int64_t i) { out[i] = std::lower_bound(sorted.begin(), sorted.end(), out[i]) - sorted.begin(); });
  return out;
}

// Numbers of the pairs (set[i], code[i]) by first appearance, -1 where set[i] is; returns how many there are.  Sets are
// below n_sets, codes in [0, n).
int64_t number_pairs(const std::vector<int64_t>& set, int64_t n_sets, const std::vector<int64_t>& code,
                     int64_t* numbers) {
  struct First {
    int64_t set, item;
  };
  const int64_t n = static_cast<int64_t>(set.size());
  const Members members = members_of(set.data(), n, n_sets);
  std::vector<First> first_of(n, First{-1, 0});  // of each code, in the set that it was seen in last
  polled(0, static_cast<int64_t>(members.records.size()), [&](int64_t at) {
    const int64_t i = members.records[at];
    First& first = first_of[code[i]];
    if (first.set != set[i]) first = {set[i], i};
    numbers[i] = first.item;
  });
  int64_t next = 0;
  polled(0, n, [&](int64_t i) {
    if (set[i] < 0) {
      numbers[i] = -1;
    } else {
      numbers[i] = numbers[i] == i ? next++ : numbers[numbers[i]];
    }
  });
  return next;
}

std::vector<int64_t> groups_of(const int64_t* group_offsets, int64_t n_groups) {
  std::vector<int64_t> out(group_offsets[n_groups]);
  for (int64_t g = 0; g < n_groups; ++g) {
    std::fill(out.begin() + group_offsets[g], out.begin() + group_offsets[g + 1], g);
  }
  return out;
}

}  // namespace

void cluster_exact(const int64_t* codes, const int64_t* group_offsets, int64_t n_groups, int64_t* labels) {
  const std::vector<int64_t> group = groups_of(group_offsets, n_groups);
  number_pairs(group, n_groups, small_codes(codes, group_offsets[n_groups]), labels);
}

void cluster_history(const int64_t* codes, const int64_t* step, const int64_t* trajectory_offsets,
                     int64_t n_trajectories, const int64_t* group_offsets, int64_t n_groups, int64_t depth,
                     int64_t* labels) {
  const int64_t n_records = group_offsets[n_groups];
  // earlier[i]: first record of the step before i's in its trajectory, -1 at the beginning.  A step recorded twice
  // is in later histories once.
  std::vector<int64_t> earlier(n_records, -1);
  for (int64_t t = 0; t < n_trajectories; ++t) {
    int64_t current = trajectory_offsets[t], before = -1;
    polled(trajectory_offsets[t], trajectory_offsets[t + 1], [&](int64_t i) {
      if (i > trajectory_offsets[t] && !(step && step[i] == step[i - 1])) {
        before = current;
        current = i;
      }
      earlier[i] = before;
    });
  }
  // The tuple of the last k codes is the pair (tuple of the last k − 1 codes one step earlier, own code).
  const std::vector<int64_t> code = small_codes(codes, n_records);
  std::vector<int64_t> prefix = groups_of(group_offsets, n_groups);
  int64_t n_prefixes = n_groups;
  for (int64_t k = 0; k < depth; ++k) {
    int64_t* row = labels + k * n_records;
    n_prefixes = number_pairs(prefix, n_prefixes, code, row);
    polled(0, n_records, [&](int64_t i) { prefix[i] = earlier[i] < 0 ? -1 : row[earlier[i]]; });
  }
}

}  // namespace bipace
