"""Cosines from the CUDA kernels' Gram matrices, with tensor cores that cut off: within 2e-6 of float64.

A tensor core adds sixteen products to a sum at once and cuts each off some bits below the last one of the largest.
One bit is the fewest that others have measured on a GPU of compute capability 8.0 or newer (an A100; two on an H100).
Even so a float32 sum of all D elements would be far off. The kernels begin a new sum every `kSum` stages of `kDepth`
elements, and add those with rounding (csrc/cuda/gram.cu). With no bit at all, as on a V100, for which there are no
kernels, the worst of 24 batches of 3,584 elements was off by 2.5e-6, and sums of 64 elements would have held.
"""

import re

import numpy as np
import pytest

from bipace_kernels.backends.cuda import _launch

TOGETHER = 16  # products
KEPT = 23 + 1  # bits behind the first of the largest
LIMIT = 2e-6  # of a cosine, by the definition


def constant(name):
    found = re.search(rf"\b{name} = (\d+)", (_launch.SOURCES / "cuda/gram.cu").read_text())
    assert found is not None, name
    return int(found[1])


def add(total, products):
    """float32 values [P] and exact products [P, 16], as a tensor core adds them; float64."""
    largest = np.maximum(np.abs(total), np.abs(products).max(1))
    last_bit = np.exp2(np.floor(np.log2(np.where(largest > 0, largest, 1.0))) - KEPT)
    exact = (np.trunc(total / last_bit) + np.trunc(products / last_bit[:, None]).sum(1)) * last_bit
    cut = exact.astype(np.float32)
    beyond = np.abs(cut.astype(np.float64)) > np.abs(exact)
    return np.where(beyond, np.nextafter(cut, np.float32(0)), cut).astype(np.float64)


def cosines(x, elements):
    """[n, n] of 16-bit rows, upper triangle, by sums of so many elements."""
    n, dim = x.shape
    i, j = np.triu_indices(n)
    total = np.zeros(len(i), np.float32)
    for begin in range(0, dim, elements):
        part = np.zeros(len(i))
        for k in range(begin, min(begin + elements, dim), TOGETHER):
            part = add(part, x[i, k : k + TOGETHER] * x[j, k : k + TOGETHER])
        total += part.astype(np.float32)
    reciprocal = (np.float32(1) / np.sqrt(total[i == j])).astype(np.float32)
    found = np.zeros((n, n))
    found[i, j] = (total * reciprocal[i]) * reciprocal[j]
    return found


def rows(seed, dim, common, own, outliers):
    """[14, dim] bfloat16 rows with a direction in common, and features that are much larger than the others."""
    rng = np.random.default_rng(seed)
    x = common * rng.standard_normal((1, dim)) + own * rng.standard_normal((14, dim))
    x[:, :outliers] *= 60
    return (x.astype(np.float32).view(np.uint32) & 0xFFFF0000).view(np.float32).astype(np.float64)


@pytest.mark.parametrize("dim", [3584, 8192])
@pytest.mark.parametrize(("common", "own", "outliers"), [(1.5, 0.15, 4), (1.0, 0.5, 0), (0.0, 1.0, 0)])
def test_cosines_are_within_two_millionths(dim, common, own, outliers):
    together = constant("kSum") * constant("kDepth")
    for seed in range(4):
        x = rows(seed, dim, common, own, outliers)
        lengths = np.linalg.norm(x, axis=1)
        exact, upper = (x @ x.T) / lengths[:, None] / lengths, np.triu_indices(len(x))
        assert np.abs(cosines(x, together) - exact)[upper].max() <= LIMIT, seed
    if common:
        assert np.abs(cosines(x, dim) - exact)[upper].max() > 2 * LIMIT, "one sum over all of D would do"
