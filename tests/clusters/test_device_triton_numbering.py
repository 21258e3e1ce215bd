"""Dense cluster numbers: any number of records, rows and blocks, against a dictionary."""

import numpy as np
import pytest
import torch
from ragged import stage

numbering = stage("numbering")
BLOCK, FEW = 512, numbering.FEW


def firsts(rng, n, clusters):
    """[n] the first record of each record's cluster; some records have none."""
    cluster, seen = rng.integers(-1, clusters, n), {}
    return [-1 if c < 0 else seen.setdefault(int(c), i) for i, c in enumerate(cluster)]


def expected(first):
    number = {}
    return [-1 if f < 0 else number.setdefault(f, len(number)) for f in first]


@pytest.mark.parametrize("n", [1, 2, BLOCK - 1, BLOCK, BLOCK + 1, FEW, FEW + 1, 40 * BLOCK + 3])
@pytest.mark.parametrize("clusters", [1, 7, 10**9])
def test_numbers_by_first_appearance(device, n, clusters):
    first = firsts(np.random.default_rng(n + clusters), n, clusters)
    labels = numbering.dense_labels(torch.tensor(first, device=device))
    assert labels.dtype == torch.int64 and labels.tolist() == expected(first)


@pytest.mark.parametrize("n", [3 * BLOCK - 5, FEW + 5])
def test_rows_are_numbered_by_themselves(device, n):
    rng = np.random.default_rng(5)
    rows = [firsts(rng, n, k) for k in (1, 40, 10**9)]
    labels = numbering.dense_labels(torch.tensor(rows, device=device))
    assert labels.tolist() == [expected(row) for row in rows]


@pytest.mark.parametrize("shape", [(0,), (0, 5), (3, 0)])
def test_nothing_to_number(device, shape):
    assert numbering.dense_labels(torch.empty(shape, dtype=torch.int64, device=device)).shape == shape
