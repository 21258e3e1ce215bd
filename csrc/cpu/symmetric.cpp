#include "cpu/symmetric.h"

#include <cmath>
#include <limits>
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

// QR steps on the tridiagonal matrix with `value` on its diagonal and `beside` next to it; the rows of `vectors`, those
// of the identity, become its eigenvectors.
void diagonalise(const DotKernels& dot, std::vector<double>& value, std::vector<double>& beside, Symmetric& vectors) {
  constexpr double kNone = std::numeric_limits<double>::epsilon();
  const auto negligible = [&](int64_t i) {
    return std::abs(beside[i]) <= kNone * (std::abs(value[i]) + std::abs(value[i + 1]));
  };
  int64_t steps = 40 * vectors.n;  // about two for each value are needed
  for (int64_t last = vectors.n - 1; last > 0 && steps > 0; --steps) {
    if (negligible(last - 1)) {
      --last;
      continue;
    }
    int64_t first = last - 1;
    while (first > 0 && !negligible(first - 1)) --first;
    const double half = 0.5 * (value[last - 1] - value[last]), off = beside[last - 1];
    const double shift = value[last] - off * off / (half + std::copysign(std::hypot(half, off), half));
    double x = value[first] - shift, z = beside[first];
    for (int64_t i = first; i < last; ++i) {
      const double length = std::hypot(x, z), cosine = length > 0.0 ? x / length : 1.0;
      const double sine = length > 0.0 ? z / length : 0.0;
      if (i > first) beside[i - 1] = length;
      const double own = value[i], next = value[i + 1], mixed = 2.0 * cosine * sine * beside[i];
      value[i] = cosine * cosine * own + mixed + sine * sine * next;
      value[i + 1] = sine * sine * own - mixed + cosine * cosine * next;
      x = beside[i] = (cosine * cosine - sine * sine) * beside[i] + cosine * sine * (next - own);
      if (i + 1 < last) {
        z = sine * beside[i + 1];
        beside[i + 1] *= cosine;
      }
      dot.rotate(cosine, -sine, vectors.n, vectors.row(i), vectors.row(i + 1));
    }
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
      for (int64_t j = k + 1; j < end; ++j) dot.subtract(pivot + j, pivot[j], a.n - j, a.row(j) + j);
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

// Householder reflections make the matrix tridiagonal, implicitly shifted QR steps make that diagonal (Golub and Van
// Loan, Matrix Computations, 8.3); then the reflections are applied to the eigenvectors of the tridiagonal matrix.
std::vector<double> eigenvectors(const DotKernels& dot, Symmetric& a) {
  const int64_t n = a.n;
  Symmetric reflection, turned;  // row k: the unit vector of reflection k, 0 up to k; eigenvector k
  reflection.clear(n);
  turned.clear(n);
  std::vector<double> value(n), beside(n), w(n);
  for (int64_t k = 0; k < n; ++k) {
    turned.row(k)[k] = 1.0;
    value[k] = a.row(k)[k];
    const int64_t first = (k + 1) / 8 * 8, size = n - first;  // products take eight at a time
    double* const v = reflection.row(k);
    std::copy(a.row(k) + k + 1, a.row(k) + n, v + k + 1);
    const double length = std::sqrt(dot.product(v + first, v + first, size));
    if (length == 0.0) continue;
    beside[k] = -std::copysign(length, v[k + 1]);
    v[k + 1] -= beside[k];
    dot.divide(std::sqrt(dot.product(v + first, v + first, size)), size, v + first);
    // A - v w^T - w v^T with w = p - (v . p) v and p = 2 A v
    std::fill(w.begin(), w.end(), 0.0);
    for (int64_t i = k + 1; i < n; ++i) w[i] = 2.0 * dot.product(a.row(i) + first, v + first, size);
    dot.subtract(v + first, dot.product(v + first, w.data() + first, size), size, w.data() + first);
    for (int64_t i = k + 1; i < n; ++i) {
      dot.subtract(v + first, w[i], size, a.row(i) + first);
      dot.subtract(w.data() + first, v[i], size, a.row(i) + first);
    }
  }
  diagonalise(dot, value, beside, turned);
  std::vector<int64_t> order(n);
  std::iota(order.begin(), order.end(), 0);
  std::stable_sort(order.begin(), order.end(), [&](int64_t i, int64_t j) { return value[i] > value[j]; });
  std::vector<double> sorted;
  for (int64_t k = 0; k < n; ++k) {
    double* const row = turned.row(order[k]);
    for (int64_t r = n - 1; r >= 0; --r) {
      dot.subtract(reflection.row(r), 2.0 * dot.product(reflection.row(r), row, n), n, row);
    }
    std::copy(row, row + n, a.row(k));
    sorted.push_back(value[order[k]]);
  }
  return sorted;
}

}  // namespace bipace
