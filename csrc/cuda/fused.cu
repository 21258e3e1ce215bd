// From rows that have been looked at to the advantages of cosine clusters in one launch: Gram matrix, decisions,
// numbers, step term, total; or to the clusters.
//
// As many blocks as run at once share two lists of work. A block takes a group, and in the end writes its results; and
// it takes tiles of Gram matrices, anybody's, whenever its group's next decisions need products that are not there yet
// and that nobody has begun. So the first columns of all groups come first, and decisions are made while the GPU
// multiplies the later ones.
//
//     tile       multiply, tell that it is done                                   gram.h
//     decide     a group's records, as far as its columns are there               scan.h
//     number     a group's clusters; tell how many
//     finish     when all earlier groups have told: labels, step terms, totals    estimators.h
//                (or labels alone)
//
// Nobody can wait for ever, however few blocks run and in whatever order: a block waits only for tiles that somebody
// has taken, and a tile waits for nothing; or for the clusters of earlier groups, all of which somebody has taken too,
// and the first of them waits for tiles alone.  Each step has the bits that it has in a launch of its own.
#include "cuda/estimators.h"
#include "cuda/gram.h"
#include "cuda/scan.h"

namespace bipace {

struct FusedArgs {
  GramArgs gram;
  ScanArgs scan;          // of one ε and whole groups
  const float* returns;   // [M]
  const float* episode;   // [M]
  const int64_t* key;     // [N] by row; null for the mean
  const int64_t* source;  // [N]: -1 where a row has no record
  int64_t n_rows;         // N
  int64_t estimator;      // 0 mean, 1 diff_peer, 2 q_style
  int64_t divide;         // by σ + δ
  double delta;
  double weight;  // of the step term
  RowResults out;
  int64_t slots;      // groups
  int64_t together;   // groups whose tiles are taken column by column
  int64_t parts;      // of `together` groups each
  int32_t* progress;  // zeros before: groups taken, tiles taken; [slots] clusters + 1; [slots, columns / 128] tiles
  int64_t* labels;    // [M]; not null: clusters of records, −1 where not taken, are all that is wanted
};

namespace {

constexpr int kThreads = scan::kThreads;
static_assert(kThreads == gram::kThreads, "a block does both");
constexpr int kNone = -1;

enum Work : int { kTile, kDecide, kNumber, kFinish, kLeave };

// What the block is about; warp 0 writes it between two barriers.
struct Desk {
  int work;
  int tile_slot, block_i, block_j;  // of a tile
  int slot;                         // the block's group, or kNone
  int clusters;                     // of it, once numbered
  int numbered;                     // 1: its clusters have been told
  int ready;                        // columns of it that are there
  int no_more_groups, no_more_tiles;
  int part;           // of the tile taken last
  int counted;        // groups whose clusters are in `base`
  int64_t base;       // clusters of groups before `counted`
  scan::Progress at;  // its decisions
  int32_t room[scan::kWarps];
};

// Shared memory: a place for a tile or for the finish, the desk, the tiles before each part, and what the scan needs.
struct Shared {
  unsigned char* tile;  // first, for its alignment
  Desk* desk;
  int64_t* tiles_before;  // [parts + 1]
  unsigned char* scan;
};

constexpr int64_t kDeskBytes = 256;
static_assert(sizeof(Desk) <= kDeskBytes, "the desk has its place");

BIPACE_DEVICE int64_t up(int64_t bytes) { return (bytes + 127) / 128 * 128; }

BIPACE_DEVICE Shared shared_of(const FusedArgs& a) {
  unsigned char* const tile = gpu::shared_memory();
  unsigned char* const desk = tile + up(gram::shared_bytes(a.gram));
  unsigned char* const after = desk + kDeskBytes;
  return {tile, reinterpret_cast<Desk*>(desk), reinterpret_cast<int64_t*>(after), after + up((a.parts + 1) * 8)};
}

BIPACE_DEVICE int length_of(const FusedArgs& a, int64_t slot) {
  return static_cast<int>(a.gram.ends[slot] - a.gram.begins[slot]);
}
BIPACE_DEVICE int32_t* groups_taken(const FusedArgs& a) { return a.progress; }
BIPACE_DEVICE int32_t* tiles_taken(const FusedArgs& a) { return a.progress + 1; }
BIPACE_DEVICE int32_t* clusters_of(const FusedArgs& a, int64_t slot) { return a.progress + 2 + slot; }
BIPACE_DEVICE int32_t* tiles_done(const FusedArgs& a, int64_t slot, int column) {
  return a.progress + 2 + a.slots + slot * (a.gram.columns / gram::kTile) + column;
}

// Tiles before each part of the groups.  A part has as many for each of its groups as for its longest, so that the
// number of a tile tells its group at once; those that there are not are passed over.
BIPACE_DEVICE void count_tiles(const FusedArgs& a, const Shared& shared) {
  for (int64_t part = gpu::thread(); part < a.parts; part += kThreads) {
    int longest = 0;
    for (int64_t slot = part * a.together; slot < a.slots && slot < (part + 1) * a.together; ++slot) {
      longest = max(longest, length_of(a, slot));
    }
    shared.tiles_before[part + 1] = gram::tiles_before((longest + gram::kTile - 1) / gram::kTile) * a.together;
  }
  gpu::sync_block();
  if (gpu::thread() == 0) {
    shared.tiles_before[0] = 0;
    for (int64_t part = 0; part < a.parts; ++part) shared.tiles_before[part + 1] += shared.tiles_before[part];
  }
}

BIPACE_DEVICE int take(int32_t* tickets) {  // by a warp
  int ticket = 0;
  if (gpu::lane() == 0) ticket = gpu::atomic_add(tickets, 1);
  return gpu::shuffle(ticket, 0);
}

// A number that others count up, as one lane sees it, for each might see another.  By a warp.
BIPACE_DEVICE int seen(const int32_t* at) {
  int value = 0;
  if (gpu::lane() == 0) value = gpu::look(at);
  return gpu::shuffle(value, 0);
}

// The next tile that there is.  By a warp; false: all are taken.
BIPACE_DEVICE bool take_tile(const FusedArgs& a, const Shared& shared, Desk& mine) {
  while (!mine.no_more_tiles) {
    const int64_t ticket = take(tiles_taken(a));
    if (ticket >= shared.tiles_before[a.parts]) {
      mine.no_more_tiles = 1;
      break;
    }
    while (ticket >= shared.tiles_before[mine.part + 1]) ++mine.part;
    const int64_t in_part = ticket - shared.tiles_before[mine.part];
    const int64_t slot = mine.part * a.together + in_part % a.together;
    gram::triangle(in_part / a.together, mine.block_i, mine.block_j);
    if (slot >= a.slots || mine.block_j * gram::kTile >= length_of(a, slot)) continue;
    mine.tile_slot = static_cast<int>(slot);
    return true;
  }
  return false;
}

// Whether somebody has taken every tile of a group's column of tiles.
BIPACE_DEVICE bool is_taken(const FusedArgs& a, const Shared& shared, int slot, int column) {
  const int64_t last = gram::tiles_before(column + 1) - 1;
  const int64_t ticket = shared.tiles_before[slot / a.together] + last * a.together + slot % a.together;
  return seen(tiles_taken(a)) > ticket;
}

// Adds up the clusters of the groups before this one; false where some have not told.  By a warp.
BIPACE_DEVICE bool count_before(const FusedArgs& a, Desk& mine) {
  while (mine.counted < mine.slot) {
    const int other = mine.counted + gpu::lane();
    const int32_t told = other < mine.slot ? gpu::look(clusters_of(a, other)) : 1;
    if (gpu::any(told == 0)) return false;
    int32_t sum = told - 1;
    for (int mask = gpu::kWarp / 2; mask > 0; mask /= 2) sum += gpu::shuffle_xor(sum, mask);
    mine.base += sum;
    mine.counted = min(mine.counted + gpu::kWarp, mine.slot);
  }
  return true;
}

// What the block does next.  By warp 0; every lane comes to the same answer.
BIPACE_DEVICE Work choose(const FusedArgs& a, const Shared& shared, Desk& mine, int* count) {
  for (;;) {
    if (mine.slot == kNone && !mine.no_more_groups) {
      const int slot = take(groups_taken(a));
      mine.no_more_groups = slot >= a.slots;
      if (!mine.no_more_groups) {
        mine.slot = slot;
        mine.numbered = mine.ready = 0;
        mine.at = {0, 0};
        if (gpu::lane() == 0) *count = 0;
      }
    }
    bool waits = false;
    if (mine.slot != kNone) {
      const int n = length_of(a, mine.slot);
      if (mine.numbered) {
        if (count_before(a, mine)) return kFinish;
      } else {
        if (mine.at.panel >= n) return kNumber;
        const int needed = mine.at.panel + scan::kPanel < n ? mine.at.panel + scan::kPanel : mine.at.panel;
        while (mine.ready < n) {
          const int column = mine.ready / gram::kTile;
          if (seen(tiles_done(a, mine.slot, column)) <= column) break;
          mine.ready += gram::kTile;
        }
        if (needed < mine.ready) return kDecide;
        waits = is_taken(a, shared, mine.slot, needed / gram::kTile);
      }
    }
    if (!waits && take_tile(a, shared, mine)) return kTile;
    if (mine.slot == kNone && mine.no_more_groups) return kLeave;
    gpu::pause();
  }
}

// The place of each cluster among its group's: those that begin before it.  Tells how many there are.
BIPACE_DEVICE void number(const FusedArgs& a, const scan::Group& g, Desk& desk) {
  int32_t* const place = g.decided.members;  // counts of members are needed no more
  int32_t told = 0;
  for (int start = 0; start < g.n; start += kThreads) {
    const int i = start + gpu::thread();
    const int k = i < g.n ? g.decided.joined[i] : scan::kNowhere;
    const bool begins = i < g.n && g.kind[i] != 2 && (k < 0 || g.decided.leader[k] == i);
    const uint32_t mine = gpu::ballot(begins);
    gpu::sync_block();  // the room may still be read
    if (gpu::lane() == 0) desk.room[gpu::warp()] = gpu::count_bits(mine);
    gpu::sync_block();
    int32_t before = told + gpu::count_bits(mine & ((1u << gpu::lane()) - 1));
    for (int w = 0; w < scan::kWarps; ++w) {
      before += w < gpu::warp() ? desk.room[w] : 0;
      told += desk.room[w];
    }
    if (begins) place[i] = before;
  }
  gpu::sync_block();
  if (gpu::thread() == 0) {
    gpu::publish(clusters_of(a, desk.slot), told + 1);
    desk.clusters = told;
    desk.numbered = 1;
  }
}

// The records of a group, side by side with those of their cluster, in processing order.
struct Sorted {
  int64_t* key;    // [room] by place
  float* value;    // [room] by place
  int32_t* label;  // [room] by record: the cluster's place in its group; kNone: not taken
  int32_t* place;  // [room] by record
  int32_t* size;   // [room] by cluster
  int32_t* begin;  // [room] by cluster
};
constexpr int kLongest = 1024;  // records of a group (LONGEST of bipace_kernels/cuda/fused.py)
static_assert(kLongest * (8 + 5 * 4) <= gram::kShared, "the finish takes the place of a tile");

BIPACE_DEVICE Sorted sorted_in(unsigned char* memory, int64_t room) {
  int64_t* const key = reinterpret_cast<int64_t*>(memory);
  float* const value = reinterpret_cast<float*>(key + room);
  int32_t* const label = reinterpret_cast<int32_t*>(value + room);
  return {key, value, label, label + room, label + 2 * room, label + 3 * room};
}

// The place of every record in its cluster, and where each cluster begins.  By warp 0, a record to a lane.
BIPACE_DEVICE void find_places(const Sorted& s, int n, int clusters) {
  const int l = gpu::lane();
  for (int k = l; k < clusters; k += gpu::kWarp) s.size[k] = 0;
  gpu::sync_warp();
  for (int start = 0; start < n; start += gpu::kWarp) {
    const int label = start + l < n ? s.label[start + l] : kNone;
    const uint32_t alike = gpu::match(label), before = alike & ((1u << l) - 1);
    const int had = label == kNone ? 0 : s.size[label];
    if (label != kNone) s.place[start + l] = had + gpu::count_bits(before);
    gpu::sync_warp();  // everybody has read before the first of each cluster writes
    if (label != kNone && before == 0) s.size[label] = had + gpu::count_bits(alike);
    gpu::sync_warp();
  }
  int32_t taken = 0;
  for (int start = 0; start < clusters; start += gpu::kWarp) {
    const int32_t own = start + l < clusters ? s.size[start + l] : 0;
    int32_t sum = own;
#pragma unroll
    for (int by = 1; by < gpu::kWarp; by *= 2) {
      const int32_t other = gpu::shuffle_up(sum, by);
      sum += l >= by ? other : 0;
    }
    if (start + l < clusters) s.begin[start + l] = taken + sum - own;
    taken += gpu::shuffle(sum, gpu::kWarp - 1);
  }
}

// Step term and branch of a record out of its cluster's `n` records, of which it is the `self`-th.
template <typename Sums>
BIPACE_DEVICE float step_of_action(const int64_t* key, const float* value, int n, int self, uint8_t& branch) {
  Sums sums{key[self]};
  for (int j = 0; j < n; ++j) sums.add(true, j == self, static_cast<double>(value[j]), key[j]);
  branch = sums.branch();
  return sums.term(value[self]);
}

BIPACE_DEVICE float step_of_mean(const FusedArgs& a, const float* value, int n, int self, uint8_t& branch) {
  Mean sums;
  for (int j = 0; j < n; ++j) sums.add(true, static_cast<double>(value[j]));
  branch = kPaceBranch;
  if (!a.divide) return sums.term(value[self]);
  const double mean = sums.mean();
  for (int j = 0; j < n; ++j) sums.add_square(true, static_cast<double>(value[j]), mean);
  return sums.scaled_term(value[self], a.delta, true);
}

BIPACE_DEVICE void finish(const FusedArgs& a, const scan::Group& g, const Desk& desk, unsigned char* memory) {
  const int t = gpu::thread();
  const Sorted s = sorted_in(memory, a.scan.room);
  for (int i = t; i < g.n; i += kThreads) {
    const int k = g.decided.joined[i];
    s.label[i] = g.kind[i] == 2 ? kNone : g.decided.members[k < 0 ? i : g.decided.leader[k]];
  }
  if (a.labels) {
    for (int i = t; i < g.n; i += kThreads) a.labels[g.begin + i] = s.label[i] == kNone ? -1 : desk.base + s.label[i];
    return;
  }
  gpu::sync_block();
  if (gpu::warp() == 0) find_places(s, g.n, desk.clusters);
  gpu::sync_block();
  for (int i = t; i < g.n; i += kThreads) {
    if (s.label[i] == kNone) continue;
    const int at = s.begin[s.label[i]] + s.place[i];
    s.value[at] = a.returns[g.begin + i];
    s.key[at] = a.key ? a.key[a.gram.rows.order[g.begin + i]] : 0;
  }
  gpu::sync_block();
  for (int i = t; i < g.n; i += kThreads) {
    const int64_t record = g.begin + i, row = a.gram.rows.order[record];
    const int label = s.label[i];
    if (label == kNone) {
      a.out.nothing(row);
      continue;
    }
    const int begin = s.begin[label], n = s.size[label], self = s.place[i];
    uint8_t branch = kSingletonBranch;
    float step = 0.0f;
    if (n > 1) {
      if (a.estimator == 0) {
        step = step_of_mean(a, s.value + begin, n, self, branch);
      } else if (a.estimator == 1) {
        step = step_of_action<DiffPeer>(s.key + begin, s.value + begin, n, self, branch);
      } else {
        step = step_of_action<QStyle>(s.key + begin, s.value + begin, n, self, branch);
      }
    }
    const float episode = a.episode[record];
    a.out.write(row, total_advantage(episode, step, a.weight), step, episode, s.value[begin + self], desk.base + label,
                branch);
  }
}

}  // namespace

// Any number of blocks, as many as run at once being the best.
BIPACE_SHARING_KERNEL(fused_advantage, FusedArgs, kThreads) {
  const Shared shared = shared_of(a);
  Desk* const desk = shared.desk;
  const int t = gpu::thread();
  for (int64_t row = gpu::block() * kThreads + t; row < a.n_rows; row += gpu::blocks() * kThreads) {
    if (a.source[row] < 0) a.out.nothing(row);
  }
  count_tiles(a, shared);
  if (t == 0) {
    desk->slot = kNone;
    desk->no_more_groups = desk->no_more_tiles = desk->part = desk->counted = 0;
    desk->base = 0;
  }
  for (;;) {
    gpu::sync_block();  // everybody is done with the work before
    if (gpu::warp() == 0) {
      Desk mine = *desk;
      gpu::sync_warp();
      mine.work = choose(a, shared, mine, scan::room_of(a.scan, 0, 0, a.slots, shared.scan).count);
      if (gpu::lane() == 0) *desk = mine;
    }
    gpu::sync_block();
    const int work = desk->work;
    if (work == kLeave) return;
    if (work == kTile) {
      const int64_t slot = desk->tile_slot;
      const int64_t begin = a.gram.begins[slot];
      const gram::Tile tile{a.gram,
                            begin,
                            length_of(a, slot),
                            desk->block_i,
                            desk->block_j,
                            a.gram.gram + slot * a.gram.n_rows * a.gram.columns,
                            a.gram.reciprocal + begin,
                            shared.tile};
      if (a.gram.rows.dtype == kFloat32) {
        gram::multiply_tile<kFloat32>(tile);
      } else {
        gram::multiply_tile_half(tile);
      }
      gpu::sync_block();
      if (t == 0) gpu::publish_one(tiles_done(a, slot, tile.block_j));
      continue;
    }
    const scan::Group g = scan::group_of(a.scan, desk->slot, 0, a.slots);
    if (work == kDecide) {
      const scan::Room room = scan::room_of(a.scan, desk->slot, 0, a.slots, shared.scan);
      scan::Progress at = desk->at;
      scan::decide_columns(g, room, static_cast<float>(a.scan.only_lowest), 0, g.n, desk->ready, 0, at);
      gpu::sync_block();  // everybody has read the desk
      if (t == 0) desk->at = at;
    } else if (work == kNumber) {
      number(a, g, *desk);
    } else {
      finish(a, g, *desk, shared.tile);
      gpu::sync_block();
      if (t == 0) desk->slot = kNone;
    }
  }
}

}  // namespace bipace
