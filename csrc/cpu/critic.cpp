// Method of kernel_values: products of centred rows in bundles (gram.h; a Gram matrix of the original rows, centred
// afterwards, would put the rounding of cosines near 0.99 into every entry); K in float64.  With M = K_mm + jitter of
// the landmarks and U = K_im, C + N is A inside a block and U M^-1 U^T elsewhere: D + U M^-1 U^T, D = A - U M^-1 U^T
// block by block.  Sherman, Morrison and Woodbury's formula, once for the whole and once for D, needs only A^-1 of each
// of b blocks:
//     q = U^T A^-1 y,   P = (M - U^T A^-1 U)^-1,   w = (M^-1 + sum (P - M^-1))^-1 sum P q,
//     (C + N)^-1 y = A^-1 (y + U P (q - w))
#include "cpu/critic.h"

#include <algorithm>
#include <cmath>
#include <iterator>
#include <limits>
#include <numeric>
#include <utility>
#include <vector>

#include "common/mean.h"
#include "cpu/gram.h"
#include "cpu/greedy.h"
#include "cpu/pages.h"
#include "cpu/parallel.h"
#include "cpu/symmetric.h"

namespace bipace {
namespace {

constexpr double kFlat = 1e-5;      // up to this centred squared length a row counts as the mean
constexpr double kJitter = 1e-3;    // on the diagonal of the landmarks' matrix, which equal rows make singular
constexpr double kSmallest = 1e-6;  // of the first eigenvalue: directions beyond are rounding
constexpr double kTiny = 1e-6;      // of max |R|: a root mean square up to this is rounding
constexpr int64_t kRuns = 64;       // of blocks, whose sums are added in order
constexpr int64_t kRoom = 1 << 24;  // entries of the factors that are kept: 128 MB

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

// Usable records that stand one after the other in a list.
struct Block {
  const int64_t* records;
  int64_t size;
  int64_t first;  // of its padded rows, among those of all blocks
};

// Rows and steps of some records.
struct Bundled {
  Bundles rows;
  std::vector<double> time;
  std::vector<double> square, reciprocal;  // |x|^2 and 1 / |x|, once their own products are known

  int64_t size() const { return static_cast<int64_t>(time.size()); }
};

void add_diagonal(Symmetric& matrix, int64_t n, double added) {
  for (int64_t i = 0; i < n; ++i) matrix.row(i)[i] += added;
}

// sum += the upper triangle of `matrix`, which may be larger.
void add_upper(const Symmetric& matrix, Symmetric& sum) {
  for (int64_t i = 0; i < sum.n; ++i) {
    for (int64_t j = i; j < sum.n; ++j) sum.row(i)[j] += matrix.row(i)[j];
  }
}

// x = (U^T U)^-1 x.
void solve(const DotKernels& dot, const Symmetric& u, std::vector<double>& x) {
  solve_forward(dot, u, x.data());
  solve_backward(dot, u, x.data());
}

// Scratch of one thread.
struct Scratch {
  Bundled block;
  Symmetric matrix, inside;
  std::vector<double> column;
  std::vector<double> decay, later;  // of for_luck()
};

struct Work {
  const float* rows;
  const float* inside;  // or null
  int64_t dim;
  const int64_t* time;
  const int64_t* trajectory;  // or null: luck is 0
  const ValueKernel& kernel;
  const DotKernels& dot;

  // The usable records of [begin, end), and the blocks they are cut into, after others.
  void gather(int64_t begin, int64_t end, std::vector<int64_t>& list, std::vector<int64_t>& sizes) const {
    const int64_t before = static_cast<int64_t>(list.size());
    for (int64_t i = begin; i < end; ++i) {
      if (!std::isnan(rows[i * dim])) list.push_back(i);
    }
    const int64_t n = static_cast<int64_t>(list.size()) - before;
    const int64_t runs = static_cast<double>(n) <= kernel.longest ? (n ? 1 : 0) : (n + kCutBlock - 1) / kCutBlock;
    for (int64_t k = 0; k < runs; ++k) sizes.push_back((k + 1) * n / runs - k * n / runs);
  }

  // K of row i of a and the rows of b from `first` on, in place of their products.
  void entries(const Bundled& a, int64_t i, const Bundled& b, int64_t first, double* row) const {
    const KernelRow of{a.square[i], a.reciprocal[i],    a.time[i],
                       kFlat,       1.0 / kernel.width, kernel.horizon > 0.0 ? 1.0 / kernel.horizon : 0.0};
    dot.exponents(of, b.square.data() + first, b.reciprocal.data() + first, b.time.data() + first, b.size() - first,
                  row + first);
    dot.exponential(row + first, b.size() - first);
  }

  // K of n records in the upper triangle of `matrix`; `block` gets their rows.
  void make_kernel(const float* from, const int64_t* records, int64_t n, Bundled& block, Symmetric& matrix) const {
    fill_bundles(dot, from, dim, records, n, block.rows);
    matrix.reset(n);
    multiply(dot, block.rows, block.rows, matrix.data.data(), matrix.stride);
    block.time.resize(n);
    block.square.resize(n);
    block.reciprocal.resize(n);
    for (int64_t i = 0; i < n; ++i) {
      block.time[i] = static_cast<double>(time[records[i]]);
      block.square[i] = matrix.row(i)[i];
      block.reciprocal[i] = 1.0 / std::sqrt(matrix.row(i)[i]);
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
  void for_luck(const Block& block, Scratch& scratch, const Add& add) const {
    if (!trajectory) return;
    const int64_t* const of = block.records;
    std::vector<double>&decay = scratch.decay, &later = scratch.later;
    decay.assign(block.size, 0.0);  // gamma^(steps since the record before), 0 for a first one
    later.assign(block.size, 1.0);
    for (int64_t j = 1; j < block.size; ++j) {
      if (trajectory[of[j]] != trajectory[of[j - 1]]) continue;
      decay[j] = std::pow(kernel.gamma, static_cast<double>(steps_between(time[of[j - 1]], time[of[j]])));
    }
    for (size_t j = later.size() - 1; j > 0; --j) later[j - 1] += decay[j] * decay[j] * later[j];
    for (int64_t j = 1; j < block.size; ++j) {
      if (trajectory[of[j]] == trajectory[of[j - 1]] && time[of[j]] == time[of[j - 1]]) later[j] = later[j - 1];
    }
    for (int64_t i = 0; i < block.size; ++i) {
      double power = kernel.luck;
      for (int64_t j = i; j < block.size && trajectory[of[j]] == trajectory[of[i]]; ++j) {
        if (j > i) power *= decay[j];
        add(i, j, power * later[j]);
      }
    }
  }

  // C + luck L L^T + noise of a block in the scratch's matrix, and its rows in the scratch.
  void covariance(const Block& block, Scratch& scratch) const {
    if (inside) make_kernel(inside, block.records, block.size, scratch.block, scratch.inside);
    make_kernel(rows, block.records, block.size, scratch.block, scratch.matrix);
    for (int64_t i = 0; i < block.size; ++i) {
      double* const row = scratch.matrix.row(i);
      for (int64_t j = i; j < block.size; ++j) row[j] += kernel.same;
      for (int64_t j = i; inside && j < block.size; ++j) row[j] += kernel.inside * scratch.inside.row(i)[j];
    }
    for_luck(block, scratch, [&](int64_t i, int64_t j, double value) { scratch.matrix.row(i)[j] += value; });
    add_diagonal(scratch.matrix, block.size, kernel.noise);
  }
};

// Values of the records of a list, from their returns and what the array holds before: their means, or anything.
struct Values {
  const Work& work;
  const float* returns;
  bool from_mean;
  double* value;

  void run(const std::vector<int64_t>& list, const std::vector<int64_t>& sizes, const std::vector<int64_t>& landmarks,
           std::vector<Scratch>& scratch) const {
    const DotKernels& dot = work.dot;
    const int n_threads = static_cast<int>(scratch.size());
    const int64_t n_blocks = static_cast<int64_t>(sizes.size()), m = static_cast<int64_t>(landmarks.size());
    std::vector<Block> blocks;
    const int64_t* next = list.data();
    int64_t tall = 0, longest = 0;
    for (const int64_t size : sizes) {
      blocks.push_back({next, size, tall});
      next += size;
      tall += Symmetric::padded(size);
      longest = std::max(longest, size);
    }
    Bundled fixed;
    Symmetric among;
    work.make_kernel(work.rows, landmarks.data(), m, fixed, among);
    add_diagonal(among, m, kJitter);

    // A = W^T W of a block, in the scratch.
    const int64_t wide = among.n, width = wide + kOuterB;
    const auto factor = [&](const Block& block, Scratch& own) {
      work.covariance(block, own);
      factorise(dot, own.matrix);
    };

    // W^-T [U, y] of each block, V = R^-T [I, q] of its M - U^T A^-1 U = R^T R, and sums of V^T V = [P, P q].  W is
    // computed again below where all would take much memory.
    const int64_t triangle = Symmetric::triangle(longest);
    const bool keep = n_blocks * triangle <= kRoom;
    const int64_t runs = std::min(kRuns, n_blocks);
    std::vector<Symmetric> sums(runs);
    std::vector<double> factors = large_zeros(keep ? n_blocks * triangle : 0), solved = large_zeros(tall * width);
    std::vector<double> inverse = large_zeros(n_blocks * wide * width);
    parallel_for(runs, n_threads, [&](int64_t r, int worker) {
      const DefaultFloats floats_mode;
      Scratch& own = scratch[worker];
      Symmetric &sum = sums[r], rest;
      sum.clear(width);
      for (int64_t b = r * n_blocks / runs; b < (r + 1) * n_blocks / runs; ++b) {
        const Block& block = blocks[b];
        factor(block, own);
        const int64_t n = own.matrix.n;
        double* const x = solved.data() + block.first * width;
        multiply(dot, own.block.rows, fixed.rows, x, width);
        for (int64_t i = 0; i < block.size; ++i) work.entries(own.block, i, fixed, 0, x + i * width);
        for (int64_t i = 0; i < block.size; ++i) x[i * width + wide] = difference(block.records[i]);
        solve_forward(dot, own.matrix, x, width, width);
        rest.clear(width);
        add_square(dot, rest, x, width, n, -1.0);
        rest.n = wide;
        add_upper(among, rest);
        double* const v = inverse.data() + b * wide * width;
        for (int64_t k = 0; k < wide; ++k) {
          v[k * width + k] = 1.0;
          v[k * width + wide] = -rest.row(k)[wide];
        }
        factorise(dot, rest);
        solve_forward(dot, rest, v, width, width);
        add_square(dot, sum, v, width, wide, 1.0);
        if (keep) own.matrix.pack(factors.data() + b * triangle);
      }
    });

    Symmetric inner;  // sum P + (1 - b) M^-1
    inner.clear(wide);
    std::vector<double> weight(wide, 0.0), identity(wide * wide, 0.0);
    for (int64_t k = 0; k < wide; ++k) identity[k * wide + k] = 1.0;
    factorise(dot, among);
    solve_forward(dot, among, identity.data(), wide, wide);
    add_square(dot, inner, identity.data(), wide, wide, 1.0 - static_cast<double>(n_blocks));
    for (const Symmetric& sum : sums) {
      add_upper(sum, inner);
      for (int64_t i = 0; i < wide; ++i) weight[i] += sum.row(i)[wide];
    }
    factorise(dot, inner);
    solve(dot, inner, weight);
    parallel_for(n_blocks, n_threads, [&](int64_t b, int worker) {
      const DefaultFloats floats_mode;
      Scratch& own = scratch[worker];
      const Block& block = blocks[b];
      if (keep) own.matrix.unpack(factors.data() + b * triangle, block.size);
      if (!keep) factor(block, own);
      std::vector<double> towards(wide, 0.0);  // P (q - w) = V^T (V q - V w)
      for (int64_t k = 0; k < wide; ++k) {
        const double* const v = inverse.data() + (b * wide + k) * width;
        dot.subtract(v, dot.product(v, weight.data(), wide) - v[wide], wide, towards.data());
      }
      own.column.assign(own.matrix.n, 0.0);
      for (int64_t i = 0; i < block.size; ++i) {
        const double* const of = solved.data() + (block.first + i) * width;
        own.column[i] = of[wide] + dot.product(of, towards.data(), wide);
      }
      solve_backward(dot, own.matrix, own.column.data());
      set(block, own);
    });
  }

  // value = prior + C x = prior + y - (luck L L^T + noise) x of the records of a block, x = (C + luck L L^T + noise)^-1
  // y in the scratch's column.
  void set(const Block& block, Scratch& own) const {
    std::vector<double> rest(block.size);
    const std::vector<double>& x = own.column;
    for (int64_t i = 0; i < block.size; ++i) rest[i] = work.kernel.noise * x[i];
    work.for_luck(block, own, [&](int64_t i, int64_t j, double luck) {
      rest[i] += luck * x[j];
      if (j > i) rest[j] += luck * x[i];
    });
    for (int64_t i = 0; i < block.size; ++i) {
      double& of = value[block.records[i]];
      of = (from_mean ? of : 0.0) + difference(block.records[i]) - rest[i];
    }
  }

  double difference(int64_t record) const {
    return static_cast<double>(returns[record]) - (from_mean ? value[record] : 0.0);
  }
};

// ---- coordinates ---------------------------------------------------------------------------------------------------

constexpr int64_t kTaskRows = 64;

// The leading directions of the covariance of m rows, each divided by the fourth root of its eigenvalue relative to the
// first one, in bundles; `offsets` gets the coordinates of their mean.
Bundles leading_directions(const DotKernels& dot, const float* rows, int64_t dim, const int64_t* landmarks, int64_t m,
                           int64_t most, std::vector<double>& offsets) {
  const int64_t wide = Symmetric::padded(m);
  std::vector<double> centred(dim * wide, 0.0), means(dim);
  for (int64_t e = 0; e < dim; ++e) {
    double* const row = centred.data() + e * wide;
    double& mean = means[e];
    for (int64_t k = 0; k < m; ++k) mean += row[k] = static_cast<double>(rows[landmarks[k] * dim + e]);
    mean /= static_cast<double>(std::max<int64_t>(m, 1));
    for (int64_t k = 0; k < m; ++k) row[k] -= mean;
  }
  Symmetric square;
  square.clear(wide);
  add_square(dot, square, centred.data(), wide, dim, 1.0);
  for (int64_t i = 0; i < wide; ++i) {
    for (int64_t j = 0; j < i; ++j) square.row(i)[j] = square.row(j)[i];
  }
  const std::vector<double> values = eigenvectors(dot, square);
  std::vector<float> directions;
  for (int64_t j = 0; j < std::min(most, m) && values[j] > kSmallest * values[0]; ++j) {
    const double value = values[j], scale = std::pow(values[0] / value, 0.25) / std::sqrt(value);
    const double* const vector = square.row(j);
    offsets.push_back(0.0);
    for (int64_t e = 0; e < dim; ++e) {
      const double sum = scale * dot.product(centred.data() + e * wide, vector, wide);
      directions.push_back(static_cast<float>(sum));
      offsets.back() += means[e] * static_cast<double>(directions.back());
    }
  }
  std::vector<int64_t> every(offsets.size());
  std::iota(every.begin(), every.end(), 0);
  Bundles out;
  fill_bundles(dot, directions.data(), dim, every.data(), static_cast<int64_t>(every.size()), out);
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
    std::vector<int64_t> order(n);
    std::iota(order.begin(), order.end(), begin);
    std::stable_sort(order.begin(), order.end(), [&](int64_t i, int64_t j) { return labels[i] < labels[j]; });
    for (auto first = order.begin(), last = first; first != order.end(); first = last) {
      double total = 0.0;
      for (; last != order.end() && labels[*last] == labels[*first]; ++last) total += double{returns[*last]} - mean;
      const double found = mean + total / (static_cast<double>(last - first) + shrinkage);
      for (auto i = first; i != last; ++i) value[*i] = found;
    }
  });
}

void unit_rows(const Rows& rows, const int64_t* order, int64_t n_records, const uint8_t* usable, const float* signs,
               int64_t width, float* out, const int32_t* weights, int64_t* keys, int n_threads) {
  const DotKernels& dot = dot_kernels();
  prefer_huge_pages(out, static_cast<size_t>(n_records * width) * sizeof(float));
  parallel_for((n_records + kTaskRows - 1) / kTaskRows, n_threads, [&](int64_t task, int) {
    const DefaultFloats floats_mode;
    std::vector<float> buffer(width);
    std::vector<double> sum(width);
    for (int64_t i = task * kTaskRows; i < std::min(n_records, (task + 1) * kTaskRows); ++i) {
      if (keys) keys[i] = key_of_row(rows, dot, order[i], weights);  // first: it brings the row into the cache
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
      for (int64_t e = 0; e < width; ++e) to[e] = static_cast<float>(reciprocal * sum[e]);
    }
  });
}

void whitened_rows(const float* rows, int64_t n_records, int64_t dim, const int64_t* landmarks, int64_t n_landmarks,
                   int64_t directions, float* out, int n_threads) {
  const DefaultFloats floats_mode;
  const DotKernels& dot = dot_kernels();
  std::vector<double> offsets;
  const Bundles basis = leading_directions(dot, rows, dim, landmarks, n_landmarks, directions, offsets);
  const int64_t stride = basis.count() * kBundle;
  parallel_for((n_records + kTaskRows - 1) / kTaskRows, n_threads, [&](int64_t task, int) {
    const DefaultFloats own_mode;
    const int64_t first = task * kTaskRows, n = std::min(kTaskRows, n_records - first);
    std::vector<int64_t> records(n);
    std::iota(records.begin(), records.end(), first);
    std::vector<double> products(kTaskRows * stride, 0.0);
    Bundles own;
    fill_bundles(dot, rows, dim, records.data(), n, own);
    multiply(dot, own, basis, products.data(), stride);
    for (int64_t i = 0; i < n; ++i) {
      float* const to = out + (first + i) * directions;
      std::fill(to, to + directions, std::isnan(rows[(first + i) * dim]) ? rows[(first + i) * dim] : 0.0f);
      for (int64_t j = 0; j < basis.n; ++j) to[j] = static_cast<float>(products[i * stride + j] - offsets[j]);
    }
  });
}

void centred_rows(const float* rows, int64_t dim, const int64_t* group_offsets, int64_t n_groups, Share share,
                  float* out, int n_threads) {
  const DotKernels& dot = dot_kernels();
  const size_t width = dim;
  prefer_huge_pages(out, static_cast<size_t>(group_offsets[n_groups] * dim) * sizeof(float));
  std::vector<std::vector<double>> means(n_groups);  // sums first; the last entry: of how many
  parallel_for(n_groups, n_threads, [&](int64_t g, int) {
    std::vector<double>& sum = means[g];
    sum.assign(width + 1, 0.0);
    for (int64_t i = group_offsets[g]; i < group_offsets[g + 1]; ++i) {
      if (std::isnan(rows[i * dim])) continue;
      dot.add(rows + i * dim, dim, sum.data());
      sum[width] += 1.0;
    }
  });
  if (share == Share::kBatch) {
    for (size_t g = 1; g < means.size(); ++g) {
      for (size_t e = 0; e <= width; ++e) means[0][e] += means[g][e];
    }
    std::fill(means.begin(), means.end(), std::vector<double>(means.empty() ? std::vector<double>() : means[0]));
  }
  parallel_for(n_groups, n_threads, [&](int64_t g, int) {
    std::vector<double>& mean = means[g];
    for (size_t e = 0; e < width; ++e) mean[e] /= std::max(mean[width], 1.0);
    for (int64_t i = group_offsets[g]; i < group_offsets[g + 1]; ++i) {
      dot.centre(rows + i * dim, mean.data(), dim, out + i * dim);
    }
  });
}

void kernel_values(const float* rows, const float* inside, int64_t dim, const float* returns, const int64_t* time,
                   const int64_t* group_offsets, int64_t n_groups, const int64_t* trajectory, const int64_t* landmarks,
                   int64_t n_landmarks, Share share, const ValueKernel* kernel, double* value, int n_threads) {
  const bool batch = share == Share::kBatch;
  ValueKernel numbers = *kernel;
  if (!batch) numbers.same = 0.0;
  const Work work{rows, inside, dim, time, trajectory, numbers, dot_kernels()};
  for (int64_t g = 0; g < n_groups; ++g) {
    const int64_t begin = group_offsets[g], n = group_offsets[g + 1] - begin;
    if (n > 0) std::fill(value + begin, value + begin + n, mean_of(returns + begin, n));
  }
  const auto run = [&](int64_t first, int64_t last, std::vector<Scratch>& scratch) {
    const DefaultFloats floats_mode;
    std::vector<int64_t> list, sizes, chosen;
    for (int64_t g = first; g < last; ++g) work.gather(group_offsets[g], group_offsets[g + 1], list, sizes);
    const int64_t n = static_cast<int64_t>(list.size()), m = landmarks ? n_landmarks : std::min(n, kLandmarks);
    for (int64_t k = 0; sizes.size() > 1 && k < m; ++k) {
      const int64_t record = landmarks ? landmarks[k] : list[batch ? k : k * n / m];
      if (!std::isnan(rows[record * dim])) chosen.push_back(record);
    }
    Values{work, returns, !batch, value}.run(list, sizes, chosen, scratch);
  };
  std::vector<std::vector<Scratch>> scratch(batch ? 1 : n_threads, std::vector<Scratch>(batch ? n_threads : 1));
  if (batch) return run(0, n_groups, scratch[0]);
  parallel_for(n_groups, n_threads, [&](int64_t g, int worker) { run(g, g + 1, scratch[worker]); });
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
                           const uint8_t* parsed, const ValueKernel* kernel, double* out, int n_threads) {
  const Work work{rows, nullptr, dim, time, nullptr, *kernel, dot_kernels()};
  const double noise = kernel->noise;
  std::vector<Scratch> scratch(std::max(n_threads, 1));
  parallel_for(n_groups, n_threads, [&](int64_t g, int worker) {
    const DefaultFloats floats_mode;
    Scratch& own = scratch[worker];
    for (int64_t i = group_offsets[g]; i < group_offsets[g + 1]; ++i) out[i] = advantage[i] / (1.0 + noise);
    std::vector<int64_t> list, sizes, sorted;  // the last: of a block, by action
    work.gather(group_offsets[g], group_offsets[g + 1], list, sizes);
    const int64_t* next = list.data();
    for (const int64_t in_block : sizes) {
      sorted.clear();
      std::copy_if(next, next + in_block, std::back_inserter(sorted), [&](int64_t i) { return !parsed || parsed[i]; });
      next += in_block;
      std::stable_sort(sorted.begin(), sorted.end(),
                       [&](int64_t i, int64_t j) { return action_key[i] < action_key[j]; });
      for (auto first = sorted.begin(), last = first; first != sorted.end(); first = last) {
        last = std::find_if(first, sorted.end(), [&](int64_t i) { return action_key[i] != action_key[*first]; });
        const int64_t size = last - first;
        if (size == 1) continue;
        work.make_kernel(rows, &*first, size, own.block, own.matrix);
        add_diagonal(own.matrix, size, noise);
        factorise(work.dot, own.matrix);
        own.column.assign(own.matrix.n, 0.0);
        for (int64_t i = 0; i < size; ++i) own.column[i] = advantage[first[i]];
        solve(work.dot, own.matrix, own.column);
        for (int64_t i = 0; i < size; ++i) out[first[i]] = advantage[first[i]] - noise * own.column[i];
      }
    }
  });
}

void normed_advantage(const double* advantage, const float* returns, const int64_t* group_offsets, int64_t n_groups,
                      StepNorm step_norm, float* out, int n_threads) {
  const int64_t n_records = group_offsets[n_groups];
  std::vector<double> square(n_groups, 0.0);
  std::vector<float> largest(n_groups, 0.0f);
  parallel_for(n_groups, n_threads, [&](int64_t g, int) {
    double total = 0.0;
    float most = 0.0f;
    for (int64_t i = group_offsets[g]; i < group_offsets[g + 1]; ++i) {
      total += advantage[i] * advantage[i];
      most = std::max(most, std::abs(returns[i]));
    }
    square[g] = total;
    largest[g] = most;
  });
  const auto reciprocal = [](double total, int64_t n, float most) {
    const double size = n ? std::sqrt(total / static_cast<double>(n)) : 0.0;
    return size > kTiny * std::max(most, std::numeric_limits<float>::min()) ? 1.0 / size : 0.0;
  };
  double whole = 0.0;
  float most = 0.0f;
  for (int64_t g = 0; g < n_groups; ++g) {
    whole += square[g];
    most = std::max(most, largest[g]);
  }
  const double of_batch = reciprocal(whole, n_records, most);
  constexpr double kLimit = static_cast<double>(std::numeric_limits<float>::max());
  parallel_for(n_groups, n_threads, [&](int64_t g, int) {
    const int64_t begin = group_offsets[g], end = group_offsets[g + 1];
    double factor = step_norm == StepNorm::kBatch ? of_batch : 1.0;
    if (step_norm == StepNorm::kGroup) factor = reciprocal(square[g], end - begin, largest[g]);
    for (int64_t i = begin; i < end; ++i) {
      out[i] = static_cast<float>(std::clamp(factor * advantage[i], -kLimit, kLimit));
    }
  });
}

}  // namespace bipace
