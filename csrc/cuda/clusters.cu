// The greedy decisions of Algorithm 1, at a cost that does not depend on D (cpu/clusters.cpp, and the sweep of
// cpu/sweep.cpp).
//
// A centroid is a positive combination of its members, so its similarity to any record follows from known numbers.
// When x_i joins cluster k as its m-th member, with s = S[k, i] and the Gram matrix G of the unit rows,
//
//     a = 1 − 1/m,  b = 1/m,  q = 2ab(1 − s) + b²(1 − G[i,i]),  u = √(1 − q),  d = q/(u(1 + u)) − b/u,  w = b/u
//     S[k, j] += d · S[k, j] + w · G[i, j]          for all records j still to come
//
// and a seed sets S[k, ·] = G[i, ·].  The plain form r(aS + bG) drifts linearly in float32 (1.5e-4 at 8,192 members);
// the increment form does not.
//
// A block of threads takes one group under one ε, panel by panel of 32 records.  S exists for two panels at a time, in
// shared memory: while warp 0 decides a panel's records, the others compute S of the next panel from all known
// decisions and G, which is read once; then all warps add the panel's own decisions.  So S is not stored, a sweep costs
// no memory, and only the 32 columns of a panel are in the chain from one decision to the next.
//
// That chain is what a group takes, so up to kFew clusters it has a loop of its own, decide_few: all it reads is in
// shared memory, brought there a panel ahead by the other warps.  `python -m bench sass` counts its instructions.
#include "common/greedy.h"
#include "cuda/arguments.h"
#include "cuda/intrinsics.h"

namespace bipace {
namespace {

constexpr int kWarps = 16, kThreads = kWarps * gpu::kWarp;
constexpr int kWorkers = kWarps - 1, kWorkerThreads = kWorkers * gpu::kWarp;
constexpr int kWorkerBarrier = 1;
constexpr int kPanel = 32;      // records decided before others follow: a lane each
constexpr int kChunk = 64;      // decisions whose rows of G are brought in together
constexpr int kNowhere = -1;    // instead of a cluster: the record affects no other
constexpr float kSeed = -1.0f;  // d of a record that begins a cluster; no join has it, for a > 0
constexpr int kFew = 128;       // clusters whose decisions take the short way: four to a lane
// S of a panel that begins with kFew clusters at most, in shared memory: room for 64 more, lanes' four values in a
// piece. Two rows are read beyond the last record, and ignored.
constexpr int kFewPitch = 196, kFewRows = kPanel + 2;
constexpr float kAbsent = -2.0f;  // S of a cluster that is not there: below every cosine, and finite
constexpr int kBalanced = 1024;   // clusters that are dealt to workers by size; those beyond by number

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
BIPACE_DEVICE int decide(const float* similar, int count, float lowest) {  // S[·, i]
  const int l = gpu::lane();
  float best = kAbsent;
  for (int k = l; k < count; k += gpu::kWarp) best = max(best, similar[k]);
  const float most = warp_most(best);
  if (!(most >= lowest)) return count;
  const float near = most - static_cast<float>(kBand);
  for (int base = 0; base < count; base += gpu::kWarp) {
    const uint32_t found = gpu::ballot(base + l < count && similar[base + l] >= near);
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

// S[k, j] after a join; a seed is one with change = kSeed, weight = 1 and 0 before.
BIPACE_DEVICE float moved(float before, float product, float change, float weight) {
  return before + gpu::fma_rn(change, before, weight * product);
}

// Of one decision, as it is kept for the panels to come.
struct Decisions {
  int32_t* joined;  // [room] the cluster, or kNowhere
  float* change;    // [room] d, or kSeed
  float* weight;    // [room] w
  int32_t* leader;  // [room] of cluster k: the record of the group that began it
  float* next;      // [room] of cluster k: the number m of the member that joins next; while there are kFew clusters at
                    // most both stand in shared memory
  float* share;     // [room] of cluster k: 1 / m, a division that the chain need not wait for
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

// Products of a panel's unit rows: of record t with l at t · 32 + l, for t ≤ l.
struct Panel {
  float products[kPanel * kPanel];
  Ahead ahead[kPanel];
};

// A chunk of decisions in shared memory, with the rows of G at the panel's columns.
struct Stage {
  float products[kChunk * kPanel];
  int32_t joined[kChunk];
  int32_t worker[kChunk];  // the warp whose decision it is
  float change[kChunk];
  float weight[kChunk];  // w / ‖x‖
};

// All that stands in shared memory before S.
struct Shared {
  Stage stages[3];  // two for the decisions before a panel, one for the panel's own
  Panel panels[2];
  Share shares[kFew];         // of cluster k, while there are kFew at most
  uint8_t worker[kBalanced];  // of cluster k: which of the other warps makes its S
  int32_t count[4];           // clusters so far; three to keep what follows on 16 bytes
};
static_assert(sizeof(Shared) == 38416, "bipace_kernels/backends/cuda/scan.py asks for as much");

struct Group {
  const float* gram;  // [pitch, pitch]
  int64_t pitch;
  const float* reciprocal;  // [n]
  const uint8_t* kind;      // [n]
  int64_t begin;            // its first record
  int n;
  Decisions decided;
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
          {reinterpret_cast<int32_t*>(scratch), reinterpret_cast<float*>(scratch + a.side),
           reinterpret_cast<float*>(scratch + 2 * a.side), reinterpret_cast<int32_t*>(scratch + 3 * a.side),
           reinterpret_cast<float*>(scratch + 4 * a.side), reinterpret_cast<float*>(scratch + 5 * a.side)}};
}

// Asks for a chunk: decisions [first, first + rows) and G at the panel's columns.  By the workers, `t` of them this.
BIPACE_DEVICE void ask(Stage& stage, const Group& g, int first, int rows, int panel, int t) {
  for (int i = t; i < rows * (kPanel / 4); i += kWorkerThreads) {
    const int r = i / (kPanel / 4), c = i % (kPanel / 4) * 4;
    gpu::copy_async(stage.products + r * kPanel + c, g.gram + (first + r) * g.pitch + panel + c, 16);
  }
}

// What goes with it; the decisions must have been made.  `worker`: of clusters below kBalanced.
BIPACE_DEVICE void take_decisions(Stage& stage, const Group& g, int first, int rows, const uint8_t* worker, int t) {
  for (int r = t; r < kChunk; r += kWorkerThreads) {
    const bool inside = r < rows;
    const int k = inside ? g.decided.joined[first + r] : kNowhere;
    stage.joined[r] = k;
    stage.worker[r] = k == kNowhere ? kNowhere : k < kBalanced ? worker[k] : k % kWorkers;
    stage.change[r] = inside ? g.decided.change[first + r] : 0.0f;
    stage.weight[r] = inside ? g.decided.weight[first + r] * g.reciprocal[first + r] : 0.0f;
  }
}

// Applies the decisions of a chunk that are a worker's, in order, to S of a panel; a lane to a column.
BIPACE_DEVICE void apply(const Stage& stage, int rows, float* similar, int64_t pitch, float reciprocal_j, int worker) {
  const int l = gpu::lane();
  float* const column = similar + l * pitch;
  for (int base = 0; base < rows; base += gpu::kWarp) {
    const int k_of_lane = stage.joined[base + l];
    uint32_t mine = gpu::ballot(stage.worker[base + l] == worker);
    while (mine) {
      int r = gpu::lowest_bit(mine);
      const int k = stage.joined[base + r];
      uint32_t same = gpu::ballot(k_of_lane == k);  // its decisions, one after another
      mine &= ~same;
      float change = stage.change[base + r], weight = stage.weight[base + r];
      float product = stage.products[(base + r) * kPanel + l];
      float s = change == kSeed ? 0.0f : column[k];
      while (same &= same - 1) {  // what the next one needs is asked for before this one is done
        r = gpu::lowest_bit(same);
        const float next_change = stage.change[base + r], next_weight = stage.weight[base + r];
        const float next_product = stage.products[(base + r) * kPanel + l];
        s = moved(s, product * reciprocal_j, change, weight);
        change = next_change, weight = next_weight, product = next_product;
      }
      column[k] = moved(s, product * reciprocal_j, change, weight);
    }
  }
}

// All decisions before the `last` record on S of a panel, chunk by chunk: the next one is on its way while one is
// applied.  By the workers, `t` of them this.
BIPACE_DEVICE void apply_all(Shared& shared, const Group& g, int last, int panel, float* similar, int64_t pitch,
                             float reciprocal_j, int t) {
  const int chunks = (last + kChunk - 1) / kChunk;
  for (int c = -1; c < chunks; ++c) {
    if (c + 1 < chunks) {
      const int from = (c + 1) * kChunk, rows = last - from < kChunk ? last - from : kChunk;
      ask(shared.stages[(c + 1) % 2], g, from, rows, panel, t);
      take_decisions(shared.stages[(c + 1) % 2], g, from, rows, shared.worker, t);
    }
    gpu::copy_commit();  // an empty group where there is nothing more, so that their count stays
    if (c < 0) continue;
    gpu::copy_wait<1>();
    gpu::sync_some(kWorkerBarrier, kWorkerThreads);
    apply(shared.stages[c % 2], kChunk, similar, pitch, reciprocal_j, t / gpu::kWarp);
    gpu::sync_some(kWorkerBarrier, kWorkerThreads);  // before the stage is filled anew
  }
  gpu::copy_wait<0>();
}

// Brings the products of a panel's records in.  By `threads` threads, `t` of them this.
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
}

// Where a block keeps S of two panels: in shared memory where all clusters fit, else in memory.
struct Room {
  Shared* shared;
  float* near;  // [2, kPanel, capacity]
  float* far;   // [2, kPanel, far_pitch]
  int64_t capacity, far_pitch;

  // S of the turn-th panel, `known` clusters being there at the beginning of the one before: there may be up to 32 more
  // by that one's end, and 32 more by its own.
  BIPACE_DEVICE bool fits(int known) const { return known + 2 * kPanel <= capacity; }
  // Whether a panel's S has the layout of decide_few; while `known` clusters are there now, it is decided by it.
  BIPACE_DEVICE bool few(int known) const { return known <= kFew && capacity * kPanel >= kFewPitch * kFewRows; }
  BIPACE_DEVICE int64_t pitch(int known) const { return few(known) ? kFewPitch : fits(known) ? capacity : far_pitch; }
  BIPACE_DEVICE float* similar(int turn, int known) const {
    return fits(known) ? near + turn % 2 * kPanel * capacity : far + turn % 2 * kPanel * far_pitch;
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
// kFewPitch values to a record.  A lane has four clusters, the last lane the first ones: the highest bit of a ballot is
// the oldest, for an instruction less than the lowest.
//
// While record t's cluster is sought, the row of t + 1 waits in registers: t's decision changes one number there, which
// every lane computes for itself, and the maximum over all others is found meanwhile.
BIPACE_DEVICE int join_few(const Panel& panel, const Share* shares, uint32_t similar, int t, int stop, float lowest,
                           Decision& mine) {
  constexpr uint32_t kRowBytes = kFewPitch * 4, kAheadBytes = sizeof(Ahead);
  // What comes out of a shuffle stays in a register: otherwise it is computed anew in every turn.
  const int l = gpu::lane(), first = gpu::shuffle(4 * (gpu::kWarp - 1 - l), l);
  const uint32_t column = gpu::shuffle(similar + l * kRowBytes, l);
  const uint32_t all_shares = gpu::shuffle(gpu::shared_address(shares), 0);
  const uint32_t ahead_first = gpu::shuffle(gpu::shared_address(panel.ahead), 0);
  const uint32_t ahead_mine = gpu::shuffle(ahead_first + l * kAheadBytes, l);
  const uint32_t ahead_stop = ahead_first + stop * kAheadBytes;
  uint32_t ahead = ahead_first + t * kAheadBytes;
  uint32_t row = similar + t * kRowBytes;  // of record t
  uint32_t lanes = row + first * 4;        // and this lane's clusters there
  uint32_t products = gpu::shared_address(panel.products + t * kPanel + l);
  const auto most_of = [](const float (&v)[4]) { return max(max(v[0], v[1]), max(v[2], v[3])); };
  float v[4], next[4];
  gpu::load_shared(v, lanes);
  gpu::load_shared(next, lanes + kRowBytes);
  float mine_most = most_of(v), most = warp_most(mine_most);
#pragma unroll 1
  do {
    const float near = most - static_cast<float>(kBand);
    int oldest = 3;
    if (v[2] >= near) oldest = 2;
    if (v[1] >= near) oldest = 1;
    if (v[0] >= near) oldest = 0;
    const uint32_t found = gpu::ballot(mine_most >= near && most >= lowest);
    if (found == 0) break;
    const int k = gpu::shuffle(first + oldest, gpu::highest_bit(found));
    float lack, product_ahead, b, m;
    const float product = gpu::load_shared(products);
    gpu::load_shared(lack, product_ahead, ahead);
    const uint32_t at = row + k * 4, at_column = column + k * 4, at_share = all_shares + k * 8;
    const float s = gpu::load_shared(at);
    gpu::load_shared(b, m, at_share);
    const float before_ahead = gpu::load_shared(at + kRowBytes), before = gpu::load_shared(at_column);
    // Row t + 1 without cluster k, and then with it.
    const uint32_t here = static_cast<uint32_t>(k - first);
#pragma unroll
    for (uint32_t c = 0; c < 4; ++c) v[c] = here == c ? kAbsent : next[c];
    mine_most = most_of(v);
    most = warp_most(mine_most);
    const Join<float> step = join_quickly(b, s, lack);
    const float moved_ahead = moved(before_ahead, product_ahead, step.change, step.weight);
    most = max(most, moved_ahead);
#pragma unroll
    for (uint32_t c = 0; c < 4; ++c) v[c] = here == c ? moved_ahead : v[c];
    mine_most = max(mine_most, here < 4 ? moved_ahead : kAbsent);
    gpu::sync_warp();  // everybody has read before anybody writes
    gpu::store_shared(at_column, moved(before, product, step.change, step.weight));
    if (ahead == ahead_mine) {
      gpu::store_shared(at_share, gpu::reciprocal_quick(m + 1.0f), m + 1.0f);
      mine = {k, step.change, step.weight};
    }
    gpu::sync_warp();
    gpu::load_shared(next, lanes + 2 * kRowBytes);
    row += kRowBytes;
    lanes += kRowBytes;
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
    similar[l * kFewPitch + k] = panel.products[t * kPanel + l];
    if (l == t) {
      shares[k] = {0.5f, 2.0f};
      leader[k] = first_record + t;
      mine = {k, kSeed, 1.0f};
    }
    gpu::sync_warp();
  }
}

// The same for any number of clusters, wherever S stands.
BIPACE_DEVICE void decide_many(const Panel& panel, const Decisions& decided, float* similar, int64_t pitch,
                               uint32_t usable, int width, float lowest, int first_record, int t, int& count,
                               Decision& mine) {
  const int l = gpu::lane();
  for (; t < width; ++t) {
    if ((usable >> t & 1) == 0) continue;
    const int k = decide(similar + t * pitch, count, lowest);
    Join<float> step = {kSeed, 1.0f};
    float before = 0.0f, m = 1.0f;
    if (k < count) {
      m = decided.next[k];
      before = similar[l * pitch + k];
      step = join_quickly(decided.share[k], similar[t * pitch + k], panel.ahead[t].lack);
    } else {
      ++count;
      if (l == 0) decided.leader[k] = first_record + t;
    }
    gpu::sync_warp();  // everybody has read before anybody writes
    similar[l * pitch + k] = moved(before, panel.products[t * kPanel + l], step.change, step.weight);
    if (l == 0) {
      decided.next[k] = m + 1.0f;
      decided.share[k] = gpu::reciprocal_quick(m + 1.0f);
    }
    if (l == t) mine = {k, step.change, step.weight};
    gpu::sync_warp();
  }
}

// Decides a panel's records in order, by warp 0; leaves its decisions in memory and in the third stage.  `known`:
// clusters at the beginning of the panel before, by which S of this one was laid out.
BIPACE_DEVICE void decide_panel(const Group& g, const Room& room, int panel, int turn, int known, float lowest) {
  const Panel& products = room.shared->panels[turn % 2];
  Shared& shared = *room.shared;
  const int l = gpu::lane();
  // The compiler knows that what comes out of a shuffle is the same for all lanes, and that they have not parted.
  const int width = gpu::shuffle(g.n - panel < kPanel ? g.n - panel : kPanel, 0);
  const uint32_t usable = gpu::ballot(l < width && g.kind[panel + l] == 0);
  int count = gpu::shuffle(shared.count[0], 0), t = 0;
  Decision mine = {kNowhere, 0.0f, 0.0f};
  if (room.few(count)) {
    decide_few(products, shared.shares, room.similar(turn, known), usable, width, lowest, g.decided.leader, panel, t,
               count, mine);
    // From here on there are more, and their members are counted in memory.  The next record begins a cluster, and
    // barriers follow before anybody joins one.
    for (int k = l; t < width && k < count; k += gpu::kWarp) {
      g.decided.share[k] = shared.shares[k].b;
      g.decided.next[k] = shared.shares[k].m;
    }
  }
  decide_many(products, g.decided, room.similar(turn, known), room.pitch(known), usable, width, lowest, panel, t, count,
              mine);
  Stage& stage = shared.stages[2];
  stage.joined[l] = mine.joined;
  stage.worker[l] = mine.joined == kNowhere ? kNowhere : mine.joined % kWarps;
  stage.change[l] = mine.change;
  stage.weight[l] = l < width ? mine.weight * g.reciprocal[panel + l] : 0.0f;
  if (l < width) {
    g.decided.joined[panel + l] = mine.joined;
    g.decided.change[panel + l] = mine.change;
    g.decided.weight[panel + l] = mine.weight;
  }
  if (l == 0) shared.count[0] = count;
}

// Clusters that are not there yet, in a row of S: a warp to a row.
BIPACE_DEVICE void leave_out(float* similar, int64_t pitch, int count, int warp) {
  for (int j = warp; j < kPanel; j += kWarps) {
#pragma unroll
    for (int c = 0; c < kFew; c += gpu::kWarp) {
      const int k = c + gpu::lane();
      if (k >= count) similar[j * pitch + k] = kAbsent;
    }
  }
}

// Deals clusters to workers by size: of all members in the order of clusters, the one in the middle of a cluster says
// in which part of them it is.  So a large cluster has a worker to itself.  Members are those at the panel's beginning
// or later: nothing depends on it but time.  By a warp.
BIPACE_DEVICE void deal(const Room& room, const Decisions& decided, int count) {
  Shared& shared = *room.shared;
  const int l = gpu::lane(), some = count < kBalanced ? count : kBalanced;
  const bool few = room.few(count);
  const auto members = [&](int k) { return k < some ? (few ? shared.shares[k].m : decided.next[k]) - 1.0f : 0.0f; };
  float all = 0.0f;
  for (int k = l; k < some; k += gpu::kWarp) all += members(k);
  for (int mask = gpu::kWarp / 2; mask > 0; mask /= 2) all += gpu::shuffle_xor(all, mask);
  const float scale = static_cast<float>(kWorkers) / all;
  float before = 0.0f;
  for (int base = 0; base < some; base += gpu::kWarp) {
    const float own = members(base + l);
    float upto = own;
    for (int by = 1; by < gpu::kWarp; by *= 2) {
      const float other = gpu::shuffle_up(upto, by);
      if (l >= by) upto += other;
    }
    const int worker = static_cast<int>((before + upto - 0.5f * own) * scale);
    if (base + l < some) shared.worker[base + l] = static_cast<uint8_t>(worker < kWorkers ? worker : kWorkers - 1);
    before += gpu::shuffle(upto, gpu::kWarp - 1);
  }
}

// Decides a group, by a block: a panel while S of the next one is made.
BIPACE_DEVICE void decide_group(const Group& g, const Room& room, float lowest) {
  Shared& shared = *room.shared;
  const int t = gpu::thread(), w = gpu::shuffle(gpu::warp(), 0), l = gpu::lane();
  if (t == 0) shared.count[0] = 0;
  bring_panel(shared.panels[0], g, 0, t, kThreads);
  if (room.few(0)) leave_out(room.similar(0, 0), kFewPitch, 0, w);
  gpu::sync_block();
  int known_before = 0;  // clusters at the beginning of the panel before
  for (int panel = 0; panel < g.n; panel += kPanel) {
    const int next = panel + kPanel, turn = panel / kPanel, known = shared.count[0];
    float* const similar = room.similar(turn + 1, known);
    const int64_t pitch = room.pitch(known);
    const float reciprocal_next = next + l < g.n ? g.reciprocal[next + l] : 0.0f;
    gpu::sync_block();  // everybody has read the number of clusters
    if (w == 0) {
      decide_panel(g, room, panel, turn, known_before, lowest);
    } else if (next < g.n) {
      const int worker = t - gpu::kWarp;
      ask(shared.stages[2], g, panel, kPanel, next, worker);
      bring_panel(shared.panels[(turn + 1) % 2], g, next, worker, kWorkerThreads);
      apply_all(shared, g, panel, next, similar, pitch, reciprocal_next, worker);
    }
    gpu::sync_block();
    if (next < g.n) {
      const int count = shared.count[0];
      apply(shared.stages[2], kPanel, similar, pitch, reciprocal_next, w);
      if (room.few(count)) leave_out(similar, pitch, count, w);
      if (w == kWarps - 1) deal(room, g.decided, count);
    }
    known_before = known;
  }
}

}  // namespace

// Blocks: (slots, E).
BIPACE_KERNEL(scan_groups, ScanArgs, kThreads) {
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
