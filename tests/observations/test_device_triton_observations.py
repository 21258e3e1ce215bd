"""Partitions by observations and histories against the reference: ragged, long, repeated steps, records set aside."""

import numpy as np
import pytest
import torch
from marks import slow
from ragged import from_lengths, ragged, same_bits, sentinels, stage, unaligned
from sized import Sized

from bipace_kernels.backends.cpu import observations as cpu_observations
from bipace_kernels.backends.reference import observations as reference_observations

cpu = Sized(cpu_observations)
reference = Sized(reference_observations)

observations = stage("observations")
TILE = 128  # records: one or two programs, compared with one or two tiles at a time


def exact(device, lay, codes, taken=None):
    with sentinels():
        return observations.cluster_exact(
            unaligned(codes.to(device)), lay.group_offsets.to(device),
            taken=None if taken is None else unaligned(taken.to(device)),
        )  # fmt: skip


def history(device, lay, codes, depth, *, with_step=True, taken=None):
    with sentinels():
        return observations.cluster_history(
            unaligned(codes.to(device)), unaligned(lay.step.to(device)) if with_step else None,
            lay.trajectory_offsets.to(device), lay.group_offsets.to(device), depth,
            taken=None if taken is None else unaligned(taken.to(device)),
        )  # fmt: skip


def codes_of(seed, n, states):
    """Codes that differ only in their upper or lower 32 bits, including −1 and the extremes."""
    rng = np.random.default_rng(seed)
    pool = np.array([-1, 0, 2**32, 2**63 - 1, -(2**63), -(2**32), 5, 5 + 2**32, *range(100, 400)], dtype=np.int64)
    return torch.from_numpy(pool[rng.integers(0, states, n)])


@pytest.mark.parametrize("states", [1, 8, 300])
@pytest.mark.parametrize("seed", [0, slow(1), slow(2)])
def test_exact(device, seed, states):
    lay = ragged(seed, groups=8)
    codes = codes_of(seed, lay.n_records, states)
    got = exact(device, lay, codes)
    assert same_bits(got, reference.cluster_exact(codes, lay.group_offsets))
    assert same_bits(got, cpu.cluster_exact(codes, lay.group_offsets))


@pytest.mark.parametrize("states", [1, 8, 300])
def test_exact_in_groups_longer_than_a_tile(device, states):
    lay = from_lengths([TILE * 3 + 1, 1, TILE, TILE * 2], [1, 1, 1, 1])
    codes = codes_of(6, lay.n_records, states)
    assert same_bits(exact(device, lay, codes), reference.cluster_exact(codes, lay.group_offsets))


@pytest.mark.parametrize("with_step", [True, False])
@pytest.mark.parametrize("gaps", [True, False])
@pytest.mark.parametrize("seed", [0, slow(1), slow(2)])
def test_history(device, seed, gaps, with_step):
    lay = ragged(seed, groups=4, longest=8, gaps=gaps)
    codes = codes_of(seed, lay.n_records, 2)
    step = lay.step if with_step else None
    got = history(device, lay, codes, 5, with_step=with_step)
    for other in (reference, cpu):
        assert same_bits(got, other.cluster_history(codes, step, lay.trajectory_offsets, lay.group_offsets, 5))


@pytest.mark.parametrize("depth", [1, 2, 4])
def test_history_of_trajectories_longer_than_a_tile(device, depth):
    lengths = [TILE * 2 + 3, TILE, 1, 2]
    rng = np.random.default_rng(2)
    # Steps repeated over the edge of a tile and over a whole tile, and single ones.
    runs = rng.choice([1, 1, 1, 2, 3], TILE)
    runs[5] = TILE + 5
    lay = from_lengths(lengths, [1, 3], [np.repeat(np.arange(runs.size), runs)[:n] for n in lengths])
    codes = codes_of(2, lay.n_records, 2)
    wanted = reference.cluster_history(codes, lay.step, lay.trajectory_offsets, lay.group_offsets, depth)
    assert same_bits(history(device, lay, codes, depth), wanted)


@pytest.mark.parametrize("seed", range(3))
def test_records_set_aside_change_nothing_for_the_others(device, seed):
    lay = ragged(seed + 40, groups=5, gaps=True)
    codes = codes_of(seed, lay.n_records, 3)
    gone = torch.from_numpy(np.random.default_rng(seed).random(lay.n_trajectories) < 0.4)
    assert bool(gone.any())
    taken = ~gone[lay.trajectory_of_record()]
    rest = lay.restrict(taken)
    got = exact(device, lay, codes, taken).cpu()
    assert same_bits(got[taken], exact(device, rest, codes[taken])) and bool((got[~taken] == -1).all())
    got = history(device, lay, codes, 3, taken=taken).cpu()
    assert same_bits(got[:, taken], history(device, rest, codes[taken], 3)) and bool((got[:, ~taken] == -1).all())
    none = torch.zeros_like(taken)
    assert bool((exact(device, lay, codes, none) == -1).all())
    assert bool((history(device, lay, codes, 3, taken=none) == -1).all())


def test_nothing(device):
    lay, none = from_lengths([], []), torch.empty(0, dtype=torch.int64)
    assert exact(device, lay, none).shape == (0,) and history(device, lay, none, 3).shape == (3, 0)
