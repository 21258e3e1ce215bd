// The stages, a section for each source; action keys and the critic have headers of their own.
#pragma once

#include <cstdint>
#include <vector>

#include "common/mean.h"
#include "cpu/rows.h"

namespace bipace {

// ---- returns.cpp: discounted returns-to-go and trajectory returns.

void discounted_returns(const double* rewards,              // [M]
                        const int64_t* step,                // [M] or nullptr: neighbours are one step apart
                        const int64_t* trajectory_offsets,  // [T+1]
                        int64_t n_trajectories, double gamma,
                        float* out,  // [M]
                        int n_threads);

void trajectory_returns(const double* rewards,              // [M]
                        const int64_t* step,                // [M] or nullptr
                        const int64_t* trajectory_offsets,  // [T+1]
                        int64_t n_trajectories,
                        float* out,  // [T]
                        int n_threads);

// ---- episode.cpp: the episode advantage A_ep.

void episode_advantage(const float* episode_return,        // [T]
                       const int64_t* trajectory_offsets,  // [T+1]
                       const int64_t* group_trajectories,  // [G+1]
                       int64_t n_groups,
                       bool over_steps,  // population: the group's step records instead of its trajectories
                       bool divide,      // by σ + δ
                       bool lone_raw,    // a population of one keeps its return instead of 0
                       double delta,
                       float* out,  // [M]
                       int n_threads);

// ---- clusters.cpp: greedy cosine clusters inside each prompt group, Algorithm 1 of the paper with a band on its two
// decisions.

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

// Many epsilons at once: one Gram matrix per group, one scan of it per epsilon (sweep.cpp).

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

// ---- observations.cpp: partitions of codes (numbers of equal observations) inside each prompt group.

void cluster_exact(const int64_t* codes,          // [M]
                   const int64_t* group_offsets,  // [G+1]
                   int64_t n_groups,
                   int64_t* labels);  // [M] dense over the batch, by first appearance

void cluster_history(const int64_t* codes,               // [M]
                     const int64_t* step,                // [M] or nullptr
                     const int64_t* trajectory_offsets,  // [T+1]
                     int64_t n_trajectories,
                     const int64_t* group_offsets,  // [G+1]
                     int64_t n_groups, int64_t depth,
                     int64_t* labels);  // [depth, M]; row k-1: clusters by the last k codes, -1 if there are fewer

// ---- similar.cpp: first-fit clusters of texts by the Ratcliff/Obershelp ratio, as Python's difflib.SequenceMatcher
// defines it.

// The code points of one string, 1, 2 or 4 bytes each (CPython's own storage, so nothing is copied).
struct Text {
  const void* data;
  int64_t size;  // code points, at most 2³¹ − 1
  int width;     // bytes per code point: 1, 2 or 4
};

// Labels [M]: inside each group, in the order given, a text joins the oldest cluster whose first member b satisfies
// SequenceMatcher(None, text, b).ratio() >= similarity, else it seeds one.  Dense over the batch, numbered by first
// appearance. Threads share the groups; labels do not depend on their number.  similarity must be at most 1.
void cluster_similar(const Text* texts,             // [M]
                     const int64_t* group_offsets,  // [G+1]
                     int64_t n_groups, double similarity, int n_threads,
                     int64_t* labels);  // [M]

// ---- values.cpp: the step advantage A_S: means over clusters and over equal actions inside them.

// Records by cluster, each cluster in processing order.
struct Members {
  std::vector<int64_t> offsets;  // [C+1]
  std::vector<int64_t> records;  // [M], those of a cluster
};

Members members_of(const int64_t* labels,  // [M] from -1 (none) to C - 1
                   int64_t n_records, int64_t n_clusters);

enum class Estimator { kMean, kDiffPeer, kQStyle };

void step_advantage(const float* returns,   // [M]
                    const int64_t* labels,  // [M] cluster of each record, in [0, C)
                    int64_t n_records, int64_t n_clusters,
                    const int64_t* action_key,  // [M]; nullptr for kMean
                    Estimator estimator, bool divide, double delta,
                    float* step,      // [M] zeros, as they stay for records without peers
                    uint8_t* branch,  // [M] kSingleton, likewise
                    int n_threads);

void hgpo_advantage(const float* returns,         // [M]
                    const int64_t* depth_labels,  // [depth, M]; -1: fewer observations than the depth
                    int64_t depth, int64_t n_records,
                    const float* episode_advantage,  // [M]
                    bool divide, double delta, double alpha, bool base_group,
                    float* advantage,  // [M]
                    int64_t* deepest,  // [M] deepest depth at which the record has peers; 0: none
                    uint8_t* branch,   // [M]
                    int n_threads);

// ---- ngrams.cpp: hashed n-gram counts of byte strings, scaled to unit length (spec: the paper's HashNgram).

// Every n bytes of (n-1 times 0x02) + text + (n-1 times 0x03) add ±1 to one of dim buckets; then ℓ2, in float64,
// rounded to float32 once.  A row that cancels to zero gets 1 in bucket 0.
void ngram_fingerprints(const uint8_t* bytes,    // [B] the texts one after the other
                        const int64_t* offsets,  // [N+1]
                        int64_t n_rows, int64_t n, int64_t dim,
                        float* out,  // [N, dim] row-major
                        int n_threads);

}  // namespace bipace
