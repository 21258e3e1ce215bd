"""An ε that follows the policy: the rule on batches whose cluster sizes are known, and on a drift."""

import json
import math
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from batches import spread_out
from hypothesis import given, settings, strategies as st
from refusals import refused

import bipace_kernels as bk
from bipace_kernels.diagnostics.value_r2 import value_r2


def drifting(steps, *, groups=3, dim=64, seed=20260, rollouts=8, horizon=20, states=24):
    """(fingerprints, layout, returns) of each step of a training, on the fly; every step has a seed of its own.

    A record is √(1−s)·shared + √(s(1−v))·own + √(s·vᵢ)·noise, unit vectors; `own` is half a room's direction and half
    the state's, six states to a room; vᵢ is a record's own share of noise, v on the median.  So two visits of a state
    are s·v apart, and two states of different rooms s.  The cone s narrows, opens wider and comes back; v grows.
    """

    def unit(x):
        return x / np.linalg.norm(x, axis=-1, keepdims=True)

    group = np.repeat(np.arange(groups), rollouts * horizon)
    layout = bk.layout(group, np.repeat(np.arange(groups * rollouts), horizon))
    visits = 1.0 / np.arange(1, states + 1)
    for t in range(steps):
        rng = np.random.default_rng([seed, t])
        at = t / max(steps - 1, 1)
        s, v = np.interp(at, (0.0, 0.4, 0.7, 1.0), (0.30, 0.10, 0.45, 0.30)), np.interp(at, (0.0, 1.0), (0.25, 0.40))
        shared = unit(rng.standard_normal(dim))
        rooms = unit(rng.standard_normal((groups, -(-states // 6), dim)))
        own = unit(rng.standard_normal((groups, states, dim)))
        own = unit(rooms[:, np.arange(states) // 6] + own)
        state = rng.choice(states, len(group), p=visits / visits.sum())
        share = np.minimum(v * np.exp(0.5 * rng.standard_normal((len(group), 1))), 1.0)
        noise = unit(rng.standard_normal((len(group), dim)))
        x = np.sqrt(1 - s) * shared + np.sqrt(s * (1 - v)) * own[group, state] + np.sqrt(s * share) * noise
        value = rng.standard_normal((groups, states))
        yield torch.from_numpy(x.astype(np.float32)), layout, value[group, state] + rng.standard_normal(len(group))


def apart(*sizes):
    """One group of equal rows: orthogonal states visited so often; every ε below 1 gives these sizes."""
    x = np.repeat(np.eye(len(sizes), dtype=np.float32), sizes, axis=0)
    return x, np.zeros(len(x), np.int64)


def near(states, copies, distance):
    """States at one cosine distance of each other, each visited `copies` times, in turns."""
    common = np.sqrt(1 - distance) * np.ones((states, 1))
    x = np.concatenate([common, np.sqrt(distance) * np.eye(states)], axis=1).astype(np.float32)
    return np.tile(x, (copies, 1)), np.zeros(states * copies, np.int64)


def medians(x, group, epsilons):
    return [float(np.median(np.bincount(row))) for row in bk.cluster(x, group, epsilons).numpy()]


def test_stays_inside_the_band(backend):
    x, group = spread_out(n=120)
    controller = bk.EpsilonController(0.21)
    assert controller.reason == "no update yet"
    for _ in range(5):
        assert controller.update(x, group, backend=backend) == 0.21
        assert controller.reason == "kept 0.21: median cluster size 6 is inside the band [4, 8]"
    alone = float((np.bincount(bk.cluster(x, group, 0.21)) == 1).mean())
    wanted = {"epsilon": 0.21, "epsilon_moves": 0.0, "median_cluster_size": 6.0, "singleton_cluster_fraction": alone}
    assert controller.metrics() == {f"bipace/{name}": value for name, value in wanted.items()}


@pytest.mark.parametrize("start", [0.02, 0.40])
@pytest.mark.parametrize("max_step", [1.05, 1.25, 2.0])
def test_reaches_the_band_by_bounded_steps_and_stays(start, max_step):
    x, group = spread_out(n=120)
    x = x + (0.6 if start == 0.40 else 0.0)  # a narrower cone: 0.40 joins too much
    assert not 4 <= medians(x, group, [start])[0] <= 8
    controller = bk.EpsilonController(start, max_step=max_step)
    path = [start]
    while len(path) < 100 and "inside the band" not in controller.reason:
        path.append(controller.update(x, group))
    ratios = np.diff(np.log(path))
    assert np.all(np.abs(ratios) <= math.log(max_step) + 1e-12)
    assert np.all(ratios <= 0) if start == 0.40 else np.all(ratios >= 0)
    assert 4 <= controller.metrics()["bipace/median_cluster_size"] <= 8 and path[1] != start
    assert controller.update(x, group) == path[-1]


def test_hysteresis():
    """Once settled, a median just outside the band moves nothing; before, or further outside, it does."""
    inside, slightly, clearly = apart(5, 5, 5), apart(3, 3, 3), apart(2, 2, 2)
    fresh = bk.EpsilonController(0.1)
    assert fresh.update(*slightly) == pytest.approx(0.125) and "at every ε within one step" in fresh.reason

    settled = bk.EpsilonController(0.1)
    settled.update(*inside)
    for batch in (slightly, apart(10, 10), slightly):
        assert settled.update(*batch) == 0.1 and "outside the band [4, 8] by less than the slack" in settled.reason
    assert settled.update(*clearly) == pytest.approx(0.125)
    assert settled.update(*slightly) == pytest.approx(0.125**2 / 0.1)  # it is settled no more

    strict = bk.EpsilonController(0.1, slack=0.0)
    strict.update(*inside)
    assert strict.update(*slightly) == pytest.approx(0.125)
    assert bk.EpsilonController(0.1).update(*apart(11, 11, 11)) == pytest.approx(0.08)


def test_takes_the_point_whose_median_is_nearest_to_the_middle_of_the_band():
    """Three levels within reach: singles, then pairs of pairs … whatever the sweep shows, by the definition."""
    rng = np.random.default_rng(0)
    moved = 0
    for trial in range(30):
        x = rng.normal(size=(15, 6)).repeat(8, axis=0) + 0.5 * rng.normal(size=(120, 6)) + rng.uniform(0, 2)
        group = np.arange(120) // 40
        start = float(rng.uniform(0.02, 0.4))
        controller = bk.EpsilonController(start, max_step=1.6, points=17)
        got = controller.update(x, group)
        grid = sorted({min(max(start * 1.6 ** (j / 8), 0.02), 0.40) for j in range(-8, 9)} - {start} | {start})
        found = dict(zip(grid, medians(x, group, grid), strict=True))
        now = found[start]
        if 4 <= now <= 8:
            assert got == start, trial
            continue
        ahead = {e: m for e, m in found.items() if (e > start if now < 4 else e < start)}
        inside = {e: m for e, m in ahead.items() if 4 <= m <= 8}
        if not inside:
            continue
        moved += 1
        want = min(inside, key=lambda e: (abs(math.log(inside[e] / math.sqrt(32))), abs(e - start)))
        assert got == want, trial
        assert f"there it is {found[want]:g}" in controller.reason
    assert moved >= 5


def test_of_equally_good_points_the_nearest():
    """Two pairs of states, each visited twice: medians 2, 4 and 8; 4 and 8 are equally far from √32."""
    parts = [np.full((4, 1), 0.87**0.5), 0.028**0.5 * np.eye(2).repeat(2, axis=0), 0.102**0.5 * np.eye(4)]
    x, group = np.tile(np.concatenate(parts, axis=1).astype(np.float32), (2, 1)), np.zeros(8, np.int64)
    ahead = [0.1 * 1.25 ** (j / 4) for j in range(5)]
    assert medians(x, group, ahead) == [2, 4, 8, 8, 8]
    assert bk.EpsilonController(0.1).update(x, group) == ahead[1]


def test_a_band_between_two_points():
    """States 0.1 apart: below all single, above all one.  The nearest of the two is taken, and kept."""
    for copies, states, start, end in (
        (3, 4, 0.095, "below"),  # 3 or 12: a factor of 1.33 below the band, 1.5 above it
        (2, 5, 0.095, "above"),  # 2 or 10: 2 below, 1.25 above
        (3, 4, 0.11, "below"),
        (2, 5, 0.11, "above"),
    ):
        batch = near(states, copies, 0.1)
        controller = bk.EpsilonController(start)
        first = controller.update(*batch)
        assert (first < 0.1) == (end == "below")
        assert "no ε within one step hits it, and here it is nearest" in controller.reason
        assert controller.reason.startswith("kept" if first == start else "moved")
        for _ in range(5):
            assert controller.update(*batch) == first


def test_bounds_hold():
    low, high = apart(1, 1, 1, 1), apart(40, 40)
    controller = bk.EpsilonController(0.36)
    assert controller.update(*low) == 0.40 and controller.update(*low) == 0.40
    assert controller.reason.endswith("is below the band [4, 8], and ε is at its bound")
    controller = bk.EpsilonController(0.11, bounds=(0.1, 0.3))
    assert controller.update(*high) == 0.1 and controller.update(*high) == 0.1
    assert "above the band [4, 8], and ε is at its bound" in controller.reason


@settings(max_examples=25)
@given(
    seed=st.integers(0, 10**6),
    start=st.floats(0.02, 0.40),
    max_step=st.floats(1.01, 2.0),
    points=st.sampled_from([3, 5, 9, 21]),
    objective=st.sampled_from(["median", "value_r2"]),
)
def test_no_update_goes_further_than_a_step(seed, start, max_step, points, objective):
    rng = np.random.default_rng(seed)
    controller = bk.EpsilonController(start, max_step=max_step, points=points, objective=objective)
    before = start
    for _ in range(3):
        n = int(rng.integers(1, 40))
        x = rng.normal(size=(n, 3)) + rng.uniform(0, 3)
        group = rng.integers(0, 3, n)
        trajectory = group * 4 + rng.integers(0, 3, n)
        after = controller.update(x, group, trajectory=trajectory, returns=rng.normal(size=n))
        assert 0.02 <= after <= 0.40 and abs(math.log(after / before)) <= math.log(max_step) + 1e-9
        assert after == controller.epsilon == controller.metrics()["bipace/epsilon"]
        assert controller.reason.startswith("kept" if after == before else "moved")
        before = after


def test_batches_without_a_row_that_counts_leave_it_as_it_is(backend):
    controller = bk.EpsilonController(0.1)
    controller.update(*apart(5, 5), backend=backend)
    before = controller.metrics()
    bad = np.full((6, 3), np.nan, np.float32)
    bad[3:] = 0
    padding = bk.layout([0, 0], [0, 0], valid=[False, False])
    for arguments in (
        {"fingerprint": bad, "group": np.zeros(6, int)},
        {"fingerprint": np.zeros((0, 4)), "group": []},
        {"fingerprint": np.ones((2, 4)), "layout": padding},
    ):
        assert controller.update(**arguments, backend=backend) == 0.1
        assert controller.reason == "kept 0.1: no row of the batch has a usable fingerprint"
        assert controller.metrics() == before
    assert controller.update(*apart(3, 3), backend=backend) == 0.1, "it was settled and is still"


@pytest.mark.parametrize("objective", ["median", "value_r2"])
def test_rows_without_a_direction_count_in_nothing(objective, backend):
    rng = np.random.default_rng(1)
    x, group = spread_out(n=60)
    trajectory, returns = np.arange(60) // 10, rng.normal(size=60)
    clean = bk.EpsilonController(0.05, objective=objective, max_step=1.6)
    clean.update(x, group, trajectory=trajectory, returns=returns, backend=backend)

    at = np.sort(rng.integers(0, 60, 40))
    dirty = np.insert(x, at, np.where(rng.random((40, 1)) < 0.5, np.nan, 0.0), axis=0)
    arguments = {name: np.insert(v, at, v[at]) for name, v in (("group", group), ("trajectory", trajectory))}
    controller = bk.EpsilonController(0.05, objective=objective, max_step=1.6)
    controller.update(dirty, **arguments, returns=np.insert(returns, at, 0.3), backend=backend)
    assert controller.state_dict() == clean.state_dict()


def two_levels(seed, fine):
    """Pairs of states 0.1 apart, each state met once by each of four rollouts; returns follow the state or the pair.

    Below 0.1 the clusters are the states (size 4), above it the pairs (size 8): both inside the band.
    """
    rng = np.random.default_rng(seed)
    pairs, rollouts, groups = 6, 4, 8
    rows, group, trajectory, returns = [], [], [], []
    for g in range(groups):
        value = 2 * rng.normal(size=2 * pairs) if fine else np.repeat(rng.normal(size=pairs), 2)
        for r in range(rollouts):
            for s in rng.permutation(2 * pairs):
                row = np.zeros(3 * pairs)
                row[s // 2], row[pairs + s] = np.sqrt(0.9), np.sqrt(0.1)
                rows.append(row)
                group.append(g)
                trajectory.append(g * rollouts + r)
                returns.append(value[s] + (0.3 if fine else 1.5) * rng.normal())
    return np.array(rows, np.float32), np.array(group), np.array(trajectory), np.array(returns)


@pytest.mark.parametrize("fine", [True, False])
def test_value_r2_takes_the_better_of_two_partitions(fine):
    x, group, trajectory, returns = two_levels(3, fine)
    grid = [0.09, 0.11]
    assert medians(x, group, grid) == [4, 8]
    given_all = {"trajectory": trajectory, "returns": returns}
    for start in grid:
        controller = bk.EpsilonController(start, objective="value_r2")
        end = controller.update(x, group, **given_all)
        assert (end < 0.1) == fine
        if (start < 0.1) == fine:
            assert end == start and "is within 0.01 of the best in the band" in controller.reason
        else:
            assert "is the best in the band [4, 8], with median cluster size" in controller.reason
        known = {"returns": returns, "episode_return": np.zeros(len(x)), "fingerprint": x}
        result = bk.advantage(group, trajectory, **known, config=bk.Config.bigpo(end))
        assert controller.metrics()["bipace/value_r2"] == pytest.approx(result.value_r2().r2, abs=1e-12)
        assert bk.EpsilonController(start).update(x, group, **given_all) == start, "both medians are inside"
        stubborn = bk.EpsilonController(start, objective="value_r2", gain=10)
        assert stubborn.update(x, group, **given_all) == start


def test_value_r2_only_looks_inside_the_band_and_undefined_or_out_of_reach_goes_by_the_median():
    x, group, trajectory, returns = two_levels(3, True)
    same = bk.EpsilonController(0.09, objective="value_r2")
    assert same.update(x, group, trajectory=trajectory, returns=np.ones(len(x))) == 0.09
    assert same.reason.startswith("kept 0.09: median cluster size 4 is inside the band")
    assert same.reason.endswith("no ε within one step has its median in the band and a value R²")
    assert same.metrics()["bipace/value_r2"] == 0.0
    for start in (0.05, 0.11, 0.09):
        controller = bk.EpsilonController(start, objective="value_r2", band=(6, 10))
        end = controller.update(x, group, trajectory=trajectory, returns=returns)
        assert end == pytest.approx(0.0625) if start == 0.05 else end > 0.1


def test_value_r2_leaves_out_rows_with_bad_returns():
    x, group, trajectory, returns = two_levels(3, False)
    spoilt = returns.copy()
    spoilt[::7] = np.nan
    keep = np.isfinite(spoilt)
    controller = bk.EpsilonController(0.09, objective="value_r2")
    end = controller.update(x, group, trajectory=trajectory, returns=spoilt)
    labels = bk.cluster(x, group, end, trajectory=trajectory)[keep]
    kept = torch.tensor(returns[keep], dtype=torch.float32)
    want = value_r2(kept, labels, torch.tensor(trajectory[keep]), torch.tensor(group[keep]), 8)
    assert controller.metrics()["bipace/value_r2"] == pytest.approx(want.r2, abs=1e-12)


@pytest.mark.parametrize("objective", ["median", "value_r2"])
def test_a_restored_controller_goes_on_bit_for_bit(objective):
    batches = list(drifting(16, dim=32, seed=5))
    settings_of = {"objective": objective, "max_step": 1.4}

    def run(controller, part):
        out = []
        for x, layout, returns in part:
            controller.update(x, layout=layout, returns=returns)
            out.append(json.dumps([controller.state_dict(), controller.metrics()]))
        return out

    whole = run(bk.EpsilonController(0.1, **settings_of), batches)
    assert len({json.loads(line)[0]["epsilon"] for line in whole}) > 3
    for cut in (0, 1, 5, 11):
        first = bk.EpsilonController(0.1, **settings_of)
        run(first, batches[:cut])
        second = bk.EpsilonController(0.3, **settings_of)
        second.load_state_dict(json.loads(json.dumps(first.state_dict())))
        assert second.state_dict() == first.state_dict() and run(second, batches[cut:]) == whole[cut:]


def test_layout_or_ids_any_row_order_any_thread_count():
    x, group = spread_out(n=120)
    trajectory, step = np.arange(120) // 12, np.arange(120) % 12
    rows = np.random.default_rng(0).permutation(120)
    found = set()
    for arguments in (
        {"fingerprint": x, "group": group, "trajectory": trajectory, "step": step},
        {"fingerprint": x[rows], "group": group[rows], "trajectory": trajectory[rows], "step": step[rows]},
        {"fingerprint": x[rows], "layout": bk.layout(group[rows], trajectory[rows], step[rows])},
        {"fingerprint": x, "group": group, "num_threads": 1},
        {"fingerprint": torch.from_numpy(x), "group": torch.from_numpy(group), "num_threads": 3},
    ):
        controller = bk.EpsilonController(0.05)
        controller.update(**arguments)
        found.add(json.dumps(controller.state_dict()))
    assert len(found) == 1


def test_bad_settings():
    for changes, words in (
        ({"objective": "mean"}, "objective must be one of median, value_r2, got 'mean'"),
        ({"band": (8, 4)}, "band must be in order"),
        ({"bounds": (0.0, 0.4)}, r"bounds\[0\] must be a number in"),
        ({"epsilon": 0.5}, r"epsilon must be a number in \[0.02, 0.4\], got 0.5"),
        ({"max_step": 1}, "max_step must be above 1"),
        ({"points": 4}, "points must be odd and at most 63, got 4"),
        ({"slack": -0.1}, "slack must be a number in"),
    ):
        refused(words, bk.EpsilonController, **changes)


def test_bad_input_and_ctrl_c_change_nothing(monkeypatch):
    x, group = spread_out(n=60)
    good = {"fingerprint": x, "group": group, "trajectory": group, "returns": np.zeros(60)}
    controller = bk.EpsilonController(objective="value_r2")
    before = controller.state_dict()
    for changes, error, words in (
        ({"fingerprint": None}, ValueError, "fingerprint is missing"),
        ({"group": None}, ValueError, "group is missing"),
        ({"step": np.zeros(60, int), "trajectory": None}, ValueError, "trajectory is missing; step numbers"),
        ({"returns": None}, ValueError, "returns is missing; objective='value_r2'"),
        ({"returns": np.zeros(3)}, ValueError, r"returns must have shape \[N\] = \[60\]"),
        ({"trajectory": None}, ValueError, "trajectory is missing; objective='value_r2' needs it"),
    ):
        refused(words, controller.update, error=error, **{**good, **changes})
        assert controller.state_dict() == before
    monkeypatch.setattr(controller, "_sweep", Mock(side_effect=KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        controller.update(**good)
    assert controller.state_dict() == before


def test_states_of_something_else():
    controller = bk.EpsilonController()
    before = controller.state_dict()
    for change, words in (
        (lambda s: s.pop("moves"), "state must come from state_dict"),
        (lambda s: s.update(epsilon=0.9), r"state\['epsilon'\] must be a number in \[0.02, 0.4\]"),
        (lambda s: s.update(updates=-1), r"state\['updates'\] must be an int"),
        (lambda s: s.update(epsilon=0.3, settled=1), r"state\['settled'\] must be bool, got 1"),
        (lambda s: s.update(epsilon=0.3, reason=None), r"state\['reason'\] must be str, got None"),
        (lambda s: s.update(epsilon=0.3, singletons=1.5), r"state\['singletons'\] must be a number in \[0, 1\]"),
    ):
        state = controller.state_dict()
        change(state)
        refused(words, controller.load_state_dict, state)
        refused("state must come from state_dict", controller.load_state_dict, [])
        assert controller.state_dict() == before
    for value in (
        math.nan, math.inf, -math.inf, np.float64("inf"), 10**400, -(10**400), 10**5000, np.zeros(2), [1.0],
        torch.empty(1, device="meta"), torch.zeros(2).to_sparse(),
    ):  # fmt: skip
        for name in before:
            words = rf"state\['{name}'\] must be .*, got .{{1,60}}\.$"
            refused(words, controller.load_state_dict, {**before, name: value})
    assert controller.state_dict() == before


@pytest.mark.parametrize("objective", ["median", "value_r2"])
def test_on_a_device_as_on_the_cpu(stand_ins, objective):
    x, group, trajectory, returns = two_levels(3, False)
    x[[5, 40]] = np.nan
    found = []
    for backend in ("cpu", "triton"):
        controller = bk.EpsilonController(0.09, objective=objective, band=(6, 10))
        for _ in range(3):
            controller.update(x, group, trajectory=trajectory, returns=returns, backend=backend)
        found.append(controller.state_dict())
    assert found[0] == found[1] and stand_ins.calls == ["scan_rows", "cluster_sweep"] * 3


def test_holds_sizes_and_singletons_where_a_fixed_epsilon_lets_go():
    """A controller that never moved would be the line `static`."""
    between, lines = {"band": (4.0, 8.0), "bounds": (0.02, 0.40)}, {}  # (ε, sizes of the clusters) of each step
    for t, (x, layout, returns) in enumerate(drifting(60)):
        search = bk.choose_epsilon(x, layout=layout, **between).epsilon
        if t == 0:
            first = search
            follows = {o: bk.EpsilonController(first, objective=o, **between) for o in ("median", "value_r2")}
        chosen = {name: one.update(x, layout=layout, returns=returns) for name, one in follows.items()}
        chosen |= {"static": first, "search": search}
        labels = bk.cluster(x, epsilon=(*chosen.values(),), layout=layout)
        for (name, epsilon), label in zip(chosen.items(), labels, strict=True):
            lines.setdefault(name, []).append((epsilon, np.bincount(label.numpy())))
    near_the_band = {name: np.mean([3 <= np.median(size) <= 10 for _, size in line]) for name, line in lines.items()}
    assert near_the_band["static"] < 0.5 and near_the_band["median"] > 0.9
    assert near_the_band["value_r2"] > 0.85
    singletons = {name: np.std([(size == 1).mean() for _, size in line]) for name, line in lines.items()}
    assert singletons["median"] < 0.5 * singletons["static"]
    moves = {name: np.count_nonzero(np.diff([epsilon for epsilon, _ in line])) for name, line in lines.items()}
    assert 3 <= moves["median"] < 0.7 * moves["search"]
