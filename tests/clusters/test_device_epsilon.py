"""Many ε at once on a device: the clusters of each, and the search, as the reference has them; and action clusters."""

import numpy as np
import pytest
import torch
from marks import slow_interpreted
from ragged import BACKEND, nothing_waits, stage, states
from refusals import refused

import bipace_kernels as bk

clusters = stage("clusters")

EPSILONS = [0.1, 0.0, 0.35, 1.0]


def cluster(device, x, epsilon, **rest):
    found = bk.cluster(torch.as_tensor(x).to(device), epsilon=epsilon, backend=BACKEND, **rest)
    assert found.device.type == device.type
    return found.cpu()


def test_entries_as_a_tensor_where_the_rows_are(device):
    x, group = states()
    want = cluster(device, x, EPSILONS, group=group)
    there = torch.tensor(EPSILONS, dtype=torch.float64, device=device)
    assert torch.equal(cluster(device, x, there, group=group), want)
    assert cluster(device, x, [], group=group).shape == (0, 24)
    assert cluster(device, np.zeros((0, 3), np.float32), EPSILONS, group=[]).shape == (4, 0)


def test_padding_copies_and_row_order_without_a_wait(device):
    x, group = states()
    rng = np.random.default_rng(3)
    rows, valid = rng.permutation(24), rng.random(24) < 0.8
    lay = bk.layout(group[rows], (group * 10 + np.arange(24) % 3)[rows], (np.arange(24) // 6)[rows], valid)
    assert lay.n_duplicates
    x = torch.from_numpy(x)[rows].to(device)
    want = bk.cluster(x.cpu(), epsilon=EPSILONS, layout=lay, backend="reference")
    bk.cluster(x, epsilon=EPSILONS, layout=lay, backend=BACKEND)  # compiles, and copies the layout there
    with nothing_waits(device):
        found = bk.cluster(x, epsilon=EPSILONS, layout=lay, backend=BACKEND)
    assert torch.equal(found.cpu(), want) and bool(((want == -1) == torch.from_numpy(~valid)).all())


@slow_interpreted
def test_a_row_of_the_sweep_is_the_partition_of_advantage(device):
    x, group = states()
    trajectory = np.arange(24) // 4
    x = torch.from_numpy(x).to(device)
    found = bk.cluster(x, group, EPSILONS, trajectory=trajectory, backend=BACKEND)
    for epsilon, labels in zip(EPSILONS, found, strict=True):
        given = {"fingerprint": x, "config": bk.Config.bigpo(epsilon), "backend": BACKEND}
        result = bk.advantage(group, trajectory, np.ones(24), **given)
        assert torch.equal(result.cluster, labels)


def test_bad_rows_are_alone_unless_asked_for(device):
    x, group = states()
    x[7], x[8] = 0, np.nan
    found = cluster(device, x, EPSILONS, group=group)
    for labels in found:
        sizes = np.bincount(labels.numpy())
        assert sizes[labels[7]] == sizes[labels[8]] == 1
    refused(r"got non-finite values \(.*\) at row 8;", cluster, device, x, EPSILONS, group=group, check="now")


@pytest.mark.parametrize("probes", [1, 6])
def test_the_search_is_that_of_the_reference(device, probes):
    x, group = states()
    rows = torch.from_numpy(x).to(device)
    want = bk.choose_epsilon(x, group, band=(1, 1.2), probes=probes, backend="reference")
    assert len(want.probes) > probes // 2
    assert bk.choose_epsilon(rows, group, band=(1, 1.2), probes=probes, backend=BACKEND) == want
    x[3] = 0
    with pytest.raises(ValueError, match="got zeros, which have no direction, at row 3;"):
        bk.choose_epsilon(torch.from_numpy(x).to(device), group, backend=BACKEND)


@pytest.mark.parametrize("epsilon", [0.0, 0.35])
def test_action_clusters_are_those_of_the_reference(device, epsilon):
    """A zero row is an ordinary action at ε = 0, and gets its own key above; a row that is not finite does at any ε."""
    x, group = states()
    x[[3, 9]] = 0
    x[7] = np.nan
    lay = bk.layout(group, group, valid=np.arange(24) != 4)
    want = bk.action_clusters(x, epsilon=epsilon, layout=lay, on_invalid="singleton", backend="reference")
    rows = torch.from_numpy(x).to(device)
    lay.on(rows.device)
    with nothing_waits(device):
        found = bk.action_clusters(rows, epsilon=epsilon, layout=lay, backend=BACKEND)
    assert found.device.type == device.type and torch.equal(found.cpu(), want)
    assert want[4] == -1
    with pytest.raises(ValueError, match=r"action_fingerprint must have finite, non-zero rows, got .* at row 7;"):
        bk.action_clusters(rows, epsilon=epsilon, layout=lay, backend=BACKEND, check="now")
