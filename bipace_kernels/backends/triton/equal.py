"""ε = 0: the first record of the group whose row equals this one as given, −0.0 equal to 0.0.

Hashes of 64 bits are compared pair by pair; rows with equal hashes are compared element by element, and if they differ
the search continues after that record.
"""

import triton
import triton.language as tl
from torch import Tensor

from ..records import Records
from ._launch import ceil_div, launch

RECORDS = 16  # of a program
_OPTIONS = {"RECORDS": RECORDS, "OTHERS": 64, "COLUMNS": 64, "num_warps": 4, "enable_fp_fusion": False}


def first_equal(
    records: Records,
    fingerprint: Tensor,  # [N, D]
    kind: Tensor,  # [M] uint8
    row_hash: Tensor,  # [M] int64
    first: Tensor,  # [M] int64, written: the record itself if it is a singleton, −1 if it is not taken
) -> None:
    """Writes `first` of every record, in time quadratic in the length of a group and linear in D."""
    blocks = ceil_div(records.longest_group, RECORDS)
    tensors = (fingerprint, records.order, records.group_offsets, kind, row_hash, first)
    sizes = (blocks, fingerprint.shape[1], *fingerprint.stride())
    launch(_first_equal, (records.n_groups * blocks,), *tensors, *sizes, **_OPTIONS)


@triton.jit(do_not_specialize=["blocks"])
def _first_equal(
    x,  # [N, D]
    order,  # [M] int64
    group_offsets,  # [G+1] int64
    kind,  # [M] uint8
    row_hash,  # [M] int64
    first,  # [M] int64, written
    blocks,  # of the longest group
    dim,
    row_stride,
    column_stride,
    RECORDS: tl.constexpr,
    OTHERS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    g = tl.program_id(0) // blocks
    begin = tl.load(group_offsets + g)
    n = tl.load(group_offsets + g + 1) - begin
    start = (tl.program_id(0) % blocks).to(tl.int64) * RECORDS
    if start >= n:
        return
    i = start + tl.arange(0, RECORDS)
    inside = i < n
    what = tl.load(kind + begin + i, mask=inside, other=2)
    own = tl.load(row_hash + begin + i, mask=inside, other=0)
    row = x + (tl.load(order + begin + i, mask=inside, other=0) * row_stride)[:, None]
    earliest = i  # the first equal record; i itself if there is none yet
    seen = tl.full((RECORDS,), -1, tl.int64)  # records up to this one are known to differ
    searching = (inside & (what == 0)).to(tl.int32)
    while tl.max(searching, axis=0) > 0:
        candidate = _next_alike(row_hash + begin, kind + begin, i, own, seen, tl.minimum(start + RECORDS, n), OTHERS)
        # A record without a candidate is compared with itself, which ends its search.
        other = x + (tl.load(order + begin + candidate, mask=inside, other=0) * row_stride)[:, None]
        differ = tl.zeros((RECORDS, COLUMNS), tl.int32)
        for e0 in range(0, dim, COLUMNS):
            e = e0 + tl.arange(0, COLUMNS)
            at = (e.to(tl.int64) * column_stride)[None, :]
            mask = (searching != 0)[:, None] & (e < dim)[None, :]
            mine = tl.load(row + at, mask=mask, other=0.0).to(tl.float32)
            theirs = tl.load(other + at, mask=mask, other=0.0).to(tl.float32)
            differ |= (mine != theirs).to(tl.int32)
        equal = tl.max(differ, axis=1) == 0
        earliest = tl.where((searching != 0) & equal, candidate, earliest)
        searching = tl.where(equal, 0, searching)
        seen = candidate
    tl.store(first + begin + i, tl.where(what == 2, -1, begin + earliest), mask=inside)


@triton.jit
def _next_alike(row_hash, kind, i, own, seen, end, OTHERS: tl.constexpr):
    """The first usable record after `seen` and before i with the same hash; i if there is none."""
    candidate = i
    for start in range(0, end, OTHERS):
        j = start + tl.arange(0, OTHERS)
        hashes = tl.load(row_hash + j, mask=j < end, other=0)
        usable = tl.load(kind + j, mask=j < end, other=2) == 0
        alike = (own[:, None] == hashes[None, :]) & usable[None, :]
        alike = alike & (j[None, :] < i[:, None]) & (j[None, :] > seen[:, None])
        candidate = tl.minimum(candidate, tl.min(tl.where(alike, j[None, :], i[:, None]), axis=1))
    return candidate
