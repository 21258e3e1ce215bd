#include "cpu/symmetric.h"

#include <cmath>
#include <numeric>

#include "cpu/interrupt.h"

namespace bipace {
namespace {

constexpr int64_t kPanelRows = 16;  // of a factorisation; a panel itself is factorised without DotKernels::outer
constexpr int64_t kBlock = 64;      // columns: two blocks of a panel fit the first-level cache

// out[i][j] += sign * sum over k of a[k][i] b[k][j], for [rows, columns] of multiples of kOuterA and kOuterB.
void add_product(const DotKernels& dot, const double* a, int64_t a_stride, int64_t rows, const double* b,
                 int64_t b_stride, int64_t columns, int64_t depth, double sign, double* out, int64_t out_stride) {
  for (int64_t block = 0; block < columns; block += kBlock) {
    const int64_t end = std::min(columns, block + kBlock);
    for (int64_t i = 0; i < rows; i += kOuterA) {
      for (int64_t j = block; j < end; j += kOuterB) {
        dot.outer(a + i, a_stride, b + j, b_stride, depth, sign, out + i * out_stride + j, out_stride);
      }
    }
  }
}

// The part of add_square from row `first` on, a multiple of kOuterB.
void add_square_from(const DotKernels& dot, Symmetric& target, const double* p, int64_t p_stride, int64_t depth,
                     int64_t first, double sign) {
  for (int64_t i = first; i < target.n; i += kOuterB) {
    add_product(dot, p + i, p_stride, kOuterB, p + i, p_stride, target.n - i, depth, sign, target.row(i) + i,
                target.stride);
  }
}

}  // namespace

void add_square(const DotKernels& dot, Symmetric& target, const double* p, int64_t p_stride, int64_t depth,
                double sign) {
  add_square_from(dot, target, p, p_stride, depth, 0, sign);
}

void factorise(const DotKernels& dot, Symmetric& a) {
  for (int64_t begin = 0; begin < a.n; begin += kPanelRows) {
    poll_interrupt();
    const int64_t end = std::min(a.n, begin + kPanelRows);
    for (int64_t k = begin; k < end; ++k) {
      double* pivot = a.row(k);
      const double length = std::sqrt(pivot[k]);
      dot.divide(length, a.n - k, pivot + k);
      for (int64_t j = k + 1; j < end; ++j) {
        dot.subtract(pivot + j, pivot[j], a.n - j, a.row(j) + j);
      }
    }
    if (end < a.n) add_square_from(dot, a, a.row(begin), a.stride, end - begin, end, -1.0);
  }
}

void solve_forward(const DotKernels& dot, const Symmetric& u, double* x, int64_t x_stride, int64_t columns) {
  for (int64_t begin = 0; begin < u.n; begin += kPanelRows) {
    const int64_t end = std::min(u.n, begin + kPanelRows);
    for (int64_t k = begin; k < end; ++k) {
      const double* row = u.row(k);
      double* own = x + k * x_stride;
      dot.divide(row[k], columns, own);
      for (int64_t j = k + 1; j < end; ++j) dot.subtract(own, row[j], columns, x + j * x_stride);
    }
    add_product(dot, u.row(begin) + end, u.stride, u.n - end, x + begin * x_stride, x_stride, columns, end - begin,
                -1.0, x + end * x_stride, x_stride);
  }
}

void solve_forward(const DotKernels& dot, const Symmetric& u, double* x) {
  for (int64_t k = 0; k < u.n; ++k) {
    x[k] /= u.row(k)[k];
    dot.subtract(u.row(k) + k + 1, x[k], u.n - k - 1, x + k + 1);
  }
}

void solve_backward(const DotKernels& dot, const Symmetric& u, double* x) {
  for (int64_t k = u.n - 1; k >= 0; --k) {
    const double* const row = u.row(k);
    const int64_t whole = (k / 8 + 1) * 8;  // from here on eight at a time
    double sum = dot.product(row + whole, x + whole, u.n - whole);
    for (int64_t j = k + 1; j < whole; ++j) sum += row[j] * x[j];
    x[k] = (x[k] - sum) / row[k];
  }
}

// One-sided Jacobi: rotations make the rows orthogonal, and row k is then value k times its eigenvector.
std::vector<double> eigenvectors(const DotKernels& dot, Symmetric& a) {
  constexpr double kOrthogonal = 1e-14;
  constexpr int kSweeps = 40;  // it takes six to ten
  std::vector<double> square(static_cast<size_t>(a.n));
  bool rotated = true;
  for (int sweep = 0; rotated && sweep < kSweeps; ++sweep) {
    poll_interrupt();
    rotated = false;
    for (int64_t i = 0; i < a.n; ++i) square[static_cast<size_t>(i)] = dot.product(a.row(i), a.row(i), a.n);
    for (int64_t i = 0; i < a.n; ++i) {
      for (int64_t j = i + 1; j < a.n; ++j) {
        double &own = square[static_cast<size_t>(i)], &other = square[static_cast<size_t>(j)];
        const double between = dot.product(a.row(i), a.row(j), a.n);
        if (std::abs(between) <= kOrthogonal * std::sqrt(own * other)) continue;
        rotated = true;
        const double ratio = (other - own) / (2.0 * between);
        const double tangent = (ratio < 0.0 ? -1.0 : 1.0) / (std::abs(ratio) + std::sqrt(1.0 + ratio * ratio));
        const double cosine = 1.0 / std::sqrt(1.0 + tangent * tangent), sine = cosine * tangent;
        dot.rotate(cosine, sine, a.n, a.row(i), a.row(j));
        own -= tangent * between;
        other += tangent * between;
      }
    }
  }
  std::vector<int64_t> order(static_cast<size_t>(a.n));
  std::iota(order.begin(), order.end(), 0);
  for (int64_t i = 0; i < a.n; ++i) square[static_cast<size_t>(i)] = std::sqrt(dot.product(a.row(i), a.row(i), a.n));
  std::stable_sort(order.begin(), order.end(), [&](int64_t i, int64_t j) {
    return square[static_cast<size_t>(i)] > square[static_cast<size_t>(j)];
  });
  const std::vector<double> rows = a.data;
  std::vector<double> values;
  for (int64_t k = 0; k < a.n; ++k) {
    const int64_t from = order[static_cast<size_t>(k)];
    values.push_back(square[static_cast<size_t>(from)]);
    for (int64_t c = 0; c < a.n; ++c) {
      a.row(k)[c] = rows[static_cast<size_t>(from * a.stride + c)] / (values.back() > 0.0 ? values.back() : 1.0);
    }
  }
  return values;
}

}  // namespace bipace
