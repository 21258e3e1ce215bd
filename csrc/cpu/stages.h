// The stages, a section for each source; action keys and the critic have headers of their own.  What they compute is
// said in bipace_kernels/backends/contract.py, here only what a caller in C++ must know beside it.
//
// Shapes by the arguments' names, in all stages; `out` and what differs is said at each function:
//
//   [M]     rewards, returns, codes, labels, state, branch, value, advantage, time (step numbers, at least 0)
//           order             row of the record, in processing order
//           step, usable      may be null: neighbours are one step apart; all are
//           action_key        may be null where it is not read
//           trajectory, truncated, parsed   may be null (critic.h)
//   [T]     episode_return;   [T+1]   trajectory_offsets
//   [G+1]   group_offsets, group_trajectories
//
// The same bits at any thread count, and for a group by itself as inside any batch.
#pragma once

#include <cstdint>
#include <vector>

#include "common/mean.h"
#include "cpu/rows.h"

namespace bipace {

// ---- returns.cpp: discounted returns-to-go, out [M], and trajectory returns, out [T].

void discounted_returns(const double* rewards, const int64_t* step, const int64_t* trajectory_offsets,
                        int64_t n_trajectories, double gamma, float* out, int n_threads);

void trajectory_returns(const double* rewards, const int64_t* step, const int64_t* trajectory_offsets,
                        int64_t n_trajectories, float* out, int n_threads);

// ---- episode.cpp: the episode advantage A_ep, out [M].

// over_steps: the population is the group's step records instead of its trajectories; divide: by σ + δ; lone_raw: a
// population of one keeps its return instead of 0.
void episode_advantage(const float* episode_return, const int64_t* trajectory_offsets,
                       const int64_t* group_trajectories, int64_t n_groups, bool over_steps, bool divide, bool lone_raw,
                       double delta, float* out, int n_threads);

// ---- clusters.cpp: greedy cosine clusters inside each prompt group, Algorithm 1 of the paper with a band on its two
// decisions.

// State of each row: 0 fine, 1 not finite, 2 zero.
void scan_rows(const Rows& rows, const int64_t* order, int64_t n_records, int n_threads, uint8_t* state);

// Records that are not usable, and rows without a direction (zero or not finite), get a cluster of their own and affect
// no other.  epsilon 0: rows equal as given.  Throws only std::bad_alloc.
void cluster_cosine(const Rows& rows, const int64_t* order, const int64_t* group_offsets, int64_t n_groups,
                    const uint8_t* usable, double epsilon, int n_threads, int64_t* labels);

// ---- sweep.cpp: many epsilons at once, by one Gram matrix per group and one scan of it per epsilon.

// Longer groups are clustered by cluster_cosine for each epsilon, whose scratch only grows with the clusters: the Gram
// matrix of 4,096 records already takes 64 MiB.
constexpr int64_t kLongestSweep = 4096;

// labels [E, M]: row e as from cluster_cosine at epsilons[e], up to decisions within 1e-5 of the rule.  An epsilon of 0
// uses cluster_cosine.  Labels of one epsilon do not depend on the others.  Throws only std::bad_alloc.
void cluster_sweep(const Rows& rows, const int64_t* order, const int64_t* group_offsets, int64_t n_groups,
                   const uint8_t* usable, const double* epsilons, int64_t n_epsilons, int n_threads, int64_t* labels);

// ---- observations.cpp: partitions of codes (numbers of equal observations) inside each prompt group.

void cluster_exact(const int64_t* codes, const int64_t* group_offsets, int64_t n_groups, int64_t* labels);

// labels [depth, M], row k-1: clusters by the last k codes, -1 if there are fewer.
void cluster_history(const int64_t* codes, const int64_t* step, const int64_t* trajectory_offsets,
                     int64_t n_trajectories, const int64_t* group_offsets, int64_t n_groups, int64_t depth,
                     int64_t* labels);

// ---- similar.cpp: first-fit clusters of texts by the Ratcliff/Obershelp ratio, as Python's difflib.SequenceMatcher
// defines it.

// The code points of one string, 1, 2 or 4 bytes each (CPython's own storage, so nothing is copied).
struct Text {
  const void* data;
  int64_t size;  // code points, at most 2³¹ − 1
  int width;     // bytes per code point: 1, 2 or 4
};

// texts [M].  similarity must be at most 1.
void cluster_similar(const Text* texts, const int64_t* group_offsets, int64_t n_groups, double similarity,
                     int n_threads, int64_t* labels);

// ---- values.cpp: the step advantage A_S: means over clusters and over equal actions inside them.

// Records by cluster, each cluster in processing order.
struct Members {
  std::vector<int64_t> offsets;  // [C+1]
  std::vector<int64_t> records;  // [M], those of a cluster
};

// Labels from -1 (none) to C - 1.
Members members_of(const int64_t* labels, int64_t n_records, int64_t n_clusters);

enum class Estimator { kMean, kDiffPeer, kQStyle };

// term [M] and branch hold zeros and kSingleton before, which records without peers keep.
void step_advantage(const float* returns, const int64_t* labels, int64_t n_records, int64_t n_clusters,
                    const int64_t* action_key, Estimator estimator, bool divide, double delta, float* term,
                    uint8_t* branch, int n_threads);

// depth_labels [depth, M] of cluster_history; episode_advantage [M]; deepest [M]: depth at which the record has peers.
void hgpo_advantage(const float* returns, const int64_t* depth_labels, int64_t depth, int64_t n_records,
                    const float* episode_advantage, bool divide, double delta, double alpha, bool base_group,
                    float* advantage, int64_t* deepest, uint8_t* branch, int n_threads);

// ---- ngrams.cpp: hashed n-gram counts of byte strings, scaled to unit length (the paper's HashNgram).

// bytes [B]: the texts one after the other; offsets [N+1]; out [N, dim].  Every n bytes of (n-1 times 0x02) + text +
// (n-1 times 0x03) add ±1 to one of dim buckets; then ℓ2, in float64, rounded once.  A row that cancels to zero gets 1
// in bucket 0.
void ngram_fingerprints(const uint8_t* bytes, const int64_t* offsets, int64_t n_rows, int64_t n, int64_t dim,
                        float* out, int n_threads);

}  // namespace bipace
