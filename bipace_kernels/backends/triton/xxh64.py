"""XXH64 of many byte strings at once, one per vector lane, after the published description of the algorithm (0.1.1).

Bytes are taken as little-endian 64-bit words.  `begin`, `absorb` and `finish` hash strings that are still being written:
each goes through a ring of CAPACITY bytes (a power of two, at least 64) that starts at a multiple of eight, so that a
string of any length needs no more memory than what is written between two calls of `absorb`.
"""

from __future__ import annotations

import triton
import triton.language as tl

MASK = (1 << 64) - 1
PRIME_1 = tl.constexpr(0x9E3779B185EBCA87)
PRIME_2 = tl.constexpr(0xC2B2AE3D27D4EB4F)
PRIME_3 = tl.constexpr(0x165667B19E3779F9)
PRIME_4 = tl.constexpr(0x85EBCA77C2B2AE63)
PRIME_5 = tl.constexpr(0x27D4EB2F165667C5)
# Starts of the four accumulators, without the seed.
START_1 = tl.constexpr((0x9E3779B185EBCA87 + 0xC2B2AE3D27D4EB4F) & MASK)
START_4 = tl.constexpr(-0x9E3779B185EBCA87 & MASK)


@triton.jit
def rotate(x, BITS: tl.constexpr):
    return (x << BITS) | (x >> (64 - BITS))


@triton.jit
def add_lane(accumulator, word):
    return rotate(accumulator + word * PRIME_2, 31) * PRIME_1


@triton.jit
def add_word(hash, word):  # the 8 bytes of a tail
    return rotate(hash ^ (rotate(word * PRIME_2, 31) * PRIME_1), 27) * PRIME_1 + PRIME_4


@triton.jit
def add_half(hash, half):  # 4 bytes
    return rotate(hash ^ (half * PRIME_1), 23) * PRIME_2 + PRIME_3


@triton.jit
def add_byte(hash, byte):
    return rotate(hash ^ (byte * PRIME_5), 11) * PRIME_1


@triton.jit
def merge(hash, accumulator):
    return (hash ^ (rotate(accumulator * PRIME_2, 31) * PRIME_1)) * PRIME_1 + PRIME_4


@triton.jit
def converge(a, b, c, d):
    """The hash of whole stripes, from their four accumulators."""
    hash = rotate(a, 1) + rotate(b, 7) + rotate(c, 12) + rotate(d, 18)
    return merge(merge(merge(merge(hash, a), b), c), d)


@triton.jit
def avalanche(hash):
    hash = (hash ^ (hash >> 33)) * PRIME_2
    hash = (hash ^ (hash >> 29)) * PRIME_3
    return hash ^ (hash >> 32)


@triton.jit
def begin(SEED: tl.constexpr, LANES: tl.constexpr):
    """The four accumulators [LANES] before the first byte."""
    zero = tl.zeros([LANES], tl.uint64)
    return zero + START_1 + SEED, zero + PRIME_2 + SEED, zero + SEED, zero + START_4 + SEED


@triton.jit
def absorb(
    ring,  # [LANES] pointers to uint64, where each lane's ring starts
    a,
    b,
    c,
    d,
    absorbed,  # [LANES] int64 bytes taken so far, a multiple of 32
    available,  # [LANES] int64 bytes written so far
    CAPACITY: tl.constexpr,
):
    """Absorbs all whole stripes of 32 bytes; returns the accumulators and the number of absorbed bytes."""
    while tl.max(available - absorbed) >= 32:
        whole = available - absorbed >= 32
        stripe = ring + ((absorbed & (CAPACITY - 1)) >> 3)  # never wraps: 32 divides CAPACITY
        a = tl.where(whole, add_lane(a, tl.load(stripe, mask=whole, other=0)), a)
        b = tl.where(whole, add_lane(b, tl.load(stripe + 1, mask=whole, other=0)), b)
        c = tl.where(whole, add_lane(c, tl.load(stripe + 2, mask=whole, other=0)), c)
        d = tl.where(whole, add_lane(d, tl.load(stripe + 3, mask=whole, other=0)), d)
        absorbed = tl.where(whole, absorbed + 32, absorbed)
    return a, b, c, d, absorbed


@triton.jit
def finish(ring, a, b, c, d, absorbed, size, SEED: tl.constexpr, CAPACITY: tl.constexpr):
    """[LANES] uint64 hashes of strings of `size` [LANES] bytes, whose last 0 to 31 bytes are not yet absorbed."""
    short = tl.zeros_like(a) + PRIME_5 + SEED
    hash = tl.where(size >= 32, converge(a, b, c, d), short) + size.to(tl.uint64)
    word_at = ring + ((absorbed & (CAPACITY - 1)) >> 3)
    left = size - absorbed
    for k in tl.static_range(3):
        here = left >= 8 * (k + 1)
        hash = tl.where(here, add_word(hash, tl.load(word_at + k, mask=here, other=0)), hash)
    # The rest is in one word; the bytes above it do not belong to the string.
    rest = left & 7
    word = tl.load(word_at + (left >> 3), mask=rest > 0, other=0)
    half = rest >= 4
    hash = tl.where(half, add_half(hash, word & 0xFFFFFFFF), hash)
    word = tl.where(half, word >> 32, word)
    rest = tl.where(half, rest - 4, rest)
    for k in tl.static_range(3):
        hash = tl.where(rest > k, add_byte(hash, (word >> (8 * k)) & 0xFF), hash)
    return avalanche(hash)
