// Hashes of values from outside (observations, ids), for tables.  The key is random, so that nobody can choose values
// that fall into one slot and make a table's time quadratic.  Results never depend on it.
#pragma once

#include <cstdint>

#include "common/xxh64.h"

namespace bipace {

struct HashKey {
  uint64_t first, second;
};

// One per process.
const HashKey& hash_key();

struct SipState {
  uint64_t a, b, c, d;

  void round() {
    a += b, b = xxh_rotate(b, 13) ^ a, a = xxh_rotate(a, 32);
    c += d, d = xxh_rotate(d, 16) ^ c;
    a += d, d = xxh_rotate(d, 21) ^ a;
    c += b, b = xxh_rotate(b, 17) ^ c, c = xxh_rotate(c, 32);
  }
  void add(uint64_t word) {
    d ^= word;
    round();
    a ^= word;
  }
};

// SipHash-1-3 (Aumasson and Bernstein, 2012), which Python and Rust use for the same purpose.
inline uint64_t siphash(const uint8_t* data,  // [size], may be null where size = 0
                        int64_t size, const HashKey& key) {
  SipState state{key.first ^ 0x736f6d6570736575u, key.second ^ 0x646f72616e646f6du, key.first ^ 0x6c7967656e657261u,
                 key.second ^ 0x7465646279746573u};
  int64_t at = 0;
  for (; size - at >= 8; at += 8) state.add(xxh_read64(data + at));
  uint64_t last = static_cast<uint64_t>(size) << 56;
  for (int64_t i = at; i < size; ++i) last |= static_cast<uint64_t>(data[i]) << 8 * (i - at);
  state.add(last);
  state.c ^= 0xff;
  for (int i = 0; i < 3; ++i) state.round();
  return state.a ^ state.b ^ state.c ^ state.d;
}

}  // namespace bipace
