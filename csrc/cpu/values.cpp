#include <algorithm>
#include <numeric>
#include <vector>

#include "common/hgpo.h"
#include "common/mean.h"
#include "cpu/parallel.h"
#include "cpu/stages.h"

namespace bipace {

Members members_of(const int64_t* labels, int64_t n_records, int64_t n_clusters) {
  Members m;
  m.offsets.assign(n_clusters + 1, 0);
  for (int64_t i = 0; i < n_records; ++i) {
    if (labels[i] >= 0) ++m.offsets[labels[i] + 1];
  }
  std::partial_sum(m.offsets.begin(), m.offsets.end(), m.offsets.begin());
  m.records.resize(m.offsets.back());
  std::vector<int64_t> next(m.offsets.begin(), m.offsets.end() - 1);
  for (int64_t i = 0; i < n_records; ++i) {
    if (labels[i] >= 0) m.records[next[labels[i]]++] = i;
  }
  return m;
}

namespace {

constexpr int64_t kClustersPerTask = 64;

// body(records, n) of each cluster.
template <typename Body>
void for_clusters(const Members& m, int n_threads, const Body& body) {
  parallel_each(static_cast<int64_t>(m.offsets.size()) - 1, kClustersPerTask, n_threads,
                [&](int64_t c, int) { body(m.records.data() + m.offsets[c], m.offsets[c + 1] - m.offsets[c]); });
}

}  // namespace

void step_advantage(const float* returns, const int64_t* labels, int64_t n_records, int64_t n_clusters,
                    const int64_t* action_key, Estimator estimator, bool divide, double delta, float* term,
                    uint8_t* branch, int n_threads) {
  const Members all = members_of(labels, n_records, n_clusters);
  for_clusters(all, n_threads, [&](const int64_t* records, int64_t n) {
    if (n < 2) return;
    if (estimator == Estimator::kMean) {
      const MeanSigma stats = mean_and_sigma(n, true, [&](int64_t i) { return returns[records[i]]; });
      for (int64_t j = 0; j < n; ++j) {
        const int64_t i = records[j];
        term[i] = centred(returns[i], stats.mean);
        if (divide) term[i] = scaled(term[i], stats.sigma, delta);
        branch[i] = kPace;
      }
      return;
    }
    ExactSum total;
    double plain_total = 0.0;
    for (int64_t j = 0; j < n; ++j) {
      total.add(static_cast<double>(returns[records[j]]));
      plain_total += static_cast<double>(returns[records[j]]);
    }
    const float value = static_cast<float>(plain_total / static_cast<double>(n));  // V̂(s)
    const auto leave_one_out = [&](int64_t i) {
      ExactSum own;
      own.add(static_cast<double>(returns[i]));
      term[i] = centred(returns[i], total.minus(own) / static_cast<double>(n - 1));
      branch[i] = kLeaveOneOut;
    };
    // A stable sort by key makes each action's records contiguous and in processing order.
    std::vector<int64_t> by_key(records, records + n);
    std::stable_sort(by_key.begin(), by_key.end(), [&](int64_t a, int64_t b) { return action_key[a] < action_key[b]; });
    for (int64_t begin = 0, end; begin < n; begin = end) {
      end = begin;
      ExactSum same;
      double plain_same = 0.0;
      while (end < n && action_key[by_key[end]] == action_key[by_key[begin]]) {
        const double r = static_cast<double>(returns[by_key[end++]]);
        same.add(r);
        plain_same += r;
      }
      const int64_t n_same = end - begin;
      for (int64_t j = begin; j < end; ++j) {
        const int64_t i = by_key[j];
        branch[i] = kPace;
        if (estimator == Estimator::kDiffPeer && n_same < n) {
          term[i] = centred(returns[i], total.minus(same) / static_cast<double>(n - n_same));
        } else if (estimator == Estimator::kQStyle && n_same > 1) {
          term[i] = static_cast<float>(plain_same / static_cast<double>(n_same)) - value;
        } else {
          leave_one_out(i);
        }
      }
    }
  });
}

void hgpo_advantage(const float* returns, const int64_t* depth_labels, int64_t depth, int64_t n_records,
                    const float* episode_advantage, bool divide, double delta, double alpha, bool base_group,
                    float* advantage, int64_t* deepest, uint8_t* branch, int n_threads) {
  // a[k][i]: the record's advantage at depth k, or 0; depth 0 is the episode term.
  std::vector<std::vector<float>> a(depth + 1);
  a[0].assign(n_records, 0.0f);
  if (base_group) std::copy(episode_advantage, episode_advantage + n_records, a[0].begin());
  std::fill(deepest, deepest + n_records, int64_t{0});
  for (int64_t k = 1; k <= depth; ++k) {
    std::vector<float>& at_depth = a[k];
    at_depth.assign(n_records, 0.0f);
    const int64_t* labels = depth_labels + (k - 1) * n_records;
    const int64_t highest = n_records ? *std::max_element(labels, labels + n_records) : -1;
    const Members members = members_of(labels, n_records, highest + 1);
    for_clusters(members, n_threads, [&](const int64_t* records, int64_t n) {
      if (n < 2) return;
      const MeanSigma stats = mean_and_sigma(n, false, [&](int64_t i) { return returns[records[i]]; });
      for (int64_t j = 0; j < n; ++j) {
        const int64_t i = records[j];
        float value = centred(returns[i], stats.mean);
        if (divide) value = scaled(value, stats.sigma, delta);
        at_depth[i] = value;
        deepest[i] = k;
      }
    });
  }
  for (int64_t i = 0; i < n_records; ++i) {
    advantage[i] = hgpo_aggregate(depth, delta, alpha, [&](int64_t k) { return a[k][i]; });
    branch[i] = deepest[i] > 0 ? kPace : kSingleton;
  }
}

}  // namespace bipace
