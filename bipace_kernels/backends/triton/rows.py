"""One pass over each fingerprint row: whether it has a direction, its scale, and its hash."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from ._launch import ceil_div, launch

USABLE, ALONE, NOT_TAKEN = 0, 1, 2  # `kind` of a record
INFINITY = {torch.float32: 0x7F800000, torch.bfloat16: 0x7F80, torch.float16: 0x7C00}  # its bits
MANTISSA = {torch.float32: 23, torch.bfloat16: 7, torch.float16: 10}  # bits of it
# Eight kilobytes in flight per program, for the memory's bandwidth; with half the warps Triton 3.6 would spill.
ROWS = 4
_OPTIONS = {"ROWS": ROWS, "COLUMNS": 1024, "num_warps": 8, "enable_fp_fusion": False}


def read(
    fingerprint: Tensor,  # [N, D] float32 | bfloat16 | float16, any strides
    order: Tensor,  # [M] int64
    *,
    state: Tensor | None = None,  # [M] uint8, written: 0 fine, 1 not finite, 2 zero
    kind: Tensor | None = None,  # [M] uint8, written: USABLE, ALONE or NOT_TAKEN
    scale: Tensor | None = None,  # [M] float32, written with kind: power of two that brings the row near 1
    row_hash: Tensor | None = None,  # [M] int64, written: equal for rows that compare equal
    usable: Tensor | None = None,  # [M] bool
    taken: Tensor | None = None,  # [M] bool
    hash_bits: int = 64,  # fewer make rows collide
) -> None:
    """Reads every row once and writes the requested outputs."""
    n = order.shape[0]
    if n == 0:
        return
    tensors = (fingerprint, order, state, kind, scale, row_hash, usable, taken)
    sizes = (n, fingerprint.shape[1], *fingerprint.stride())
    bits = (INFINITY[fingerprint.dtype], MANTISSA[fingerprint.dtype], hash_bits)
    launch(_read, (ceil_div(n, ROWS),), *tensors, *sizes, *bits, **_OPTIONS)


@triton.jit(do_not_specialize=["n"])
def _read(
    x,  # [N, D]
    order,  # [M] int64
    state,  # [M] uint8, written; None, as for the next five: nothing is
    kind,  # [M] uint8, written
    scale,  # [M] float32, written
    row_hash,  # [M] int64, written
    usable,  # [M] bool
    taken,  # [M] bool
    n,
    dim,
    row_stride,
    column_stride,
    INFINITY: tl.constexpr,
    MANTISSA: tl.constexpr,
    HASH: tl.constexpr,  # bits of the hash
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    i = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    inside = i < n
    row = x + (tl.load(order + i, mask=inside, other=0) * row_stride)[:, None]
    most = tl.zeros((ROWS, COLUMNS), tl.int32)
    mixed = tl.zeros((ROWS, COLUMNS), tl.int64)
    for start in range(0, dim, COLUMNS):
        e = start + tl.arange(0, COLUMNS)
        mask = inside[:, None] & (e < dim)[None, :]
        value = tl.load(row + (e.to(tl.int64) * column_stride)[None, :], mask=mask, other=0.0)
        magnitude = _magnitude(value)
        most = tl.maximum(most, magnitude)
        if row_hash is not None:
            mixed += _mix(tl.where(magnitude == 0, 0, _bits(value)), e)
    largest = tl.max(most, axis=1)
    condition = tl.where(largest >= INFINITY, 1, tl.where(largest == 0, 2, 0))
    if state is not None:
        tl.store(state + i, condition.to(tl.uint8), mask=inside)
    if kind is not None:
        what = (condition != 0).to(tl.int32)
        if usable is not None:
            what = tl.where(tl.load(usable + i, mask=inside, other=0) == 0, 1, what)
        if taken is not None:
            what = tl.where(tl.load(taken + i, mask=inside, other=0) == 0, 2, what)
        tl.store(kind + i, what.to(tl.uint8), mask=inside)
        tl.store(scale + i, tl.where(condition == 0, _scale(largest, INFINITY, MANTISSA), 1.0), mask=inside)
    if row_hash is not None:
        total = tl.sum(mixed, axis=1)  # integers: the order of summation does not matter
        total = total ^ (total >> 31)
        if HASH < 64:
            total = total & ((1 << HASH) - 1)
        tl.store(row_hash + i, total, mask=inside)


@triton.jit
def _bits(x):
    """The value's bits as int32; converting 16-bit values to float32 would be slower."""
    if x.dtype == tl.float32:
        return x.to(tl.int32, bitcast=True)
    else:
        return x.to(tl.int16, bitcast=True).to(tl.int32) & 0xFFFF


@triton.jit
def _magnitude(x):
    """Bits of |x|: they order like |x|, and infinity and NaN come last."""
    return _bits(x) & (0x7FFFFFFF if x.dtype == tl.float32 else 0x7FFF)


@triton.jit
def _scale(magnitude, INFINITY: tl.constexpr, MANTISSA: tl.constexpr):
    """The power of two that brings a magnitude outside [2^-40, 2^40) near 1; 1 for all others, whose squares neither
    overflow nor underflow.

    2^-p need not be a float32 where p = floor(log2); the nearest one leaves at least 2^-22.
    """
    BIAS: tl.constexpr = INFINITY >> (MANTISSA + 1)
    exponent = magnitude >> MANTISSA
    denormal = (magnitude.to(tl.float32).to(tl.int32, bitcast=True) >> 23) - 127 - BIAS + 1 - MANTISSA
    power = tl.where(exponent > 0, exponent - BIAS, denormal)
    opposite = tl.minimum(tl.maximum(-power, -126), 127)
    opposite = tl.where((power >= -40) & (power < 40), 0, opposite)
    return ((opposite + 127) << 23).to(tl.float32, bitcast=True)


@triton.jit
def _mix(bits, e):
    """int64 of an element and its place; products wrap around."""
    z = bits.to(tl.int64) * 0x1E3779B97F4A7C15 + (e.to(tl.int64) * 0x3F58476D1CE4E5B9)[None, :]
    z = (z ^ (z >> 29)) * 0x14D049BB133111EB
    return z ^ (z >> 32)
