"""The step term over pairs: the reference's bits, ragged, long, sorted or not, with records set aside."""

import math

import numpy as np
import pytest
import torch
from marks import slow
from ragged import assert_close, from_lengths, ragged, same_bits, sentinels, stage, unaligned
from sized import Sized

from bipace_kernels.backends.cpu import values as cpu_values
from bipace_kernels.backends.reference import values as reference_values
from bipace_kernels.backends.schema import Branch

cpu = Sized(cpu_values)
reference = Sized(reference_values)

values = stage("values")

ESTIMATORS = [("mean", "none"), ("mean", "std"), ("diff_peer", "none"), ("q_style", "none")]
DELTA = 1e-6
# Both ways through the records of a cluster: long groups are sorted first; how long the longest is, the caller says.
BOTH_WAYS = pytest.mark.parametrize("longest", [0, values.SORT_FROM + 1], ids=["by group", "sorted"])


def dense(labels):
    """Clusters of equal entries numbered by first appearance; −1 stays."""
    number = {}
    return torch.tensor([-1 if x < 0 else number.setdefault(int(x), len(number)) for x in labels], dtype=torch.int64)


def records(seed, lay, states=4, actions=3):
    """Returns, labels and keys; many returns are equal, so that clusters of equal returns occur."""
    rng = np.random.default_rng(seed)
    n = lay.n_records
    r = np.where(rng.random(n) < 0.4, rng.choice([0.0, 1.0, 0.95, -0.5], n), rng.normal(size=n))
    labels = dense(lay.group_of_record().numpy() * states + rng.integers(0, states, n))
    return torch.from_numpy(r.astype(np.float32)), labels, torch.from_numpy(rng.integers(0, actions, n) * 2**40)


def step_advantage(device, longest, lay, r, labels, keys, estimator, norm="none"):
    with sentinels():
        return values.step_advantage(
            unaligned(r, device), unaligned(labels, device), unaligned(keys, device),
            lay.group_offsets.to(device), n_groups=lay.n_groups, longest_group=max(lay.longest_group, longest),
            estimator=estimator, step_norm=norm, delta=DELTA,
        )  # fmt: skip


@BOTH_WAYS
@pytest.mark.parametrize(("estimator", "norm"), ESTIMATORS)
@pytest.mark.parametrize("seed", [0, *map(slow, (1, 2))])
def test_equals_the_reference_in_every_bit(device, longest, seed, estimator, norm):
    lay = ragged(seed, groups=4)
    r, labels, keys = records(seed, lay)
    rule = {"estimator": estimator, "step_norm": norm, "delta": DELTA}
    wanted = reference.step_advantage(r, labels, keys, lay.group_offsets, **rule)
    got = step_advantage(device, longest, lay, r, labels, keys, estimator, norm)
    assert same_bits(got[0], wanted[0]) and same_bits(got[1], wanted[1])


@BOTH_WAYS
@pytest.mark.parametrize(("estimator", "norm"), [slow(*ESTIMATORS[0]), slow(*ESTIMATORS[1]), *ESTIMATORS[2:]])
def test_groups_longer_than_a_program(device, longest, estimator, norm):
    lay = from_lengths([64 + 5, 2 * 64 + 1, 3, 1], [1, 1, 1, 1])  # programs of 64 records, tiles of up to 128
    r, labels, keys = records(11, lay, states=3)
    arguments = {"estimator": estimator, "step_norm": norm, "delta": DELTA}
    got = step_advantage(device, longest, lay, r, labels, keys, estimator, norm)
    wanted = reference.step_advantage(r, labels, keys, lay.group_offsets, **arguments)
    assert same_bits(got[0], wanted[0]) and same_bits(got[1], wanted[1])
    on_cpu = cpu.step_advantage(r, labels, keys, lay.group_offsets, **arguments)
    assert_close(got[0], on_cpu[0])
    assert same_bits(got[1], on_cpu[1])


@BOTH_WAYS
@pytest.mark.parametrize(("estimator", "norm"), ESTIMATORS)
def test_records_set_aside_change_nothing_for_the_others(device, longest, estimator, norm):
    lay = ragged(7, groups=5)
    r, labels, keys = records(7, lay)
    gone = torch.tensor([t % 3 == 1 for t in range(lay.n_trajectories)])
    aside = gone[lay.trajectory_of_record()]
    r[aside] = torch.tensor([math.nan, math.inf, -math.inf, 3e38])[torch.arange(int(aside.sum())) % 4]
    marked = dense(torch.where(aside, -1, labels))
    got = step_advantage(device, longest, lay, r, marked, keys, estimator, norm)
    left = (lay.restrict(~aside), r[~aside], dense(labels[~aside]), keys[~aside])
    alone = step_advantage(device, longest, *left, estimator, norm)
    for whole, rest, absent in zip(got, alone, (0.0, int(Branch.SINGLETON)), strict=True):
        assert same_bits(whole.cpu()[~aside], rest) and bool((whole.cpu()[aside] == absent).all())


@BOTH_WAYS
@pytest.mark.parametrize("estimator", ["mean", "diff_peer", "q_style"])
def test_magnitudes_far_apart(device, longest, estimator):
    lay = from_lengths([6], [1])
    r = torch.tensor([1e37, 1.0, -1e37, 2.0, 1e-30, 3.0])
    labels, keys = torch.zeros(6, dtype=torch.int64), torch.tensor([0, 1, 0, 1, 2, 2])
    rule = {"estimator": estimator, "step_norm": "none", "delta": DELTA}
    wanted = reference.step_advantage(r, labels, keys, lay.group_offsets, **rule)
    assert same_bits(step_advantage(device, longest, lay, r, labels, keys, estimator)[0], wanted[0])


@BOTH_WAYS
def test_singletons_and_everything_set_aside(device, longest):
    lay = from_lengths([5, 3], [1, 1])
    r, keys = torch.arange(8.0), torch.zeros(8, dtype=torch.int64)
    for labels in (torch.arange(8), torch.full((8,), -1)):
        for estimator, norm in ESTIMATORS:
            step, branch = step_advantage(device, longest, lay, r, labels, keys, estimator, norm)
            assert not step.any() and not branch.any()


def test_nothing(device):
    none, whole = torch.empty(0, device=device), torch.empty(0, dtype=torch.int64, device=device)
    offsets = torch.zeros(1, dtype=torch.int64, device=device)
    sizes = {"n_groups": 0, "longest_group": 0, "step_norm": "none", "delta": DELTA}
    step, branch = values.step_advantage(none, whole, None, offsets, estimator="mean", **sizes)
    assert step.shape == branch.shape == (0,)
    out = values.hgpo_advantage(none, whole.view(2, 0), none, offsets, alpha=1.0, base_group=True, **sizes)
    assert [x.shape for x in out] == [(0,)] * 3


def hgpo(device, longest, lay, r, depths, episode, **options):
    with sentinels():
        return values.hgpo_advantage(
            unaligned(r, device), unaligned(depths, device), unaligned(episode, device),
            lay.group_offsets.to(device), n_groups=lay.n_groups, longest_group=max(lay.longest_group, longest),
            delta=DELTA, **options,
        )  # fmt: skip


@BOTH_WAYS
@pytest.mark.parametrize("norm", ["none", "std"])
@pytest.mark.parametrize("alpha", [slow(0.0), 0.5, slow(1.0), slow(2000.0)])
@pytest.mark.parametrize("base_group", [False, True])
def test_hgpo(device, longest, norm, alpha, base_group):
    lay = ragged(4, groups=3, trajectories=4)
    r, labels, _ = records(4, lay, states=2)
    # Finer and finer partitions; the first records of a trajectory have no long history.
    place = torch.arange(lay.n_records) - lay.trajectory_offsets[:-1][lay.trajectory_of_record()]
    depths = torch.stack([dense(torch.where(place >= k, labels * 3**k + place % 3**k, -1)) for k in range(3)])
    episode = torch.randn(lay.n_records, generator=torch.Generator().manual_seed(4)) * (labels % 2)
    options = {"step_norm": norm, "alpha": alpha, "base_group": base_group}
    got = hgpo(device, longest, lay, r, depths, episode, **options)
    wanted = reference.hgpo_advantage(r, depths, episode, lay.group_offsets, delta=DELTA, **options)
    on_cpu = cpu.hgpo_advantage(r, depths, episode, lay.group_offsets, delta=DELTA, **options)
    assert_close(got[0], wanted[0])
    assert_close(got[0], on_cpu[0])
    assert float((got[0].cpu() == wanted[0]).float().mean()) > 0.95 and same_bits(got[1], wanted[1])
    assert same_bits(got[2], wanted[2])


@BOTH_WAYS
def test_hgpo_without_company_is_the_base_group_or_nothing(device, longest):
    lay = from_lengths([4, 2], [1, 1])
    depths = torch.stack([torch.arange(6), torch.full((6,), -1)])
    episode = torch.tensor([1.0, -2.0, 0.0, 3.0, 4.0, 5.0])
    options = {"step_norm": "none", "alpha": 1.0}
    advantage, deepest, branch = hgpo(device, longest, lay, episode, depths, episode, base_group=False, **options)
    assert not advantage.any() and not deepest.any()
    assert not branch.any()
    advantage, _, branch = hgpo(device, longest, lay, episode, depths, episode, base_group=True, **options)
    assert_close(advantage, episode / (1 + DELTA))
    assert not branch.any()
