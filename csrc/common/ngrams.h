// Hashed n-grams: which bytes surround a text, and which bucket an n-gram adds to.
#pragma once

#include "common/hd.h"

namespace bipace {

constexpr uint64_t kSeedNgram = 5;
constexpr uint8_t kNgramBefore = 0x02, kNgramAfter = 0x03;

BIPACE_HD inline uint64_t ngram_bucket(uint64_t hash, uint64_t buckets) {
  return (buckets & (buckets - 1)) == 0 ? (hash >> 1) & (buckets - 1) : (hash >> 1) % buckets;
}
BIPACE_HD inline int32_t ngram_sign(uint64_t hash) { return hash & 1 ? -1 : 1; }

}  // namespace bipace
