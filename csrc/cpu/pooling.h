// One vector per state out of a block's output: the token itself, the mean over its prompt, or the mean weighted by the
// token's own attention; brought to unit length if wanted and written in the wanted dtype.  The output of the block is
// read where it is, once, and nothing of its size is ever made.
#pragma once

#include <cstdint>

#include "cpu/rows.h"

namespace bipace {

enum class Pooling : int { kLast = 0, kMean = 1, kAttention = 2 };

struct Tokens {
  const void* data;  // [batches, tokens, dim], any strides
  DType dtype;
  int64_t batches;
  int64_t tokens;
  int64_t dim;
  int64_t batch_stride;  // in elements
  int64_t token_stride;
  int64_t column_stride;

  Rows rows(int64_t batch) const;  // [tokens, dim]
};

// Queries of the wanted tokens and keys of all tokens, both as they enter the scores.
struct Attention {
  const float* query;  // [n, heads, head_dim] contiguous
  int64_t heads;
  Tokens keys;  // [batches, tokens, key_heads * head_dim], columns contiguous
  int64_t key_heads;
  int64_t head_dim;
  double scale;
  double softcap;  // scores become softcap * tanh(score / softcap); 0: they stay
};

// State i is token last[i] of batch[i]; a mean goes over the tokens [first[i], last[i]].  A state that lies outside, or
// has no token, gets zeros.  Sums in float64, in the order of the tokens: the bits depend on the state's own tokens
// only.
void pool_rows(const Tokens& hidden,
               const int64_t* batch,  // [n]
               const int64_t* first,  // [n]
               const int64_t* last,   // [n]
               int64_t n, Pooling pooling,
               const Attention* attention,  // for kAttention
               bool unit, int n_threads, DType out_dtype,
               void* out);  // [n, dim] contiguous

}  // namespace bipace
