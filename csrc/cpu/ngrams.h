// Hashed n-gram counts of byte strings, scaled to unit length (spec: the paper's HashNgram).
#pragma once

#include <cstdint>

namespace bipace {

// Every n bytes of (n-1 times 0x02) + text + (n-1 times 0x03) add ±1 to one of dim buckets; then ℓ2, in float64,
// rounded to float32 once.  A row that cancels to zero gets 1 in bucket 0.
void ngram_fingerprints(const uint8_t* bytes,    // [B] the texts one after the other
                        const int64_t* offsets,  // [N+1]
                        int64_t n_rows, int64_t n, int64_t dim,
                        float* out,  // [N, dim] row-major
                        int n_threads);

}  // namespace bipace
