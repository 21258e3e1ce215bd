"""Metrics, value R², the choice of ε: definitions restated naively."""

import itertools
import math
import warnings

import numpy as np
import pytest
import torch
from batches import CONFIGS, make_batch, spread_out
from hypothesis import given, strategies as st
from refusals import refused

import bipace_kernels as bk
from bipace_kernels.support import warnings as _warnings


def more_of(config):
    return {"bipace/value_explained_share"} if config.estimator == "gae" else set()


@given(seed=st.integers(0, 10**6), name=st.sampled_from([n for n, c in CONFIGS.items() if c.partition != "none"]))
def test_metrics_by_their_definitions(seed, name):
    batch = make_batch(seed)
    parsed = np.arange(batch.n) % 3 > 0
    result = bk.advantage(config=CONFIGS[name], action_parsed=parsed, **batch.arguments())
    got = result.metrics()
    assert all(type(value) is float for value in got.values())
    clusters = [np.flatnonzero(result.cluster.numpy() == c) for c in range(int(result.cluster.max()) + 1)]
    sizes = [len(c) for c in clusters]
    pairs = [(i, j) for c in clusters for i, j in itertools.combinations(c, 2)]
    companies = [c for c in clusters if len(c) > 1]
    unique = [len(set(batch.action_key[c])) for c in companies]
    want = {
        "singleton_cluster_fraction": np.mean([s == 1 for s in sizes]),
        "mean_cluster_size": np.mean(sizes),
        "p90_cluster_size": np.quantile(sizes, 0.9),
        "median_cluster_size": np.median(sizes),
        "cluster_count": len(sizes),
        "pairs": len(pairs),
        "mean_delta_t": np.mean([abs(int(batch.step[i]) - int(batch.step[j])) for i, j in pairs]) if pairs else 0.0,
        "pace_row_fraction": np.mean(result.branch.numpy() == bk.Branch.PACE),
        "leave_one_out_row_fraction": np.mean(result.branch.numpy() == bk.Branch.LEAVE_ONE_OUT),
        "singleton_row_fraction": np.mean(result.branch.numpy() == bk.Branch.SINGLETON),
        "invalid_row_fraction": 0.0,
        "mean_advantage": float(result.advantage.double().mean()),
        "multi_action_cluster_fraction": np.mean([u >= 2 for u in unique]) if unique else 0.0,
        "mean_unique_actions": np.mean(unique) if unique else 0.0,
        "action_parse_rate": parsed.mean(),
    }
    assert set(got) == {f"bipace/{key}" for key in want} | more_of(CONFIGS[name])
    for key, value in want.items():
        assert got[f"bipace/{key}"] == pytest.approx(float(value), abs=1e-12), key


def test_distances_of_large_steps_such_as_nanoseconds_are_exact():
    step, config = 2**62 + np.array([0, 1, 5]), bk.Config.gigpo()
    result = bk.advantage([0] * 3, [0, 0, 1], [1.0, 0.0, 0.0], step=step, observation=["a"] * 3, config=config)
    assert result.metrics()["bipace/mean_delta_t"] == 10 / 3


@pytest.mark.parametrize("name", [n for n, c in CONFIGS.items() if c.partition == "none"])
def test_without_clusters_nothing_is_said_of_them(name):
    got = bk.advantage(config=CONFIGS[name], **make_batch(0).arguments()).metrics()
    assert set(got) == {"bipace/invalid_row_fraction", "bipace/mean_advantage"} | more_of(CONFIGS[name])


@given(seed=st.integers(0, 10**6), name=st.sampled_from([n for n, c in CONFIGS.items() if c.estimator == "gae"]))
def test_the_share_that_values_explain(seed, name):
    batch = make_batch(seed)
    result = bk.advantage(config=CONFIGS[name], **batch.arguments())
    returns, value = result.returns.double().numpy(), result.value.double().numpy()
    error, spread = float(((returns - value) ** 2).sum()), 0.0
    for group in np.unique(batch.group):
        own = returns[batch.group == group]
        spread += float(((own - own.mean()) ** 2).sum())
    want = 1 - error / spread if spread > 0 else 0.0
    assert result.metrics()["bipace/value_explained_share"] == pytest.approx(want, abs=1e-6)


def test_a_metric_has_the_same_bits_at_any_number_of_threads():
    rng, n = np.random.default_rng(0), 100_000
    rewards = rng.standard_normal(n) * 10 ** rng.uniform(-8, 8, n)  # sums of these depend on their order
    result = bk.advantage(np.arange(n) // 8, np.arange(n), rewards, config=bk.Config.grpo(episode_norm="none"))
    means, before = set(), torch.get_num_threads()
    for threads in (1, 2):
        torch.set_num_threads(threads)
        means.add(result.metrics()["bipace/mean_advantage"])
    torch.set_num_threads(before)
    assert len(means) == 1


def test_ranks_log_the_same_keys():
    batch = make_batch(0)
    for name, config in CONFIGS.items():
        full = bk.advantage(config=config, **batch.arguments()).metrics()
        empty = bk.advantage(config=config, valid=np.zeros(batch.n, dtype=bool), **batch.arguments()).metrics()
        assert full.keys() == empty.keys(), name


def test_warnings_once_per_process(monkeypatch):
    n = 64
    group = np.arange(n) // 16
    arguments = {"trajectory": np.arange(n) // 4, "rewards": np.ones(n), "config": bk.Config.gigpo()}
    collapsed = bk.advantage(group, observation=["same"] * n, **arguments)
    with pytest.warns(RuntimeWarning, match="one single cluster.*Lower epsilon"):
        collapsed.metrics()
    with pytest.warns(RuntimeWarning, match="alone in their cluster.*Raise epsilon"):
        bk.advantage(group, observation=[str(i) for i in range(n)], **arguments).metrics()
    keys = {"action_key": np.arange(n) % 3, "action_parsed": np.arange(n) % 5 < 2}
    pace = arguments | keys | {"config": bk.Config.bipace(), "fingerprint": np.eye(4)[np.arange(n) % 4]}
    with pytest.warns(RuntimeWarning, match="41% of the responses hold an action that was recognized"):
        bk.advantage(group, **pace).metrics()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        collapsed.metrics()
        bk.advantage(group, **pace).metrics()
        half = np.arange(n) % 2 == 0
        monkeypatch.setattr(_warnings, "_given", set())
        bk.advantage(group, **pace | {"action_parsed": half}).metrics()  # half of them recognized is enough


def naive_value_r2(result, batch):
    """The definition, row by row."""
    r, cluster = result.returns.double().numpy(), result.cluster.numpy()
    group, trajectory = batch.group, batch.trajectory
    error, spread, covered, rows = {}, {}, 0, 0
    for i in range(batch.n):
        others = [j for j in range(batch.n) if group[j] == group[i] and trajectory[j] != trajectory[i]]
        if not others:
            continue
        rows += 1
        base = np.mean(r[others])
        peers = [j for j in others if cluster[j] == cluster[i]]
        covered += bool(peers)
        prediction = np.mean(r[peers]) if peers else base
        error[group[i]] = error.get(group[i], 0.0) + (r[i] - prediction) ** 2
        spread[group[i]] = spread.get(group[i], 0.0) + (r[i] - base) ** 2
    if sum(spread.values()) == 0:
        return None, covered / rows if rows else 0.0, None
    total, r2 = sum(spread.values()), 1 - sum(error.values()) / sum(spread.values())
    n, without = len(error), []  # one group left out
    for g in error:
        if total - spread[g] > 0:
            without.append(1 - (sum(error.values()) - error[g]) / (total - spread[g]))
    if len(without) < max(n, 2):
        return r2, covered / rows, None
    return r2, covered / rows, math.sqrt((n - 1) / n * np.sum((without - np.mean(without)) ** 2))


@given(seed=st.integers(0, 10**6), name=st.sampled_from(list(CONFIGS)))
def test_value_r2_by_its_definition(seed, name):
    batch = make_batch(seed)
    result = bk.advantage(config=CONFIGS[name], **batch.arguments())
    got, (r2, coverage, stderr) = result.value_r2(), naive_value_r2(result, batch)
    assert got.coverage == pytest.approx(coverage)
    assert got.r2 == (None if r2 is None else pytest.approx(r2, abs=1e-9))
    assert got.stderr == (None if stderr is None else pytest.approx(stderr, rel=1e-5, abs=1e-9))


def test_value_r2_by_hand_and_where_returns_do_not_vary():
    """Two trajectories of two steps; state u predicts 1, v predicts 0 across trajectories, the group mean 0.5."""
    given = {"returns": [1.0, 0.0, 1.0, 0.0], "episode_return": [1.0] * 4, "config": bk.Config.gigpo()}
    right, wrong = (bk.advantage([0] * 4, [0, 0, 1, 1], observation=list(o), **given) for o in ("uvuv", "uvvu"))
    assert right.value_r2() == bk.ValueR2(r2=1.0, coverage=1.0, stderr=None)
    assert wrong.value_r2().r2 == -3.0  # every prediction is off by 1, the group mean by 0.5
    result = bk.advantage([0] * 4, [0, 0, 1, 1], [0.0] * 4, observation=list("uvuv"), config=bk.Config.gigpo())
    assert result.value_r2() == bk.ValueR2(r2=None, coverage=1.0, stderr=None)
    alone = bk.advantage([0] * 2, [0, 0], [0.0, 1.0], observation=list("uv"), config=bk.Config.gigpo())
    assert alone.value_r2() == bk.ValueR2(r2=None, coverage=0.0, stderr=None)


def test_choose_epsilon_refuses():
    x, group = spread_out(n=60)
    for changes, words in (
        ({"band": (8, 4)}, "band must be in order"),
        ({"band": 4}, "band must be a pair"),
        ({"bounds": (0.0, 0.4)}, r"bounds\[0\] must be a number in"),
        ({"bounds": (0.1, 3)}, r"bounds\[1\] must be a number in"),
        ({"probes": 0}, "probes must be an int of at least 1"),
        ({"group": None}, "group is missing"),
        ({"step": [0] * 60}, "trajectory is missing"),
        ({"fingerprint": np.zeros((60, 3))}, "got zeros, which have no direction, at rows 0, 1, 2, 3, 4 and 55 more;"),
        ({"fingerprint": np.zeros((0, 3)), "group": []}, "at least one row"),
    ):
        refused(words, bk.choose_epsilon, **{"fingerprint": x, "group": group, **changes})


def test_metrics_do_not_change_with_the_callers_keys_and_the_mask_of_bad_states_is_checked():
    keys, parsed = torch.tensor([0, 0, 1, 1]), torch.tensor([True] * 4)
    config = bk.Config.gigpo()
    given = {"rewards": [1.0, 0.0, 0.0, 1.0], "observation": ["a"] * 4, "action_key": keys, "action_parsed": parsed}
    result = bk.advantage([0] * 4, [0, 1, 2, 3], config=config, **given)
    before = result.metrics()
    keys.zero_()
    parsed.zero_()
    assert result.metrics() == before
    result = bk.advantage(config=CONFIGS["bipace"], **make_batch(0).arguments())
    n = len(result.advantage)
    want = result.with_bad_states(torch.arange(n) == 0).metrics()["bipace/invalid_row_fraction"]
    assert result.with_bad_states([1] + [0] * (n - 1)).metrics()["bipace/invalid_row_fraction"] == want == 1 / n
    refused(rf"bad must have shape \[N\] = \[{n}\]", result.with_bad_states, torch.zeros(n + 1, dtype=torch.bool))
