// XXH64 of a byte string, after the published description of the algorithm (xxHash specification, version 0.1.1).
// Header-only, no allocation, no host library: the same lines serve host and device.
#pragma once

#include "common/hd.h"

namespace bipace {

// Seeds of action keys: they keep the kinds of key apart, so that equal bytes under different meanings differ.
constexpr uint64_t kSeedFirstN = 1, kSeedActionTag = 2, kSeedTextPrefix = 3, kSeedText = 4;

constexpr uint64_t kXxhPrime1 = 0x9E3779B185EBCA87ull;
constexpr uint64_t kXxhPrime2 = 0xC2B2AE3D27D4EB4Full;
constexpr uint64_t kXxhPrime3 = 0x165667B19E3779F9ull;
constexpr uint64_t kXxhPrime4 = 0x85EBCA77C2B2AE63ull;
constexpr uint64_t kXxhPrime5 = 0x27D4EB2F165667C5ull;

BIPACE_HD inline uint64_t xxh_rotate(uint64_t x, int bits) { return (x << bits) | (x >> (64 - bits)); }

// Little-endian on any machine and alignment; compilers turn these into single loads.
BIPACE_HD inline uint64_t xxh_read32(const uint8_t* p) {
  return static_cast<uint64_t>(p[0]) | static_cast<uint64_t>(p[1]) << 8 | static_cast<uint64_t>(p[2]) << 16 |
         static_cast<uint64_t>(p[3]) << 24;
}
BIPACE_HD inline uint64_t xxh_read64(const uint8_t* p) { return xxh_read32(p) | xxh_read32(p + 4) << 32; }

BIPACE_HD inline uint64_t xxh_round(uint64_t accumulator, uint64_t lane) {
  return xxh_rotate(accumulator + lane * kXxhPrime2, 31) * kXxhPrime1;
}

BIPACE_HD inline uint64_t xxh_merge(uint64_t hash, uint64_t accumulator) {
  return (hash ^ xxh_round(0, accumulator)) * kXxhPrime1 + kXxhPrime4;
}

// The hash of whole stripes, from their four accumulators.
BIPACE_HD inline uint64_t xxh_converge(uint64_t a, uint64_t b, uint64_t c, uint64_t d) {
  const uint64_t hash = xxh_rotate(a, 1) + xxh_rotate(b, 7) + xxh_rotate(c, 12) + xxh_rotate(d, 18);
  return xxh_merge(xxh_merge(xxh_merge(xxh_merge(hash, a), b), c), d);
}

// Initial values of accumulators 0 to 3.
BIPACE_HD inline uint64_t xxh_start(int accumulator, uint64_t seed) {
  return accumulator == 0   ? seed + kXxhPrime1 + kXxhPrime2
         : accumulator == 1 ? seed + kXxhPrime2
         : accumulator == 2 ? seed
                            : seed - kXxhPrime1;
}

// Bytes in memory.  Other inputs have the same three functions: 8, 4 and 1 bytes from `at` on.
struct XxhMemory {
  const uint8_t* data;
  BIPACE_HD uint64_t word(int64_t at) const { return xxh_read64(data + at); }
  BIPACE_HD uint64_t half(int64_t at) const { return xxh_read32(data + at); }
  BIPACE_HD uint64_t byte(int64_t at) const { return data[at]; }
};

// Mixes in the last `left` < 32 bytes, from `at` on.
template <typename Bytes>
BIPACE_HD inline uint64_t xxh_finish(uint64_t hash, const Bytes& bytes, int64_t at, int64_t left) {
  for (; left >= 8; at += 8, left -= 8) {
    hash = xxh_rotate(hash ^ xxh_round(0, bytes.word(at)), 27) * kXxhPrime1 + kXxhPrime4;
  }
  if (left >= 4) {
    hash = xxh_rotate(hash ^ (bytes.half(at) * kXxhPrime1), 23) * kXxhPrime2 + kXxhPrime3;
    at += 4;
    left -= 4;
  }
  for (; left > 0; ++at, --left) hash = xxh_rotate(hash ^ (bytes.byte(at) * kXxhPrime5), 11) * kXxhPrime1;
  hash = (hash ^ (hash >> 33)) * kXxhPrime2;
  hash = (hash ^ (hash >> 29)) * kXxhPrime3;
  return hash ^ (hash >> 32);
}

template <typename Bytes>
BIPACE_HD inline uint64_t xxh64_of(const Bytes& bytes, int64_t size, uint64_t seed) {
  int64_t at = 0;
  uint64_t hash = seed + kXxhPrime5;
  if (size >= 32) {
    uint64_t a = xxh_start(0, seed), b = xxh_start(1, seed), c = xxh_start(2, seed), d = xxh_start(3, seed);
    for (; size - at >= 32; at += 32) {
      a = xxh_round(a, bytes.word(at));
      b = xxh_round(b, bytes.word(at + 8));
      c = xxh_round(c, bytes.word(at + 16));
      d = xxh_round(d, bytes.word(at + 24));
    }
    hash = xxh_converge(a, b, c, d);
  }
  return xxh_finish(hash + static_cast<uint64_t>(size), bytes, at, size - at);
}

BIPACE_HD inline uint64_t xxh64(const uint8_t* data,  // [size], may be null where size = 0
                                int64_t size, uint64_t seed) {
  return xxh64_of(XxhMemory{data}, size, seed);
}

}  // namespace bipace
