"""Two rows that point almost opposite ways, joined: what is left of them decides where the centroid points.

S[k, ·] = (G[i, ·] + G[j, ·]) / 2u would carry the errors of both products times 1/2u.  So the rows themselves are added,
element by element.  It takes ε above 1.87 and a cluster of one, so no call that anybody makes for its result comes here;
but the result is as exact as any other, and sums have one order, however threads share the work.
"""

from __future__ import annotations

import triton
import triton.language as tl

STEP = tl.constexpr(16)  # elements of D taken at a time; _totals counts on it


@triton.jit
def length_of_mean(
    rows,  # (x [N, D], order [M] int64, scale [M] float32, dim, row_stride, column_stride)
    i,  # records of the batch
    j,
):
    """(‖x_i/‖x_i‖ + x_j/‖x_j‖‖ / 2 as float32, and the two rows' shares in that mean made unit length, as float64)."""
    square_i = tl.zeros((STEP,), tl.float64)
    square_j = tl.zeros((STEP,), tl.float64)
    for start in range(0, rows[3], STEP):
        a = _elements(rows, i, start)
        b = _elements(rows, j, start)
        square_i += a * a
        square_j += b * b
    share_i = 0.5 / tl.sqrt(_total(square_i))
    share_j = 0.5 / tl.sqrt(_total(square_j))
    square = tl.zeros((STEP,), tl.float64)
    for start in range(0, rows[3], STEP):
        c = _elements(rows, i, start) * share_i + _elements(rows, j, start) * share_j
        square += c * c
    length = tl.sqrt(_total(square))
    return length.to(tl.float32), share_i / length, share_j / length


@triton.jit
def similar_to_mean(
    rows,
    i,
    j,
    share_i,  # float64, as length_of_mean gives them
    share_j,
    record,  # [B] records of the batch
    mask,  # [B]
    reciprocal,  # [B] float32: 1 / ‖x‖ of those records
):
    """[B] float32: cosine of each record and the unit mean of rows i and j."""
    at = rows[0] + tl.load(rows[1] + record, mask=mask, other=0) * rows[4]
    scale = tl.load(rows[2] + record, mask=mask, other=0.0)
    total = tl.zeros((reciprocal.shape[0], STEP), tl.float32)
    for start in range(0, rows[3], STEP):
        e = start + tl.arange(0, STEP)
        c = (_elements(rows, i, start) * share_i + _elements(rows, j, start) * share_j).to(tl.float32)
        inside = mask[:, None] & (e < rows[3])[None, :]
        x = tl.load(at[:, None] + (e.to(tl.int64) * rows[5])[None, :], mask=inside, other=0.0).to(tl.float32)
        total += (x * scale[:, None]) * c[None, :]
    return _totals(total) * reciprocal


@triton.jit
def _totals(x):
    """[B] sums of the rows of [B, 16], pair by pair."""
    a, b = tl.split(tl.reshape(x, (x.shape[0], 8, 2)))
    a, b = tl.split(tl.reshape(a + b, (x.shape[0], 4, 2)))
    a, b = tl.split(tl.reshape(a + b, (x.shape[0], 2, 2)))
    a, b = tl.split(a + b)
    return a + b


@triton.jit
def _total(x):
    """The sum of [16], pair by pair."""
    return tl.sum(_totals(x[None, :]), axis=0)


@triton.jit
def _elements(rows, record, start):
    """[STEP] float64: elements of a record's row, scaled; 0 beyond the last."""
    e = start + tl.arange(0, STEP)
    row = tl.load(rows[1] + record)
    x = tl.load(rows[0] + row * rows[4] + e.to(tl.int64) * rows[5], mask=e < rows[3], other=0.0)
    return x.to(tl.float32).to(tl.float64) * tl.load(rows[2] + record).to(tl.float64)
