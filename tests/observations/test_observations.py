"""The exact and the history partition on the CPU, for codes of any size, against the reference."""

import numpy as np
import pytest
import torch

from bipace_kernels.backends.cpu import observations as cpu
from bipace_kernels.backends.records import Records
from bipace_kernels.backends.reference import observations as reference

OBSERVATIONS = (cpu, reference)

CODES = {
    "small": lambda rng, n: rng.integers(0, 7, n),
    "as many as records": lambda rng, n: rng.permutation(n),
    "negative": lambda rng, n: rng.integers(-5, 3, n),
    "multiples of 2^40": lambda rng, n: rng.integers(0, 9, n) << 40,
    "the whole range": lambda rng, n: rng.choice([-(2**63), 2**63 - 1, 0, -1, n, n - 1], n),
}


@pytest.mark.parametrize("name", CODES)
@pytest.mark.parametrize("lengths", [[], [1], [5, 0, 3, 40], [300, 1, 1]])
def test_labels_are_those_of_the_reference(lengths, name):
    rng = np.random.default_rng(len(lengths))
    n = sum(lengths)
    codes = torch.from_numpy(CODES[name](rng, n))
    groups = torch.tensor([0, *np.cumsum(lengths)], dtype=torch.int64)
    cuts = np.unique(rng.integers(0, n + 1, n // 4))
    trajectories = torch.from_numpy(np.unique(np.concatenate([groups.numpy(), cuts])))
    step = torch.from_numpy(np.repeat(np.arange(n), rng.integers(1, 3, n))[:n].copy())  # some are recorded twice
    counts = (n, n, len(lengths), trajectories.numel() - 1, max(lengths, default=0))
    columns = {"group_offsets": groups, "trajectory_offsets": trajectories, "step": step}
    records = Records(torch.device("cpu"), *counts, **columns)
    native, wanted = ((b.cluster_exact(records, codes), b.cluster_history(records, codes, 3)) for b in OBSERVATIONS)
    assert torch.equal(native[0], wanted[0]) and torch.equal(native[1], wanted[1])
