// n-gram fingerprints, bit for bit those of cpu/ngrams.cpp: a block per text.
//
// Counts are summed by integer atomics, in shared memory where they fit, else in the memory of the result: whole
// numbers come out the same in any order.  So a row of the result is written once (by count of bytes; not measured).
#include "common/ngrams.h"
#include "common/xxh64.h"
#include "cuda/block.h"

namespace bipace {
namespace {

constexpr int kThreads = 256;

// n bytes of the padded text; its first byte is -(n - 1).
struct PaddedText {
  const uint8_t* text;  // [size]
  int64_t size, start;

  BIPACE_HD uint64_t byte(int64_t at) const {
    const int64_t i = start + at;
    return i < 0 ? kNgramBefore : i >= size ? kNgramAfter : text[i];
  }
  BIPACE_HD uint64_t half(int64_t at) const {
    return byte(at) | byte(at + 1) << 8 | byte(at + 2) << 16 | byte(at + 3) << 24;
  }
  BIPACE_HD uint64_t word(int64_t at) const { return half(at) | half(at + 4) << 32; }
};

}  // namespace

struct NgramFingerprintsArgs {
  const uint8_t* data;     // [offsets[N]] the texts one after the other
  const int64_t* offsets;  // [N+1]
  float* out;              // [N, dim]
  int64_t n;
  int64_t dim;
  int64_t in_shared;  // whether shared memory has room for dim counts
};

BIPACE_KERNEL(ngram_fingerprints, NgramFingerprintsArgs, kThreads) {
  int64_t* room = reinterpret_cast<int64_t*>(gpu::shared_memory());
  float* out = a.out + gpu::block() * a.dim;
  int32_t* counts = a.in_shared ? reinterpret_cast<int32_t*>(room + gpu::kMostWarps) : reinterpret_cast<int32_t*>(out);
  for (int64_t b = gpu::thread(); b < a.dim; b += kThreads) counts[b] = 0;
  gpu::sync_block();
  const int64_t begin = a.offsets[gpu::block()], size = a.offsets[gpu::block() + 1] - begin;
  for (int64_t i = gpu::thread(); i < size + a.n - 1; i += kThreads) {
    const uint64_t hash = xxh64_of(PaddedText{a.data + begin, size, i - (a.n - 1)}, a.n, kSeedNgram);
    gpu::atomic_add(counts + ngram_bucket(hash, static_cast<uint64_t>(a.dim)), ngram_sign(hash));
  }
  gpu::sync_block();
  int64_t squares = 0;
  for (int64_t b = gpu::thread(); b < a.dim; b += kThreads) squares += static_cast<int64_t>(counts[b]) * counts[b];
  squares = gpu::block_sum(squares, room);
  const double norm = sqrt(static_cast<double>(squares));
  for (int64_t b = gpu::thread(); b < a.dim; b += kThreads) {
    const int32_t count = counts[b];
    const float entry = count ? static_cast<float>(static_cast<double>(count) / norm) : 0.0f;
    out[b] = squares == 0 && b == 0 ? 1.0f : entry;  // what cancels to zero gets 1 in bucket 0
  }
}

}  // namespace bipace
