// Greedy cosine clusters of groups, or of some columns of long ones: a block per group (scan.h).
#include "cuda/scan.h"

namespace bipace {

// Blocks: (slots, E).
BIPACE_KERNEL(scan_groups, ScanArgs, scan::kThreads) {
  using namespace scan;
  const int64_t slots = gpu::blocks(), slot = gpu::block(), e = gpu::block_y();
  const Group g = group_of(a, slot, e, slots);
  const int begin = static_cast<int>(a.first_column);
  const int end = g.n < begin + a.columns ? g.n : static_cast<int>(begin + a.columns);
  if (begin >= end) return;
  const float lowest = a.lowest ? a.lowest[e] : static_cast<float>(a.only_lowest);
  const Room room = room_of(a, slot, e, slots, gpu::shared_memory());
  const int t = gpu::thread(), before = begin ? a.counts[e * slots + slot] : 0;  // clusters of the columns before these
  decide_columns(g, room, lowest, begin, end, before);
  if (t == 0) a.counts[e * slots + slot] = room.shared->count[0];
  int64_t* const first = a.first + e * a.first_stride + g.begin;
  for (int i = begin + t; i < end; i += kThreads) {
    const int k = g.decided.joined[i];
    first[i] = g.kind[i] == 2 ? -1 : g.begin + (k < 0 ? i : g.decided.leader[k]);
  }
}

// S of every panel of a block of columns, out of what all earlier records decided.  Blocks: (panels, slots); one ε.
BIPACE_KERNEL(similar_to_columns, ScanArgs, scan::kThreads) {
  using namespace scan;
  const int64_t slot = gpu::block_y();
  const Group g = group_of(a, slot, 0, 1);
  const int begin = static_cast<int>(a.first_column), panel = begin + static_cast<int>(gpu::block()) * kPanel;
  if (panel >= g.n) return;
  Stage* const stages = reinterpret_cast<Stage*>(gpu::shared_memory());
  float* const near = reinterpret_cast<float*>(stages + 3);  // [kPanel, 2 · capacity − 1]: odd
  const int64_t capacity = 2 * a.capacity - 1;
  float* const far = a.similar + (slot * a.far_panels + gpu::block()) * kPanel * a.far_pitch;
  const int t = gpu::thread(), count = a.counts[slot];
  const float reciprocal_j = panel + gpu::lane() < g.n ? g.reciprocal[panel + gpu::lane()] : 0.0f;
  const auto wait = [] { gpu::sync_block(); };
  for (int low = 0; low < count; low += static_cast<int>(capacity)) {
    const int high = low + static_cast<int>(capacity) < count ? low + static_cast<int>(capacity) : count;
    apply_all(stages, g, 0, begin, panel, near, capacity, reciprocal_j, nullptr, t, kThreads, low, high, wait);
    for (int i = t; i < (high - low) * kPanel; i += kThreads) {
      const int column = i / (high - low), k = i % (high - low);
      far[column * a.far_pitch + low + k] = near[column * capacity + k];
    }  // apply_all waits for all to be done before it writes there
  }
}

struct FindLongArgs {
  const int64_t* group_offsets;  // [G+1]
  int64_t n_groups;
  int64_t shortest;
  int64_t* begins;  // [slots] zeros before
  int64_t* ends;    // [slots] zeros before
};

// Groups of `shortest` records or more.  Two of them begin at least so many records apart, so each has a slot of its
// own.
BIPACE_KERNEL(find_long_groups, FindLongArgs, 256) {
  const int64_t group = gpu::block() * 256 + gpu::thread();
  if (group >= a.n_groups) return;
  const int64_t begin = a.group_offsets[group], end = a.group_offsets[group + 1];
  if (end - begin < a.shortest) return;
  a.begins[begin / a.shortest] = begin;
  a.ends[begin / a.shortest] = end;
}

}  // namespace bipace
