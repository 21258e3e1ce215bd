"""XXH64, ours in C++ and Python, against the xxhash library."""

import random

import pytest

from bipace_kernels import _native
from bipace_kernels.backends.reference.xxh64 import signed, xxh64

xxhash = pytest.importorskip("xxhash", reason="xxhash is not installed")
SEEDS = [0, 1, 2, 3, 4, 5, 0x9E3779B185EBCA87, 2**64 - 1]


@pytest.mark.parametrize("seed", SEEDS)
def test_every_length_to_300(seed):
    data = random.Random(300).randbytes(301)
    for length in range(301):
        want = xxhash.xxh64_intdigest(data[:length], seed)
        assert xxh64(data[:length], seed) == want, length
        assert _native.xxh64(data[:length], seed) == want, length


def test_signed_reads_the_same_bits_as_int64():
    assert [signed(v) for v in (0, 2**63 - 1, 2**63, 2**64 - 1)] == [0, 2**63 - 1, -(2**63), -1]
