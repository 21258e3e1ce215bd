// Method of kernel_values: rows at unit length, minus their mean in float64, rounded to float32 once; products of those
// in bundles (gram.h; a Gram matrix of the original rows, centred afterwards, would put the rounding of cosines near
// 0.99 into every entry); K in float64.  With L L^T = K_mm + jitter of the landmarks and U = K_im L^-T, C is U U^T + D
// with a block-diagonal D.  So a block only needs its own D + noise, (C + noise)^-1 follows by Sherman, Morrison and
// Woodbury, and blocks are processed in parallel.
#include "cpu/critic.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>
#include <utility>
#include <vector>

#include "common/mean.h"
#include "cpu/gram.h"
#include "cpu/greedy.h"
#include "cpu/parallel.h"
#include "cpu/symmetric.h"

namespace bipace {
namespace {

constexpr double kFlat = 1e-5;     // up to this centred squared length a row counts as the mean
constexpr double kJitter = 1e-3;   // on the diagonal of the landmarks' matrix, which equal rows make singular
constexpr double kTiny = 1e-6;     // of max |R|: a root mean square up to this is rounding
constexpr int64_t kRuns = 64;      // of blocks, whose sums are added in order
constexpr int64_t kStretch = 128;  // elements of a bundle's rows that are centred at a time

// In processing order; exact if all values are equal.
double mean_of(const float* values, int64_t n) {
  double total = 0.0;
  float low = values[0], high = low;
  for (int64_t i = 0; i < n; ++i) {
    total += static_cast<double>(values[i]);
    low = std::min(low, values[i]);
    high = std::max(high, values[i]);
  }
  return low == high ? static_cast<double>(low) : total / static_cast<double>(n);
}

// ---- the kernel ----------------------------------------------------------------------------------------------------

// Centred rows and their steps.
struct Centred {
  Bundles rows;
  std::vector<int64_t> time;
  std::vector<double> square, reciprocal;  // |x|^2 and 1 / |x|, once their own products are known

  int64_t size() const { return rows.n; }
};

void add_diagonal(Symmetric& matrix, int64_t n, double added) {
  for (int64_t i = 0; i < n; ++i) matrix.row(i)[i] += added;
}

// Usable records that share a mean: those of a group, or of the batch.
struct Members {
  std::vector<ScaledRow> rows;
  std::vector<int64_t> at;         // which record
  std::vector<double> reciprocal;  // 1 / norm
  std::vector<double> mean;        // [D] of the rows at unit length
  std::vector<int64_t> blocks;     // [B+1] where each begins
  std::vector<int64_t> landmarks;  // members that carry the kernel between blocks

  int64_t size() const { return static_cast<int64_t>(rows.size()); }
  int64_t n_blocks() const { return static_cast<int64_t>(blocks.size()) - 1; }
};

// Scratch of one thread.
struct Scratch {
  std::vector<float> row;
  Centred block;
  Symmetric matrix;
  std::vector<double> transposed, columns;
};

struct Work {
  const Rows& rows;
  const float* returns;
  const int64_t* time;
  ValueKernel kernel;
  double* value;  // holds each group's mean
  const DotKernels& dot;

  // K of row i of a and the rows of b from `first` on, in place of their products.
  void entries(const Centred& a, int64_t i, const Centred& b, int64_t first, double* row) const {
    const double square = a.square[static_cast<size_t>(i)], reciprocal = a.reciprocal[static_cast<size_t>(i)];
    const double rate = 1.0 / kernel.width;
    const bool flat = square <= kFlat;
    for (int64_t j = first; j < b.size(); ++j) {
      const double other = b.square[static_cast<size_t>(j)], product = row[j];
      double cosine = std::min(1.0, product * reciprocal * b.reciprocal[static_cast<size_t>(j)]);
      if (2.0 * product >= square + other) cosine = 1.0;  // equal rows
      if (flat || other <= kFlat) cosine = flat && other <= kFlat ? 1.0 : 0.0;
      row[j] = (cosine - 1.0) * rate;
    }
    if (kernel.horizon > 0.0) {
      const int64_t own = a.time[static_cast<size_t>(i)];
      for (int64_t j = first; j < b.size(); ++j) {
        const double between = static_cast<double>(steps_between(b.time[static_cast<size_t>(j)], own));
        const double steps = between / kernel.horizon;
        row[j] -= steps * steps / 2.0;
      }
    }
    dot.exponential(row + first, b.size() - first);
  }

  // The usable records of [begin, begin + length), with the sum of their rows at unit length as `mean`, and their
  // blocks.
  Members gather(const int64_t* order, const uint8_t* usable, int64_t begin, int64_t length, Scratch& scratch) const {
    Members found;
    found.mean.assign(static_cast<size_t>(rows.dim), 0.0);
    scratch.row.resize(static_cast<size_t>(rows.dim));
    for (int64_t i = begin; i < begin + length; ++i) {
      if (usable && !usable[i]) continue;
      ScaledRow row{order[i], 1.0f};
      const double reciprocal = measure(rows, dot, row);
      if (reciprocal == 0.0) continue;
      found.rows.push_back(row);
      found.at.push_back(i);
      found.reciprocal.push_back(reciprocal);
      const float* x = read_panel(rows, dot, row, 0, rows.dim, scratch.row.data());
      double* sum = found.mean.data();
      for (int64_t e = 0; e < rows.dim; ++e) sum[e] += reciprocal * static_cast<double>(x[e]);
    }
    const int64_t n = found.size(), runs = n <= kLongestBlock ? (n ? 1 : 0) : (n + kCutBlock - 1) / kCutBlock;
    for (int64_t k = 0; k <= runs; ++k) found.blocks.push_back(runs ? k * n / runs : 0);
    const int64_t m = runs > 1 ? kLandmarks : 0;
    for (int64_t k = 0; k < m; ++k) found.landmarks.push_back(k * n / m);
    return found;
  }

  // The rows which(0) ... which(n - 1) minus the mean.
  template <typename Which>
  void centre(const Members& members, int64_t n, const Which& which, Scratch& scratch, Centred& out) const {
    out.rows.resize(n, rows.dim);
    out.time.resize(static_cast<size_t>(n));
    for (int64_t i = 0; i < n; ++i) out.time[static_cast<size_t>(i)] = time[members.at[static_cast<size_t>(which(i))]];
    scratch.row.resize(static_cast<size_t>(kStretch * (kBundle + 1)));
    float* const beside = scratch.row.data() + kStretch;  // [kBundle, kStretch], to be turned
    for (int64_t bundle = 0; bundle < out.rows.count(); ++bundle) {
      const int64_t first = bundle * kBundle, height = std::min<int64_t>(kBundle, n - first);
      std::fill(beside, beside + kBundle * kStretch, 0.0f);
      for (int64_t from = 0; from < rows.dim; from += kStretch) {
        const int64_t len = std::min(kStretch, rows.dim - from);
        const double* mean = members.mean.data() + from;
        for (int64_t i = 0; i < height; ++i) {
          const size_t member = static_cast<size_t>(which(first + i));
          const double reciprocal = members.reciprocal[member];
          const float* x = read_panel(rows, dot, members.rows[member], from, len, scratch.row.data());
          float* z = beside + i * kStretch;
          for (int64_t e = 0; e < len; ++e) {
            z[e] = static_cast<float>(reciprocal * static_cast<double>(x[e]) - mean[e]);
          }
        }
        float* to = out.rows.at(bundle, from);
        for (int64_t e = 0; e < len; ++e) {
          for (int64_t i = 0; i < kBundle; ++i) to[e * kBundle + i] = beside[i * kStretch + e];
        }
      }
    }
  }

  // K + same of a block in the upper triangle of `matrix`, which fills in the squares of its rows too.
  void fill(Centred& block, double same, Symmetric& matrix) const {
    const int64_t n = block.size();
    matrix.reset(n);
    multiply(dot, block.rows, block.rows, matrix.data.data(), matrix.stride);
    block.square.resize(static_cast<size_t>(n));
    block.reciprocal.resize(static_cast<size_t>(n));
    for (int64_t i = 0; i < n; ++i) {
      block.square[static_cast<size_t>(i)] = matrix.row(i)[i];
      block.reciprocal[static_cast<size_t>(i)] = 1.0 / std::sqrt(matrix.row(i)[i]);
    }
    for (int64_t i = 0; i < n; ++i) {
      double* const row = matrix.row(i);
      entries(block, i, block, i + 1, row);
      row[i] = 1.0;
      for (int64_t j = i; j < n; ++j) row[j] += same;
    }
  }

  // K of the rows of a and b, into whole bundles of zeros at `out`.
  void between(const Centred& a, const Centred& b, double* out, int64_t stride) const {
    multiply(dot, a.rows, b.rows, out, stride);
    for (int64_t i = 0; i < a.size(); ++i) entries(a, i, b, 0, out + i * stride);
  }

  // K (K + noise I)^-1 A of the members which[0] ... which[n - 1].
  void average(const Members& members, const int64_t* which, int64_t n, const double* advantage, double* out,
               Scratch& scratch) const {
    if (n == 1) return;
    const auto record = [&](int64_t i) { return members.at[static_cast<size_t>(which[i])]; };
    const double* x = solve_block(
        members, n, [which](int64_t i) { return which[i]; }, 0.0, scratch,
        [&](int64_t i) { return advantage[record(i)]; });
    for (int64_t i = 0; i < n; ++i) out[record(i)] = advantage[record(i)] - kernel.noise * x[i];
  }

  // Values of the members, whose means are `prior` or else 0.
  void run(const Members& members, bool from_mean, double same, int n_threads, std::vector<Scratch>& scratch) const {
    if (members.n_blocks() == 1) return run_whole(members, from_mean, same, scratch[0]);
    run_blocks(members, from_mean, same, n_threads, scratch);
  }

 private:
  double prior(int64_t record, bool from_mean) const { return from_mean ? value[record] : 0.0; }
  double difference(int64_t record, bool from_mean) const {
    return static_cast<double>(returns[record]) - prior(record, from_mean);
  }

  // C is K + same: C x = y - noise x.
  void run_whole(const Members& members, bool from_mean, double same, Scratch& scratch) const {
    const double* x = solve_block(
        members, members.size(), [](int64_t i) { return i; }, same, scratch,
        [&](int64_t i) { return difference(members.at[static_cast<size_t>(i)], from_mean); });
    for (int64_t i = 0; i < members.size(); ++i) {
      const int64_t record = members.at[static_cast<size_t>(i)];
      value[record] = prior(record, from_mean) + difference(record, from_mean) - kernel.noise * x[i];
    }
  }

  // x = (K + same + noise I)^-1 y of the members which(0) ... which(n - 1), in the scratch.
  template <typename Which, typename Right>
  const double* solve_block(const Members& members, int64_t n, const Which& which, double same, Scratch& scratch,
                            const Right& y) const {
    centre(members, n, which, scratch, scratch.block);
    fill(scratch.block, same, scratch.matrix);
    add_diagonal(scratch.matrix, n, kernel.noise);
    factorise(dot, scratch.matrix);
    std::vector<double>& x = scratch.columns;
    x.assign(static_cast<size_t>(scratch.matrix.n), 0.0);
    for (int64_t i = 0; i < n; ++i) x[static_cast<size_t>(i)] = y(i);
    solve(scratch.matrix, x.data());
    return x.data();
  }

  void run_blocks(const Members& members, bool from_mean, double same, int n_threads,
                  std::vector<Scratch>& scratch) const {
    const int64_t n = members.size(), m = static_cast<int64_t>(members.landmarks.size());
    const int64_t wide = Symmetric::padded(m);
    Centred landmarks;
    centre(members, m, [&](int64_t k) { return members.landmarks[static_cast<size_t>(k)]; }, scratch[0], landmarks);
    Symmetric among;
    fill(landmarks, 0.0, among);
    add_diagonal(among, m, kJitter);
    factorise(dot, among);

    // Of each block D + noise = W^T W, with [U, y] in `wide` + 1 columns: sums of [U, y]^T (D + noise)^-1 [U, y], and
    // (D + noise)^-1 [U, y] itself.
    const int64_t width = wide + kOuterB, n_blocks = members.n_blocks(), runs = std::min(kRuns, n_blocks);
    std::vector<Symmetric> sums(static_cast<size_t>(runs));
    std::vector<double> solved(static_cast<size_t>(n * (wide + 1)));
    parallel_for(runs, n_threads, [&](int64_t r, int worker) {
      const DefaultFloats floats_mode;
      Scratch& own = scratch[static_cast<size_t>(worker)];
      Symmetric& sum = sums[static_cast<size_t>(r)];
      sum.n = sum.stride = width;
      sum.data.assign(static_cast<size_t>(width * width), 0.0);
      for (int64_t block = r * n_blocks / runs; block < (r + 1) * n_blocks / runs; ++block) {
        const int64_t first = members.blocks[static_cast<size_t>(block)];
        const int64_t size = members.blocks[static_cast<size_t>(block) + 1] - first, tall = Symmetric::padded(size);
        centre(members, size, [first](int64_t i) { return first + i; }, own, own.block);
        fill(own.block, same, own.matrix);
        add_diagonal(own.matrix, size, kernel.noise);
        own.transposed.assign(static_cast<size_t>(wide * tall), 0.0);  // U^T
        double* u = own.transposed.data();
        between(landmarks, own.block, u, tall);
        solve_forward(dot, among, u, tall, tall);
        add_square(dot, own.matrix, u, tall, wide, -1.0);
        factorise(dot, own.matrix);
        own.columns.assign(static_cast<size_t>(tall * width), 0.0);
        double* x = own.columns.data();
        for (int64_t i = 0; i < size; ++i) {
          for (int64_t k = 0; k < m; ++k) x[i * width + k] = u[k * tall + i];
          x[i * width + wide] = difference(members.at[static_cast<size_t>(first + i)], from_mean);
        }
        solve_forward(dot, own.matrix, x, width, width);
        add_square(dot, sum, x, width, tall, 1.0);
        solve_backward(dot, own.matrix, x, width, width);
        for (int64_t i = 0; i < size; ++i) {
          std::copy(x + i * width, x + i * width + wide + 1, solved.data() + (first + i) * (wide + 1));
        }
      }
    });

    Symmetric inner;
    inner.n = inner.stride = wide;
    inner.data.assign(static_cast<size_t>(wide * wide), 0.0);
    std::vector<double> weight(static_cast<size_t>(wide), 0.0);
    for (const Symmetric& sum : sums) {
      for (int64_t i = 0; i < wide; ++i) {
        for (int64_t j = i; j < wide; ++j) inner.row(i)[j] += sum.row(i)[j];
        weight[static_cast<size_t>(i)] += sum.row(i)[wide];
      }
    }
    for (int64_t i = 0; i < wide; ++i) inner.row(i)[i] += 1.0;
    factorise(dot, inner);
    solve(inner, weight.data());
    for (int64_t i = 0; i < n; ++i) {
      const int64_t record = members.at[static_cast<size_t>(i)];
      const double* x = solved.data() + i * (wide + 1);
      double rest = x[wide];
      for (int64_t k = 0; k < wide; ++k) rest -= x[k] * weight[static_cast<size_t>(k)];
      value[record] = prior(record, from_mean) + difference(record, from_mean) - kernel.noise * rest;
    }
  }
};

}  // namespace

void cluster_values(const float* returns, const int64_t* labels, const int64_t* group_offsets, int64_t n_groups,
                    double shrinkage, double* value, int n_threads) {
  parallel_for(n_groups, n_threads, [&](int64_t g, int) {
    const int64_t begin = group_offsets[g], n = group_offsets[g + 1] - begin;
    if (n == 0) return;
    const double mean = mean_of(returns + begin, n);
    std::fill(value + begin, value + begin + n, mean);
    if (!labels) return;
    // Labels are dense over the batch, so those of a group are close together.
    const auto [low, high] = std::minmax_element(labels + begin, labels + begin + n);
    std::vector<double> total(static_cast<size_t>(*high - *low) + 1, 0.0);
    std::vector<int64_t> size(total.size(), 0);
    for (int64_t i = begin; i < begin + n; ++i) {
      total[static_cast<size_t>(labels[i] - *low)] += static_cast<double>(returns[i]) - mean;
      ++size[static_cast<size_t>(labels[i] - *low)];
    }
    for (int64_t i = begin; i < begin + n; ++i) {
      const size_t c = static_cast<size_t>(labels[i] - *low);
      value[i] = mean + total[c] / (static_cast<double>(size[c]) + shrinkage);
    }
  });
}

void kernel_values(const Rows& rows, const int64_t* order, const float* returns, const int64_t* time,
                   const int64_t* group_offsets, int64_t n_groups, const uint8_t* usable, const int64_t* landmarks,
                   int64_t n_landmarks, Share share, ValueKernel kernel, double* value, int n_threads) {
  const Work work{rows, returns, time, kernel, value, dot_kernels()};
  const size_t workers = static_cast<size_t>(std::max(n_threads, 1));
  std::vector<std::vector<Scratch>> scratch(workers);
  std::vector<Members> members(share == Share::kBatch ? static_cast<size_t>(n_groups) : 0);
  parallel_for(n_groups, n_threads, [&](int64_t g, int worker) {
    const DefaultFloats floats_mode;
    std::vector<Scratch>& own = scratch[static_cast<size_t>(worker)];
    own.resize(1);
    const int64_t begin = group_offsets[g], n = group_offsets[g + 1] - begin;
    if (n == 0) return;
    std::fill(value + begin, value + begin + n, mean_of(returns + begin, n));
    Members found = work.gather(order, usable, begin, n, own[0]);
    if (share == Share::kBatch) {
      members[static_cast<size_t>(g)] = std::move(found);
    } else if (found.size()) {
      for (double& m : found.mean) m /= static_cast<double>(found.size());
      work.run(found, true, 0.0, 1, own);
    }
  });
  if (share != Share::kBatch) return;

  const DefaultFloats floats_mode;
  Members all;
  all.mean.assign(static_cast<size_t>(rows.dim), 0.0);
  all.blocks.push_back(0);
  for (Members& part : members) {
    const int64_t begin = all.size();
    all.rows.insert(all.rows.end(), part.rows.begin(), part.rows.end());
    all.at.insert(all.at.end(), part.at.begin(), part.at.end());
    all.reciprocal.insert(all.reciprocal.end(), part.reciprocal.begin(), part.reciprocal.end());
    for (size_t k = 1; k < part.blocks.size(); ++k) all.blocks.push_back(begin + part.blocks[k]);
    for (size_t e = 0; e < part.mean.size(); ++e) all.mean[e] += part.mean[e];
    part = Members();
  }
  if (!all.size()) return;
  for (double& m : all.mean) m /= static_cast<double>(all.size());
  for (int64_t k = 0; k < (landmarks ? n_landmarks : std::min(all.size(), kLandmarks)); ++k) {
    if (!landmarks) {
      all.landmarks.push_back(k);
      continue;
    }
    const auto found = std::lower_bound(all.at.begin(), all.at.end(), landmarks[k]);
    if (found != all.at.end() && *found == landmarks[k]) all.landmarks.push_back(found - all.at.begin());
  }
  std::vector<Scratch> each(workers);
  work.run(all, false, kernel.same, n_threads, each);
}

void gae_advantage(const double* rewards, const double* value, const int64_t* step, const int64_t* trajectory_offsets,
                   int64_t n_trajectories, const uint8_t* truncated, double gamma, double gae_lambda, double* out,
                   int n_threads) {
  parallel_for(n_trajectories, n_threads, [&](int64_t t, int) {
    const int64_t begin = trajectory_offsets[t], end = trajectory_offsets[t + 1];
    double next_value = 0.0, next_advantage = 0.0;
    for (int64_t last = end; last > begin;) {
      int64_t first = last - 1;
      while (step && first > begin && step[first - 1] == step[first]) --first;
      double discount = gamma, decay = gamma * gae_lambda;
      if (last < end && step && steps_between(step[first], step[last]) != 1) {
        const double gap = static_cast<double>(steps_between(step[first], step[last]));
        discount = std::pow(discount, gap);
        decay = std::pow(decay, gap);
      }
      double total = 0.0;
      bool cut = false;
      for (int64_t i = last - 1; i >= first; --i) {
        total += value[i];
        cut |= truncated && truncated[i];
      }
      const double own = total / static_cast<double>(last - first);
      if (last == end) next_value = cut ? own : 0.0;
      total = 0.0;
      for (int64_t i = last - 1; i >= first; --i) {
        out[i] = rewards[i] + discount * next_value - value[i] + decay * next_advantage;
        total += out[i];
      }
      next_value = own;
      next_advantage = total / static_cast<double>(last - first);
      last = first;
    }
  });
}

void same_action_advantage(const Rows& rows, const int64_t* order, const double* advantage, const int64_t* time,
                           const int64_t* action_key, const int64_t* group_offsets, int64_t n_groups,
                           const uint8_t* usable, double width, double horizon, double noise, double* out,
                           int n_threads) {
  const Work work{rows, nullptr, time, ValueKernel{width, horizon, noise, 0.0}, nullptr, dot_kernels()};
  std::vector<Scratch> scratch(static_cast<size_t>(std::max(n_threads, 1)));
  parallel_for(n_groups, n_threads, [&](int64_t g, int worker) {
    const DefaultFloats floats_mode;
    Scratch& own = scratch[static_cast<size_t>(worker)];
    const int64_t begin = group_offsets[g], n = group_offsets[g + 1] - begin;
    for (int64_t i = begin; i < begin + n; ++i) out[i] = advantage[i] / (1.0 + noise);
    Members members = work.gather(order, usable, begin, n, own);
    if (!members.size()) return;
    for (double& m : members.mean) m /= static_cast<double>(members.size());
    std::vector<int64_t> sorted;  // members of a block, by action
    const auto key = [&](int64_t member) { return action_key[members.at[static_cast<size_t>(member)]]; };
    for (int64_t block = 0; block < members.n_blocks(); ++block) {
      sorted.resize(static_cast<size_t>(members.blocks[static_cast<size_t>(block) + 1] -
                                        members.blocks[static_cast<size_t>(block)]));
      std::iota(sorted.begin(), sorted.end(), members.blocks[static_cast<size_t>(block)]);
      std::stable_sort(sorted.begin(), sorted.end(), [&](int64_t i, int64_t j) { return key(i) < key(j); });
      for (auto first = sorted.begin(); first != sorted.end();) {
        const auto last = std::find_if(first, sorted.end(), [&](int64_t i) { return key(i) != key(*first); });
        work.average(members, &*first, last - first, advantage, out, own);
        first = last;
      }
    }
  });
}

void normed_advantage(const double* advantage, const float* returns, const int64_t* group_offsets, int64_t n_groups,
                      StepNorm step_norm, float* out, int n_threads) {
  const int64_t n_records = group_offsets[n_groups];
  std::vector<double> square(static_cast<size_t>(n_groups), 0.0);
  std::vector<float> largest(static_cast<size_t>(n_groups), 0.0f);
  parallel_for(n_groups, n_threads, [&](int64_t g, int) {
    double total = 0.0;
    float most = 0.0f;
    for (int64_t i = group_offsets[g]; i < group_offsets[g + 1]; ++i) {
      total += advantage[i] * advantage[i];
      most = std::max(most, std::abs(returns[i]));
    }
    square[static_cast<size_t>(g)] = total;
    largest[static_cast<size_t>(g)] = most;
  });
  const auto reciprocal = [](double total, int64_t n, float most) {
    const double size = n ? std::sqrt(total / static_cast<double>(n)) : 0.0;
    return most > 0.0f && size > kTiny * static_cast<double>(most) ? 1.0 / size : 0.0;
  };
  double whole = 0.0;
  float most = 0.0f;
  for (int64_t g = 0; g < n_groups; ++g) {
    whole += square[static_cast<size_t>(g)];
    most = std::max(most, largest[static_cast<size_t>(g)]);
  }
  const double of_batch = reciprocal(whole, n_records, most);
  constexpr double kLimit = static_cast<double>(std::numeric_limits<float>::max());
  parallel_for(n_groups, n_threads, [&](int64_t g, int) {
    const int64_t begin = group_offsets[g], end = group_offsets[g + 1];
    double factor = step_norm == StepNorm::kBatch ? of_batch : 1.0;
    if (step_norm == StepNorm::kGroup) {
      factor = reciprocal(square[static_cast<size_t>(g)], end - begin, largest[static_cast<size_t>(g)]);
    }
    for (int64_t i = begin; i < end; ++i) {
      out[i] = static_cast<float>(std::clamp(factor * advantage[i], -kLimit, kLimit));
    }
  });
}

}  // namespace bipace
