"""The Gram matrix of every group, from the unnormalised rows: G[i, j] = x_i · x_j for i ≤ j, float32.

Products of 16-bit values are exact in float32.  Tensor cores truncate sums beyond float32 (over 3,584 elements
a bias of 5e-6, which norms and products share only in part), so every two BLOCK_K elements of D begin a new sum, and
those sums are added with rounding.  The order over D is fixed; G[i, j] only depends on the two rows, not on their
place in a batch: tiles count from the group's first record, and results for rows beyond its last are never read.
The norms are the diagonal, so the remaining bias cancels in the cosine.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from ._launch import ceil_div

FUSED = True  # only dot products are computed, with one rounding per product
UNIT = 128  # the side of a Gram matrix is a multiple of this, which every tile's side and the width of a load divide

# The interpreter would multiply the bits of bfloat16 as integers; in float32 the products are equally exact.
WIDEN = tl.constexpr(bool(triton.knobs.runtime.interpret))


# Tiles of a Gram matrix; its bits depend on them, so only dtype and GPU choose one.
# 128 × 128 reads each row once per 128 others, which is what the L2 cache of an H100 can feed to its tensor cores; the
# two accumulators fill 128 of the 255 registers.  Three stages of two steps of 64 take 192 KB of shared memory, which
# compute capability 9.0 and 10.0 have; elsewhere steps of 32 take 96 KB.
LARGE = {"BLOCK": 128, "BLOCK_K": 64, "num_warps": 8, "num_stages": 3}
SMALL = {"BLOCK": 128, "BLOCK_K": 32, "num_warps": 8, "num_stages": 3}
# Outside the tensor cores a tile twice as wide would spill its operands.
FLOAT32 = {"BLOCK": 64, "BLOCK_K": 16, "num_warps": 4, "num_stages": 3}
# For GPUs of other vendors: 64 KB of shared memory are common.
OTHER = {"BLOCK": 64, "BLOCK_K": 32, "num_warps": 4, "num_stages": 2}


def tile_for(fingerprint: Tensor) -> dict[str, int]:
    """The tile of this dtype on this GPU."""
    if fingerprint.dtype == torch.float32:
        return FLOAT32
    if not fingerprint.is_cuda or torch.version.hip is not None:
        return OTHER
    return LARGE if torch.cuda.get_device_capability(fingerprint.device)[0] in (9, 10) else SMALL


def multiply_groups(
    fingerprint: Tensor,  # [N, D]
    order: Tensor,  # [M] int64
    group_offsets: Tensor,  # [G+1] int64
    scale: Tensor,  # [M] float32
    gram: Tensor,  # [groups, side, side] float32, written
    reciprocal: Tensor,  # [groups, side] float32, written
    *,
    first_group: int,
    tile: dict[str, int] | None = None,  # None: by dtype and GPU
) -> None:
    """Gram matrices of some groups."""
    launches = [(False, tile or tile_for(fingerprint))]
    if fingerprint.dtype != torch.float16:  # whose squares are all float32
        # Recomputes pairs with a row of extreme length, which overflowed or underflowed in the first launch.  Nearly
        # always there are none, and the programs end after reading the scales.
        launches.append((True, FLOAT32 if fingerprint.dtype == torch.float32 else OTHER))
    groups, side = reciprocal.shape
    dim, row_stride, column_stride = fingerprint.shape[1], *fingerprint.stride()
    aligned = min(row_stride & -row_stride, 16) if row_stride else 16  # the largest power of two up to 16
    for scaled, cut in launches:
        tiles = ceil_div(side, cut["BLOCK"])
        _gram[(tiles * (tiles + 1) // 2, groups)](
            fingerprint, order, group_offsets, scale, gram, reciprocal, side // UNIT, dim, row_stride, column_stride,
            first_group, SCALED=scaled, ALIGNED=aligned, EVEN=dim % (2 * cut["BLOCK_K"]) == 0, UNIT=UNIT, **cut,
            enable_fp_fusion=FUSED,
        )  # fmt: skip


@triton.jit(do_not_specialize=["units", "first_group"])
def _gram(
    x,  # [N, D]
    order,  # [M] int64
    group_offsets,  # [G+1] int64
    scale,  # [M] float32: powers of two, 1 for nearly all; read where SCALED
    gram,  # [groups of the launch, stride, stride] float32, written for i ≤ j, and wherever a tile reaches
    reciprocal,  # [groups of the launch, stride] float32, written: 1 / ‖x_i · scale_i‖
    units,  # stride / UNIT
    dim,
    row_stride,
    column_stride,
    first_group,
    SCALED: tl.constexpr,  # only pairs with a row that is scaled
    ALIGNED: tl.constexpr,  # values: a power of two that divides row_stride
    EVEN: tl.constexpr,  # 2 · BLOCK_K divides D
    BLOCK: tl.constexpr,  # rows and columns of a tile; divides UNIT
    BLOCK_K: tl.constexpr,  # half the elements of D in one partial sum
    UNIT: tl.constexpr,
):
    """One tile of one group's Gram matrix, and on the diagonal the norms."""
    g = tl.program_id(1).to(tl.int64)
    begin = tl.load(group_offsets + first_group + g)
    n = tl.load(group_offsets + first_group + g + 1) - begin
    block_i, block_j = _triangle(tl.program_id(0))
    if block_j * BLOCK >= n:
        return
    # Rows beyond the last repeat it, so that no mask is needed below; their results are never read.
    i = block_i * BLOCK + tl.arange(0, BLOCK)
    j = block_j * BLOCK + tl.arange(0, BLOCK)
    record_i = begin + tl.minimum(i, n - 1)
    record_j = begin + tl.minimum(j, n - 1)
    scale_i = tl.full((BLOCK,), 1.0, tl.float32)
    scale_j = scale_i
    if SCALED:
        scale_i = tl.load(scale + record_i)
        scale_j = tl.load(scale + record_j)
        if tl.max((scale_i != 1.0).to(tl.int32), axis=0) + tl.max((scale_j != 1.0).to(tl.int32), axis=0) == 0:
            return
    e = tl.arange(0, BLOCK_K).to(tl.int64)
    a = x + tl.multiple_of(tl.load(order + record_i) * row_stride, ALIGNED)[:, None] + (e * column_stride)[None, :]
    b = x + tl.multiple_of(tl.load(order + record_j) * row_stride, ALIGNED)[None, :] + (e * column_stride)[:, None]
    step = tl.cast(BLOCK_K, tl.int64) * column_stride
    pairs = dim // (2 * BLOCK_K)
    total = tl.zeros((BLOCK, BLOCK), tl.float32)
    for _ in range(0, pairs):
        part = tl.zeros((BLOCK, BLOCK), tl.float32)
        part = _dot(tl.load(a), tl.load(b), scale_i, scale_j, part, SCALED)
        total += _dot(tl.load(a + step), tl.load(b + step), scale_i, scale_j, part, SCALED)
        a += 2 * step
        b += 2 * step
    if not EVEN:
        left = dim - pairs * (2 * BLOCK_K)
        part = tl.zeros((BLOCK, BLOCK), tl.float32)
        for half in tl.static_range(2):
            inside = e + half * BLOCK_K < left
            u = tl.load(a + half * step, mask=inside[None, :], other=0.0)
            v = tl.load(b + half * step, mask=inside[:, None], other=0.0)
            part = _dot(u, v, scale_i, scale_j, part, SCALED)
        total += part

    stride = units * UNIT
    out = gram + g * stride * stride + i[:, None] * stride + j[None, :]
    if SCALED:
        tl.store(out, total, mask=(scale_i != 1.0)[:, None] | (scale_j != 1.0)[None, :])
    else:
        tl.store(out, total)
    if block_i == block_j:
        square = tl.sum(tl.where(i[:, None] == j[None, :], total, 0.0), axis=1)
        length = reciprocal + g * stride + i
        if SCALED:
            tl.store(length, tl.div_rn(1.0, tl.sqrt_rn(square)), mask=scale_i != 1.0)
        else:
            tl.store(length, tl.div_rn(1.0, tl.sqrt_rn(square)))


@triton.jit
def _triangle(tile):
    """(i, j), i ≤ j, of a tile; tiles are numbered column by column, so a group's do not depend on its length."""
    j = ((tl.sqrt(8.0 * tile + 1.0) - 1.0) * 0.5).to(tl.int32)
    j = tl.where(j * (j + 1) // 2 > tile, j - 1, j)
    j = tl.where((j + 1) * (j + 2) // 2 <= tile, j + 1, j)
    return tile - j * (j + 1) // 2, j


@triton.jit
def _dot(a, b, scale_i, scale_j, part, SCALED: tl.constexpr):
    """part + a · b; rows times powers of two keep their dtype: exact."""
    if SCALED:
        a = (a.to(tl.float32) * scale_i[:, None]).to(a.dtype)
        b = (b.to(tl.float32) * scale_j[None, :]).to(b.dtype)
    if WIDEN:
        a = a.to(tl.float32)
        b = b.to(tl.float32)
    return tl.dot(a, b, part, input_precision="ieee")
