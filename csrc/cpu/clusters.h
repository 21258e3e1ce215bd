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

// ---- many epsilons at once: one Gram matrix per group, one scan of it per epsilon (sweep.cpp)

// Longer groups are clustered by cluster_cosine for each epsilon, whose scratch only grows with the clusters: the Gram
// matrix of 4,096 records already takes 64 MiB.
constexpr int64_t kLongestSweep = 4096;

// labels[e] as from cluster_cosine at epsilons[e], up to decisions within 1e-5 of the rule.  An epsilon of 0
// uses cluster_cosine.  Labels of one epsilon only depend on the group's rows and that epsilon.  Same bits
// at any thread count, and for a group by itself as inside any batch.  Throws only std::bad_alloc.
void cluster_sweep(const Rows& rows,
                   const int64_t* order,          // [M] row of the record, in processing order
                   const int64_t* group_offsets,  // [G+1]
                   int64_t n_groups,
                   const uint8_t* usable,   // [M] or null: all
                   const double* epsilons,  // [E]
                   int64_t n_epsilons, int n_threads,
                   int64_t* labels);  // [E, M]

}  // namespace bipace
