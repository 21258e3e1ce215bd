// Greedy cosine clusters of groups: a block per group (scan.h).
#include "cuda/scan.h"

namespace bipace {

// Blocks: (slots, E).
BIPACE_KERNEL(scan_groups, ScanArgs, scan::kThreads) {
  using namespace scan;
  const int64_t slots = gpu::blocks(), slot = gpu::block(), e = gpu::block_y();
  const Group g = group_of(a, slot, e, slots);
  if (g.n == 0) return;
  const float lowest = a.lowest ? a.lowest[e] : static_cast<float>(a.only_lowest);
  decide_group(g, room_of(a, slot, e, slots, gpu::shared_memory()), lowest);
  int64_t* const first = a.first + e * a.first_stride + g.begin;
  for (int i = gpu::thread(); i < g.n; i += kThreads) {
    const int k = g.decided.joined[i];
    first[i] = g.kind[i] == 2 ? -1 : g.begin + (k < 0 ? i : g.decided.leader[k]);
  }
}

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
