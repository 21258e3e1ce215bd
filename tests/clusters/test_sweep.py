"""Sweeps of ε: what is their own.  What they share with a clustering is in test_clusters.py (EITHER)."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from certificate import BAND, direction
from clustering import DTYPES, EPSILONS, ODD_DIMS, bit_case, check_partition, cosine, mixture, offsets_of, sample, sweep
from hypothesis import given, settings
from hypothesis import strategies as st
from marks import slow
from sized import Sized

from bipace_kernels.backends import native_loader
from bipace_kernels.backends.reference import clusters as reference_clusters

reference = Sized(reference_clusters)


def one(x: torch.Tensor, sizes: list[int], epsilon: float, usable: torch.Tensor | None = None) -> torch.Tensor:
    return cosine(x, sizes, epsilon, usable=usable)


# ---- the rule --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dim", [dim if dim in (3, 17, 257) else slow(dim) for dim in ODD_DIMS])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_each_follows_the_rule(dim: int, dtype: torch.dtype, isa: str):
    sizes = [60, 0, 1, 133, 2, 0]
    x = mixture(dim, sum(sizes), dim, 7).to(dtype)
    for epsilon, labels in zip(EPSILONS, sweep(x, sizes), strict=True):
        if check_partition(x, sizes, epsilon, labels):
            order = torch.arange(len(x))
            assert torch.equal(labels, reference.cluster_cosine(x, order, offsets_of(sizes), None, epsilon))


def test_the_reference_sweep_is_its_clustering_of_each():
    x, sizes = mixture(4, 50, 12, 5), [20, 0, 30]
    order, usable = torch.arange(50), torch.arange(50) % 7 > 0
    found = reference.cluster_sweep(x, order, offsets_of(sizes), usable, [0.0, 0.1, 0.5])
    for epsilon, labels in zip([0.0, 0.1, 0.5], found, strict=True):
        assert torch.equal(labels, reference.cluster_cosine(x, order, offsets_of(sizes), usable, epsilon))
    assert reference.cluster_sweep(x, order, offsets_of(sizes), None, []).shape == (0, 50)


def test_no_epsilons_and_no_records():
    assert sweep(torch.eye(7), epsilons=[]).shape == (0, 7)
    assert sweep(torch.empty(0, 5), [0, 0]).shape == (len(EPSILONS), 0)
    assert sweep(torch.empty(0, 5), []).shape == (len(EPSILONS), 0)


def test_a_centroid_that_moves_by_less_than_a_rounding():
    """One member, then 3,000 copies of another: steps below float32's grid that together decide."""
    rng = np.random.default_rng(2)
    dim, epsilon = 64, 0.1
    b, side = np.linalg.qr(rng.standard_normal((dim, 2)))[0].T
    a = 0.92 * b + np.sqrt(1 - 0.92**2) * side
    x = np.concatenate([a[None], np.repeat(b[None], 3000, 0)]).astype(np.float32)
    c = direction(x)
    towards = side - (side @ c) * c
    for sign in (1, -1):
        for offset in (3e-6, -3e-6):
            cos = 1 - epsilon - BAND + offset
            probe = cos * c + sign * np.sqrt(1 - cos**2) * towards / np.linalg.norm(towards)
            labels = sweep(torch.from_numpy(np.concatenate([x, probe[None].astype(np.float32)])), epsilons=[epsilon])[0]
            assert int(labels[-1]) == (0 if offset > 0 else 1)
            assert not labels[:-1].any()


def test_long_clusters_do_not_drift():
    x = mixture(3, 4096, 64, 12, noise=0.25, common=1.0)
    for epsilon, labels in zip((0.03, 0.06), sweep(x, epsilons=[0.03, 0.06]), strict=True):
        check_partition(x, [4096], epsilon, labels)


# ---- what goes through cluster_cosine --------------------------------------------------------------------------------


def test_zero_among_others():
    """ε = 0 compares rows as given, wherever it stands."""
    base = np.random.default_rng(11).standard_normal((6, 40))
    rows, sizes = torch.from_numpy(np.concatenate([base, 2 * base, -base, base]).astype(np.float32)), [20, 4]
    zero, found, again = sweep(rows, sizes, [0.0, 0.1, 0.0])
    assert torch.equal(zero, one(rows, sizes, 0.0)) and torch.equal(again, zero)
    check_partition(rows, sizes, 0.1, found)


def test_groups_too_long_for_a_gram_matrix():
    longest = native_loader.load().longest_sweep
    sizes = [30, longest + 1, 0, longest, 17]
    x = mixture(5, sum(sizes), 9, 6)
    epsilons = [0.05, 0.0, 0.2]
    found = sweep(x, sizes, epsilons)
    for epsilon, labels in zip(epsilons, found, strict=True):
        assert torch.equal(labels, one(x, sizes, epsilon))
    usable = torch.arange(len(x)) % 5 > 0
    for epsilon, labels in zip(epsilons, sweep(x, sizes, epsilons, usable=usable), strict=True):
        assert torch.equal(labels, one(x, sizes, epsilon, usable))


def test_more_gram_matrices_than_fit_at_a_time():
    sizes = [2500, 3000, 40, 3900, 1]
    x = mixture(6, sum(sizes), 8, 5)
    assert torch.equal(sweep(x, sizes, [0.1])[0], one(x, sizes, 0.1))


# ---- the same bits ---------------------------------------------------------------------------------------------------

NEAR = [0.36, 0.38, 0.4, 0.42, 0.0]


def test_alone_as_among_other_epsilons():
    x, sizes = bit_case()
    found = sweep(x, sizes, NEAR)
    for e, epsilon in enumerate(NEAR):
        assert torch.equal(sweep(x, sizes, [epsilon])[0], found[e])


# ---- anything --------------------------------------------------------------------------------------------------------


@settings(max_examples=60, deadline=None)
@given(
    sizes=st.lists(st.integers(0, 40), min_size=1, max_size=5),
    dim=st.integers(1, 40),
    kind=st.sampled_from(["normal", "counts", "few", "mixture"]),
    epsilons=st.lists(st.sampled_from([0.0, 1e-4, 0.02, 0.1, 0.25, 0.5, 0.9, 1.0]), max_size=4),
    dtype=st.sampled_from(DTYPES),
    seed=st.integers(0, 2**32 - 1),
)
def test_any_ragged_batch(sizes: list[int], dim: int, kind: str, epsilons: list[float], dtype: torch.dtype, seed: int):
    x = sample(kind, sum(sizes), dim, seed).to(dtype)
    found = sweep(x, sizes, epsilons)
    assert found.shape == (len(epsilons), sum(sizes))
    for epsilon, labels in zip(epsilons, found, strict=True):
        if epsilon == 0:
            assert torch.equal(labels, one(x, sizes, 0.0))
        else:
            check_partition(x, sizes, epsilon, labels)
    assert torch.equal(sweep(x, sizes, epsilons, num_threads=1), found)
