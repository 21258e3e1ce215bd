// How kernel_values works on a group: rows to unit length, less their mean in float64, rounded to float32 once;
// products of those by the kernels of dot.h (a Gram of the rows as they are, centred afterwards, would put the rounding
// of cosines near 0.99 into every entry); K in float64, factorised in place.
#include "cpu/critic.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <memory>
#include <vector>

#include "cpu/gram.h"
#include "cpu/greedy.h"
#include "cpu/parallel.h"

namespace bipace {
namespace {

constexpr double kFlat = 1e-5;    // a centred squared length up to here counts as the mean
constexpr double kJitter = 1e-3;  // on the diagonal of the landmarks' matrix, which equal rows make singular
constexpr double kTiny = 1e-6;    // of max |R|: a root mean square up to here is rounding
constexpr int64_t kRows = 192;    // rows at a time that meet the landmarks

// In processing order; exactly the value where all are equal.
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

// ---- symmetric matrices --------------------------------------------------------------------------------------------

constexpr int64_t kPanelRows = 64;    // of a factorisation
constexpr int64_t kUpdateBlock = 64;  // columns: two blocks of a panel stay in the first cache

// The upper triangle of an n x n matrix, row by row; rows and columns up to a multiple of four are those of the
// identity.
struct Symmetric {
  int64_t n = 0, stride = 0;
  std::vector<double> data;

  void reset(int64_t size) {
    n = (size + 3) / 4 * 4;
    stride = n % 512 == 0 ? n + 8 : n;  // rows a multiple of 4 KB apart would share the sets of the cache
    data.assign(static_cast<size_t>(n * stride), 0.0);
    for (int64_t i = size; i < n; ++i) row(i)[i] = 1.0;
  }
  double* row(int64_t i) { return data.data() + i * stride; }
  const double* row(int64_t i) const { return data.data() + i * stride; }
};

typedef double Two __attribute__((vector_size(16)));

inline Two load(const double* x) { return Two{x[0], x[1]}; }

// target[i][j] += sign * sum over k of p[k][i] p[k][j] for j >= i >= first, k in order.  A 4 x 4 tile of the diagonal
// is written whole.
void update(Symmetric& target, const double* p, int64_t p_stride, int64_t depth, int64_t first, double sign) {
  const int64_t n = target.n;
  for (int64_t row_block = first; row_block < n; row_block += kUpdateBlock) {
    const int64_t row_end = std::min(n, row_block + kUpdateBlock);
    for (int64_t block = row_block; block < n; block += kUpdateBlock) {
      const int64_t end = std::min(n, block + kUpdateBlock);
      for (int64_t i = row_block; i < row_end; i += 4) {
        for (int64_t j = std::max(i, block); j < end; j += 4) {
          Two sum[4][2] = {};
          for (int64_t k = 0; k < depth; ++k) {
            const double* a = p + k * p_stride + i;
            const double* b = p + k * p_stride + j;
            const Two low = load(b), high = load(b + 2);
            for (int r = 0; r < 4; ++r) {
              const Two x = {a[r], a[r]};
              sum[r][0] += x * low;
              sum[r][1] += x * high;
            }
          }
          for (int r = 0; r < 4; ++r) {
            double* out = target.row(i + r) + j;
            for (int c = 0; c < 4; ++c) out[c] += sign * sum[r][c / 2][c % 2];
          }
        }
      }
    }
  }
}

// A = U^T U in place.  A is positive definite by far: its noise is at least 0.1, rounding stays below 1e-2.
void factorise(Symmetric& a) {
  for (int64_t begin = 0; begin < a.n; begin += kPanelRows) {
    const int64_t end = std::min(a.n, begin + kPanelRows);
    for (int64_t k = begin; k < end; ++k) {
      double* pivot = a.row(k);
      const double length = std::sqrt(pivot[k]);
      for (int64_t c = k; c < a.n; ++c) pivot[c] /= length;
      for (int64_t j = k + 1; j < end; ++j) {
        double* below = a.row(j);
        const double factor = pivot[j];
        for (int64_t c = j; c < a.n; ++c) below[c] -= factor * pivot[c];
      }
    }
    if (end < a.n) update(a, a.row(begin), a.stride, end - begin, end, -1.0);
  }
}

// x = (U^T U)^-1 x in place; x has a.n entries.
void solve(const Symmetric& a, double* x) {
  for (int64_t k = 0; k < a.n; ++k) {
    const double* row = a.row(k);
    x[k] /= row[k];
    const double factor = x[k];
    for (int64_t c = k + 1; c < a.n; ++c) x[c] -= factor * row[c];
  }
  for (int64_t k = a.n - 1; k >= 0; --k) {
    const double* row = a.row(k);
    double rest = x[k];
    for (int64_t c = k + 1; c < a.n; ++c) rest -= row[c] * x[c];
    x[k] = rest / row[k];
  }
}

// ---- the kernel ----------------------------------------------------------------------------------------------------

// Centred rows of float32, their squared lengths and their steps.
struct Centred {
  std::vector<float> data;  // [n, stride]
  std::vector<ScaledRow> rows;
  std::vector<double> square;
  std::vector<int64_t> time;
  int64_t stride = 0, dim = 0;

  // Keeps what is there.
  void resize(int64_t n, int64_t new_dim) {
    dim = new_dim;
    stride = (dim + 15) / 16 * 16;
    if (stride % 1024 == 0) stride += 16;  // rows a multiple of 4 KB apart would share the sets of the cache
    data.resize(static_cast<size_t>(n * stride));
    rows.resize(static_cast<size_t>(n));
    square.resize(static_cast<size_t>(n));
    time.resize(static_cast<size_t>(n));
  }
  Rows view() const { return {data.data(), DType::kFloat32, stride, 1, dim}; }
};

double entry(double product, double square_a, double square_b, int64_t time_a, int64_t time_b, ValueKernel kernel) {
  double cosine;
  if (square_a <= kFlat || square_b <= kFlat) {
    cosine = square_a <= kFlat && square_b <= kFlat ? 1.0 : 0.0;
  } else if (2.0 * product >= square_a + square_b) {
    cosine = 1.0;  // equal rows
  } else {
    cosine = std::min(1.0, product / std::sqrt(square_a * square_b));
  }
  double exponent = (cosine - 1.0) / kernel.width;
  if (kernel.horizon > 0.0) {
    const double steps = static_cast<double>(time_a - time_b) / kernel.horizon;
    exponent -= steps * steps / 2.0;
  }
  return std::exp(exponent);
}

// One group; its scratch is kept from group to group.
class GroupValues {
 public:
  void run(const Rows& rows, const int64_t* order, const float* returns, const int64_t* time, const uint8_t* usable,
           int64_t length, ValueKernel kernel, double* value) {
    const double mean = mean_of(returns, length);
    std::fill(value, value + length, mean);
    take_part(rows, order, usable, length);
    const int64_t n = static_cast<int64_t>(wanted_.size());
    if (n == 0) return;
    const auto difference = [&](int64_t i) { return static_cast<double>(returns[at(i)]) - mean; };
    if (n <= kLongestKernel) {
      centre(rows, time, 0, n, [](int64_t i) { return i; }, 0);
      fill(kernel, n);
      for (int64_t i = 0; i < n; ++i) matrix_.row(i)[i] += kernel.noise;
      factorise(matrix_);
      solution_.assign(static_cast<size_t>(matrix_.n), 0.0);
      for (int64_t i = 0; i < n; ++i) solution_[static_cast<size_t>(i)] = difference(i);
      solve(matrix_, solution_.data());
      // K x = y - noise x
      for (int64_t i = 0; i < n; ++i) {
        value[at(i)] = mean + (difference(i) - kernel.noise * solution_[static_cast<size_t>(i)]);
      }
      return;
    }
    by_landmarks(rows, time, kernel, n, mean, difference, value);
  }

 private:
  int64_t at(int64_t i) const { return position_[static_cast<size_t>(i)]; }

  // The usable rows with 1 / norm, and the mean of them at unit length.
  void take_part(const Rows& rows, const int64_t* order, const uint8_t* usable, int64_t length) {
    wanted_.clear();
    position_.clear();
    reciprocal_.clear();
    for (int64_t i = 0; i < length; ++i) {
      if (usable && !usable[i]) continue;
      ScaledRow row{order[i], 1.0f};
      const double reciprocal = measure(rows, dot_, row);
      if (reciprocal == 0.0) continue;
      wanted_.push_back(row);
      position_.push_back(i);
      reciprocal_.push_back(reciprocal);
    }
    mean_.assign(static_cast<size_t>(rows.dim), 0.0);
    buffer_.resize(static_cast<size_t>(rows.dim));
    for (size_t i = 0; i < wanted_.size(); ++i) {
      const float* x = read_panel(rows, dot_, wanted_[i], 0, rows.dim, buffer_.data());
      for (int64_t e = 0; e < rows.dim; ++e)
        mean_[static_cast<size_t>(e)] += reciprocal_[i] * static_cast<double>(x[e]);
    }
    for (double& m : mean_) m /= static_cast<double>(wanted_.size());
  }

  // The rows which(first) ... which(last - 1) less the mean, as rows `to` and on of the centred ones.
  template <typename Which>
  void centre(const Rows& rows, const int64_t* time, int64_t first, int64_t last, const Which& which, int64_t to) {
    centred_.resize(to + last - first, rows.dim);
    const Rows view = centred_.view();
    for (int64_t i = first; i < last; ++i) {
      const size_t from = static_cast<size_t>(which(i)), place = static_cast<size_t>(to + i - first);
      const float* x = read_panel(rows, dot_, wanted_[from], 0, rows.dim, buffer_.data());
      float* z = centred_.data.data() + static_cast<int64_t>(place) * centred_.stride;
      for (int64_t e = 0; e < rows.dim; ++e) {
        z[e] = static_cast<float>(reciprocal_[from] * static_cast<double>(x[e]) - mean_[static_cast<size_t>(e)]);
      }
      centred_.rows[place] = {static_cast<int64_t>(place), 1.0f};
      centred_.time[place] = time[position_[from]];
      centred_.square[place] = square_of(view, dot_, centred_.rows[place]);
    }
  }

  // use(i, j, K_ij) of centred rows [first, first + height) and [from, from + width), both at most kGramBlock long; the
  // same rows twice: i <= j only.
  template <typename Use>
  void entries(ValueKernel kernel, int64_t first, int64_t height, int64_t from, int64_t width, const Use& use) {
    const ScaledRow* wanted = centred_.rows.data();
    multiply_rows(centred_.view(), dot_, wanted + first, height, wanted + from, width, first == from, products_);
    for (int64_t j = 0; j < width; ++j) {
      for (int64_t i = 0; i < (first == from ? j + 1 : height); ++i) {
        const size_t a = static_cast<size_t>(first + i), b = static_cast<size_t>(from + j);
        use(first + i, from + j,
            a == b ? 1.0
                   : entry(products_[j][i], centred_.square[a], centred_.square[b], centred_.time[a], centred_.time[b],
                           kernel));
      }
    }
  }

  // The kernel of the first n centred rows, into the upper triangle of the matrix.
  void fill(ValueKernel kernel, int64_t n) {
    matrix_.reset(n);
    for (int64_t i = 0; i < n; i += kGramBlock) {
      for (int64_t j = i; j < n; j += kGramBlock) {
        entries(kernel, i, std::min(kGramBlock, n - i), j, std::min(kGramBlock, n - j),
                [&](int64_t p, int64_t q, double k) { matrix_.row(p)[q] = k; });
      }
    }
  }

  // V = mean + K_nm (K_mn K_nm + noise (K_mm + jitter I))^-1 K_mn (R - mean), the rows of K_nm made twice.
  template <typename Difference>
  void by_landmarks(const Rows& rows, const int64_t* time, ValueKernel kernel, int64_t n, double mean,
                    const Difference& difference, double* value) {
    constexpr int64_t m = kLandmarks;
    centre(rows, time, 0, m, [n](int64_t k) { return k * n / m; }, 0);
    fill(kernel, m);
    for (int64_t i = 0; i < m; ++i) {
      matrix_.row(i)[i] += kJitter;
      for (int64_t j = i; j < m; ++j) matrix_.row(i)[j] *= kernel.noise;
    }
    solution_.assign(static_cast<size_t>(matrix_.n), 0.0);
    for_blocks(rows, time, kernel, n, [&](const double* block, int64_t first, int64_t height) {
      update(matrix_, block, m, height, 0, 1.0);
      for (int64_t i = 0; i < height; ++i) {
        const double y = difference(first + i);
        for (int64_t k = 0; k < m; ++k) solution_[static_cast<size_t>(k)] += block[i * m + k] * y;
      }
    });
    factorise(matrix_);
    solve(matrix_, solution_.data());
    for_blocks(rows, time, kernel, n, [&](const double* block, int64_t first, int64_t height) {
      for (int64_t i = 0; i < height; ++i) {
        double total = 0.0;
        for (int64_t k = 0; k < m; ++k) total += block[i * m + k] * solution_[static_cast<size_t>(k)];
        value[at(first + i)] = mean + total;
      }
    });
  }

  // Calls body(K of rows [first, first + height) with the landmarks, first, height).
  template <typename Body>
  void for_blocks(const Rows& rows, const int64_t* time, ValueKernel kernel, int64_t n, const Body& body) {
    block_.resize(static_cast<size_t>(kRows * kLandmarks));
    for (int64_t first = 0; first < n; first += kRows) {
      const int64_t height = std::min(kRows, n - first);
      centre(rows, time, first, first + height, [](int64_t i) { return i; }, kLandmarks);
      for (int64_t i = 0; i < height; i += kGramBlock) {
        for (int64_t k = 0; k < kLandmarks; k += kGramBlock) {
          entries(kernel, kLandmarks + i, std::min(kGramBlock, height - i), k, std::min(kGramBlock, kLandmarks - k),
                  [&](int64_t p, int64_t q, double value) {
                    block_[static_cast<size_t>((p - kLandmarks) * kLandmarks + q)] = value;
                  });
        }
      }
      body(block_.data(), first, height);
    }
  }

  const DotKernels& dot_ = dot_kernels();
  std::vector<ScaledRow> wanted_;   // the group's rows that take part
  std::vector<int64_t> position_;   // in the group
  std::vector<double> reciprocal_;  // 1 / norm
  std::vector<double> mean_;        // [D] of the rows at unit length
  std::vector<float> buffer_;       // [D]
  Centred centred_;                 // the whole group, or landmarks and a block of rows
  Symmetric matrix_;
  std::vector<double> solution_, block_;
  double products_[kGramBlock][kGramBlock];
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
    // Labels are dense over the batch, so those of a group lie close together.
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
                   const int64_t* group_offsets, int64_t n_groups, const uint8_t* usable, ValueKernel kernel,
                   double* value, int n_threads) {
  std::vector<std::unique_ptr<GroupValues>> scratch(static_cast<size_t>(std::max(n_threads, 1)));
  parallel_for(n_groups, n_threads, [&](int64_t g, int worker) {
    const DefaultFloats floats_mode;
    std::unique_ptr<GroupValues>& own = scratch[static_cast<size_t>(worker)];
    if (!own) own.reset(new GroupValues);
    const int64_t begin = group_offsets[g];
    if (group_offsets[g + 1] == begin) return;
    own->run(rows, order + begin, returns + begin, time + begin, usable ? usable + begin : nullptr,
             group_offsets[g + 1] - begin, kernel, value + begin);
  });
}

void gae_advantage(const double* rewards, const double* value, const float* returns, const int64_t* step,
                   const int64_t* trajectory_offsets, int64_t n_trajectories, const int64_t* group_offsets,
                   int64_t n_groups, const uint8_t* truncated, double gamma, double gae_lambda, StepNorm step_norm,
                   float* out, int n_threads) {
  const int64_t n_records = group_offsets[n_groups];
  std::vector<double> advantage(static_cast<size_t>(n_records));
  parallel_for(n_trajectories, n_threads, [&](int64_t t, int) {
    const int64_t begin = trajectory_offsets[t], end = trajectory_offsets[t + 1];
    double next_value = 0.0, next_advantage = 0.0;
    for (int64_t last = end; last > begin;) {
      int64_t first = last - 1;
      while (step && first > begin && step[first - 1] == step[first]) --first;
      double discount = gamma, decay = gamma * gae_lambda;
      if (last < end && step && step[last] - step[first] != 1) {
        const double gap = static_cast<double>(step[last] - step[first]);
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
        double& a = advantage[static_cast<size_t>(i)];
        a = rewards[i] + discount * next_value - value[i] + decay * next_advantage;
        total += a;
      }
      next_value = own;
      next_advantage = total / static_cast<double>(last - first);
      last = first;
    }
  });
  std::vector<double> square(static_cast<size_t>(n_groups), 0.0);
  std::vector<float> largest(static_cast<size_t>(n_groups), 0.0f);
  parallel_for(n_groups, n_threads, [&](int64_t g, int) {
    double total = 0.0;
    float most = 0.0f;
    for (int64_t i = group_offsets[g]; i < group_offsets[g + 1]; ++i) {
      total += advantage[static_cast<size_t>(i)] * advantage[static_cast<size_t>(i)];
      most = std::max(most, std::abs(returns[i]));
    }
    square[static_cast<size_t>(g)] = total;
    largest[static_cast<size_t>(g)] = most;
  });
  const auto reciprocal = [](double total, int64_t n, float most) {
    const double size = n ? std::sqrt(total / static_cast<double>(n)) : 0.0;
    return size > kTiny * static_cast<double>(most) ? 1.0 / size : 0.0;
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
      out[i] = static_cast<float>(std::clamp(factor * advantage[static_cast<size_t>(i)], -kLimit, kLimit));
    }
  });
}

}  // namespace bipace
