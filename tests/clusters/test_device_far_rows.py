"""Fingerprints of more than 2^31 elements: rows, or elements of a row, further apart than 32 bits count.

The room takes 5 GB of a GPU's memory; on a CPU only what is touched takes any.
"""

import numpy as np
import pytest
import torch
from ragged import room, stage

clusters = stage("clusters")

STEP = 2**26 + 16  # from the 32nd step on, 32 bits are too few
EPSILONS = [0.0, 0.1, 1.0]


def far(values, device, *, columns=False):
    """The same matrix with STEP elements from a row to the next, or from a column to the next."""
    shape, step = values.shape, (1, STEP) if columns else (STEP, 1)
    n = sum((size - 1) * stride for size, stride in zip(shape, step, strict=True)) + 1
    assert n > 2**31
    return room(n, values.dtype, device).as_strided(shape, step).copy_(values)


def rows(dim):
    """[40, dim] bfloat16 in a few clusters, some equal, one with a NaN, one all zeros."""
    rng = np.random.default_rng(1)
    x = 2 * rng.standard_normal(dim) + 1.5 * rng.standard_normal((6, dim))[rng.integers(0, 6, 40)]
    x += 0.2 * rng.standard_normal((40, dim))
    x[20:23] = x[35]
    x[36], x[37, 3] = 0, np.nan
    return torch.from_numpy(x.astype(np.float32)).to(torch.bfloat16)


@pytest.mark.slow
@pytest.mark.parametrize("columns", [False, True], ids=["rows", "columns"])
def test_clusters(columns, device):
    """ε = 0, short groups and long ones: the labels of the same rows side by side."""
    sizes = [30, 134]
    x = rows(40 if columns else 24)
    order = torch.from_numpy(np.random.default_rng(2).integers(0, 40, sum(sizes)))
    order[:4] = order[30:34] = torch.tensor([36, 39, 37, 33])
    offsets = torch.tensor([0, *np.cumsum(sizes)])
    found = []
    for values in (x.to(device), far(x, device, columns=columns)):
        state = clusters.scan_rows(values, order.to(device))
        there, how = (values, order.to(device), offsets.to(device)), {"n_groups": 2, "longest_group": max(sizes)}
        labels = clusters.cluster_sweep(*there, None, EPSILONS, **how, taken=None)
        found.append((state.cpu(), labels.cpu()))
    for near, apart in zip(*found, strict=True):
        assert torch.equal(near, apart)
    assert found[0][1].max() > 3 and found[0][0].unique().tolist() == [0, 1, 2]
