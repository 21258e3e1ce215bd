// Method of kernel_values: rows at unit length, minus the mean of their group in float64, rounded to float32 once;
// products of those in bundles (gram.h; a Gram matrix of the original rows, centred afterwards, would put the rounding
// of cosines near 0.99 into every entry); K in float64.  Rows about the batch's mean are z + d, d the difference of the
// two means, and their products z_i z_j + (z_i d + z_j d + d d), so that the z_i z_j serve same_action_advantage too;
// where a row is so near the batch's mean that these cancel, its block is centred about that mean instead.  With
// L L^T = K_mm + jitter of the landmarks and U = K_im L^-T, C is U U^T + D with a block-diagonal D.  So a block only
// needs its own D + noise, (C + noise)^-1 follows by Sherman, Morrison and Woodbury, and blocks are processed in
// parallel.
#include "cpu/critic.h"

#include <algorithm>
#include <cmath>
#include <limits>
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
constexpr double kCancels = 16.0;  // squared distance between the means, as a multiple of a row's from the batch's
constexpr double kTiny = 1e-6;     // of max |R|: a root mean square up to this is rounding
constexpr int64_t kRuns = 64;      // of blocks, whose sums are added in order

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

// A usable record.
struct Member {
  ScaledRow row;
  int64_t at;         // which record
  double reciprocal;  // 1 / norm
};

// Where the products of a group's rows are kept: the upper triangle over its n records from `begin` on, row by row.
struct Products {
  double* data = nullptr;  // null: nowhere
  int64_t begin = 0, n = 0;

  static int64_t size(int64_t n) { return n * (n + 1) / 2; }
  // Of record i with record j is at [j], i <= j.
  double* row(int64_t i) const {
    const int64_t k = i - begin;
    return data + k * (2 * n - k - 1) / 2 - begin;
  }
};

constexpr double kUnusable = -1.0;  // as the product of a record's row with itself

struct Group {
  std::vector<double> mean;  // [D] of its members' rows at unit length
  Products products;
};

struct Block {
  int64_t first, size;  // members
  size_t group;
};

// Usable records of a group, or of the batch.
struct Members {
  std::vector<Member> list;
  std::vector<Group> groups;
  std::vector<double> mean;  // [D] of the batch; empty: the group's is used
  std::vector<Block> blocks;
  std::vector<int64_t> landmarks;  // members that carry the kernel between blocks

  int64_t size() const { return static_cast<int64_t>(list.size()); }
  const Member& operator[](int64_t i) const { return list[static_cast<size_t>(i)]; }
};

// Centred rows and their steps.
struct Centred {
  Bundles rows;
  std::vector<int64_t> time;
  std::vector<double> square, reciprocal;  // |x|^2 and 1 / |x|, once their own products are known

  int64_t size() const { return static_cast<int64_t>(time.size()); }
};

void add_diagonal(Symmetric& matrix, int64_t n, double added) {
  for (int64_t i = 0; i < n; ++i) matrix.row(i)[i] += added;
}

// Scratch of one thread.
struct Scratch {
  std::vector<float> row;
  Centred block;
  std::vector<float> shift;  // [D] from the mean of the block's group to the batch's
  Symmetric matrix;
  std::vector<double> transposed, columns, shifts;
};

struct Work {
  const Rows& rows;
  const int64_t* time;
  ValueKernel kernel;
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

  // The usable records of [begin, begin + length), and their blocks.
  Members gather(const int64_t* order, const uint8_t* usable, int64_t begin, int64_t length, Scratch& scratch) const {
    Members found;
    std::vector<double> mean(static_cast<size_t>(rows.dim), 0.0);
    scratch.row.resize(static_cast<size_t>(rows.dim));
    for (int64_t i = begin; i < begin + length; ++i) {
      if (usable && !usable[i]) continue;
      ScaledRow row{order[i], 1.0f};
      const double reciprocal = measure(rows, dot, row);
      if (reciprocal == 0.0) continue;
      found.list.push_back({row, i, reciprocal});
      dot.add_scaled(read_panel(rows, dot, row, 0, rows.dim, scratch.row.data()), reciprocal, rows.dim, mean.data());
    }
    const int64_t n = found.size(), runs = n <= kLongestBlock ? (n ? 1 : 0) : (n + kCutBlock - 1) / kCutBlock;
    for (double& m : mean) m /= static_cast<double>(std::max<int64_t>(n, 1));
    found.groups.push_back({std::move(mean), {}});
    for (int64_t k = 0; k < runs; ++k) found.blocks.push_back({k * n / runs, (k + 1) * n / runs - k * n / runs, 0});
    const int64_t m = runs > 1 ? kLandmarks : 0;
    for (int64_t k = 0; k < m; ++k) found.landmarks.push_back(k * n / m);
    return found;
  }

  // The rows of which(0) ... which(n - 1) at unit length, minus the mean.
  template <typename Which>
  void centre(const std::vector<double>& mean, int64_t n, const Which& which, Scratch& scratch, Centred& out) const {
    out.rows.resize(n, rows.dim);
    take_steps(n, which, out);
    scratch.row.resize(static_cast<size_t>(kPanel * kBundle));
    for (int64_t bundle = 0; bundle < out.rows.count(); ++bundle) {
      const int64_t first = bundle * kBundle, height = std::min<int64_t>(kBundle, n - first);
      const float* panel[kBundle];
      double reciprocal[kBundle];
      for (int64_t i = 0; i < height; ++i) reciprocal[i] = which(first + i).reciprocal;
      for (int64_t from = 0; from < rows.dim; from += kPanel) {
        const int64_t len = std::min(kPanel, rows.dim - from);
        for (int64_t i = 0; i < height; ++i) {
          float* const buffer = scratch.row.data() + i * kPanel;
          panel[i] = read_panel(rows, dot, which(first + i).row, from, len, buffer);
        }
        dot.centre(panel, reciprocal, height, mean.data() + from, len, out.rows.at(bundle, from));
      }
    }
  }

  template <typename Which>
  void take_steps(int64_t n, const Which& which, Centred& out) const {
    out.time.resize(static_cast<size_t>(n));
    for (int64_t i = 0; i < n; ++i) out.time[static_cast<size_t>(i)] = time[which(i).at];
  }

  // K + same of a block in the upper triangle of `matrix`, in place of the products, with the squares of its rows.
  void to_kernel(Centred& block, double same, Symmetric& matrix) const {
    const int64_t n = block.size();
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

  // Products of the rows of which(0) ... which(n - 1) about the mean, in the scratch's matrix.
  template <typename Which>
  void multiply_block(const std::vector<double>& mean, int64_t n, const Which& which, Scratch& scratch) const {
    centre(mean, n, which, scratch, scratch.block);
    scratch.matrix.reset(n);
    multiply(dot, scratch.block.rows, scratch.block.rows, scratch.matrix.data.data(), scratch.matrix.stride);
  }

  // The same about the group's mean, from where they were kept.
  template <typename Which>
  void read_block(const Products& from, int64_t n, const Which& which, Scratch& scratch) const {
    take_steps(n, which, scratch.block);
    scratch.matrix.reset(n);
    for (int64_t i = 0; i < n; ++i) {
      const double* const row = from.row(which(i).at);
      for (int64_t j = i; j < n; ++j) scratch.matrix.row(i)[j] = row[which(j).at];
    }
  }

  // The products of a whole block, kept where the group keeps them; then the landmarks' and its own are moved to the
  // batch's mean.
  void multiply_block(const Members& members, const Block& block, Scratch& scratch) const {
    const Group& group = members.groups[block.group];
    const auto which = [&](int64_t i) -> const Member& { return members[block.first + i]; };
    multiply_block(group.mean, block.size, which, scratch);
    for (int64_t i = 0; group.products.data && i < block.size; ++i) {
      double* const keep = group.products.row(which(i).at);
      for (int64_t j = i; j < block.size; ++j) keep[which(j).at] = scratch.matrix.row(i)[j];
    }
    if (members.mean.empty()) return;
    scratch.shift.resize(static_cast<size_t>(rows.dim));
    double square = 0.0;
    for (size_t e = 0; e < scratch.shift.size(); ++e) {
      scratch.shift[e] = static_cast<float>(group.mean[e] - members.mean[e]);
      square += static_cast<double>(scratch.shift[e]) * static_cast<double>(scratch.shift[e]);
    }
    std::vector<double>& shifts = scratch.shifts;
    multiply(dot, scratch.block.rows, scratch.shift, shifts);
    for (double& shift : shifts) shift += square / 2.0;
    for (int64_t i = 0; i < block.size; ++i) {
      const double about_batch = scratch.matrix.row(i)[i] + 2.0 * shifts[static_cast<size_t>(i)];
      if (square <= kCancels * about_batch) continue;
      multiply_block(members.mean, block.size, which, scratch);
      std::fill(scratch.shift.begin(), scratch.shift.end(), 0.0f);
      return;
    }
    for (int64_t i = 0; i < block.size; ++i) {
      double* const row = scratch.matrix.row(i);
      const double own = shifts[static_cast<size_t>(i)];
      for (int64_t j = i; j < block.size; ++j) row[j] += own + shifts[static_cast<size_t>(j)];
    }
  }

  // K of the landmarks and the block in the scratch, into whole bundles of zeros at `out`.
  void between(const Members& members, const Centred& landmarks, Scratch& scratch, double* out, int64_t stride) const {
    multiply(dot, landmarks.rows, scratch.block.rows, out, stride);
    std::vector<double>& shifts = scratch.shifts;
    shifts.assign(static_cast<size_t>(landmarks.size()), 0.0);
    if (!members.mean.empty()) multiply(dot, landmarks.rows, scratch.shift, shifts);
    for (int64_t k = 0; k < landmarks.size(); ++k) {
      double* const row = out + k * stride;
      for (int64_t i = 0; i < scratch.block.size(); ++i) row[i] += shifts[static_cast<size_t>(k)];
      entries(landmarks, k, scratch.block, 0, row);
    }
  }

  // x = (matrix + noise I)^-1 y of n rows, in the scratch.
  template <typename Right>
  const double* solve_block(int64_t n, Scratch& scratch, const Right& y) const {
    add_diagonal(scratch.matrix, n, kernel.noise);
    factorise(dot, scratch.matrix);
    std::vector<double>& x = scratch.columns;
    x.assign(static_cast<size_t>(scratch.matrix.n), 0.0);
    for (int64_t i = 0; i < n; ++i) x[static_cast<size_t>(i)] = y(i);
    solve(scratch.matrix, x.data());
    return x.data();
  }
};

// Values of records, from their returns and what the array holds before: their means, or anything.
struct Values {
  const Work& work;
  const float* returns;
  bool from_mean;
  double same;
  double* value;

  void run(const Members& members, int n_threads, std::vector<Scratch>& scratch) const {
    if (members.blocks.size() == 1) return run_whole(members, scratch[0]);
    run_blocks(members, n_threads, scratch);
  }

 private:
  double prior(int64_t record) const { return from_mean ? value[record] : 0.0; }
  double difference(int64_t record) const { return static_cast<double>(returns[record]) - prior(record); }

  // value = prior + C (C + noise)^-1 y = prior + y - noise x.
  void set(int64_t record, double x) const {
    value[record] = prior(record) + difference(record) - work.kernel.noise * x;
  }

  // C is K + same.
  void run_whole(const Members& members, Scratch& scratch) const {
    work.multiply_block(members, members.blocks[0], scratch);
    work.to_kernel(scratch.block, same, scratch.matrix);
    const double* x = work.solve_block(members.size(), scratch, [&](int64_t i) { return difference(members[i].at); });
    for (int64_t i = 0; i < members.size(); ++i) set(members[i].at, x[i]);
  }

  void run_blocks(const Members& members, int n_threads, std::vector<Scratch>& scratch) const {
    const DotKernels& dot = work.dot;
    const int64_t n = members.size(), m = static_cast<int64_t>(members.landmarks.size());
    const int64_t wide = Symmetric::padded(m);
    Centred landmarks;
    work.centre(
        members.mean.empty() ? members.groups[0].mean : members.mean, m,
        [&](int64_t k) -> const Member& { return members[members.landmarks[static_cast<size_t>(k)]]; }, scratch[0],
        landmarks);
    Symmetric among;
    among.reset(m);
    multiply(dot, landmarks.rows, landmarks.rows, among.data.data(), among.stride);
    work.to_kernel(landmarks, 0.0, among);
    add_diagonal(among, m, kJitter);
    factorise(dot, among);

    // Of each block D + noise = W^T W, with [U, y] in `wide` + 1 columns: sums of [U, y]^T (D + noise)^-1 [U, y], and
    // (D + noise)^-1 [U, y] itself.
    const int64_t width = wide + kOuterB, n_blocks = static_cast<int64_t>(members.blocks.size());
    const int64_t runs = std::min(kRuns, n_blocks);
    std::vector<Symmetric> sums(static_cast<size_t>(runs));
    std::vector<double> solved(static_cast<size_t>(n * (wide + 1)));
    parallel_for(runs, n_threads, [&](int64_t r, int worker) {
      const DefaultFloats floats_mode;
      Scratch& own = scratch[static_cast<size_t>(worker)];
      Symmetric& sum = sums[static_cast<size_t>(r)];
      sum.n = sum.stride = width;
      sum.data.assign(static_cast<size_t>(width * width), 0.0);
      for (int64_t b = r * n_blocks / runs; b < (r + 1) * n_blocks / runs; ++b) {
        const Block& block = members.blocks[static_cast<size_t>(b)];
        const int64_t first = block.first, size = block.size, tall = Symmetric::padded(size);
        work.multiply_block(members, block, own);
        work.to_kernel(own.block, same, own.matrix);
        add_diagonal(own.matrix, size, work.kernel.noise);
        own.transposed.assign(static_cast<size_t>(wide * tall), 0.0);  // U^T
        double* u = own.transposed.data();
        work.between(members, landmarks, own, u, tall);
        solve_forward(dot, among, u, tall, tall);
        add_square(dot, own.matrix, u, tall, wide, -1.0);
        factorise(dot, own.matrix);
        own.columns.assign(static_cast<size_t>(tall * width), 0.0);
        double* x = own.columns.data();
        constexpr int64_t kLine = 8;  // doubles of a cache line
        for (int64_t i = 0; i < size; i += kLine) {
          for (int64_t k = 0; k < m; ++k) {
            for (int64_t j = i; j < std::min(size, i + kLine); ++j) x[j * width + k] = u[k * tall + j];
          }
        }
        for (int64_t i = 0; i < size; ++i) x[i * width + wide] = difference(members[first + i].at);
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
      const double* x = solved.data() + i * (wide + 1);
      double rest = x[wide];
      for (int64_t k = 0; k < wide; ++k) rest -= x[k] * weight[static_cast<size_t>(k)];
      set(members[i].at, rest);
    }
  }
};

// Of each group; `data` holds the products of all pairs, group after group, or is null.  None for a group that may be
// cut.
std::vector<Products> products_of(double* data, const int64_t* group_offsets, int64_t n_groups) {
  std::vector<Products> found(static_cast<size_t>(n_groups));
  for (int64_t g = 0; data && g < n_groups; ++g) {
    const int64_t n = group_offsets[g + 1] - group_offsets[g];
    if (n > kLongestBlock) continue;
    found[static_cast<size_t>(g)] = {data, group_offsets[g], n};
    data += Products::size(n);
  }
  return found;
}

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
                   int64_t n_landmarks, Share share, ValueKernel kernel, double* value, double* products,
                   int n_threads) {
  const Work work{rows, time, kernel, dot_kernels()};
  const size_t workers = static_cast<size_t>(std::max(n_threads, 1));
  std::vector<std::vector<Scratch>> scratch(workers);
  const std::vector<Products> kept = products_of(products, group_offsets, n_groups);
  std::vector<Members> members(share == Share::kBatch ? static_cast<size_t>(n_groups) : 0);
  parallel_for(n_groups, n_threads, [&](int64_t g, int worker) {
    const DefaultFloats floats_mode;
    std::vector<Scratch>& own = scratch[static_cast<size_t>(worker)];
    own.resize(1);
    const int64_t begin = group_offsets[g], n = group_offsets[g + 1] - begin;
    if (n == 0) return;
    std::fill(value + begin, value + begin + n, mean_of(returns + begin, n));
    Members found = work.gather(order, usable, begin, n, own[0]);
    const Products& keep = found.groups[0].products = kept[static_cast<size_t>(g)];
    for (int64_t i = begin; keep.data && i < begin + n; ++i) keep.row(i)[i] = kUnusable;
    if (share == Share::kBatch) {
      members[static_cast<size_t>(g)] = std::move(found);
    } else if (found.size()) {
      Values{work, returns, true, 0.0, value}.run(found, 1, own);
    }
  });
  if (share != Share::kBatch) return;

  const DefaultFloats floats_mode;
  Members all;
  all.mean.assign(static_cast<size_t>(rows.dim), 0.0);
  for (Members& part : members) {
    if (!part.size()) continue;
    const std::vector<double>& mean = part.groups[0].mean;
    for (size_t e = 0; e < mean.size(); ++e) all.mean[e] += static_cast<double>(part.size()) * mean[e];
    for (const Block& block : part.blocks) {
      all.blocks.push_back({all.size() + block.first, block.size, all.groups.size()});
    }
    all.list.insert(all.list.end(), part.list.begin(), part.list.end());
    all.groups.push_back(std::move(part.groups[0]));
    part = Members();
  }
  if (!all.size()) return;
  for (double& m : all.mean) m /= static_cast<double>(all.size());
  for (int64_t k = 0; k < (landmarks ? n_landmarks : std::min(all.size(), kLandmarks)); ++k) {
    if (!landmarks) {
      all.landmarks.push_back(k);
      continue;
    }
    const auto found = std::lower_bound(all.list.begin(), all.list.end(), landmarks[k],
                                        [](const Member& member, int64_t record) { return member.at < record; });
    if (found != all.list.end() && found->at == landmarks[k]) all.landmarks.push_back(found - all.list.begin());
  }
  std::vector<Scratch> each(workers);
  Values{work, returns, false, kernel.same, value}.run(all, n_threads, each);
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
                           const uint8_t* usable, const uint8_t* parsed, double width, double horizon, double noise,
                           double* products, double* out, int n_threads) {
  const Work work{rows, time, ValueKernel{width, horizon, noise, 0.0}, dot_kernels()};
  std::vector<Scratch> scratch(static_cast<size_t>(std::max(n_threads, 1)));
  const std::vector<Products> kept = products_of(products, group_offsets, n_groups);
  parallel_for(n_groups, n_threads, [&](int64_t g, int worker) {
    const DefaultFloats floats_mode;
    Scratch& own = scratch[static_cast<size_t>(worker)];
    const int64_t begin = group_offsets[g], n = group_offsets[g + 1] - begin;
    for (int64_t i = begin; i < begin + n; ++i) out[i] = advantage[i] / (1.0 + noise);
    const Products& from = kept[static_cast<size_t>(g)];
    Members members;
    if (from.data) {
      for (int64_t i = begin; i < begin + n; ++i) {
        if (from.row(i)[i] != kUnusable) members.list.push_back({{order[i], 1.0f}, i, 1.0});
      }
      members.blocks.push_back({0, members.size(), 0});
    } else {
      members = work.gather(order, usable, begin, n, own);
    }
    std::vector<int64_t> sorted;  // members of a block whose action is known, by action
    const auto key = [&](int64_t member) { return action_key[members[member].at]; };
    for (const Block& block : members.blocks) {
      sorted.clear();
      for (int64_t i = block.first; i < block.first + block.size; ++i) {
        if (!parsed || parsed[members[i].at]) sorted.push_back(i);
      }
      std::stable_sort(sorted.begin(), sorted.end(), [&](int64_t i, int64_t j) { return key(i) < key(j); });
      for (auto first = sorted.begin(); first != sorted.end();) {
        const auto last = std::find_if(first, sorted.end(), [&](int64_t i) { return key(i) != key(*first); });
        const int64_t size = last - first;
        const auto which = [&](int64_t i) -> const Member& { return members[first[i]]; };
        if (size > 1) {
          if (from.data) {
            work.read_block(from, size, which, own);
          } else {
            work.multiply_block(members.groups[0].mean, size, which, own);
          }
          work.to_kernel(own.block, 0.0, own.matrix);
          const double* x = work.solve_block(size, own, [&](int64_t i) { return advantage[which(i).at]; });
          for (int64_t i = 0; i < size; ++i) out[which(i).at] = advantage[which(i).at] - noise * x[i];
        }
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
