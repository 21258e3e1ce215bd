// The greedy decisions of Algorithm 1, at a cost that does not depend on D.  A centroid is a positive combination of
// its members, so S[k, j], its similarity to a record j still to come, follows from the Gram matrix G of the unit rows:
// a join adds d · S[k, j] + w · G[i, j] (common/greedy.h), a seed sets G[i, j].  The plain form r(aS + bG) drifts
// linearly in float32 (1.5e-4 at 8,192 members); the increment form does not.
//
// A block of threads takes one group under one ε, panel by panel of 32 records.  S exists for two panels at a time:
// while warp 0 decides a panel's records, the workers compute S of the next panel from all decisions before this one
// and G, which is read once; then they add the panel's own decisions.  So S is not stored, a sweep costs no memory, and
// only the 32 columns of a panel are in the chain from one decision to the next.
//
// That chain is what a group takes, so up to kFew clusters it has a loop of its own, join_few: all it reads is in
// shared memory, brought there a panel ahead.  A worker has clusters of its own and applies their decisions in order,
// so no worker waits for another; a helper assigns them a panel ahead.  A large cluster has several workers: one makes
// S of the next panel, and the others begin S of the panels after it, which they hand on from panel to panel.  `python
// -m bench sass` counts instructions.
#include "common/greedy.h"
#include "cuda/arguments.h"
#include "cuda/intrinsics.h"

namespace bipace {
namespace {

// Four schedulers serve a block's warps in turn.  The first one's are warp 0, which decides, and three that help it and
// have little to do; those of the others are workers.
constexpr int kWarps = 16, kThreads = kWarps * gpu::kWarp, kSchedulers = 4;
constexpr int kHelpers = kWarps / kSchedulers - 1, kWorkers = kWarps - 1 - kHelpers;
constexpr int kPanel = gpu::kWarp;              // records decided before others follow: a lane each
constexpr int kAtOnce = 4;                      // panels' decisions that a worker looks at together
constexpr int kQueue = (kAtOnce + 1) * kPanel;  // and that wait for it, with fewer than 32 that it has left
constexpr int kNowhere = -1;                    // instead of a cluster: the record affects no other
constexpr float kSeed = -1.0f;                  // d of a record that begins a cluster; no join has it, for a > 0
constexpr int kFew = 128;                       // clusters whose decisions take the short way: four to a lane
// S of a panel that begins with kFew clusters at most, in shared memory: a row to a record, with room for 64 more. Odd,
// so that a cluster's values for 32 records lie in 32 banks.  Two rows are read beyond the last record, and ignored.
constexpr int kFewPitch = 193, kFewRows = kPanel + 2;
constexpr float kAbsent = -2.0f;  // S of a cluster that is not there: below every cosine, and finite

// Where a cluster stands in such a row: of the first kFew, lane l of a warp has 4 (31 − l) and the three after it, one
// in each 32 values.  So a lane's four are read without conflicts, and the highest bit of a ballot is the oldest.
BIPACE_DEVICE int place_of(int cluster, bool few) {
  const uint32_t k = cluster;  // by unsigned numbers the compiler needs fewer instructions
  return few && cluster < kFew ? k % 4 * gpu::kWarp + gpu::kWarp - 1 - k / 4 : cluster;
}
// The cluster of a place below kFew.
BIPACE_DEVICE int cluster_at(uint32_t place) { return (gpu::kWarp - 1 - place % gpu::kWarp) * 4 + place / gpu::kWarp; }

// An int32 that compares as the float32 does: a maximum of integers takes one instruction per warp.
BIPACE_DEVICE int32_t in_order(float value) {
  const int32_t bits = static_cast<int32_t>(gpu::bits_of(value));
  return bits ^ ((bits >> 31) & 0x7FFFFFFF);
}
BIPACE_DEVICE float from_order(int32_t key) {
  return gpu::float_of(static_cast<uint32_t>(key ^ ((key >> 31) & 0x7FFFFFFF)));
}
BIPACE_DEVICE float warp_most(float value) { return from_order(gpu::warp_max(in_order(value))); }

// The oldest cluster with s ≥ s* − τ, or, where s* < lowest, `count`: a new one.  By a warp.
BIPACE_DEVICE int decide(const float* similar, bool few, int count, float lowest) {  // S[·, i]
  const int l = gpu::lane();
  float best = kAbsent;
  for (int k = l; k < count; k += gpu::kWarp) best = max(best, similar[place_of(k, few)]);
  const float most = warp_most(best);
  if (!(most >= lowest)) return count;
  const float near = most - static_cast<float>(kBand);
  for (int base = 0; base < count; base += gpu::kWarp) {
    const uint32_t found = gpu::ballot(base + l < count && similar[place_of(base + l, few)] >= near);
    if (found) return base + gpu::lowest_bit(found);
  }
  return count;
}

// A join of common/greedy.h with `lack` = 1 − x · x.  Square root and divisions are the hardware's, within 2 ulp: the
// centroid is off by 2e-7 of b (q/b + |x − c|) a join, which sums up to less than 1e-6 of its similarities however
// many join, for b = 1/m.
BIPACE_DEVICE Join<float> join_quickly(float b, float s, float lack) {
  const float p = gpu::fma_rn(b, lack, gpu::fma_rn(-2.0f, b, 2.0f) * (1.0f - s)), q = b * p;
  const float left = gpu::fma_rn(-b, p, 1.0f), r = gpu::rsqrt_quick(left), weight = b * r;  // r = 1/u
  return {gpu::fma_rn(q * r, gpu::reciprocal_quick(gpu::fma_rn(left, r, 1.0f)), -weight), weight};
}

// S[k, j] after a join, where `pull` is weight · product; a seed is one with change = kSeed, weight = 1 and 0 before.
BIPACE_DEVICE float moved(float before, float change, float pull) { return before + gpu::fma_rn(change, before, pull); }

// What a decision does to its cluster.
struct alignas(8) Change {
  float change, weight;  // d, or kSeed; w / ‖x‖
};

// Decisions as they are kept for the panels to come, of a group or of one panel.
struct Made {
  int32_t* joined;  // the cluster, or kNowhere
  Change* changes;
};

// A decision of a batch, read in one access.
struct alignas(16) Entry {
  int32_t place;  // the cluster's
  float change, weight;
  int32_t row;  // of its product
};

// A decision that a worker is about to take: its cluster's place, and where it and its product are.
struct Waiting {
  int32_t place, row;
};

// Of a group's clusters, once there are more than kFew; until then both numbers stand in shared memory.
struct Clusters {
  int32_t* leader;  // the record of the group that began it
  float* next;      // the number m of the member that joins next
  float* share;     // 1 / m, a division that the chain need not wait for
};

// What a record's decision was: a lane has one while its panel is decided.
struct Decision {
  int joined;
  float change, weight;
};

struct Share {
  float b, m;  // 1 / m and m: the number of the member that joins next
};

// What the chain needs of record t of a panel: 1 − x · x, and its product with the next record.
struct Ahead {
  float lack, product;
};

// What is known of a panel's records before they are decided.
struct Panel {
  float products[kPanel * kPanel];  // of the unit rows: of record t with l at t · 32 + l, for t ≤ l
  Ahead ahead[kPanel];
  float reciprocal[kPanel];
  uint32_t usable[4];  // a bit each; three to keep what follows on 16 bytes
};

// The decisions of the panel, and rows of G at the next panel's columns.
struct Own {
  float products[kPanel * kPanel];
  int32_t joined[kPanel];
  Change changes[kPanel];
};

// A worker's clusters of a panel, from `first` on.  A single one of them may have a team: the member at `ahead` makes
// its S of the panel that is as many after the next one.
struct alignas(16) Task {
  int32_t first, beyond, ahead, team;
};

// S of a cluster at the columns of a panel to come, after the decisions before record `upto`.
struct Begun {
  int32_t cluster, panel, upto;
  float similar[kPanel];
};

// All that stands in shared memory before S.
struct Shared {
  Own own;
  Panel panels[2];
  Entry batches[kWorkers][2][gpu::kWarp];
  Waiting queues[kWorkers][kQueue];
  Share shares[kFew];        // by a cluster's place, while there are kFew at most
  float members[kFew];       // theirs before the panel that is decided
  Task tasks[2][kWorkers];   // for a panel and the next
  Begun begun[2][kWorkers];  // by workers in a panel, and in the one before
  int32_t count[4];          // clusters so far; three to keep what follows on 16 bytes
};
static_assert(sizeof(Shared) == 46416, "bipace_kernels/backends/cuda/scan.py asks for as much");

struct Group {
  const float* gram;  // [pitch, pitch]
  int64_t pitch;
  const float* reciprocal;  // [n]
  const uint8_t* kind;      // [n]
  int64_t begin;            // its first record
  int n;
  Made made;
  Clusters clusters;
};

BIPACE_DEVICE Group group_of(const ScanArgs& a, int64_t slot, int64_t e, int64_t slots) {
  const int64_t begin = a.begins[slot], length = a.ends[slot] - begin;
  uint32_t* const scratch = static_cast<uint32_t*>(a.decisions) + (e * slots + slot) * 6 * a.side;
  return {a.gram + slot * a.side * a.side,
          a.side,
          a.reciprocal + begin,
          a.kind + begin,
          begin,
          length < a.long_group ? static_cast<int>(length) : 0,
          {reinterpret_cast<int32_t*>(scratch + 2 * a.side), reinterpret_cast<Change*>(scratch)},
          {reinterpret_cast<int32_t*>(scratch + 3 * a.side), reinterpret_cast<float*>(scratch + 4 * a.side),
           reinterpret_cast<float*>(scratch + 5 * a.side)}};
}

// Up to 32 decisions, sorted by cluster and in order within one.
struct Batch {
  uint32_t count;
  uint32_t row;     // of the lane's decision: where its products are
  uint32_t begins;  // a bit where another cluster's begin
  uint32_t at;      // the first one's address
};

// S of a panel, as a worker changes it: a lane to a column.
struct Work {
  static constexpr uint32_t kSome = 8;  // decisions of a batch that are left out together
  float* column;                        // from place `origin` on
  int origin;
  bool few;
  float reciprocal;              // of the column's record
  Entry (*batches)[gpu::kWarp];  // two in turn
  Waiting* queue;                // a ring

  BIPACE_DEVICE Batch sorted(const Entry& picked, uint32_t taken, uint32_t count, bool one_cluster) const {
    const uint32_t l = gpu::lane();
    uint32_t rank = l;
    if (!one_cluster) {
      const uint32_t key = l < count ? picked.place * gpu::kWarp + l : ~0u;
      rank = 0;
#pragma unroll
      for (uint32_t i = 0; i < gpu::kWarp; ++i) {
        if (i % kSome == 0 && i >= count) break;
        rank += gpu::shuffle(key, i) < key;
      }
    }
    Entry* const batch = batches[taken / gpu::kWarp % 2];
    if (l < count) batch[rank] = picked;
    gpu::sync_warp();
    if (count < gpu::kWarp) {  // beyond the last one there are decisions that change nothing
      if (l >= count) batch[l] = {batch[count - 1].place, 0.0f, 0.0f, batch[count - 1].row};
      gpu::sync_warp();
    }
    const bool begins = l == 0 || batch[l].place != batch[l - 1].place;
    return {count, static_cast<uint32_t>(batch[l].row), gpu::ballot(begins), gpu::shared_address(batch)};
  }

  // Applies a batch in order.
  BIPACE_DEVICE void apply(const float (&products)[gpu::kWarp], const Batch& batch) const {
    constexpr uint32_t kAhead = 3;
    float ahead[kAhead][4], s = 0.0f;
    const auto load = [&](uint32_t i) {
      gpu::load_shared(ahead[i % kAhead], batch.at + i % gpu::kWarp * sizeof(Entry));
    };
    const auto pull_of = [&](uint32_t i) { return ahead[i % kAhead][2] * (products[i] * reciprocal); };
    float* at = column;
#pragma unroll
    for (uint32_t i = 0; i < kAhead && batch.count > 0; ++i) load(i);
    // S of a cluster stays in a register while its decisions follow one another; in a batch they all do, so what a
    // cluster finds there is asked for before others are done.
    const auto apply_some = [&](uint32_t some, bool may_begin) {
      float pull = pull_of(some), begun[kSome];
      int places[kSome];
#pragma unroll
      for (uint32_t i = 0; i < kSome && may_begin; ++i) {
        const bool begins = batch.begins >> (some + i) & 1;
        float place, change;
        gpu::load_shared(place, change, batch.at + (some + i) * sizeof(Entry));
        places[i] = static_cast<int>(gpu::bits_of(place));
        begun[i] = begins && change != kSeed ? column[places[i]] : 0.0f;
      }
#pragma unroll
      for (uint32_t i = some; i < some + kSome; ++i) {
        const float change = ahead[i % kAhead][1], pull_now = pull;
        load(i + kAhead);
        if (i + 1 < some + kSome) pull = pull_of(i + 1);  // before S needs it
        if (may_begin && (batch.begins >> i & 1)) {
          if (i > 0) *at = s;
          at = column + places[i - some];
          s = begun[i - some];
        }
        s = moved(s, change, pull_now);
      }
    };
#pragma unroll
    for (uint32_t some = 0; some < gpu::kWarp; some += kSome) {
      if (some < batch.count && (batch.begins >> some & 0xFF) == 0) {
        apply_some(some, false);
      } else if (some < batch.count) {
        apply_some(some, true);
      }
    }
    if (batch.count > 0) *at = s;
  }

  // Applies the decisions of records [from, last) on clusters [first, beyond) to S of a panel.
  BIPACE_DEVICE void apply_before(const Group& g, int first, int beyond, int from, int last, int panel) const {
    if (first >= beyond) return;
    constexpr int kStride = kAtOnce * gpu::kWarp;
    const int l = gpu::lane();
    const float* const column_of_rows = g.gram + panel + l;
    const uint32_t row_bytes = static_cast<uint32_t>(g.pitch * 4);
    const auto joined = [&](int i) { return i < last ? g.made.joined[i] : kNowhere; };
    const Batch none = {0, 0, 0, 0};
    Batch ready = none;
    uint32_t taken = 0, queued = 0;
    int ahead[kAtOnce];
    float products[gpu::kWarp];
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) ahead[i] = joined(from + i * gpu::kWarp + l);
    for (int base = from; base < last; base += kStride) {
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {
        const int at = base + i * gpu::kWarp + l, k = ahead[i];
        const bool mine = first <= k && k < beyond;
        const uint32_t found = gpu::ballot(mine);
        if (mine) queue[(taken + queued + gpu::count_below(found, l)) % kQueue] = {place_of(k, few) - origin, at};
        queued += gpu::count_bits(found);
        ahead[i] = joined(at + kStride);
      }
      while (queued >= gpu::kWarp || (base + kStride >= last && queued + ready.count > 0)) {
        const uint32_t count = min(queued, static_cast<uint32_t>(gpu::kWarp));
        // The changes and the products are on their way together.
        Entry picked = {};
        gpu::sync_warp();  // what other lanes have queued has been written
        if (count > 0) {
          const Waiting waiting = queue[(taken + min(static_cast<uint32_t>(l), count - 1)) % kQueue];
          const Change one = g.made.changes[waiting.row];
          picked = {waiting.place, one.change, one.weight, waiting.row};
        }
#pragma unroll
        for (uint32_t i = 0; i < gpu::kWarp; ++i) {
          if (i % kSome == 0 && i >= ready.count) break;
          products[i] = gpu::load_of_row(column_of_rows, gpu::shuffle(ready.row, i), row_bytes);
        }
        const Batch next = count > 0 ? sorted(picked, taken, count, beyond - first == 1) : none;
        taken += gpu::kWarp, queued -= count;
        apply(products, ready);
        ready = next;
      }
    }
  }

  // Applies the panel's own decisions in order, each cluster's by one worker.  Four are on their way together, and what
  // one leaves in S the next one of its cluster takes.
  BIPACE_DEVICE void apply_own(const Own& own, int worker) const {
    constexpr int kTogether = 4;
    // Record t stands in lane 31 − t, so that the highest bit of a ballot is the first one's.
    const int l = gpu::lane(), k = own.joined[kPanel - 1 - l], place = place_of(k, few);
    uint32_t left = gpu::ballot(k != kNowhere && k % kWorkers == worker);
    for (int from = 0; left != 0;) {
      int places[kTogether];
      float s[kTogether], change[kTogether], pull[kTogether];
#pragma unroll
      for (int i = 0; i < kTogether; ++i) {
        const bool there = left != 0;  // otherwise it is the one before again, and changes nothing
        if (there) from = gpu::highest_bit(left);
        left &= ~(1u << from);
        const int t = kPanel - 1 - from;
        const Change made = own.changes[t];
        places[i] = gpu::shuffle(place, from);
        change[i] = there ? made.change : 0.0f;
        pull[i] = there ? made.weight * (own.products[t * kPanel + l] * reciprocal) : 0.0f;
        s[i] = made.change == kSeed ? 0.0f : column[places[i]];
      }
#pragma unroll
      for (int i = 0; i < kTogether; ++i) {
#pragma unroll
        for (int before = 0; before < i; ++before) s[i] = places[before] == places[i] ? s[before] : s[i];
        s[i] = moved(s[i], change[i], pull[i]);
      }
#pragma unroll
      for (int i = 0; i < kTogether; ++i) column[places[i]] = s[i];
    }
  }
};

// Brings in what is known of a panel's records.  By `threads` threads, `t` of them this.
BIPACE_DEVICE void bring_panel(Panel& to, const Group& g, int panel, int t, int threads) {
  for (int i = t; i < kPanel * kPanel; i += threads) {
    const int r = i / kPanel, c = i % kPanel;
    float product = 0.0f;
    if (r <= c && panel + c < g.n) {
      product = (g.gram[(panel + r) * g.pitch + panel + c] * g.reciprocal[panel + r]) * g.reciprocal[panel + c];
    }
    to.products[i] = product;
    if (r == c) to.ahead[r].lack = 1.0f - product;
    if (c == r + 1) to.ahead[r].product = product;
    if (i + 1 == kPanel * kPanel) to.ahead[r].product = 0.0f;
  }
  if (t < kPanel) {
    const bool inside = panel + t < g.n;
    to.reciprocal[t] = inside ? g.reciprocal[panel + t] : 0.0f;
    const uint32_t usable = gpu::ballot(inside && g.kind[panel + t] == 0);
    if (t == 0) to.usable[0] = usable;
  }
}

// Asks for rows of G of a panel at the columns of the next.  By the helpers, `t` of their threads this.
BIPACE_DEVICE void ask_own(Own& own, const Group& g, int panel, int t) {
  for (int i = t; i < kPanel * (kPanel / 4); i += kHelpers * gpu::kWarp) {
    const int r = i / (kPanel / 4), c = i % (kPanel / 4) * 4;
    gpu::copy_async(own.products + r * kPanel + c, g.gram + (panel + r) * g.pitch + panel + kPanel + c, 16);
  }
  gpu::copy_commit();
}

// Where a block keeps S of two panels: in shared memory where all clusters fit, else in memory.
struct Room {
  Shared* shared;
  float* near;  // [2, kPanel, capacity]
  float* far;   // [2, kPanel, far_pitch]
  int64_t capacity, far_pitch;

  // S of a panel, `known` clusters being there at the beginning of the one before: there may be up to 32 more
  // by that one's end, and 32 more by its own.
  BIPACE_DEVICE bool fits(int known) const { return known + 2 * kPanel <= capacity; }
  // Whether a panel's S has the layout of join_few; while `known` clusters are there now, it is decided by it.
  BIPACE_DEVICE bool few(int known) const { return known <= kFew && capacity * kPanel >= kFewPitch * kFewRows; }
  BIPACE_DEVICE int64_t pitch(int known) const { return few(known) ? kFewPitch : fits(known) ? capacity : far_pitch; }
  BIPACE_DEVICE float* beside(int panel) const { return near + panel / kPanel % 2 * kPanel * capacity; }
  BIPACE_DEVICE float* similar(int panel, int known) const {
    return fits(known) ? beside(panel) : far + panel / kPanel % 2 * kPanel * far_pitch;
  }
};

BIPACE_DEVICE Room room_of(const ScanArgs& a, int64_t slot, int64_t e, int64_t slots, unsigned char* shared) {
  const int64_t far_pitch = a.side + 1;  // odd, and more than there are records
  float* const far = a.similar ? a.similar + (e * slots + slot) * 2 * kPanel * far_pitch : nullptr;
  return {reinterpret_cast<Shared*>(shared), reinterpret_cast<float*>(shared + sizeof(Shared)), far, a.capacity,
          far_pitch};
}

// Lets records [t, stop) of a panel join their clusters, up to the first that begins one: the record it comes to.  All
// of them are usable, and there are kFew clusters at most.  By warp 0.  `similar`: where S stands in shared memory,
// kFewPitch values to a record.  `mine` gets the cluster's place.
//
// While record t's cluster is sought, the row of t + 1 waits in registers: t's decision changes one number there, which
// every lane computes for itself, and the maximum over all others is found meanwhile.
BIPACE_DEVICE int join_few(const Panel& panel, const Share* shares, uint32_t similar, int t, int stop, float lowest,
                           Decision& mine) {
  constexpr uint32_t kRowBytes = kFewPitch * 4, kAheadBytes = sizeof(Ahead);
  // What comes out of a shuffle stays in a register: otherwise it is computed anew in every turn.
  const int l = gpu::shuffle(gpu::lane(), gpu::lane());
  const uint32_t column = gpu::shuffle(similar + l * kRowBytes, l);
  const uint32_t all_shares = gpu::shuffle(gpu::shared_address(shares), 0);
  const uint32_t ahead_first = gpu::shuffle(gpu::shared_address(panel.ahead), 0);
  const uint32_t ahead_mine = gpu::shuffle(ahead_first + l * kAheadBytes, l);
  const uint32_t ahead_stop = ahead_first + stop * kAheadBytes;
  uint32_t ahead = ahead_first + t * kAheadBytes;
  uint32_t row = similar + t * kRowBytes;  // of record t
  uint32_t lanes = row + l * 4;            // and this lane's clusters there
  uint32_t products = gpu::shared_address(panel.products + t * kPanel + l);
  const auto load = [](float (&v)[4], uint32_t from) {
#pragma unroll
    for (uint32_t c = 0; c < 4; ++c) v[c] = gpu::load_shared(from + c * gpu::kWarp * 4);
  };
  const auto most_of = [](const float (&v)[4]) { return max(max(v[0], v[1]), max(v[2], v[3])); };
  float v[4], next[4];
  load(v, lanes);
  load(next, lanes + kRowBytes);
  float mine_most = most_of(v), most = warp_most(mine_most);
#pragma unroll 1
  do {
    const float near = most - static_cast<float>(kBand);
    int oldest = 3 * gpu::kWarp;
    if (v[2] >= near) oldest = 2 * gpu::kWarp;
    if (v[1] >= near) oldest = gpu::kWarp;
    if (v[0] >= near) oldest = 0;
    const uint32_t found = gpu::ballot(mine_most >= near && most >= lowest);
    const int place = gpu::shuffle(oldest + l, gpu::highest_bit(found));
    float lack, product_ahead, b, m;
    const float product = gpu::load_shared(products);
    gpu::load_shared(lack, product_ahead, ahead);
    const uint32_t at = row + place * 4, at_column = column + place * 4, at_share = all_shares + place * 8;
    const float s = gpu::load_shared(at);
    gpu::load_shared(b, m, at_share);
    const float before_ahead = gpu::load_shared(at + kRowBytes), before = gpu::load_shared(at_column);
    if (found == 0) break;
    lanes = gpu::shuffle(lanes + kRowBytes, l);  // the compiler would add after the loads below, and wait for them
    // Row t + 1 without that cluster, and then with it.
    const int here = place - l;
#pragma unroll
    for (int c = 0; c < 4; ++c) v[c] = here == c * gpu::kWarp ? kAbsent : next[c];
    mine_most = most_of(v);
    const int32_t most_of_others = gpu::warp_max(in_order(mine_most));
    const Join<float> step = join_quickly(b, s, lack);
    const float moved_ahead = moved(before_ahead, step.change, step.weight * product_ahead);
#pragma unroll
    for (int c = 0; c < 4; ++c) v[c] = here == c * gpu::kWarp ? moved_ahead : v[c];
    mine_most = max(mine_most, here % gpu::kWarp == 0 ? moved_ahead : kAbsent);
    gpu::sync_warp();  // everybody has read before anybody writes
    gpu::store_shared(at_column, moved(before, step.change, step.weight * product));
    if (ahead == ahead_mine) {
      gpu::store_shared(at_share, gpu::reciprocal_quick(m + 1.0f), m + 1.0f);
      mine = {place, step.change, step.weight};
    }
    gpu::sync_warp();
    load(next, lanes + kRowBytes);
    most = max(from_order(most_of_others), moved_ahead);
    row += kRowBytes;
    products += kPanel * 4;
    ahead += kAheadBytes;
  } while (ahead != ahead_stop);
  return stop - static_cast<int>((ahead_stop - ahead) / kAheadBytes);
}

// Decides records of a panel from the t-th on, up to one that finds kFew clusters and begins another; `t` and `count`
// move on.  By warp 0.
BIPACE_DEVICE void decide_few(const Panel& panel, Share* shares, float* similar, uint32_t usable, int width,
                              float lowest, int32_t* leader, int first_record, int& t, int& count, Decision& mine) {
  const int l = gpu::lane();
  for (; t < width; ++t) {
    if ((usable >> t & 1) == 0) continue;
    const int usable_from_t = gpu::lowest_bit(~(usable >> t)), stop = usable_from_t < 0 ? kPanel : t + usable_from_t;
    t = join_few(panel, shares, gpu::shared_address(similar), t, stop, lowest, mine);
    if (t == stop) {
      --t;
      continue;
    }
    if (count == kFew) return;
    const int k = count++;  // the record begins a cluster
    gpu::sync_warp();       // everybody has read before anybody writes
    const int place = place_of(k, true);
    similar[l * kFewPitch + place] = panel.products[t * kPanel + l];
    if (l == t) {
      shares[place] = {0.5f, 2.0f};
      leader[k] = first_record + t;
      mine = {place, kSeed, 1.0f};
    }
    gpu::sync_warp();
  }
}

// The same for any number of clusters, wherever S stands.
BIPACE_DEVICE void decide_many(const Panel& panel, const Clusters& clusters, float* similar, bool few, int64_t pitch,
                               uint32_t usable, int width, float lowest, int first_record, int t, int& count,
                               Decision& mine) {
  const int l = gpu::lane();
  for (; t < width; ++t) {
    if ((usable >> t & 1) == 0) continue;
    const int k = decide(similar + t * pitch, few, count, lowest), place = place_of(k, few);
    Join<float> step = {kSeed, 1.0f};
    float before = 0.0f, m = 1.0f;
    if (k < count) {
      m = clusters.next[k];
      before = similar[l * pitch + place];
      step = join_quickly(clusters.share[k], similar[t * pitch + place], panel.ahead[t].lack);
    } else {
      ++count;
      if (l == 0) clusters.leader[k] = first_record + t;
    }
    gpu::sync_warp();  // everybody has read before anybody writes
    similar[l * pitch + place] = moved(before, step.change, step.weight * panel.products[t * kPanel + l]);
    if (l == 0) {
      clusters.next[k] = m + 1.0f;
      clusters.share[k] = gpu::reciprocal_quick(m + 1.0f);
    }
    if (l == t) mine = {k, step.change, step.weight};
    gpu::sync_warp();
  }
}

// The panel that is decided, clusters at its beginning, and at the beginning of the one before, by which its S was laid
// out.
struct Turn {
  int panel, known, known_before;
};

// Decides a panel's records in order, by warp 0; leaves its decisions in memory, and in shared memory.
BIPACE_DEVICE void decide_panel(const Group& g, const Room& room, const Turn& turn, float lowest) {
  Shared& shared = *room.shared;
  const int panel = turn.panel, known = turn.known_before;
  const Panel& products = shared.panels[panel / kPanel % 2];
  const int l = gpu::lane();
  // The compiler knows that what comes out of a shuffle is the same for all lanes, and that they have not parted.
  const int width = gpu::shuffle(g.n - panel < kPanel ? g.n - panel : kPanel, 0);
  const uint32_t usable = gpu::shuffle(products.usable[0], 0);
  const float reciprocal = products.reciprocal[l];
  int count = gpu::shuffle(turn.known, 0), t = 0;
  Decision mine = {kNowhere, 0.0f, 0.0f};
  if (room.few(count)) {
    decide_few(products, shared.shares, room.beside(panel), usable, width, lowest, g.clusters.leader, panel, t, count,
               mine);
    if (mine.joined != kNowhere) mine.joined = cluster_at(mine.joined);
    // From here on there are more, and their members are counted in memory.  The next record begins a cluster, and
    // barriers follow before anybody joins one.
    for (int k = l; t < width && k < count; k += gpu::kWarp) {
      g.clusters.share[k] = shared.shares[place_of(k, true)].b;
      g.clusters.next[k] = shared.shares[place_of(k, true)].m;
    }
  }
  if (t < width) {
    decide_many(products, g.clusters, room.similar(panel, known), room.few(known), room.pitch(known), usable, width,
                lowest, panel, t, count, mine);
  }
  const float weight = mine.weight * reciprocal;
  shared.own.joined[l] = mine.joined;
  shared.own.changes[l] = {mine.change, weight};
  if (l < width) {
    g.made.joined[panel + l] = mine.joined;
    g.made.changes[panel + l] = {mine.change, weight};
  }
  if (l == 0) shared.count[0] = count;
}

// Clusters that are not there yet, in the rows of S: a warp to a row, `warp` of `warps` this.
BIPACE_DEVICE void leave_out(float* similar, int count, int warp, int warps) {
  for (int j = warp; j < kPanel; j += warps) {
#pragma unroll
    for (int place = gpu::lane(); place < kFew; place += gpu::kWarp) {
      if (cluster_at(place) >= count) similar[j * kFewPitch + place] = kAbsent;
    }
  }
}

// Deals clusters to workers by size: of all members in the order of clusters, the one in the middle of a cluster says
// in which part of them it is.  A cluster of two parts or more has the first worker to itself that begins in it, and
// who has nothing after that one is of its team.  Later clusters are the last worker's.  By a warp, an equal run of
// clusters to a lane.
template <typename Members>
BIPACE_DEVICE void deal(Task* tasks, int count, const Members& members) {
  const int l = gpu::lane(), each = (count + gpu::kWarp - 1) / gpu::kWarp;
  const int begin = min(l * each, count), end = min(begin + each, count);
  float own = 0.0f;
  for (int k = begin; k < end; ++k) own += members(k);
  float upto = own;
  for (int by = 1; by < gpu::kWarp; by *= 2) {
    const float other = gpu::shuffle_up(upto, by);
    if (l >= by) upto += other;
  }
  const float scale = static_cast<float>(kWorkers) / gpu::shuffle(upto, gpu::kWarp - 1);
  const auto worker = [&](float before, float size) {
    const int of = size * scale < 2.0f ? (before + 0.5f * size) * scale : before * scale + (before > 0.0f);
    return min(of, kWorkers - 1);
  };
  float before = upto - own;
  int found = -1;  // the last worker whose first is known
  if (begin > 0) found = worker(before - members(begin - 1), members(begin - 1));
  for (int k = begin; k < end; ++k) {
    const float size = members(k);
    for (const int of = worker(before, size); found < of;) tasks[++found].first = k;
    before += size;
  }
  if ((begin < end || l == 0) && end == count) {
    while (found < kWorkers - 1) tasks[++found].first = count;
  }
  gpu::sync_warp();
  const int first = l < kWorkers ? tasks[l].first : 0x7FFFFFFF;  // what begins later is the last one's
  const int beyond = gpu::shuffle(first, (l + 1) % gpu::kWarp);
  const uint32_t busy = gpu::ballot(first < beyond);
  const int leader = max(gpu::highest_bit(busy & ((2u << l) - 1)), 0), its_first = gpu::shuffle(first, leader);
  const int team = l - leader + gpu::lowest_bit(busy >> l >> 1) + 1;
  const bool in_team = gpu::shuffle(beyond - first, leader) == 1;
  if (l < kWorkers) tasks[l] = in_team ? Task{its_first, its_first + 1, l - leader, team} : Task{first, beyond, 0, 1};
}

// A warp's part of a group: `meanwhile` while a panel is decided, `after` once it has been, unless it is the last.
template <typename Meanwhile, typename After>
BIPACE_DEVICE void each_panel(const Group& g, const Shared& shared, const Meanwhile& meanwhile, const After& after) {
  Turn turn = {0, 0, 0};
  for (; turn.panel < g.n; turn.panel += kPanel) {
    turn.known = shared.count[0];
    gpu::sync_block();  // everybody has read it
    meanwhile(turn);
    gpu::sync_block();
    if (turn.panel + kPanel < g.n) after(turn);
    turn.known_before = turn.known;
  }
}

// Decides a group, by a block: a panel while S of the next one is made.  Each warp comes to the block's barriers from a
// loop of its own, so that none keeps in registers what others need.
BIPACE_DEVICE void decide_group(const Group& g, const Room& room, float lowest) {
  Shared& shared = *room.shared;
  const int t = gpu::thread(), w = gpu::shuffle(gpu::warp(), 0), l = gpu::lane();
  if (t == 0) shared.count[0] = 0;
  if (t < 2 * kWorkers) shared.begun[t % 2][t / 2].cluster = kNowhere;
  bring_panel(shared.panels[0], g, 0, t, kThreads);
  if (room.few(0)) leave_out(room.similar(0, 0), 0, w, kWarps);
  gpu::sync_block();
  if (w == 0) {
    each_panel(g, shared, [&](const Turn& turn) { decide_panel(g, room, turn, lowest); }, [](const Turn&) {});
  } else if (w % kSchedulers == 0) {
    const int helper = w / kSchedulers - 1, t_of_helpers = helper * gpu::kWarp + l;
    each_panel(
        g, shared,
        [&](const Turn& turn) {
          const int next = turn.panel + kPanel;
          if (next >= g.n) return;
          ask_own(shared.own, g, turn.panel, t_of_helpers);
          bring_panel(shared.panels[next / kPanel % 2], g, next, t_of_helpers, kHelpers * gpu::kWarp);
          if (room.few(turn.known)) leave_out(room.similar(next, turn.known), turn.known, helper, kHelpers);
          if (helper == 0 && room.few(turn.known)) {
            deal(shared.tasks[next / kPanel % 2], turn.known, [&](int k) { return shared.members[place_of(k, true)]; });
          }
          gpu::copy_wait<0>();
        },
        [&](const Turn& turn) {
          if (helper > 0) return;
          const int count = shared.count[0];
          if (room.few(count)) {  // dealt while the next panel is decided, which changes the shares
            for (int place = l; place < kFew; place += gpu::kWarp)
              shared.members[place] = shared.shares[place].m - 1.0f;
          } else {
            deal(shared.tasks[(turn.panel / kPanel + 1) % 2], count, [&](int k) { return g.clusters.next[k] - 1.0f; });
          }
        });
  } else {
    const int worker = w - w / kSchedulers - 1;
    Work work = {nullptr, 0, false, 0.0f, shared.batches[worker], shared.queues[worker]};
    each_panel(
        g, shared,
        [&](const Turn& turn) {
          const int next = turn.panel + kPanel, parity = turn.panel / kPanel % 2;
          if (next >= g.n) return;
          work.few = room.few(turn.known);
          work.column = room.similar(next, turn.known) + l * room.pitch(turn.known);
          work.reciprocal = next + l < g.n ? g.reciprocal[next + l] : 0.0f;
          const Task task = shared.tasks[parity][worker];
          const int panel = next + task.ahead * kPanel;
          Work part = work;
          int from = 0, last = turn.panel;
          if (task.team > 1) {
            if (panel >= g.n) return;
            const Begun* const before = shared.begun[1 - parity];
            const bool here = l < kWorkers && before[l].cluster == task.first && before[l].panel == panel;
            const int found = gpu::lowest_bit(gpu::ballot(here)), place = place_of(task.first, work.few);
            if (found >= 0) from = before[found].upto;
            last = max(from, last * (task.team - task.ahead) / task.team);
            if (task.ahead > 0) {
              Begun& mine = shared.begun[parity][worker];
              if (l == 0) mine.cluster = task.first, mine.panel = panel, mine.upto = last;
              part = {mine.similar + l, place, work.few, 0.0f, work.batches, work.queue};
              if (panel + l < g.n) part.reciprocal = g.reciprocal[panel + l];
            }
            part.column[place - part.origin] = found >= 0 ? before[found].similar[l] : 0.0f;
          }
          part.apply_before(g, task.first, min(task.beyond, turn.known), from, last, panel);
        },
        [&](const Turn&) { work.apply_own(shared.own, worker); });
  }
}

}  // namespace

// Blocks: (slots, E).
BIPACE_KERNEL(scan_groups, ScanArgs, kThreads) {
  const int64_t slots = gpu::blocks(), slot = gpu::block(), e = gpu::block_y();
  const Room room = room_of(a, slot, e, slots, gpu::shared_memory());
  const Group g = group_of(a, slot, e, slots);
  if (g.n == 0) return;
  decide_group(g, room, a.lowest ? a.lowest[e] : static_cast<float>(a.only_lowest));
  int64_t* const first = a.first + e * a.first_stride + g.begin;
  for (int i = gpu::thread(); i < g.n; i += kThreads) {
    const int k = g.made.joined[i];
    first[i] = g.kind[i] == 2 ? -1 : g.begin + (k < 0 ? i : g.clusters.leader[k]);
  }
}

}  // namespace bipace
