"""Discounted returns, trajectory returns and invalid trajectories against the CPU and the reference."""

import math

import numpy as np
import pytest
import torch
from marks import slow
from ragged import assert_close, from_lengths, ragged, same_bits, sentinels, stage, unaligned
from sized import Sized

from bipace_kernels.backends.cpu import returns as cpu_returns
from bipace_kernels.backends.reference import returns as reference_returns
from bipace_kernels.backends.schema import LIMIT

cpu = Sized(cpu_returns)
reference = Sized(reference_returns)

returns = stage("returns")

GAMMAS = (0.0, 0.5, 0.95, 1.0)


def discounted(device, rewards, step, offsets, gamma):
    with sentinels():
        given = (unaligned(x, device) for x in (rewards, step))
        return returns.discounted_returns(*given, offsets.to(device), gamma)


def totals(device, rewards, step, offsets):
    with sentinels():
        return returns.trajectory_returns(unaligned(rewards, device), unaligned(step, device), offsets.to(device))


def rewards_of(rng, n):
    sparse = rng.choice([0.0, 0.0, 1.0, -0.5], n)
    return torch.from_numpy(np.where(rng.random(n) < 0.5, sparse, rng.normal(size=n)))


@pytest.mark.parametrize("gamma", GAMMAS)
@pytest.mark.parametrize("seed", [0, slow(1), slow(2)])
def test_neighbours_one_step_apart(device, seed, gamma):
    lay = ragged(seed, groups=12)
    rewards = rewards_of(np.random.default_rng(seed), lay.n_records)
    wanted = cpu.discounted_returns(rewards, None, lay.trajectory_offsets, gamma)
    for step in (None, lay.step, lay.step + 3):
        assert same_bits(discounted(device, rewards, step, lay.trajectory_offsets, gamma), wanted)
    wanted = cpu.trajectory_returns(rewards, None, lay.trajectory_offsets)
    for step in (None, lay.step):
        assert same_bits(totals(device, rewards, step, lay.trajectory_offsets), wanted)


@pytest.mark.parametrize("gamma", GAMMAS)
@pytest.mark.parametrize("seed", [0, slow(1), slow(2)])
def test_gaps_and_repeated_steps(device, seed, gamma):
    lay = ragged(seed, groups=12, gaps=True)
    rewards = rewards_of(np.random.default_rng(seed), lay.n_records)
    got = discounted(device, rewards, lay.step, lay.trajectory_offsets, gamma)
    assert_close(got, reference.discounted_returns(rewards, lay.step, lay.trajectory_offsets, gamma))
    repeats = (lay.step[1:] == lay.step[:-1]) & (lay.trajectory_of_record().diff() == 0)
    got = got.cpu()
    assert bool(repeats.any()) and torch.equal(got[1:][repeats], got[:-1][repeats])
    wanted = cpu.trajectory_returns(rewards, lay.step, lay.trajectory_offsets)
    assert same_bits(totals(device, rewards, lay.step, lay.trajectory_offsets), wanted)


def test_enormous_gaps(device):
    rewards, offsets = torch.tensor([1.0, 2.0, 4.0], dtype=torch.float64), torch.tensor([0, 3])
    step = torch.tensor([0, 2**40, 2**62])
    assert discounted(device, rewards, step, offsets, 0.95).tolist() == [1.0, 2.0, 4.0]
    assert discounted(device, rewards, step, offsets, 1.0).tolist() == [7.0, 6.0, 4.0]


@pytest.mark.parametrize("with_step", [False, True])
def test_trajectories_longer_and_more_than_a_program_holds(device, with_step):
    lengths = [8 * 20 + 3, *[1, 2, 8] * 16]  # eight steps are loaded together, 32 trajectories share a program
    lay = from_lengths(lengths, [len(lengths)])
    step = lay.step if with_step else None
    rewards = rewards_of(np.random.default_rng(8), lay.n_records)
    wanted = cpu.discounted_returns(rewards, step, lay.trajectory_offsets, 0.99)
    assert same_bits(discounted(device, rewards, step, lay.trajectory_offsets, 0.99), wanted)
    wanted = cpu.trajectory_returns(rewards, step, lay.trajectory_offsets)
    assert same_bits(totals(device, rewards, step, lay.trajectory_offsets), wanted)


def test_equal_rewards_give_equal_returns_wherever_they_stand(device):
    lay = from_lengths([40] * 50, [50])
    rewards = torch.zeros(lay.n_records, dtype=torch.float64)
    rewards[lay.trajectory_offsets[1:] - 1] = 1.0
    got = discounted(device, rewards, lay.step, lay.trajectory_offsets, 0.95).view(50, 40)
    assert torch.equal(got, got[:1].expand_as(got))


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("gamma", GAMMAS)
def test_a_bad_reward_stays_in_its_trajectory(device, gamma, bad):
    lay = ragged(3, gaps=True)
    rewards = rewards_of(np.random.default_rng(3), lay.n_records)
    clean = discounted(device, rewards, lay.step, lay.trajectory_offsets, gamma)
    clean_total = totals(device, rewards, lay.step, lay.trajectory_offsets)
    hit = torch.tensor([t % 3 == 1 for t in range(lay.n_trajectories)])
    broken = rewards.clone()
    broken[lay.trajectory_offsets[1:][hit] - 1] = bad
    own = hit[lay.trajectory_of_record()]
    got = discounted(device, broken, lay.step, lay.trajectory_offsets, gamma)
    assert same_bits(got.cpu()[~own], clean.cpu()[~own])
    assert same_bits(totals(device, broken, lay.step, lay.trajectory_offsets).cpu()[~hit], clean_total.cpu()[~hit])
    # Earlier records are invalid too, so the trajectory is detected from any of its rows.
    assert not bool(got.cpu()[lay.trajectory_offsets[:-1][hit]].isfinite().any())


def test_nothing(device):
    none, offsets = torch.empty(0, dtype=torch.float64), torch.zeros(1, dtype=torch.int64)
    assert discounted(device, none, None, offsets, 0.9).shape == (0,)
    assert totals(device, none, None, offsets).shape == (0,)
    assert spoilt(device, none.float(), none.float(), None, offsets).shape == (0,)


def spoilt(device, step_return, trajectory_return, bad, offsets):
    with sentinels():
        given = (unaligned(x, device) for x in (step_return, trajectory_return, bad))
        return returns.spoilt_trajectories(*given, offsets.to(device))


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, 2e37, -2e37])
def test_spoilt_by_a_step_a_total_or_a_mark(device, value):
    lay = from_lengths([1, 3, 65, 32, 2], [2, 3])
    fine, own = torch.full((lay.n_records,), LIMIT), torch.full((5,), -LIMIT)
    assert not spoilt(device, fine, own, None, lay.trajectory_offsets).any()
    for at in (0, 1, 3, 4, 3 + 32, 4 + 2 * 32, lay.n_records - 1):
        one = fine.clone()
        one[at] = value
        wanted = [t == int(lay.trajectory_of_record()[at]) for t in range(5)]
        assert spoilt(device, one, own, None, lay.trajectory_offsets).tolist() == wanted
    for t in range(5):
        one = own.clone()
        one[t] = value
        assert spoilt(device, fine, one, None, lay.trajectory_offsets).tolist() == [u == t for u in range(5)]
    bad = torch.zeros(lay.n_records, dtype=torch.bool)
    assert not spoilt(device, fine, own, bad, lay.trajectory_offsets).any()
    bad[[0, 4 + 2 * 32]] = True
    assert spoilt(device, fine, own, bad, lay.trajectory_offsets).tolist() == [True, False, True, False, False]


@pytest.mark.parametrize("gaps", [False, True])
def test_all_at_once_are_the_three_by_themselves(device, gaps):
    lay = ragged(4, gaps=gaps)
    rng = np.random.default_rng(4)
    rewards = rewards_of(rng, lay.n_records)
    rewards[rng.choice(lay.n_records, 3, replace=False)] = rewards.new_tensor([math.nan, -math.inf, 2e37])
    offsets, step = lay.trajectory_offsets, lay.step if gaps else None
    steps, own = discounted(device, rewards, step, offsets, 0.95), totals(device, rewards, step, offsets)
    for bad in (None, torch.from_numpy(rng.random(lay.n_records) < 0.1)):
        with sentinels():
            given = (unaligned(x, device) for x in (rewards, step, bad))
            found = returns.all_returns(*given, offsets.to(device), 0.95)
        assert same_bits(found[0], steps) and same_bits(found[1], own)
        wanted = spoilt(device, steps, own, bad, offsets)
        assert torch.equal(found[2], wanted) and wanted.any() and not wanted.all()
