"""The episode term: every scope, norm and rule for a lone trajectory, with invalid trajectories."""

import itertools
import math

import numpy as np
import pytest
import torch
from marks import slow
from ragged import assert_close, from_lengths, ragged, same_bits, sentinels, stage, unaligned
from sized import Sized

from bipace_kernels.backends.cpu import episode as cpu_episode
from bipace_kernels.backends.reference import episode as reference_episode

cpu = Sized(cpu_episode)
reference = Sized(reference_episode)

episode = stage("episode")

RULES = [
    {"scope": scope, "norm": norm, "lone": lone, "delta": 1e-6}
    for scope, norm, lone in itertools.product(("trajectory", "step"), ("std", "none"), ("zero", "raw"))
]


def term(device, lay, returns, spoilt=None, **rule):
    with sentinels():
        return episode.episode_advantage(
            unaligned(returns, device), lay.trajectory_offsets.to(device), lay.group_trajectories.to(device),
            n_groups=lay.n_groups, n_records=lay.n_records, spoilt=unaligned(spoilt, device), **rule,
        )  # fmt: skip


def returns_of(seed, lay):
    rng = np.random.default_rng(seed)
    n = lay.n_trajectories
    values = np.where(rng.random(n) < 0.5, rng.choice([0.0, 1.0], n), rng.normal(size=n))
    return torch.from_numpy(values.astype(np.float32))


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("seed", [0, slow(1), slow(2)])
def test_against_the_other_backends(device, seed, rule):
    lay = ragged(seed, groups=6, trajectories=7)
    returns = returns_of(seed, lay)
    got = term(device, lay, returns, **rule)
    for other in (reference, cpu):
        wanted = other.episode_advantage(returns, lay.trajectory_offsets, lay.group_trajectories, **rule)
        assert_close(got, wanted)
        if rule["scope"] == "trajectory":
            assert same_bits(got, wanted)  # the very same sums
        else:
            assert float((got.cpu() == wanted).float().mean()) > 0.95


@pytest.mark.parametrize("rule", RULES)
def test_more_trajectories_and_steps_than_a_tile(device, rule):
    lengths = [32 * 2 + 1, *[1, 3] * 16, 32]  # tiles of 16 × 32, or 32 trajectories a warp
    lay = from_lengths(lengths, [len(lengths) - 1, 1])
    returns = returns_of(9, lay)
    wanted = reference.episode_advantage(returns, lay.trajectory_offsets, lay.group_trajectories, **rule)
    assert_close(term(device, lay, returns, **rule), wanted)


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("seed", [0, slow(1)])
def test_spoilt_trajectories_change_nothing_for_the_others(device, seed, rule):
    lay = ragged(seed + 20, groups=6)
    returns = returns_of(seed, lay)
    spoilt = torch.from_numpy(np.random.default_rng(seed).random(lay.n_trajectories) < 0.4)
    assert bool(spoilt.any())
    returns[spoilt] = torch.tensor([math.nan, math.inf, -math.inf, 5.0])[torch.arange(int(spoilt.sum())) % 4]
    own = spoilt[lay.trajectory_of_record()]
    got = term(device, lay, returns, spoilt, **rule).cpu()
    assert same_bits(got[~own], term(device, lay.restrict(~own), returns[~spoilt], **rule))
    assert same_bits(got[own], torch.zeros(int(own.sum())))
    unspoilt = torch.zeros_like(spoilt)
    clean = returns_of(seed, lay)
    assert same_bits(term(device, lay, clean, unspoilt, **rule), term(device, lay, clean, **rule))


@pytest.mark.parametrize("rule", RULES)
def test_one_left_of_many_is_alone(device, rule):
    lay = from_lengths([2, 1, 3], [3])
    spoilt = torch.tensor([True, False, True])
    got = term(device, lay, torch.tensor([7.0, 3.0, 8.0]), spoilt, **rule).tolist()
    raw = 3.0 if rule["norm"] == "none" else float(np.float32(3.0 / (1 + 1e-6)))
    assert got == [0.0, 0.0, raw if rule["lone"] == "raw" else 0.0, 0.0, 0.0, 0.0]


@pytest.mark.parametrize("rule", RULES)
def test_equal_returns_give_exactly_zero(device, rule):
    lay = from_lengths([5, 9, 2, 4, 1, 1], [4, 2])
    for value in (0.1, -1e-30, 1e37):
        assert not term(device, lay, torch.full((6,), value), **rule).any()


def test_a_group_alone_gives_the_same_bits_and_no_group_nothing(device):
    lay = ragged(31, groups=5)
    returns, rule = returns_of(31, lay), RULES[4]
    whole = term(device, lay, returns, **rule).cpu()
    for g in range(lay.n_groups):
        own = slice(*lay.group_trajectories[g : g + 2].tolist())
        lengths = lay.trajectory_offsets.diff()[own].tolist()
        alone = term(device, from_lengths(lengths, [len(lengths)]), returns[own], **rule)
        assert same_bits(whole[lay.group_offsets[g] : lay.group_offsets[g + 1]], alone)
    assert term(device, from_lengths([], []), torch.empty(0), **RULES[0]).shape == (0,)
