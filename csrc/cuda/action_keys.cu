// Action keys of token ids, bit for bit those of cpu/action_keys.cpp: a warp per row, a lane per token.
//
// The text of a row is written into a ring of shared memory and searched or hashed as it passes, so rows and tokens
// of any length need the same small memory.  A row is read up to three times, the last two from the nearest cache:
//
//   check  every valid id is in the table (else the row gets its first_n key, and `outside` its position)
//   find   start and end of the body of the first <action>…</action>, without the white space at its ends; up to the
//          tag, tokens without a < are not spelt, 32 at a time
//   hash   its bytes, lowered; or the first n valid ids if there is no such body
#include "common/xxh64.h"
#include "cuda/arguments.h"
#include "cuda/intrinsics.h"

namespace bipace {
namespace {

constexpr int kThreads = 128;
constexpr int kWarps = kThreads / gpu::kWarp;
constexpr int64_t kRing = 2048;          // bytes of a warp, a power of two
constexpr int64_t kRound = kRing - 32;   // written at most between two looks; the rest is not yet done with
constexpr int kUnroll = 2;               // ids whose check is under way together
constexpr int kBytes = 8;                // of a token, likewise
constexpr int64_t kNowhere = 1ll << 62;  // beyond any position of a row
constexpr int64_t kOpenSize = 8, kCloseSize = 9;

constexpr int64_t kFirstN = 0, kActionTag = 1;  // modes; 2 is the whole text

BIPACE_DEVICE int64_t within(int64_t x, int64_t most) { return x < 0 ? 0 : x < most ? x : most; }

BIPACE_DEVICE int64_t load_integer(const void* items, int64_t bytes, bool is_signed, int64_t at) {
  switch (bytes) {
    case 1:
      return is_signed ? static_cast<const int8_t*>(items)[at] : static_cast<const uint8_t*>(items)[at];
    case 2:
      return is_signed ? static_cast<const int16_t*>(items)[at] : static_cast<const uint16_t*>(items)[at];
    case 4:
      return is_signed ? static_cast<int64_t>(static_cast<const int32_t*>(items)[at])
                       : static_cast<int64_t>(static_cast<const uint32_t*>(items)[at]);
    default:
      return static_cast<const int64_t*>(items)[at];
  }
}

struct Row {
  const ActionKeysArgs& a;
  int64_t place, size, id_at, valid_at;  // flat position, columns, items before the first

  BIPACE_DEVICE Row(const ActionKeysArgs& args, int64_t row) : a(args) {
    if (a.row_offsets) {
      place = a.row_offsets[row];
      size = a.row_offsets[row + 1] - place;
      id_at = place * a.id_column_stride;
      valid_at = place * a.valid_column_stride;
    } else {
      place = row * a.n_columns;
      size = a.n_columns;
      id_at = row * a.id_row_stride;
      valid_at = row * a.valid_row_stride;
    }
  }
  BIPACE_DEVICE bool is_valid(int64_t column) const {
    return column < size &&
           (!a.valid || load_integer(a.valid, a.valid_bytes, true, valid_at + column * a.valid_column_stride) != 0);
  }
  BIPACE_DEVICE int64_t id(int64_t column) const {
    return column < size ? load_integer(a.ids, a.id_bytes, a.id_signed, id_at + column * a.id_column_stride) : 0;
  }
  // Column of the first valid id outside the table; -1: there is none.
  BIPACE_DEVICE int64_t first_outside() const {
    for (int64_t start = 0; start < size; start += kUnroll * gpu::kWarp) {
      bool bad[kUnroll];
#pragma unroll
      for (int u = 0; u < kUnroll; ++u) {
        const int64_t column = start + u * gpu::kWarp + gpu::lane(), token = id(column);
        bad[u] = is_valid(column) && (token < 0 || token >= a.vocabulary);
      }
#pragma unroll
      for (int u = 0; u < kUnroll; ++u) {
        const uint32_t found = gpu::ballot(bad[u]);
        if (found) return start + u * gpu::kWarp + gpu::lowest_bit(found);
      }
    }
    return -1;
  }
};

// The text of 32 tokens, one a lane.
struct Spelled {
  const uint8_t* source;  // the token's bytes
  int32_t start, end;     // where they stand in the text
  int32_t size;           // of the text

  BIPACE_DEVICE Spelled(const Row& row, int64_t column) {
    const int64_t mine = column + gpu::lane();
    const bool is_valid = row.is_valid(mine);
    const int64_t token = is_valid ? row.id(mine) : 0;
    const int64_t from = is_valid ? row.a.table_offsets[token] : 0;
    const int32_t length = is_valid ? static_cast<int32_t>(row.a.table_offsets[token + 1] - from) : 0;
    source = row.a.table_bytes + from;
    end = length;
#pragma unroll
    for (int by = 1; by < gpu::kWarp; by *= 2) {
      const int32_t before = gpu::shuffle_up(end, by);
      end += gpu::lane() >= by ? before : 0;
    }
    start = end - length;
    size = gpu::shuffle(end, gpu::kWarp - 1);
  }
  // Writes the bytes low ≤ p < high of the text to target, target + 1, … of the ring.
  BIPACE_DEVICE void write(uint8_t* ring, int64_t low, int64_t high, int64_t target, bool lower) const {
    const int64_t first = start > low ? start : low, count = (end < high ? end : high) - first;
    const uint8_t* from = source + (first - start);
    const int64_t place = target + (first - low);
    for (int64_t done = 0; done < count; done += kBytes) {
      uint8_t byte[kBytes];
#pragma unroll
      for (int k = 0; k < kBytes; ++k) byte[k] = done + k < count ? from[done + k] : 0;
#pragma unroll
      for (int k = 0; k < kBytes; ++k) {
        const bool upper = lower && byte[k] >= 'A' && byte[k] <= 'Z';
        if (done + k < count)
          ring[(place + done + k) & (kRing - 1)] = static_cast<uint8_t>(byte[k] | (upper ? 0x20 : 0));
      }
    }
  }
};

// The body's text [head, tail), empty where they are equal, and 32 tokens that begin at or before it.
struct Body {
  bool found;
  int64_t head, tail;
  int64_t column, position;
};

// Searches a text as it passes, each byte once.
struct Search {
  const uint8_t* ring;
  bool tags;
  int64_t looked = 0;
  int64_t body, close = kNowhere;     // first byte of the body, of the closing tag
  int64_t head = kNowhere, tail = 0;  // of the body, what is not white space at its ends

  BIPACE_DEVICE Search(const uint8_t* warps_ring, bool for_tags)
      : ring(warps_ring), tags(for_tags), body(for_tags ? kNowhere : 0) {}

  BIPACE_DEVICE uint8_t at(int64_t place) const { return ring[place & (kRing - 1)]; }

  // Whether a tag stands at `place`, and whether it is a closing one.
  BIPACE_DEVICE bool is_tag(int64_t place, bool& closing) const {
    closing = at(place + 1) == '/';
    const int64_t name = place + (closing ? 2 : 1);
    return at(name) == 'a' && at(name + 1) == 'c' && at(name + 2) == 't' && at(name + 3) == 'i' &&
           at(name + 4) == 'o' && at(name + 5) == 'n' && at(name + 6) == '>';
  }
  // Whether no tag can have begun in what has been written and not looked at, up to `end`; it is done with then.
  BIPACE_DEVICE bool is_over(int64_t end) {
    const int64_t mine = looked + gpu::lane();  // less than a tag
    if (gpu::any(mine < end && at(mine) == '<')) return false;
    looked = end;
    return true;
  }
  // Everything before `limit`; a tag that begins there is whole.
  BIPACE_DEVICE void look(int64_t limit) {
    for (int64_t start = looked; start < limit && close == kNowhere; start += gpu::kWarp) {
      const int64_t mine = start + gpu::lane();
      const uint8_t byte = mine < limit ? at(mine) : ' ';
      if (tags && gpu::any(byte == '<')) {  // most of a text has none
        bool closing = false;
        const bool tag = byte == '<' && is_tag(mine, closing);
        const uint32_t opens = gpu::ballot(tag && !closing);
        if (body == kNowhere && opens) body = start + gpu::lowest_bit(opens) + kOpenSize;
        const uint32_t closes = gpu::ballot(tag && closing && mine >= body);
        if (closes) close = start + gpu::lowest_bit(closes);
      }
      const bool blank = byte == ' ' || (byte >= '\t' && byte <= '\r');
      const uint32_t solid = gpu::ballot(!blank && mine >= body && mine < close);
      if (solid) {
        if (head == kNowhere) head = start + gpu::lowest_bit(solid);
        tail = start + gpu::highest_bit(solid) + 1;
      }
    }
    looked = looked > limit ? looked : limit;
  }
};

BIPACE_DEVICE Body find_body(const Row& row, uint8_t* ring, bool tags) {
  Search search(ring, tags);
  int64_t position = 0, body_column = 0, body_position = 0;
  for (int64_t column = 0; column < row.size && search.close == kNowhere; column += gpu::kWarp) {
    const bool unopened = search.body == kNowhere;
    if (unopened && row.a.may_open) {
      const int64_t mine = column + gpu::lane();
      if (!gpu::any(row.is_valid(mine) && row.a.may_open[row.id(mine)]) && search.is_over(position)) continue;
    }
    const Spelled text(row, column);
    for (int64_t low = 0, high; low < text.size; low = high) {  // once, but for very long tokens
      high = within(low + kRound, text.size);
      text.write(ring, low, high, position + low, false);
      gpu::sync_warp();
      search.look(position + high - (tags ? kCloseSize - 1 : 0));
      gpu::sync_warp();
    }
    if (unopened && search.body != kNowhere) {
      body_column = column;
      body_position = position;
    }
    position += text.size;
  }
  const bool found = tags ? search.close != kNowhere : search.tail > 0, solid = found && search.tail > 0;
  return {found, solid ? search.head : 0, solid ? search.tail : 0, body_column, body_position};
}

// XXH64 of what passes through the ring; lane l holds accumulator l mod 4.
struct Stream {
  const uint8_t* ring;
  uint64_t seed, accumulator;
  int64_t absorbed = 0;  // bytes, a multiple of 32

  BIPACE_DEVICE Stream(const uint8_t* warps_ring, uint64_t s)
      : ring(warps_ring), seed(s), accumulator(xxh_start(gpu::lane() % 4, s)) {}

  // A multiple of their length each, so that none goes round the ring's end.
  BIPACE_DEVICE uint64_t word(int64_t at) const {
    return *reinterpret_cast<const uint64_t*>(ring + (at & (kRing - 1)));
  }
  BIPACE_DEVICE uint64_t half(int64_t at) const {
    return *reinterpret_cast<const uint32_t*>(ring + (at & (kRing - 1)));
  }
  BIPACE_DEVICE uint64_t byte(int64_t at) const { return ring[at & (kRing - 1)]; }

  // Takes all whole stripes of the bytes written.
  BIPACE_DEVICE void absorb(int64_t written) {
    for (; written - absorbed >= 32; absorbed += 32) {
      accumulator = xxh_round(accumulator, word(absorbed + 8 * (gpu::lane() % 4)));
    }
  }
  BIPACE_DEVICE uint64_t finish(int64_t size) const {
    const uint64_t a = gpu::shuffle(accumulator, 0), b = gpu::shuffle(accumulator, 1), c = gpu::shuffle(accumulator, 2),
                   d = gpu::shuffle(accumulator, 3);
    const uint64_t hash = (size >= 32 ? xxh_converge(a, b, c, d) : seed + kXxhPrime5) + static_cast<uint64_t>(size);
    return xxh_finish(hash, *this, absorbed, size - absorbed);
  }
};

// The body's bytes, A–Z lowered.
BIPACE_DEVICE uint64_t hash_body(const Row& row, const Body& body, uint8_t* ring, uint64_t seed) {
  Stream stream(ring, seed);
  int64_t column = body.column;
  for (int64_t position = body.position; position < body.tail; column += gpu::kWarp) {
    const Spelled text(row, column);
    const int64_t stop = within(body.tail - position, text.size);
    for (int64_t low = within(body.head - position, text.size), high; low < stop; low = high) {
      high = within(low + kRound, stop);
      text.write(ring, low, high, position + low - body.head, true);
      gpu::sync_warp();
      stream.absorb(position + high - body.head);
      gpu::sync_warp();
    }
    position += text.size;
  }
  return stream.finish(body.tail - body.head);
}

// The first n valid ids as little-endian int64.
BIPACE_DEVICE uint64_t hash_first_ids(const Row& row, int64_t n, uint8_t* ring) {
  Stream stream(ring, kSeedFirstN);
  int64_t taken = 0;
  for (int64_t column = 0; column < row.size && taken < n; column += gpu::kWarp) {
    const int64_t mine = column + gpu::lane();
    const bool is_valid = row.is_valid(mine);
    const uint32_t valid = gpu::ballot(is_valid);
    const int64_t rank = taken + gpu::count_below(valid, gpu::lane());
    if (is_valid && rank < n) {
      *reinterpret_cast<uint64_t*>(ring + (8 * rank & (kRing - 1))) = static_cast<uint64_t>(row.id(mine));
    }
    taken = within(taken + gpu::count_bits(valid), n);
    gpu::sync_warp();  // once: what is written next lies elsewhere in the ring
    stream.absorb(8 * taken);
  }
  return stream.finish(8 * taken);
}

}  // namespace

BIPACE_KERNEL(action_keys, ActionKeysArgs, kThreads) {
  uint8_t* ring = gpu::shared_memory() + gpu::warp() * kRing;
  const int64_t which = gpu::block() * kWarps + gpu::warp();
  if (which >= a.n_rows) return;  // the whole warp
  const Row row(a, which);
  uint64_t key = 0;
  bool found = false, by_ids = true;
  if (a.mode != kFirstN) {
    const int64_t bad = row.first_outside();
    if (bad < 0) {
      const Body body = find_body(row, ring, a.mode == kActionTag);
      found = body.found;
      by_ids = a.mode == kActionTag && !found;  // text of only white space has the key of zero bytes
      if (!by_ids) key = hash_body(row, body, ring, a.mode == kActionTag ? kSeedActionTag : kSeedText);
    } else if (gpu::lane() == 0) {
      gpu::atomic_min(a.outside, static_cast<uint64_t>(row.place + bad));
    }
  }
  if (by_ids) key = hash_first_ids(row, a.n, ring);
  if (gpu::lane() == 0) {
    a.keys[which] = static_cast<int64_t>(key);
    a.parsed[which] = found;
  }
}

}  // namespace bipace
