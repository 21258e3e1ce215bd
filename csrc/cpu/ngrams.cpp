#include <algorithm>
#include <cmath>
#include <cstring>
#include <vector>

#include "common/xxh64.h"
#include "cpu/interrupt.h"
#include "cpu/parallel.h"
#include "cpu/stages.h"

namespace bipace {
namespace {

// The bytes around a text, and the bucket of an n-gram.
constexpr uint64_t kSeedNgram = 5;
constexpr int64_t kGramsBetweenPolls = 1 << 20;  // some milliseconds
constexpr uint8_t kNgramBefore = 0x02, kNgramAfter = 0x03;

uint64_t ngram_bucket(uint64_t hash, uint64_t buckets) {
  return (buckets & (buckets - 1)) == 0 ? (hash >> 1) & (buckets - 1) : (hash >> 1) % buckets;
}
int32_t ngram_sign(uint64_t hash) { return hash & 1 ? -1 : 1; }

struct Scratch {
  std::vector<int64_t> counts;   // [dim], zero between rows
  std::vector<int64_t> touched;  // buckets that a row has written, with repeats
  std::vector<uint8_t> padded;
};

void fingerprint(const uint8_t* text, int64_t size, int64_t n, int64_t dim, float* out, Scratch& scratch) {
  const int64_t n_grams = size + n - 1;
  scratch.padded.assign(n - 1, kNgramBefore);
  scratch.padded.insert(scratch.padded.end(), text, text + size);
  scratch.padded.insert(scratch.padded.end(), n - 1, kNgramAfter);
  scratch.counts.resize(dim, 0);
  if (static_cast<int64_t>(scratch.touched.size()) < n_grams) scratch.touched.resize(n_grams);
  const uint8_t* grams = scratch.padded.data();
  int64_t* counts = scratch.counts.data();
  const auto buckets = static_cast<uint64_t>(dim);

  int64_t squares = 0;  // Σ count², kept up to date: exact, and no pass over all dim buckets
  for (int64_t i = 0; i < n_grams; ++i) {
    if (i % kGramsBetweenPolls == kGramsBetweenPolls - 1) poll_interrupt();
    const uint64_t hash = xxh64(grams + i, n, kSeedNgram);
    const uint64_t bucket = ngram_bucket(hash, buckets);
    const int64_t sign = ngram_sign(hash);
    squares += 2 * sign * counts[bucket] + 1;
    counts[bucket] += sign;
    scratch.touched[i] = static_cast<int64_t>(bucket);
  }
  std::memset(out, 0, dim * sizeof(float));
  const double norm = std::sqrt(static_cast<double>(squares));
  for (int64_t i = 0; i < n_grams; ++i) {
    const int64_t bucket = scratch.touched[i];
    if (counts[bucket] == 0) continue;  // cancelled, or written at an earlier gram
    out[bucket] = static_cast<float>(static_cast<double>(counts[bucket]) / norm);
    counts[bucket] = 0;
  }
  if (squares == 0) out[0] = 1.0f;
}

}  // namespace

void ngram_fingerprints(const uint8_t* bytes, const int64_t* offsets, int64_t n_rows, int64_t n, int64_t dim,
                        float* out, int n_threads) {
  std::vector<Scratch> scratch(std::max(n_threads, 1));
  parallel_for(n_rows, n_threads, [&](int64_t row, int worker) {
    fingerprint(bytes + offsets[row], offsets[row + 1] - offsets[row], n, dim, out + row * dim, scratch[worker]);
  });
}

}  // namespace bipace
