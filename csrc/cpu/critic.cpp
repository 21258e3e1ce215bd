// Method of kernel_values: rows minus a mean in float64, rounded to float32 once; products of those in bundles (gram.h;
// a Gram matrix of the original rows, centred afterwards, would put the rounding of cosines near 0.99 into every
// entry); K in float64.  With L L^T = K_mm + jitter of the landmarks and U = K_im L^-T, C is U U^T + D with a
// block-diagonal D, and the noise is block-diagonal too.  So a block only needs its own D + noise, (C + noise)^-1
// follows by Sherman, Morrison and Woodbury, and blocks are processed in parallel.
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

constexpr double kFlat = 1e-5;      // up to this centred squared length a row counts as the mean
constexpr double kJitter = 1e-3;    // on the diagonal of the landmarks' matrix, which equal rows make singular
constexpr double kSmallest = 1e-6;  // of the first eigenvalue: directions beyond are rounding
constexpr double kTiny = 1e-6;      // of max |R|: a root mean square up to this is rounding
constexpr int64_t kRuns = 64;       // of blocks, whose sums are added in order

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
  int64_t at;          // which record
  int64_t trajectory;  // only known where luck is not 0
};

struct Block {
  int64_t first, size;  // members
  size_t group;
};

// Usable records of a group, or of the batch.
struct Members {
  std::vector<Member> list;
  std::vector<std::vector<double>> means;  // [D] of each group's rows
  std::vector<double> mean;                // [D] that is taken from the rows for K
  std::vector<Block> blocks;
  std::vector<int64_t> landmarks;  // members that carry the kernel between blocks

  int64_t size() const { return static_cast<int64_t>(list.size()); }
  const Member& operator[](int64_t i) const { return list[static_cast<size_t>(i)]; }
};

// Centred rows and their steps.
struct Centred {
  Bundles rows;
  std::vector<double> time;
  std::vector<double> square, reciprocal;  // |x|^2 and 1 / |x|, once their own products are known

  int64_t size() const { return static_cast<int64_t>(time.size()); }
};

void add_diagonal(Symmetric& matrix, int64_t n, double added) {
  for (int64_t i = 0; i < n; ++i) matrix.row(i)[i] += added;
}

// Scratch of one thread.
struct Scratch {
  Centred block;
  Symmetric matrix, inside;
  std::vector<double> transposed, columns;
  std::vector<double> decay, later;  // of luck()
};

struct Work {
  const float* rows;
  int64_t dim;
  const int64_t* time;
  const int64_t* trajectory_offsets;
  bool centred;
  ValueKernel kernel;
  const DotKernels& dot;

  // K of row i of a and the rows of b from `first` on, in place of their products.
  void entries(const Centred& a, int64_t i, const Centred& b, int64_t first, double* row) const {
    const size_t own = static_cast<size_t>(i);
    const KernelRow of{a.square[own], a.reciprocal[own],  a.time[own],
                       kFlat,         1.0 / kernel.width, kernel.horizon > 0.0 ? 1.0 / kernel.horizon : 0.0};
    dot.exponents(of, b.square.data() + first, b.reciprocal.data() + first, b.time.data() + first, b.size() - first,
                  row + first);
    dot.exponential(row + first, b.size() - first);
  }

  // The usable records of [begin, begin + length), and their blocks.
  Members gather(const uint8_t* usable, int64_t begin, int64_t length) const {
    Members found;
    std::vector<double> mean(static_cast<size_t>(dim), 0.0);
    int64_t trajectory = 0;
    if (trajectory_offsets) {
      while (trajectory_offsets[trajectory + 1] <= begin) ++trajectory;
    }
    for (int64_t i = begin; i < begin + length; ++i) {
      while (trajectory_offsets && trajectory_offsets[trajectory + 1] <= i) ++trajectory;
      if ((usable && !usable[i]) || std::isnan(rows[i * dim])) continue;
      found.list.push_back({i, trajectory});
      dot.add_scaled(rows + i * dim, 1.0, dim, mean.data());
    }
    const int64_t n = found.size(), longest = centred ? kCutBlock : kLongestBlock;
    const int64_t runs = n <= longest ? (n ? 1 : 0) : (n + kCutBlock - 1) / kCutBlock;
    for (double& m : mean) m /= static_cast<double>(std::max<int64_t>(n, 1));
    found.means.push_back(std::move(mean));
    for (int64_t k = 0; k < runs; ++k) found.blocks.push_back({k * n / runs, (k + 1) * n / runs - k * n / runs, 0});
    const int64_t m = runs > 1 ? kLandmarks : 0;
    for (int64_t k = 0; k < m; ++k) found.landmarks.push_back(k * n / m);
    return found;
  }

  // The rows of which(0) ... which(n - 1) minus the mean.
  template <typename Which>
  void centre(const std::vector<double>& mean, int64_t n, const Which& which, Centred& out) const {
    out.rows.resize(n, dim);
    out.time.resize(static_cast<size_t>(n));
    for (int64_t i = 0; i < n; ++i) out.time[static_cast<size_t>(i)] = static_cast<double>(time[which(i).at]);
    for (int64_t bundle = 0; bundle < out.rows.count(); ++bundle) {
      const int64_t first = bundle * kBundle, height = std::min<int64_t>(kBundle, n - first);
      const float* row[kBundle];
      double one[kBundle];
      std::fill(one, one + kBundle, 1.0);
      for (int64_t i = 0; i < height; ++i) row[i] = rows + which(first + i).at * dim;
      dot.centre(row, one, height, mean.data(), dim, out.rows.at(bundle, 0));
    }
  }

  // K of which(0) ... which(n - 1) about the mean, in the upper triangle of `matrix`; `block` gets their rows.
  template <typename Which>
  void make_kernel(const std::vector<double>& mean, int64_t n, const Which& which, Centred& block,
                   Symmetric& matrix) const {
    centre(mean, n, which, block);
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
    }
  }

  // Calls add(i, j, luck (L L^T)_ij) for the pairs i <= j of a block in one trajectory: gamma^(t_j - t_i) times the sum
  // over its records k in the block from step t_j on of gamma^(2 (t_k - t_j)).
  template <typename Add>
  void for_luck(const Members& members, const Block& block, Scratch& scratch, const Add& add) const {
    if (kernel.luck == 0.0) return;
    const Member* const of = &members[block.first];
    std::vector<double>&decay = scratch.decay, &later = scratch.later;
    decay.assign(static_cast<size_t>(block.size), 0.0);  // gamma^(steps since the record before), 0 for a first one
    later.assign(static_cast<size_t>(block.size), 1.0);
    for (int64_t j = 1; j < block.size; ++j) {
      if (of[j].trajectory != of[j - 1].trajectory) continue;
      decay[static_cast<size_t>(j)] =
          std::pow(kernel.gamma, static_cast<double>(steps_between(time[of[j - 1].at], time[of[j].at])));
    }
    for (size_t j = later.size() - 1; j > 0; --j) later[j - 1] += decay[j] * decay[j] * later[j];
    for (int64_t j = 1; j < block.size; ++j) {
      if (of[j].trajectory == of[j - 1].trajectory && time[of[j].at] == time[of[j - 1].at]) {
        later[static_cast<size_t>(j)] = later[static_cast<size_t>(j - 1)];
      }
    }
    for (int64_t i = 0; i < block.size; ++i) {
      double power = kernel.luck;
      for (int64_t j = i; j < block.size && of[j].trajectory == of[i].trajectory; ++j) {
        if (j > i) power *= decay[static_cast<size_t>(j)];
        add(i, j, power * later[static_cast<size_t>(j)]);
      }
    }
  }

  // C + luck L L^T + noise of a block in the scratch's matrix, and its rows in the scratch.
  void covariance(const Members& members, const Block& block, double same, double inside, Scratch& scratch) const {
    const auto which = [&](int64_t i) -> const Member& { return members[block.first + i]; };
    if (inside > 0.0) {
      make_kernel(members.means[block.group], block.size, which, scratch.block, scratch.inside);
    }
    make_kernel(members.mean, block.size, which, scratch.block, scratch.matrix);
    for (int64_t i = 0; i < block.size; ++i) {
      double* const row = scratch.matrix.row(i);
      for (int64_t j = i; j < block.size; ++j) row[j] += same;
      for (int64_t j = i; inside > 0.0 && j < block.size; ++j) row[j] += inside * scratch.inside.row(i)[j];
    }
    for_luck(members, block, scratch, [&](int64_t i, int64_t j, double value) { scratch.matrix.row(i)[j] += value; });
    add_diagonal(scratch.matrix, block.size, kernel.noise);
  }

  // x = matrix^-1 y of n rows, for the scratch's matrix, which is factorised in place.
  template <typename Right>
  const double* solve_block(int64_t n, Scratch& scratch, const Right& y) const {
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
  double same, inside;
  double* value;

  void run(const Members& members, int n_threads, std::vector<Scratch>& scratch) const {
    if (members.blocks.size() > 1) return run_blocks(members, n_threads, scratch);
    const Block& block = members.blocks[0];
    work.covariance(members, block, same, inside, scratch[0]);
    const auto y = [&](int64_t i) { return difference(members[i].at); };
    set(members, block, work.solve_block(members.size(), scratch[0], y), scratch[0]);
  }

 private:
  double prior(int64_t record) const { return from_mean ? value[record] : 0.0; }
  double difference(int64_t record) const { return static_cast<double>(returns[record]) - prior(record); }

  // value = prior + C x = prior + y - (luck L L^T + noise) x of the members of a block, x = (C + luck L L^T + noise)^-1
  // y.
  void set(const Members& members, const Block& block, const double* x, Scratch& scratch) const {
    std::vector<double> rest(static_cast<size_t>(block.size));
    for (int64_t i = 0; i < block.size; ++i) rest[static_cast<size_t>(i)] = work.kernel.noise * x[i];
    work.for_luck(members, block, scratch, [&](int64_t i, int64_t j, double luck) {
      rest[static_cast<size_t>(i)] += luck * x[j];
      if (j > i) rest[static_cast<size_t>(j)] += luck * x[i];
    });
    for (int64_t i = 0; i < block.size; ++i) {
      const int64_t record = members[block.first + i].at;
      value[record] = prior(record) + difference(record) - rest[static_cast<size_t>(i)];
    }
  }

  void run_blocks(const Members& members, int n_threads, std::vector<Scratch>& scratch) const {
    const DotKernels& dot = work.dot;
    const int64_t n = members.size(), m = static_cast<int64_t>(members.landmarks.size());
    const int64_t wide = Symmetric::padded(m);
    Centred landmarks;
    Symmetric among;
    const auto landmark = [&](int64_t k) -> const Member& {
      return members[members.landmarks[static_cast<size_t>(k)]];
    };
    work.make_kernel(members.mean, m, landmark, landmarks, among);
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
        work.covariance(members, block, same, inside, own);
        own.transposed.assign(static_cast<size_t>(wide * tall), 0.0);  // U^T
        double* u = own.transposed.data();
        multiply(dot, landmarks.rows, own.block.rows, u, tall);
        for (int64_t k = 0; k < m; ++k) work.entries(landmarks, k, own.block, 0, u + k * tall);
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
    std::vector<double> weight(static_cast<size_t>(wide), 0.0), x(static_cast<size_t>(n));
    for (const Symmetric& sum : sums) {
      for (int64_t i = 0; i < wide; ++i) {
        for (int64_t j = i; j < wide; ++j) inner.row(i)[j] += sum.row(i)[j];
        weight[static_cast<size_t>(i)] += sum.row(i)[wide];
      }
    }
    add_diagonal(inner, wide, 1.0);
    factorise(dot, inner);
    solve(inner, weight.data());
    for (int64_t i = 0; i < n; ++i) {
      const double* of = solved.data() + i * (wide + 1);
      x[static_cast<size_t>(i)] = of[wide];
      for (int64_t k = 0; k < wide; ++k) x[static_cast<size_t>(i)] -= of[k] * weight[static_cast<size_t>(k)];
    }
    for (const Block& block : members.blocks) set(members, block, x.data() + block.first, scratch[0]);
  }
};

// ---- coordinates ---------------------------------------------------------------------------------------------------

constexpr int64_t kTaskRows = 64;

// The leading directions of the covariance of m rows, each divided by the fourth root of its eigenvalue relative to the
// first one, in bundles.
Bundles leading_directions(const DotKernels& dot, const float* rows, int64_t dim, const int64_t* landmarks, int64_t m,
                           int64_t most) {
  const int64_t wide = Symmetric::padded(m);
  std::vector<double> centred(static_cast<size_t>(dim * wide), 0.0);
  for (int64_t e = 0; e < dim; ++e) {
    double* const row = centred.data() + e * wide;
    double mean = 0.0;
    for (int64_t k = 0; k < m; ++k) mean += row[k] = static_cast<double>(rows[landmarks[k] * dim + e]);
    for (int64_t k = 0; k < m; ++k) row[k] -= mean / static_cast<double>(m);
  }
  Symmetric square;
  square.n = square.stride = wide;
  square.data.assign(static_cast<size_t>(wide * wide), 0.0);
  add_square(dot, square, centred.data(), wide, dim, 1.0);
  for (int64_t i = 0; i < wide; ++i) {
    for (int64_t j = 0; j < i; ++j) square.row(i)[j] = square.row(j)[i];
  }
  const std::vector<double> values = eigenvectors(dot, square);
  std::vector<std::vector<double>> directions;
  for (int64_t j = 0; j < std::min(most, m) && values[static_cast<size_t>(j)] > kSmallest * values[0]; ++j) {
    const double value = values[static_cast<size_t>(j)], scale = std::pow(values[0] / value, 0.25) / std::sqrt(value);
    const double* const vector = square.row(j);
    double mean = 0.0;
    for (int64_t k = 0; k < m; ++k) mean += vector[k] / static_cast<double>(m);
    std::vector<double> sum(static_cast<size_t>(dim), 0.0);
    for (int64_t k = 0; k < m; ++k) {
      dot.add_scaled(rows + landmarks[k] * dim, scale * (vector[k] - mean), dim, sum.data());
    }
    directions.push_back(std::move(sum));
  }
  Bundles out;
  out.resize(static_cast<int64_t>(directions.size()), dim);
  std::fill(out.data.begin(), out.data.end(), 0.0f);
  for (int64_t j = 0; j < out.n; ++j) {
    for (int64_t e = 0; e < dim; ++e) {
      out.at(j / kBundle, e)[j % kBundle] =
          static_cast<float>(directions[static_cast<size_t>(j)][static_cast<size_t>(e)]);
    }
  }
  return out;
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

void unit_rows(const Rows& rows, const int64_t* order, int64_t n_records, const uint8_t* usable, const float* signs,
               int64_t width, float* out, int n_threads) {
  const DotKernels& dot = dot_kernels();
  parallel_for((n_records + kTaskRows - 1) / kTaskRows, n_threads, [&](int64_t task, int) {
    const DefaultFloats floats_mode;
    std::vector<float> buffer(static_cast<size_t>(width));
    std::vector<double> sum(static_cast<size_t>(width));
    for (int64_t i = task * kTaskRows; i < std::min(n_records, (task + 1) * kTaskRows); ++i) {
      ScaledRow row{order[i], 1.0f};
      const double reciprocal = usable && !usable[i] ? 0.0 : measure(rows, dot, row);
      float* const to = out + i * width;
      if (reciprocal == 0.0) {
        std::fill(to, to + width, std::numeric_limits<float>::quiet_NaN());
        continue;
      }
      std::fill(sum.begin(), sum.end(), 0.0);
      for (int64_t from = 0; from < rows.dim; from += width) {
        const int64_t len = std::min(width, rows.dim - from);
        dot.add_signed(read_panel(rows, dot, row, from, len, buffer.data()), signs + from, len, sum.data());
      }
      for (int64_t e = 0; e < width; ++e) to[e] = static_cast<float>(reciprocal * sum[static_cast<size_t>(e)]);
    }
  });
}

void whitened_rows(const float* rows, int64_t n_records, int64_t dim, const int64_t* landmarks, int64_t n_landmarks,
                   int64_t directions, float* out, int n_threads) {
  const DefaultFloats floats_mode;
  const DotKernels& dot = dot_kernels();
  const Bundles basis = leading_directions(dot, rows, dim, landmarks, n_landmarks, directions);
  const int64_t tasks = (n_records + kTaskRows - 1) / kTaskRows, stride = basis.count() * kBundle;
  std::vector<double> z(static_cast<size_t>(tasks * kTaskRows * stride), 0.0);
  std::vector<double> sums(static_cast<size_t>(tasks * (stride + 1)), 0.0);  // of a task; the last: of how many rows
  const std::vector<double> nothing(static_cast<size_t>(dim), 0.0), one(kBundle, 1.0);
  parallel_for(tasks, n_threads, [&](int64_t task, int) {
    const DefaultFloats own_mode;
    const int64_t first = task * kTaskRows, n = std::min(kTaskRows, n_records - first);
    Bundles own;
    own.resize(n, dim);
    for (int64_t i = 0; i < n; i += kBundle) {
      const float* row[kBundle];
      const int64_t height = std::min<int64_t>(kBundle, n - i);
      for (int64_t k = 0; k < height; ++k) row[k] = rows + (first + i + k) * dim;
      dot.centre(row, one.data(), height, nothing.data(), dim, own.at(i / kBundle, 0));
    }
    multiply(dot, own, basis, z.data() + first * stride, stride);
    double* const sum = sums.data() + task * (stride + 1);
    for (int64_t i = first; i < first + n; ++i) {
      if (std::isnan(rows[i * dim])) continue;
      for (int64_t j = 0; j < basis.n; ++j) sum[j] += z[static_cast<size_t>(i * stride + j)];
      sum[stride] += 1.0;
    }
  });
  std::vector<double> mean(static_cast<size_t>(stride + 1), 0.0);
  for (int64_t k = 0; k < static_cast<int64_t>(sums.size()); ++k) {
    mean[static_cast<size_t>(k % (stride + 1))] += sums[static_cast<size_t>(k)];
  }
  for (int64_t i = 0; i < n_records; ++i) {
    std::fill(out + i * directions, out + (i + 1) * directions, std::isnan(rows[i * dim]) ? rows[i * dim] : 0.0f);
    for (int64_t j = 0; j < basis.n; ++j) {
      const double of_mean = mean[static_cast<size_t>(j)] / std::max(mean[static_cast<size_t>(stride)], 1.0);
      out[i * directions + j] = static_cast<float>(z[static_cast<size_t>(i * stride + j)] - of_mean);
    }
  }
}

void kernel_values(const float* rows, int64_t dim, const float* returns, const int64_t* time,
                   const int64_t* group_offsets, int64_t n_groups, const int64_t* trajectory_offsets,
                   const uint8_t* usable, const int64_t* landmarks, int64_t n_landmarks, Share share, bool centred,
                   ValueKernel kernel, double* value, int n_threads) {
  const Work work{rows, dim, time, kernel.luck > 0.0 ? trajectory_offsets : nullptr, centred, kernel, dot_kernels()};
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
    Members found = work.gather(usable, begin, n);
    if (share == Share::kBatch) {
      members[static_cast<size_t>(g)] = std::move(found);
    } else if (found.size()) {
      found.mean = found.means[0];
      Values{work, returns, true, 0.0, 0.0, value}.run(found, 1, own);
    }
  });
  if (share != Share::kBatch) return;

  const DefaultFloats floats_mode;
  Members all;
  all.mean.assign(static_cast<size_t>(dim), 0.0);
  for (Members& part : members) {
    if (!part.size()) continue;
    std::vector<double>& mean = part.means[0];
    for (size_t e = 0; !centred && e < mean.size(); ++e) {
      all.mean[e] += static_cast<double>(part.size()) * mean[e];
    }
    for (const Block& block : part.blocks) {
      all.blocks.push_back({all.size() + block.first, block.size, all.means.size()});
    }
    all.list.insert(all.list.end(), part.list.begin(), part.list.end());
    all.means.push_back(std::move(mean));
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
  Values{work, returns, false, kernel.same, kernel.inside, value}.run(all, n_threads, each);
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

void same_action_advantage(const float* rows, int64_t dim, const double* advantage, const int64_t* time,
                           const int64_t* action_key, const int64_t* group_offsets, int64_t n_groups,
                           const uint8_t* usable, const uint8_t* parsed, bool centred, double width, double horizon,
                           double noise, double* out, int n_threads) {
  const ValueKernel kernel{width, horizon, noise, 0.0, 0.0, 0.0, 0.0};
  const Work work{rows, dim, time, nullptr, centred, kernel, dot_kernels()};
  const std::vector<double> nothing(static_cast<size_t>(dim), 0.0);
  std::vector<Scratch> scratch(static_cast<size_t>(std::max(n_threads, 1)));
  parallel_for(n_groups, n_threads, [&](int64_t g, int worker) {
    const DefaultFloats floats_mode;
    Scratch& own = scratch[static_cast<size_t>(worker)];
    const int64_t begin = group_offsets[g], n = group_offsets[g + 1] - begin;
    for (int64_t i = begin; i < begin + n; ++i) out[i] = advantage[i] / (1.0 + noise);
    const Members members = work.gather(usable, begin, n);
    const std::vector<double>& mean = centred ? nothing : members.means[0];
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
          work.make_kernel(mean, size, which, own.block, own.matrix);
          add_diagonal(own.matrix, size, noise);
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
