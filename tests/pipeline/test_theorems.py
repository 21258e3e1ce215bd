"""What must hold whatever the data: the paper's identities and the project's promises, over the whole pipeline."""

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from batches import CONFIGS, OUTPUTS, assert_same, make_batch
from hypothesis import given, strategies as st
from refusals import refused

import bipace_kernels as bk


def shares(config):
    """Whether values are read over the batch, which then decides them."""
    return config.estimator == "gae" and config.value == "kernel" and config.share != "group"


def run(batch, config, backend="cpu", **changes):
    return bk.advantage(config=config, backend=backend, **batch.arguments(**changes))


@given(seed=st.integers(0, 10**6), preset=st.sampled_from(["bigpo", "bipace", "bipace_diff"]))
def test_epsilon_zero_with_identity_fingerprints_is_gigpo(seed, preset):
    """The paper's regression test, bit for bit: one-hot fingerprints of the observations and ε = 0."""
    batch = make_batch(seed)
    codes = {text: i for i, text in enumerate(dict.fromkeys(batch.observation))}
    one_hot = np.eye(len(codes), dtype=np.float32)[[codes[o] for o in batch.observation]]
    config = replace(CONFIGS[preset], epsilon=0.0)
    for backend in ("reference", "cpu"):
        cosine = run(batch, config, backend, fingerprint=one_hot)
        exact = run(batch, replace(config, partition="exact"), backend)
        assert_same(cosine, exact)


@pytest.mark.parametrize("name", [n for n in CONFIGS if "hgpo" not in n])
def test_weight_zero_is_the_episode_term(name, backend):
    result = run(make_batch(1), replace(CONFIGS[name], step_weight=0.0, episode_weight=1.0), backend)
    assert torch.equal(result.advantage, result.episode_advantage)


@given(seed=st.integers(0, 10**6))
def test_q_style_identity(seed):
    """Σ over PACE rows + (n − 1)/n · Σ over LEAVE_ONE_OUT rows = 0 in every cluster of n."""
    batch = make_batch(seed)
    for backend in ("reference", "cpu"):
        result = run(batch, bk.Config.bipace(0.3), backend)
        seen = 0
        for cluster in result.cluster.unique():
            members = result.cluster == cluster
            n = int(members.sum())
            step = result.step_advantage[members].double()
            branch = result.branch[members]
            total = step[branch == bk.Branch.PACE].sum() + (n - 1) / n * step[branch == bk.Branch.LEAVE_ONE_OUT].sum()
            assert abs(float(total)) < 1e-6 * max(1, n)
            seen += n
        assert seen == batch.n


@pytest.mark.parametrize("name", [name for name, config in CONFIGS.items() if not shares(config)])
def test_one_group_alone_is_the_same_group_in_a_batch(name, backend):
    batch = make_batch(3, groups=6)
    config = CONFIGS[name]
    if config.step_norm == "batch":
        config = replace(config, step_norm="none")  # whose divisor is the batch's
    whole = run(batch, config, backend)
    for g in np.unique(batch.group):
        rows = np.flatnonzero(batch.group == g)
        alone = run(batch.take(rows), config, backend)
        inside = _take(whole, rows)
        inside.cluster -= inside.cluster.min()
        assert_same(alone, inside, metrics=False)


@pytest.mark.parametrize("name", list(CONFIGS))
def test_shuffled_rows_change_only_the_row_order(name, backend):
    batch = make_batch(4)
    rows = np.random.default_rng(0).permutation(batch.n)
    shuffled, whole = run(batch.take(rows), CONFIGS[name], backend), run(batch, CONFIGS[name], backend)
    assert_same(shuffled, _take(whole, rows), metrics=False)


@pytest.mark.parametrize("name", list(CONFIGS))
def test_order_keeping_relabelling_changes_nothing(name, backend):
    batch = make_batch(5)
    groups, trajectories = ([f"{'abcdefgh'[g]}" for g in batch.group], [f"0000-{t:012d}" for t in batch.trajectory])
    ids = {"group": groups, "trajectory": trajectories}
    other = run(batch, CONFIGS[name], backend, **ids, action_key=batch.action_key * 7 + 1)
    assert_same(other, run(batch, CONFIGS[name], backend))


@pytest.mark.parametrize("name", list(CONFIGS))
def test_backends_agree(name):
    for seed in range(8):
        batch = make_batch(seed, groups=5)
        a, b = run(batch, CONFIGS[name], "reference"), run(batch, CONFIGS[name], "cpu")
        assert torch.equal(a.cluster, b.cluster), seed
        assert torch.equal(a.branch, b.branch), seed
        for field in OUTPUTS[:4]:
            torch.testing.assert_close(getattr(a, field), getattr(b, field), atol=2e-5, rtol=2e-6)


@pytest.mark.parametrize("name", list(CONFIGS))
def test_same_bits_at_any_thread_count_and_again(name):
    batch = make_batch(6, groups=9, trajectories=6, longest=12)
    first = run(batch, CONFIGS[name], num_threads=1)
    for threads in (2, 3, 5, 8, 1):
        assert_same(run(batch, CONFIGS[name], num_threads=threads), first)


def test_equal_returns_give_exactly_zero(backend):
    """Float32 sums would make R − mean ≠ 0 here and σ + δ would blow it up."""
    n = 30
    returns = np.full(n, 0.1, dtype=np.float32)
    ids, states = (np.zeros(n, dtype=np.int64), np.arange(n) // 3), {"observation": ["same"] * n}
    given = {**states, "returns": returns, "episode_return": returns, "action_key": np.arange(n) % 2}
    for name in ("gigpo_mean_std_norm", "bipace_exact", "hgpo_all"):
        result = bk.advantage(*ids, **given, config=CONFIGS[name], backend=backend)
        assert torch.equal(result.advantage, torch.zeros(n))


def test_padding_rows_take_part_in_nothing(backend):
    batch = make_batch(7)
    rng = np.random.default_rng(1)
    rows = np.sort(rng.integers(0, batch.n, batch.n + 11))
    valid = np.concatenate(([True], rows[1:] != rows[:-1]))  # the repeats become padding, full of junk
    padded, rest = batch.take(rows), batch.take(rows[valid])
    padded.rewards[~valid] = np.nan
    padded.fingerprint[~valid] = np.inf
    padded.group[~valid] = 999
    padded.step[~valid] = -1
    for name in ("bipace", "hgpo", "gigpo"):
        result, want = run(padded, CONFIGS[name], backend, valid=valid), run(rest, CONFIGS[name], backend)
        assert_same(_take(result, np.flatnonzero(valid)), want, metrics=False)
        assert not result.advantage[~valid].any() and (result.cluster[~valid] == -1).all()
        assert result.metrics() == want.metrics()


def test_duplicates_counted_once_are_the_batch_without_them_and_else_change_means_but_not_returns(backend):
    batch = make_batch(8)
    rows = np.concatenate((np.arange(batch.n), [0, 5, 5, batch.n - 1]))
    doubled = batch.take(rows)
    for name in ("gigpo_mean_std_norm", "hgpo", "bipace", "bipace_history"):
        once = run(doubled, replace(CONFIGS[name], duplicates="once"), backend)
        plain = run(batch, CONFIGS[name], backend)
        assert_same(once, _take(plain, rows), metrics=False)
        assert once.metrics() == plain.metrics()
        refused(r"rows 0 and \d+ share group, trajectory and step", run, doubled, CONFIGS[name], backend)
    batch = make_batch(9)
    rows = np.concatenate((np.arange(batch.n), [0, 5, 5]))
    counted = run(batch.take(rows), replace(CONFIGS["gigpo"], duplicates="count"), backend)
    plain = run(batch, CONFIGS["gigpo"], backend)
    assert torch.equal(counted.returns, plain.returns[rows])
    cluster = counted.cluster == counted.cluster[5]
    mean = counted.returns[cluster].double().mean().float()
    assert torch.equal(counted.step_advantage[cluster], counted.returns[cluster] - mean)
    assert int(cluster.sum()) == int((plain.cluster == plain.cluster[5]).sum()) + 2 + int(bool(cluster[0]))


def test_a_layout_gives_the_same_as_its_ids(backend):
    batch = make_batch(10)
    lay = bk.layout(batch.group, batch.trajectory, batch.step)
    for name in ("bipace", "hgpo"):
        with_layout = run(batch, CONFIGS[name], backend, layout=lay, group=None, trajectory=None, step=None)
        assert_same(with_layout, run(batch, CONFIGS[name], backend))


def test_mean_of_bigpo_is_hgpo_of_depth_one_without_weights(backend):
    """HGPO at only depth 1 is GiGPO's step term times w_1 = 2/(2 + δ)."""
    batch = make_batch(11)
    hgpo = run(batch, bk.Config.hgpo(0, length_weight_alpha=1.0), backend)
    gigpo = run(batch, bk.Config.gigpo(), backend)
    expected = (gigpo.step_advantage.double() * (2 / (2 + 1e-6))).float()
    torch.testing.assert_close(hgpo.advantage, expected, atol=1e-7, rtol=1e-6)
    assert torch.equal(hgpo.cluster, gigpo.cluster)


def _take(result, rows):
    """The result's rows, as an object with the same fields."""
    index = torch.as_tensor(np.asarray(rows))
    return SimpleNamespace(**{name: getattr(result, name)[index] for name in OUTPUTS})
