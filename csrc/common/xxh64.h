// XXH64 of a byte string, after the published description of the algorithm (xxHash specification, version 0.1.1).
// Header-only, no allocation, no host library: the same lines serve host and device.
#pragma once

#include "common/hd.h"

namespace bipace {

constexpr uint64_t kXxhPrime1 = 0x9E3779B185EBCA87ull;
constexpr uint64_t kXxhPrime2 = 0xC2B2AE3D27D4EB4Full;
constexpr uint64_t kXxhPrime3 = 0x165667B19E3779F9ull;
constexpr uint64_t kXxhPrime4 = 0x85EBCA77C2B2AE63ull;
constexpr uint64_t kXxhPrime5 = 0x27D4EB2F165667C5ull;

BIPACE_HD inline uint64_t xxh_rotate(uint64_t x, int bits) { return (x << bits) | (x >> (64 - bits)); }

// Little-endian whatever the machine and the alignment; compilers turn these into single loads.
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

BIPACE_HD inline uint64_t xxh64(const uint8_t* data,  // [size], may be null where size = 0
                                int64_t size, uint64_t seed) {
  const uint8_t* p = data;
  int64_t left = size;
  uint64_t hash;
  if (left >= 32) {
    uint64_t a = seed + kXxhPrime1 + kXxhPrime2, b = seed + kXxhPrime2, c = seed, d = seed - kXxhPrime1;
    for (; left >= 32; p += 32, left -= 32) {
      a = xxh_round(a, xxh_read64(p));
      b = xxh_round(b, xxh_read64(p + 8));
      c = xxh_round(c, xxh_read64(p + 16));
      d = xxh_round(d, xxh_read64(p + 24));
    }
    hash = xxh_rotate(a, 1) + xxh_rotate(b, 7) + xxh_rotate(c, 12) + xxh_rotate(d, 18);
    hash = xxh_merge(xxh_merge(xxh_merge(xxh_merge(hash, a), b), c), d);
  } else {
    hash = seed + kXxhPrime5;
  }
  hash += static_cast<uint64_t>(size);
  for (; left >= 8; p += 8, left -= 8) {
    hash = xxh_rotate(hash ^ xxh_round(0, xxh_read64(p)), 27) * kXxhPrime1 + kXxhPrime4;
  }
  if (left >= 4) {
    hash = xxh_rotate(hash ^ (xxh_read32(p) * kXxhPrime1), 23) * kXxhPrime2 + kXxhPrime3;
    p += 4;
    left -= 4;
  }
  for (; left > 0; ++p, --left) hash = xxh_rotate(hash ^ (*p * kXxhPrime5), 11) * kXxhPrime1;
  hash = (hash ^ (hash >> 33)) * kXxhPrime2;
  hash = (hash ^ (hash >> 29)) * kXxhPrime3;
  return hash ^ (hash >> 32);
}

}  // namespace bipace
