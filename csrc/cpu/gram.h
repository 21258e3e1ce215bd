// Products of fingerprint rows by the fixed-order kernels of dot.h, a square of the Gram matrix at a time.
#pragma once

#include <cstdint>

#include "cpu/rows.h"

namespace bipace {

constexpr int64_t kGramBlock = 96;  // rows of a square: two panels of them stay in a cache of 512 KB

// The square of a row's norm, by the tile that makes the Gram matrix.
double square_of(const Rows& rows, const DotKernels& dot, ScaledRow row);

// Fills in the factor by which a row is read; returns 1 / norm of it so, 0 for a row without a direction.
double measure(const Rows& rows, const DotKernels& dot, ScaledRow& row);

// products[j][i] = a_i . b_j; of a square on the diagonal only i <= j is sure to be written.
void multiply_rows(const Rows& rows, const DotKernels& dot,
                   const ScaledRow* a,  // [n], n <= kGramBlock
                   int64_t n, const Rows& rows_b,
                   const ScaledRow* b,  // [width], width <= kGramBlock
                   int64_t width, bool diagonal, double (*products)[kGramBlock]);

}  // namespace bipace
