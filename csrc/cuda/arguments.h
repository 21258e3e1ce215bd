// The arguments of every kernel, declared once for both sides: a struct of 8-byte fields each, which the launching code
// packs by name (bipace_kernels/backends/cuda/_launch.py reads this file line by line).  ARGUMENTS names the struct,
// the source file, and its kernels that take it; tensors are in processing order.
#pragma once

#include "common/hd.h"

#define ARGUMENTS(Args, source, ...) struct Args {
#define POINTER(field, type) type* field;
#define INTEGER(field) int64_t field;
#define REAL(field) double field;
#define END \
  }         \
  ;

// clang-format off
namespace bipace {

ARGUMENTS(ActionKeysArgs, action_keys, action_keys)
POINTER(ids, const void)               // [N, T], or flat with row_offsets
POINTER(valid, const void)             // like ids, non-zero = valid; null: all are
POINTER(row_offsets, const int64_t)    // [N+1], or null
POINTER(table_offsets, const int64_t)  // [V+1]; null for first_n, as table_bytes
POINTER(table_bytes, const uint8_t)
POINTER(may_open, const uint8_t)       // [V] bool: whether a token holds a <; null for other modes than action_tag
POINTER(keys, int64_t)                 // [N], written
POINTER(parsed, uint8_t)               // [N] bool, written
POINTER(outside, uint64_t)             // [1] lowest flat position of a valid id outside the table; all ones before
INTEGER(n_rows)                        // N
INTEGER(n_columns)                     // T
INTEGER(vocabulary)                    // V
INTEGER(n)
INTEGER(id_row_stride)                 // in items, as all strides
INTEGER(id_column_stride)
INTEGER(valid_row_stride)
INTEGER(valid_column_stride)
INTEGER(id_bytes)                      // 1, 2, 4 or 8
INTEGER(id_signed)
INTEGER(valid_bytes)
INTEGER(mode)
END

ARGUMENTS(GramArgs, gram, gram_half, gram_single, gram_tall)
POINTER(x, const void)            // [N, D] with strides in elements
POINTER(order, const int64_t)     // [M] the row of each record
INTEGER(dim)                      // D
INTEGER(row_stride)
INTEGER(column_stride)
INTEGER(dtype)                    // Dtype of gram.cu
POINTER(begins, const int64_t)    // [slots] first record of each group
POINTER(ends, const int64_t)      // [slots]
INTEGER(long_group)               // groups of this length or more are not for this launch
INTEGER(side)                     // of a matrix: a multiple of 128
POINTER(gram, float)              // [slots, side, side], written for i ≤ j, and wherever a tile reaches
POINTER(reciprocal, float)        // [M], written: 1 / ‖x_i‖
POINTER(scale, const float)       // [M] powers of two, 1 for nearly all: the others over- or underflow as they are
END

ARGUMENTS(ScanArgs, clusters, scan_groups)
POINTER(begins, const int64_t)    // [slots] first record of each group
POINTER(ends, const int64_t)      // [slots]
INTEGER(long_group)               // groups of this length or more are not for this launch
POINTER(gram, const float)        // [slots, side, side]: x_i · x_j for i ≤ j
INTEGER(side)                     // of a matrix: ≥ records of a group, a multiple of 128
POINTER(reciprocal, const float)  // [M]: 1 / ‖x_i‖
POINTER(kind, const uint8_t)      // [M] 0 usable, 1 alone, 2 not taken
POINTER(lowest, const float)      // [E]: 1 − ε − τ, or null
REAL(only_lowest)                 // instead, for one ε
INTEGER(capacity)                 // clusters whose S fits into shared memory; odd
POINTER(similar, float)           // [E, slots, 2, 32, side + 1] scratch: S that does not; null where all does
POINTER(decisions, void)          // [E, slots, 6, side] 32 bits: change and weight, joined; leader, next, share
POINTER(first, int64_t)           // [E, M], written: the record that began the record's cluster; −1: not taken
INTEGER(first_stride)             // M
END

ARGUMENTS(StepTermArgs, values, step_mean, step_diff_peer, step_q_style)
POINTER(returns, const float)          // [M]
POINTER(labels, const int64_t)         // [E, M] by place; −1: set aside
POINTER(action_key, const int64_t)     // [M]; null for step_mean
POINTER(order, const int64_t)          // [E, M] the record at each place, where places are sorted by label; else null
POINTER(group_offsets, const int64_t)  // [G+1]
POINTER(step, float)                   // [E, M], written
POINTER(branch, uint8_t)               // [E, M], written
INTEGER(m)
INTEGER(segments)                      // groups; 1 where sorted
INTEGER(blocks)                        // of a segment
REAL(delta)
INTEGER(divide)                        // by σ + δ
INTEGER(unbiased)                      // σ over n − 1
END

ARGUMENTS(AggregateDepthsArgs, values, aggregate_depths)
POINTER(term, const float)               // [H, M] the record's advantage at each depth
POINTER(company, const uint8_t)          // [H, M] the branch there
POINTER(episode_advantage, const float)  // [M] the item of depth 0, or null: there is none
POINTER(advantage, float)                // [M], written
POINTER(deepest, int64_t)                // [M], written: the deepest depth in company; 0: none
POINTER(branch, uint8_t)                 // [M], written
INTEGER(depth)                           // H
INTEGER(m)
REAL(delta)
REAL(alpha)
END

}  // namespace bipace
