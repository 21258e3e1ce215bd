// Greedy cosine clusters inside each prompt group: Algorithm 1 of the paper with a band on its two decisions.
#pragma once

#include <cstdint>

#include "cpu/rows.h"

namespace bipace {

// State of each row: 0 fine, 1 not finite, 2 zero.
void scan_rows(const Rows& rows,
               const int64_t* order,  // [M] row of the record
               int64_t n_records, int n_threads,
               uint8_t* state);  // [M]

// Labels 0..C-1 over the batch, numbered by first appearance.  Records that are not usable, and rows without a
// direction (zero or not finite), get a cluster of their own and affect no other.  epsilon 0: rows equal as given. Same
// bits at any thread count, and for a group by itself as inside any batch.  Throws only std::bad_alloc.
void cluster_cosine(const Rows& rows,
                    const int64_t* order,          // [M] row of the record, in processing order
                    const int64_t* group_offsets,  // [G+1]
                    int64_t n_groups,
                    const uint8_t* usable,  // [M] or null: all
                    double epsilon, int n_threads,
                    int64_t* labels);  // [M]

}  // namespace bipace
