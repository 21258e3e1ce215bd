"""The chain with deferred checks: the CPU's results, without reading a tensor; errors when someone asks.

The stages are stand-ins (stand_ins.py): those of the cpu backend, so all must be equal to the bit.
"""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from bad_inputs import BAD, BATCH, KINDS, N, bad_values
from batches import CONFIGS, assert_same
from refusals import refused

import bipace_kernels as bk

IDS = {"group": None, "trajectory": None, "step": None}

pytestmark = pytest.mark.usefixtures("stand_ins")
PARSED = np.arange(N) % 3 > 0


def both(config, **arguments):
    """The result on the CPU, and that with deferred checks."""
    given = BATCH.arguments(**arguments)
    return bk.advantage(config=config, backend="cpu", **given), bk.advantage(config=config, backend="triton", **given)


@pytest.mark.parametrize("name", list(CONFIGS))
@pytest.mark.parametrize("kind", ["none", *KINDS])
def test_equals_the_cpu(name, kind):
    host, device = both(replace(CONFIGS[name], on_invalid="singleton"), action_parsed=PARSED, **bad_values(kind))
    assert_same(host, device)
    device.check()


@pytest.mark.parametrize("duplicates", ["once", "count"])
@pytest.mark.parametrize("name", list(CONFIGS))
def test_any_row_order_padding_and_copies_of_a_step(name, duplicates):
    rng = np.random.default_rng(1)
    order = rng.permutation(N + 4)
    batch = BATCH.take(np.concatenate((np.arange(N), [0, 5, 5, N - 1]))[order])
    ignored = max(np.flatnonzero(np.isin(order, [N - 1, N + 3])))
    valid = (rng.random(batch.n) < 0.8) | np.isin(order, [N - 1, N + 3])
    batch.rewards[~valid] = np.nan
    batch.fingerprint[~valid] = np.nan
    config = replace(CONFIGS[name], duplicates=duplicates, on_invalid="singleton")
    for spoil in (False, True):
        if spoil:
            batch.rewards[ignored] = np.nan  # an ignored copy also invalidates its trajectory
        given = batch.arguments(valid=valid)
        assert_same(*(bk.advantage(config=config, backend=b, **given) for b in ("cpu", "triton")))
    with pytest.raises(ValueError, match=r"step must be unique"):  # known from the ids: said at the call
        bk.advantage(config=CONFIGS[name], backend="triton", **given)


@pytest.mark.parametrize("name", list(CONFIGS))
def test_given_returns(name):
    returns = np.linspace(-1, 1, N)
    episode = BATCH.trajectory.astype(float)
    config = replace(CONFIGS[name], on_invalid="singleton")
    for changes in (
        {"returns": returns},
        {"episode_return": episode},
        {"returns": returns, "episode_return": episode, **({} if config.estimator == "gae" else {"rewards": None})},
    ):
        assert_same(*both(config, **changes))
        for argument in ("returns", "episode_return"):
            if argument in changes:
                worse = changes[argument].copy()
                worse[[1, N - 2]] = np.inf
                assert_same(*both(config, **{**changes, argument: worse}))


@pytest.mark.parametrize("name", [n for n in CONFIGS if n != "bipace_similar"])
@pytest.mark.parametrize("duplicates", ["raise", "once", "count"])
def test_reads_no_tensor(name, duplicates, stand_ins):
    """With a layout and tensors, nothing waits: not the checks, not the chain, not the result."""
    batch = BATCH if duplicates == "raise" else BATCH.take(np.concatenate((np.arange(N), [0, 5])))
    lay = bk.layout(batch.group, batch.trajectory, batch.step, np.arange(batch.n) % 5 > 0)
    codes = torch.tensor([hash(o) for o in batch.observation])
    given = {
        "rewards": torch.from_numpy(batch.rewards).float(), "fingerprint": torch.from_numpy(batch.fingerprint),
        "observation": codes, "action_key": torch.from_numpy(batch.action_key),
        "action_parsed": torch.ones(batch.n, dtype=torch.uint8), "valid": torch.arange(batch.n) % 5 > 0,
        "episode_return": torch.from_numpy(batch.trajectory).float(),
    }  # fmt: skip
    config = replace(CONFIGS[name], duplicates=duplicates)
    bk.advantage(layout=lay, config=config, backend="triton", **given)  # the first call moves the layout
    stand_ins.calls.clear()
    with stand_ins.watch():
        result = bk.advantage(layout=lay, config=config, backend="triton", **given)
    assert "combine" in stand_ins.calls
    assert_same(bk.advantage(layout=lay, config=config, backend="cpu", **given), result)
    with stand_ins.watch(), pytest.raises(AssertionError, match="waits for the device"):
        result.metrics()


LATE = [
    (name, value, error)
    for name, cases in BAD.items()
    for value, error, words in cases
    if name in ("rewards", "returns", "episode_return", "fingerprint")
]


@pytest.mark.parametrize(("name", "value", "error"), LATE)
def test_errors_have_the_words_of_the_cpu(name, value, error):
    """At the call for shapes and dtypes; for values at check() and metrics(), or at the call with check="now"."""
    given = {"config": CONFIGS["bipace"], **BATCH.arguments(**{name: value})}
    want = refused("", bk.advantage, backend="cpu", error=error, **given)
    for ask in ("check", "metrics", "value_r2", "now"):

        def late(ask=ask):
            getattr(bk.advantage(backend="triton", check="now" if ask == "now" else "auto", **given), ask)()

        assert refused("", late, error=error) == want


def test_what_contradicts_itself_is_an_error_in_both_modes():
    doubled = BATCH.take(np.concatenate((np.arange(N), [3, 7])))
    doubled.rewards[N:] += 1
    episode = BATCH.trajectory.astype(float)
    episode[2] += 1
    for mode, duplicates in (("raise", "once"), ("singleton", "once"), ("raise", "count")):
        for row, given in ((3, doubled.arguments()), (2, BATCH.arguments(episode_return=episode))):
            config = replace(CONFIGS["gigpo"], duplicates=duplicates, on_invalid=mode)
            want = refused(r"must agree|one value per trajectory", bk.advantage, config=config, backend="cpu", **given)
            result = bk.advantage(config=config, backend="triton", **given)
            assert torch.isfinite(result.advantage).all()
            assert result.cluster[row] == -1, "its trajectory is set aside until someone asks"
            assert refused("", result.check) == refused("", result.metrics) == want


def test_masks_are_questions_for_later():
    lay = bk.layout(BATCH.group, BATCH.trajectory, BATCH.step)
    other = np.arange(N) > 0
    for changes, error in (
        ({"valid": other}, ValueError),
        ({"valid": np.full(N, 2)}, TypeError),
        ({"action_parsed": np.full(N, 2)}, TypeError),
    ):
        given = {"layout": lay, "config": CONFIGS["bipace"], **BATCH.arguments(**IDS, **changes)}
        want = refused("", bk.advantage, backend="cpu", error=error, **given)
        assert refused("", bk.advantage(backend="triton", **given).check, error=error) == want
    both(CONFIGS["bipace"], valid=np.ones(N, dtype=np.int64))[1].check()


def test_a_value_changed_since_is_still_an_error():
    """The flag stays with the result, even if the message can no longer name the value."""
    rewards = torch.from_numpy(BATCH.rewards.copy())
    rewards[4] = math.nan
    result = bk.advantage(config=CONFIGS["gigpo"], backend="triton", **BATCH.arguments(rewards=rewards))
    rewards[4] = 0.0
    refused(r"rewards must sum to finite returns within .1e37, got other sums at rows", result.check)


@pytest.mark.parametrize("kind", ["none", "fingerprint_nan"])
def test_rows_are_read_once(kind, stand_ins):
    """A pass over the fingerprints only for flags would take a GPU about as long as the one that clusters."""
    given = BATCH.arguments(action_parsed=PARSED, **bad_values(kind))
    result = bk.advantage(config=CONFIGS["bipace"], backend="triton", **given)
    assert stand_ins.calls == ["all_returns", "episode_advantage", "cluster_cosine", "step_advantage", "combine"]
    if kind != "none":
        refused(r"rows? 2\b", result.check)


READINGS = {
    "item": lambda t: t[0].item(),
    "bool": lambda t: bool(t[1] > 0),
    "mask": lambda t: t[t > 2],
    "assign by mask": lambda t: t.__setitem__(t > 2, 0),
    "list": lambda t: t.tolist(),
    "cpu": lambda t: t.cpu(),
    "nonzero": lambda t: t.nonzero(),
    "equal": lambda t: torch.equal(t, t),
    "repeat": lambda t: torch.repeat_interleave(t, t),
    "unique": lambda t: t.unique(),
}


@pytest.mark.parametrize("name", list(READINGS))
def test_a_reading_would_be_seen(name, stand_ins):
    tensor = torch.arange(5)
    with stand_ins.watch(), pytest.raises(AssertionError, match="waits for the device"):
        READINGS[name](tensor)
    READINGS[name](tensor)
