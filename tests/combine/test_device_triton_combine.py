"""The total in the caller's row order: rounding, saturation, w = 0, rows without a record."""

import numpy as np
import pytest
import torch
from ragged import BACKEND, same_bits, sentinels, stage, unaligned

import bipace_kernels as bk

combine = stage("combine")

ABSENT = (0.0, 0.0, 0.0, 0.0, -1, 0)
MAX = torch.finfo(torch.float32).max


def rows_of(device, values, source, taken=None, *, weight=1.0, total_is_step=False):
    with sentinels():
        out = combine.combine(
            *(unaligned(x, device) for x in (*values, source, taken)), weight=weight, total_is_step=total_is_step,
            n_rows=source.numel(),
        )  # fmt: skip
    return [x.cpu() for x in out]


def made(m, seed=0):
    """episode, step, returns, labels, branch of m records."""
    rng = np.random.default_rng(seed)
    floats = [torch.from_numpy(rng.normal(size=m).astype(np.float32)) for _ in range(3)]
    return *floats, torch.from_numpy(rng.integers(0, 9, m)), torch.from_numpy(rng.integers(0, 3, m).astype(np.uint8))


def wanted(values, source, taken, total):
    episode, step, returns, labels, branch = values
    gone = source < 0 if taken is None else (source < 0) | ~taken[source.clamp(min=0)]
    columns = (total, step, episode, returns, labels, branch)
    return [c[source.clamp(min=0)].masked_fill(gone, a) for c, a in zip(columns, ABSENT, strict=True)]


@pytest.mark.parametrize("weight", [1.0, 0.1, 3, 1e300])
@pytest.mark.parametrize("m", [1, 256, 2 * 256 + 7])  # 128 or 256 rows share a program
def test_every_row_gets_its_record(device, m, weight):
    values = made(m)
    rng = np.random.default_rng(m)
    source = torch.from_numpy(np.concatenate([rng.permutation(m), rng.integers(-1, m, 9), [-1]]))
    total = (values[0].double() + weight * values[1].double()).clamp(-MAX, MAX).float()
    for taken in (None, torch.from_numpy(rng.random(m) < 0.7)):
        got = rows_of(device, values, source, taken, weight=weight)
        assert all(same_bits(a, b) for a, b in zip(got, wanted(values, source, taken, total), strict=True))
        got = rows_of(device, values, source, taken, weight=weight, total_is_step=True)
        assert all(same_bits(a, b) for a, b in zip(got, wanted(values, source, taken, values[1]), strict=True))


def test_weight_zero_gives_the_episode_term_back_bits_saturate_and_round_once_and_padding_is_nothing(device):
    values = list(made(4))
    values[0] = torch.tensor([-0.0, 0.0, 1e-45, -3.5])
    values[1] = torch.tensor([MAX, -MAX, 1.0, 0.0])
    got = rows_of(device, values, torch.arange(4), weight=0.0)
    assert same_bits(got[0], values[0]) and same_bits(got[1], values[1])
    values = list(made(3))
    values[0], values[1] = torch.tensor([MAX, -MAX, MAX]), torch.tensor([MAX, -MAX, -MAX])
    assert rows_of(device, values, torch.arange(3))[0].tolist() == [MAX, -MAX, 0.0]
    values = list(made(1))
    values[0], values[1] = torch.tensor([1.0]), torch.tensor([2.0**-24])
    # With w rounded to float32, 1, the sum would be a tie and go to 1.
    assert rows_of(device, values, torch.zeros(1, dtype=torch.int64), weight=1 + 1e-8)[0].tolist() == [1 + 2.0**-23]
    got = rows_of(device, made(0), torch.full((5,), -1))
    assert [x.tolist() for x in got] == [[a] * 5 for a in ABSENT]
    assert all(x.shape == (0,) for x in rows_of(device, made(3), torch.empty(0, dtype=torch.int64)))


@pytest.mark.parametrize(("weights", "wanted"), [((1e300, 2e300), -MAX), ((2e300, 1e300), MAX), ((1e300, 1.0), MAX)])
def test_huge_weights_saturate_with_the_sign_of_the_sum(device, weights, wanted):
    """A_ep = 1e30 and A_S = −1e30, each times its weight: ∞ − ∞ would be NaN."""
    options = {"gamma": 1.0, "episode_weight": weights[0], "step_weight": weights[1]}
    rewards = torch.tensor([4e30, -2e30, 0.0, 0.0], dtype=torch.float64, device=device)
    for backend in {BACKEND, "reference"} if device.type == "cpu" else {BACKEND}:
        result = bk.advantage(
            [0] * 4, [0, 0, 1, 1], rewards, observation=["a", "b", "c", "b"],
            config=bk.Config.gigpo("mean_norm", **options), backend=backend,
        )  # fmt: skip
        assert result.episode_advantage.tolist()[1] == pytest.approx(1e30)
        assert result.step_advantage.tolist()[1] == pytest.approx(-1e30)
        assert result.advantage.tolist()[1] == pytest.approx(wanted)
