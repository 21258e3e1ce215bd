"""ε as a vector, ε by search, ε that follows the policy."""

import importlib
import math

import numpy as np
import pytest
import torch
from batches import spread_out
from hypothesis import given, strategies as st
from refusals import refused

import bipace_kernels as bk
from bipace_kernels.clustering import epsilon as _epsilon

EPSILONS = [0.1, 0.0, 0.35, 1.0]


@pytest.mark.parametrize("kind", [list, tuple, np.array, torch.DoubleTensor, torch.FloatTensor])
def test_a_vector_gives_a_row_for_each(backend, kind):
    x, group = spread_out()
    found = bk.cluster(x, group, kind(EPSILONS), backend=backend)
    assert found.shape == (4, len(x))
    for epsilon, labels in zip(EPSILONS, found, strict=True):
        assert torch.equal(labels, bk.cluster(x, group, epsilon, backend=backend))


def test_zero_among_others_compares_rows_as_given(backend):
    x = np.array([[1, 0], [2, 0], [1, -0.0], [0, 1]], np.float32)
    found = bk.cluster(x, [0] * 4, [0.1, 0.0, 1e-4], backend=backend)
    assert found.tolist() == [[0, 0, 0, 1], [0, 1, 0, 2], [0, 0, 0, 1]]


def test_a_plain_number_gives_a_vector_of_labels(backend):
    x, group = spread_out(n=60)
    want = bk.cluster(x, group, 0.1, backend=backend)
    assert want.shape == (60,)
    for number in (np.float64(0.1), np.array(0.1), torch.tensor(0.1, dtype=torch.float64)):
        assert torch.equal(bk.cluster(x, group, number, backend=backend), want)
    assert bk.cluster(x, group, [], backend=backend).shape == (0, 60)
    assert bk.cluster(x, group, torch.empty(0), backend=backend).shape == (0, 60)
    assert bk.cluster(np.zeros((0, 3)), [], EPSILONS, backend=backend).shape == (4, 0)
    smallest = bk.cluster(x, group, torch.tensor([1e-4]), backend=backend)[0]  # float32's nearest is below it
    assert torch.equal(smallest, bk.cluster(x, group, 1e-4, backend=backend))


def test_padding_copies_and_row_order(backend):
    x, group = spread_out(n=60)
    rng = np.random.default_rng(3)
    rows, valid = rng.permutation(60), rng.random(60) < 0.8
    trajectory, step = group * 10 + np.arange(60) % 3, np.arange(60) // 6  # steps come twice
    lay = bk.layout(group[rows], trajectory[rows], step[rows], valid)
    assert lay.n_duplicates
    found = bk.cluster(x[rows], epsilon=EPSILONS, layout=lay, backend=backend)
    for epsilon, labels in zip(EPSILONS, found, strict=True):
        assert torch.equal(labels, bk.cluster(x[rows], epsilon=epsilon, layout=lay, backend=backend))
        assert bool(((labels == -1) == torch.from_numpy(~valid)).all())
    nobody = bk.layout(group, trajectory, step, np.zeros(60, bool))
    assert bool((bk.cluster(x, epsilon=EPSILONS, layout=nobody, backend=backend) == -1).all())


def test_bad_epsilons():
    x, group = spread_out(n=60)
    for epsilon, error, words in (
        ([0.1, 5e-5], ValueError, r"epsilon\[1\] must be 0 or in \[1e-4, 1\], got 5e-05"),
        ([0.1, 0.2, 2.1], ValueError, r"epsilon\[2\].*got 2.1"),
        (torch.tensor([-0.1]), ValueError, r"epsilon\[0\].*got -0.1"),
        (np.array([0.1, math.nan]), ValueError, r"epsilon\[1\].*got nan"),
        ([[0.1]], ValueError, r"epsilon must be one number, or a vector of them of shape \[E\], got shape \[1, 1\]"),
        (torch.tensor([True]), TypeError, "entries of torch.bool"),
        (torch.tensor([1j]), TypeError, "entries of torch.complex64"),
        (["a"], TypeError, "epsilon must be one number, or a vector"),
        (3, ValueError, r"epsilon must be a number 0 or in \[1e-4, 1\], got 3"),
        (None, ValueError, "epsilon must be a number"),
    ):
        refused(words, bk.cluster, x, group, epsilon, error=error)


@pytest.mark.parametrize("epsilon", [0.1, [0.1, 0.2]], ids=str)
def test_bad_rows_raise_on_the_cpu(backend, epsilon):
    x, group = spread_out(n=60)
    x[7] = 0
    for check in ("auto", "now"):
        with pytest.raises(ValueError, match="got zeros, which have no direction, at row 7;"):
            bk.cluster(x, group, epsilon, backend=backend, check=check)
    refused("check must be 'auto' or 'now', got 'later'", bk.cluster, x, group, epsilon, backend=backend, check="later")


@given(
    labels=st.integers(0, 30).flatmap(
        lambda m: st.lists(st.lists(st.integers(-1, max(m - 1, -1)), min_size=m, max_size=m), min_size=1, max_size=4)
    )
)
def test_sizes_of_clusters(labels):
    measured = _epsilon.measure_sizes(torch.tensor(labels, dtype=torch.int64))
    for row, found in zip(labels, measured, strict=True):
        sizes = [row.count(c) for c in set(row) - {-1}]
        assert found.clusters == len(sizes)
        if sizes:
            assert (found.median, found.singletons) == (np.median(sizes), np.mean([s == 1 for s in sizes]))


def probe_by_probe(x, low_size=4.0, high_size=8.0, low=0.02, high=0.40, probes=6, **arguments):
    """The paper's search, one clustering at a time."""
    tried = []
    for _ in range(probes):
        epsilon = (low + high) / 2
        labels = bk.cluster(x, epsilon=epsilon, **arguments)
        size = float(np.median(np.bincount(labels.numpy())))
        tried.append((epsilon, size))
        if low_size <= size <= high_size:
            return epsilon, tuple(tried)
        low, high = (epsilon, high) if size < low_size else (low, epsilon)
    best = min(tried, key=lambda probe: (max(low_size - probe[1], probe[1] - high_size), probe[0]))
    return best[0], tuple(tried)


@pytest.mark.parametrize("probes", [1, 2, 3, 6, 8, 14])
@pytest.mark.parametrize("seed", range(4))
def test_the_search_is_the_papers(seed, probes):
    x, group = spread_out(seed, n=180)
    for band in ((4, 8), (1, 1.5), (4.9, 5.1), (50, 60), (7, 7)):
        choice = bk.choose_epsilon(x, group, band=band, probes=probes)
        want = probe_by_probe(x, *band, probes=probes, group=group)
        assert (choice.epsilon, choice.probes) == want
        inside = band[0] <= choice.probes[-1][1] <= band[1]
        assert ("inside the band" if inside else "no probe is inside") in choice.reason


def test_clusters_on_a_device_without_reading_a_tensor(stand_ins, monkeypatch):
    # A list of ε becomes a host tensor, which this check cannot distinguish from a device's.
    module = importlib.import_module("bipace_kernels.clustering.cluster")
    monkeypatch.setattr(module, "_epsilons", lambda epsilon: epsilon)
    x, group = spread_out(n=60)
    valid = np.arange(60) % 5 > 0
    lay = bk.layout(group, group, valid=valid)
    rows = torch.from_numpy(x)
    lay.on(rows.device)  # copied there once
    for epsilon in (0.1, EPSILONS):
        want = bk.cluster(x, epsilon=epsilon, layout=lay, backend="cpu")
        with stand_ins.watch():
            found = bk.cluster(rows, epsilon=epsilon, layout=lay, backend="triton")
        assert torch.equal(found, want)
