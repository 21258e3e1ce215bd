// Positive definite matrices of float64, factorised in place.  Every sum has a fixed order, so bits only depend on the
// matrix and on the instruction set's DotKernels.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include "cpu/dot.h"

namespace bipace {

// The upper triangle of an n x n matrix, row by row; entries below the diagonal are undefined.  It is padded with rows
// and columns of the identity to a multiple of kOuterB.
struct Symmetric {
  int64_t n = 0, stride = 0;  // n with that padding
  std::vector<double> data;

  void reset(int64_t size) {
    data.clear();
    resize(size);
    for (int64_t i = size; i < n; ++i) row(i)[i] = 1.0;
  }
  void resize(int64_t size) {
    n = padded(size);
    stride = n % 512 == 0 ? n + 8 : n;  // rows a multiple of 4 KB apart would share the sets of the cache
    data.resize(n * stride);
  }
  // Zeros, without padding.
  void clear(int64_t size) {
    n = stride = size;
    data.assign(n * n, 0.0);
  }
  // Copies the triangle to and from memory of triangle(n) entries.
  void pack(double* to) const {
    for (int64_t i = 0; i < n; ++i) to = std::copy(row(i) + i, row(i) + n, to);
  }
  void unpack(const double* from, int64_t size) {
    resize(size);
    for (int64_t i = 0; i < n; from += n - i, ++i) std::copy(from, from + n - i, row(i) + i);
  }
  double* row(int64_t i) { return data.data() + i * stride; }
  const double* row(int64_t i) const { return data.data() + i * stride; }

  static int64_t triangle(int64_t size) { return padded(size) * (padded(size) + 1) / 2; }
  static int64_t padded(int64_t size) { return (size + kOuterB - 1) / kOuterB * kOuterB; }
};

// target += sign * P^T P with P [depth, target.n].
void add_square(const DotKernels& dot, Symmetric& target, const double* p, int64_t p_stride, int64_t depth,
                double sign);

// A = U^T U in place.
void factorise(const DotKernels& dot, Symmetric& a);

// X = U^-T X in place; X has u.n rows of `columns`, a multiple of kOuterB.
void solve_forward(const DotKernels& dot, const Symmetric& u, double* x, int64_t x_stride, int64_t columns);

// x = U^-T x and x = U^-1 x in place, of u.n entries.
void solve_forward(const DotKernels& dot, const Symmetric& u, double* x);
void solve_backward(const DotKernels& dot, const Symmetric& u, double* x);

// The eigenvalues of a positive semidefinite matrix given as a whole, largest first; row k of `a` becomes the unit
// eigenvector k.
std::vector<double> eigenvectors(const DotKernels& dot, Symmetric& a);

}  // namespace bipace
