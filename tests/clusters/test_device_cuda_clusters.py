"""The CUDA scan: whatever the cut of the columns and the room for S, the same labels; and no drift over many members."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from certificate import margins, replay
from clustering import mixture
from marks import slow
from ragged import sentinels, stage

clusters, scan = stage("clusters"), stage("scan")

EPSILONS = [0.01, 0.05, 0.3]
SIZES = [40, 300, 3, 257, 128]


def sweep(device, x, sizes, epsilons=EPSILONS, **limits):
    order, offsets = torch.arange(len(x), device=device), torch.tensor([0, *np.cumsum(sizes)], device=device)
    with sentinels():
        found = clusters.cluster_sweep(
            x.to(device),
            order,
            offsets,
            None,
            epsilons,
            n_groups=len(sizes),
            longest_group=max(sizes),
            taken=None,
            limits=clusters.Limits(**limits),
        )
    return found.cpu()


@pytest.fixture(scope="module")
def whole() -> dict[str, torch.Tensor]:
    """Labels of the first run, which had a whole Gram matrix and room for all of S."""
    return {}


@pytest.mark.parametrize(
    ("long_group", "columns", "shared"),
    [
        pytest.param(8192, 1024, 227 << 10, id="whole"),
        slow(8192, 1024, 60_000, id="whole-far"),
        slow(128, 128, 227 << 10, id="blocks"),
        pytest.param(257, 256, 60_000, id="blocks-far"),
        slow(200, 384, 99 << 10, id="one block"),
    ],
)
def test_labels_depend_on_no_cut(device, whole, long_group, columns, shared):
    """Groups by blocks of columns and at once, S near and far: every record the same cluster, in any batch."""
    limits = {"long_group": long_group, "columns": columns, "shared": shared}
    x = mixture(1, sum(SIZES), 48, 60, noise=0.9).bfloat16()
    found = sweep(device, x, SIZES, **limits)
    assert int(found[0].max()) > 400 and int(found[2].max()) > 20  # singletons, and clusters with many members
    assert torch.equal(found, whole.setdefault("labels", found))
    alone = sweep(device, x[40:340], [300], **limits)
    assert torch.equal(found[:, 40:340] - found[:, 40:41], alone)


@pytest.mark.slow
def test_groups_take_turns(device):
    """Where matrices, or S of a sweep, have no room at once."""
    x = mixture(2, sum(SIZES), 32, 12, noise=0.4).bfloat16()
    together = sweep(device, x, SIZES)
    for room in (1, 5 * 70 * 384 * 2):
        assert torch.equal(sweep(device, x, SIZES, room=room), together)


@pytest.mark.parametrize("long_group", [8192, slow(512, id="blocks")])
def test_many_members_do_not_drift(device, long_group):
    """Cosines of 0.97 and more in a few clusters with hundreds of members: every decision within 1e-5 of the rule."""
    n = 900
    x = mixture(17, n, 64, 3, noise=0.35).bfloat16()
    labels = sweep(device, x, [n], [0.05], long_group=long_group, columns=256)[0].numpy()
    assert labels.max() < 12
    values = x.to(torch.float64).numpy()
    expected, margin = margins(values, 0.05)
    if margin > 1e-5:
        np.testing.assert_array_equal(labels, expected)
    else:
        assert replay(values, labels, 0.05).excess <= 1e-5


@pytest.mark.parametrize("long_group", [slow(8192), pytest.param(64, id="blocks")])
def test_more_radii_than_one_launch_writes(device, long_group):
    limits = {"long_group": long_group, "columns": 128}
    x, epsilons = mixture(5, 90, 16, 8, noise=0.6).bfloat16(), [0.004 * e for e in range(1, 71)]
    found = sweep(device, x, [20, 70], epsilons, **limits)
    for e in (0, 23, 46, 63, 64, 69):
        assert torch.equal(found[e], sweep(device, x, [20, 70], [epsilons[e]], **limits)[0])
    assert len({tuple(row.tolist()) for row in found}) > 5


@pytest.mark.parametrize("long_group", [slow(8192), 250])
def test_few_long_groups_among_many_short_ones(device, monkeypatch, long_group):
    """Matrices of two sizes, or also blocks of columns: the same labels as with one size for all."""
    sizes = [3, 1, 130, 2, 5, 300, 4, 1, 1, 6, 128, 2, 7, 1, 257, 3]
    x = mixture(8, sum(sizes), 48, 12, noise=0.5).bfloat16()
    want = sweep(device, x, sizes)
    made, real = [], clusters.Clustering._cluster_whole
    monkeypatch.setattr(
        clusters.Clustering, "_cluster_whole", lambda self, *args: (made.append(args[2:4]), real(self, *args))
    )
    assert torch.equal(sweep(device, x, sizes, middle=128, long_group=long_group, columns=128), want)
    assert made == [(127, 128), (min(300, long_group - 1), long_group)]


def test_a_long_group_alone_has_no_matrix_of_its_own(device, monkeypatch):
    monkeypatch.setattr(clusters.Clustering, "_cluster_whole", lambda *_: pytest.fail("there is no short group"))
    sweep(device, mixture(9, 200, 16, 5, noise=0.5).bfloat16(), [200], long_group=128, columns=128)
