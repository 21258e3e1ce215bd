"""n-gram fingerprints on a device, bit for bit those of reference/ngrams.py.

Counts are summed by integer atomics, in the memory of the result: whole numbers come out the same in any order.  A
second kernel then scales each row in place.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import triton
import triton.language as tl

from . import xxh64
from ._launch import ceil_div, device_guard

SEED_NGRAM = tl.constexpr(5)
BEFORE, AFTER = tl.constexpr(0x02), tl.constexpr(0x03)
WINDOWS, BUCKETS = 256, 512  # per step of a loop: 2 windows, 4 buckets a thread (8 spill on sm_80 under Triton 3.6)
ENOUGH_PROGRAMS = 1024  # texts fewer than this are shared among several programs each
_OPTIONS = {"num_warps": 4, "enable_fp_fusion": False}


@triton.jit
def _byte(text, size, at, here):
    """Byte `at` of the padded text (−(n − 1) is its first), as uint64."""
    byte = tl.load(text + at, mask=here & (at >= 0) & (at < size), other=0)
    byte = tl.where(at < 0, BEFORE, tl.where(at >= size, AFTER, byte))
    return byte.to(tl.uint64)


@triton.jit
def _word(text, size, at, here, BYTES: tl.constexpr):
    """BYTES bytes of the padded text from `at` on, little-endian."""
    word = _byte(text, size, at, here)
    for k in tl.static_range(1, BYTES):
        word |= _byte(text, size, at + k, here) << (8 * k)
    return word


@triton.jit
def _hash_windows(text, size, at, here, N: tl.constexpr, WINDOWS: tl.constexpr):
    """[WINDOWS] uint64 hashes of the N bytes from each of `at` on."""
    STRIPES: tl.constexpr = N // 32
    REST: tl.constexpr = N % 8
    if STRIPES > 0:
        a, b, c, d = xxh64.begin(SEED_NGRAM, WINDOWS)
        for _ in range(0, STRIPES):
            a = xxh64.add_lane(a, _word(text, size, at, here, 8))
            b = xxh64.add_lane(b, _word(text, size, at + 8, here, 8))
            c = xxh64.add_lane(c, _word(text, size, at + 16, here, 8))
            d = xxh64.add_lane(d, _word(text, size, at + 24, here, 8))
            at += 32
        hash = xxh64.converge(a, b, c, d) + N
    else:
        hash = tl.zeros([WINDOWS], tl.uint64) + xxh64.PRIME_5 + SEED_NGRAM + N
    for _ in tl.static_range(N % 32 // 8):
        hash = xxh64.add_word(hash, _word(text, size, at, here, 8))
        at += 8
    if REST >= 4:
        hash = xxh64.add_half(hash, _word(text, size, at, here, 4))
        at += 4
    for k in tl.static_range(REST % 4):
        hash = xxh64.add_byte(hash, _byte(text, size, at + k, here))
    return xxh64.avalanche(hash)


@triton.jit(do_not_specialize=["sharers"])
def count_kernel(
    data,  # [offsets[N]] uint8
    offsets,  # [N+1] int64
    counts,  # [N, DIM] int32, zero before
    sharers,  # programs per text
    N: tl.constexpr,
    DIM: tl.constexpr,
    WINDOWS: tl.constexpr,
):
    program = tl.program_id(0).to(tl.int64)
    row, share = program // sharers, program % sharers
    begin = tl.load(offsets + row)
    size = tl.load(offsets + row + 1) - begin
    windows = size + (N - 1)
    for start in range(share * WINDOWS, windows, tl.cast(sharers, tl.int64) * WINDOWS):
        window = start + tl.arange(0, WINDOWS)
        here = window < windows
        hash = _hash_windows(data + begin, size, window - (N - 1), here, N, WINDOWS)
        bucket = ((hash >> 1) % DIM).to(tl.int64)
        sign = tl.where((hash & 1) == 0, 1, -1)
        tl.atomic_add(counts + row * DIM + bucket, sign, mask=here, sem="relaxed")


@triton.jit
def scale_kernel(
    rows,  # [N, DIM] int32 counts, overwritten by float32
    DIM: tl.constexpr,
    BUCKETS: tl.constexpr,
):
    row = rows + tl.program_id(0).to(tl.int64) * DIM
    squares = tl.zeros([BUCKETS], tl.int64)
    for start in range(0, DIM, BUCKETS):
        bucket = start + tl.arange(0, BUCKETS)
        count = tl.load(row + bucket, mask=bucket < DIM, other=0).to(tl.int64)
        squares += count * count
    total = tl.sum(squares)
    norm = tl.sqrt(tl.maximum(total, 1).to(tl.float64))
    for start in range(0, DIM, BUCKETS):
        bucket = start + tl.arange(0, BUCKETS)
        count = tl.load(row + bucket, mask=bucket < DIM, other=0)
        entry = (count.to(tl.float64) / norm).to(tl.float32)
        entry = tl.where((total == 0) & (bucket == 0), 1.0, entry)
        tl.store(row + bucket, entry.to(tl.int32, bitcast=True), mask=bucket < DIM)


def ngram_fingerprints(
    bytes: torch.Tensor,
    offsets: torch.Tensor,
    *,
    n: int,
    dim: int,
    windows: int = WINDOWS,
    enough_programs: int = ENOUGH_PROGRAMS,
) -> torch.Tensor:
    """Neither the windows per step nor the least number of programs changes any bit."""
    texts = offsets.numel() - 1
    counts = torch.empty((texts, dim), dtype=torch.int32, device=bytes.device).zero_()
    if texts == 0:
        return counts.view(torch.float32)
    sharers = min(ceil_div(enough_programs, texts), ceil_div(bytes.numel() + n, windows))
    with device_guard(bytes):
        count_kernel[(texts * sharers,)](bytes, offsets, counts, sharers, N=n, DIM=dim, WINDOWS=windows, **_OPTIONS)
        scale_kernel[(texts,)](counts, DIM=dim, BUCKETS=BUCKETS, **_OPTIONS)
    return counts.view(torch.float32)


def main_path() -> Iterator[tuple[Any, dict[str, str], dict[str, Any], dict[str, Any]]]:
    """(kernel, signature, constexprs, options) of each launch for the paper's n = 3, dim = 4,096."""
    count = {"data": "*u8", "offsets": "*i64", "counts": "*i32", "sharers": "i32"}
    yield count_kernel, count, {"N": 3, "DIM": 4096, "WINDOWS": WINDOWS}, _OPTIONS
    yield scale_kernel, {"rows": "*i32"}, {"DIM": 4096, "BUCKETS": BUCKETS}, _OPTIONS
