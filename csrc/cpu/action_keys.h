// Action keys: 64-bit hashes of actions, from text or from token ids.  Formats in docs/action_keys.md.
#pragma once

#include <cstdint>

#include "common/xxh64.h"

namespace bipace {

enum class KeyMode : int { kFirstN = 0, kActionTag = 1, kText = 2 };

constexpr int64_t kTextPrefixBytes = 64;

// Token ids of N rows: a strided matrix [N, T] where row_offsets is null, else flat values with row_offsets [N+1].
struct TokenRows {
  const void* ids;                              // int32 or int64, see id_bytes
  int id_bytes;                                 // 4 or 8
  const void* mask;                             // bytes or integers, non-zero = valid; null: every token is valid
  int mask_bytes;                               // 1, 4 or 8
  const int64_t* row_offsets;                   // [N+1], or null
  int64_t n_rows;                               // N
  int64_t n_columns;                            // T of a matrix
  int64_t id_row_stride, id_column_stride;      // in items
  int64_t mask_row_stride, mask_column_stride;  // in items; flat rows share row_offsets
};

// Bytes of each token id: bytes[offsets[v] .. offsets[v+1]).
struct TokenTable {
  const int64_t* offsets;  // [V+1], increasing from 0
  const uint8_t* bytes;    // [offsets[V]]
  int64_t size;            // V
};

// keys and parsed [N] of token rows.  The table is not used in mode kFirstN.  Returns the position of the first valid
// id outside the table, row * T + column or the place in flat rows, and -1 where there is none; keys and parsed are
// unfinished otherwise.
int64_t hash_token_rows(const TokenRows& rows, const TokenTable& table, KeyMode mode, int64_t n, int64_t* keys,
                        uint8_t* parsed, int n_threads);

// The same of byte strings (UTF-8 text), by their starts and sizes in bytes [N].
void hash_texts(const uint8_t* const* texts, const int64_t* sizes, int64_t n_rows, KeyMode mode, int64_t* keys,
                uint8_t* parsed, int n_threads);

}  // namespace bipace
