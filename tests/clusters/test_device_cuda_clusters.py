"""The CUDA scan: whatever the room for S and the matrices, the same labels; no drift over many members, and every
decision against the rule in float64, though reciprocals and square roots are approximate."""

import os

import numpy as np
import pytest
import torch
from certificate import BAND, replay
from clustering import device_sweep, mixture
from marks import slow
from ragged import stage

from bipace_kernels.backends.cuda import scan

clusters = stage("clusters")

EPSILONS = [0.01, 0.05, 0.3]
SIZES = [40, 300, 3, 257, 128]


def sweep(device, x, sizes, epsilons=EPSILONS, **limits):
    return device_sweep(device, x, sizes, epsilons, limits=clusters.Limits(**limits))


@pytest.fixture(scope="module")
def whole():
    """Labels of the first run, which had a whole Gram matrix and room for all of S."""
    return {}


@pytest.mark.parametrize("shared", [227 << 10, 60_000, slow(99 << 10)])
def test_labels_depend_on_no_cut(device, whole, shared):
    """S near and far: every record the same cluster, in any batch."""
    x = mixture(1, sum(SIZES), 48, 60, noise=0.9).bfloat16()
    found = sweep(device, x, SIZES, shared=shared)
    assert int(found[0].max()) > 400 and int(found[2].max()) > 20  # singletons, and clusters with many members
    assert torch.equal(found, whole.setdefault("labels", found))
    assert scan.capacity(device, 384, max(shared, 99 << 10)) >= scan._FEW  # 8.6 and 8.9 have 99 KB
    alone = sweep(device, x[40:340], [300], shared=shared)
    assert torch.equal(found[:, 40:340] - found[:, 40:41], alone)


@pytest.mark.parametrize(("noise", "epsilon", "alone", "groups"), [(3, 0.5, 0, 2), (4, 0.7, 0, 1), (3, 0.5, 127, 1)])
def test_many_members_do_not_drift(device, noise, epsilon, alone, groups):
    """Most records in one cluster, far from its mean: a decision that its workers apply twice is seen, or members that
    are not counted on where there are more than 128 clusters, or what another group has left in shared memory."""
    x = mixture(21, 600, 24, 1, noise=noise)
    if groups > 1:  # then it is the first cluster of each
        x[:: 600 // groups] = x.mean(0)
    x = torch.block_diag(torch.eye(alone), x).bfloat16()
    sizes = [len(x) // groups] * groups
    for rows, labels in zip(x.split(sizes), sweep(device, x, sizes, [epsilon])[0].split(sizes), strict=True):
        own = (labels - labels.min()).numpy()
        assert np.bincount(own).max() > len(rows) // 2
        assert replay(rows.to(torch.float64).numpy(), own, epsilon).excess <= BAND


def test_few_long_groups_among_many_short_ones(device, monkeypatch):
    """Matrices of two sizes: the same labels as with one size for all."""
    sizes = [3, 1, 130, 2, 5, 300, 4, 1, 1, 6, 128, 2, 7, 1, 257, 3]
    x = mixture(8, sum(sizes), 48, 12, noise=0.5).bfloat16()
    want = sweep(device, x, sizes)
    longest, real = [], clusters._decide_some
    monkeypatch.setattr(clusters, "_decide_some", lambda *args: (longest.append(args[4]), real(*args)))
    assert torch.equal(sweep(device, x, sizes, middle=128), want) and longest == [127, 300]


def test_more_radii_than_one_launch_writes(device):
    x, epsilons = mixture(5, 90, 16, 8, noise=0.6).bfloat16(), [0.004 * e for e in range(1, 71)]
    found = sweep(device, x, [20, 70], epsilons)
    for e in (0, 23, 46, 63, 64, 69):
        assert torch.equal(found[e], sweep(device, x, [20, 70], [epsilons[e]])[0])
    assert len({tuple(row.tolist()) for row in found}) > 5


RECORDS = int(os.environ.get("BIPACE_CERTIFICATE_RECORDS", "12800"))  # half a minute in the emulator
# Clusters of the data, noise inside them, ε, which is near their width: many decisions are close.
KINDS = [(3, 0.35, 0.02), (12, 0.5, 0.03), (40, 0.7, 0.06), (120, 0.9, 0.1)]


@pytest.mark.slow
def test_every_decision_is_within_the_band(device):
    sizes = [400] * 8
    worst, done, joined = 0.0, 0, 0
    while done < RECORDS:
        seed = done // sum(sizes)
        count, noise, epsilon = KINDS[seed % len(KINDS)]
        x = mixture(1000 + seed, sum(sizes), 64, count, noise=noise).bfloat16()
        labels = device_sweep(device, x, sizes, [epsilon])[0]
        for values, own in zip(x.to(torch.float64).split(sizes), labels.split(sizes), strict=True):
            own = (own - own.min()).numpy()
            worst = max(worst, replay(values.numpy(), own, epsilon).excess)
            joined += len(own) - len(np.unique(own))
        done += len(x)
    print(f"{done:,} decisions, {joined:,} of them joins; the worst is {worst:.2e} beyond the rule")
    assert joined > done // 3 and worst <= BAND
