"""The truth sets, what is computed from them, and the program that puts estimators on one table."""

import dataclasses
import json
import random
import re

import numpy as np
import pytest
import torch
from refusals import refused

pytest.importorskip("rich", reason="the tables of the benchmark need rich, which is not installed")
pytest.importorskip("matplotlib", reason="the picture of the benchmark needs matplotlib, which is not installed")

from alfworld_game import goal_of
from searcher import Memory, Searcher

import bipace_kernels as bk
from bench import truth, truth_batches, truth_measures, truth_rivals, truth_rows, truth_sets, truth_tables

COMMITTED = sorted(truth_sets.FOLDER.glob("*.npz"))


def small_set(path, *, groups=4, rollouts=4, seed=0, role="hold", gradients=False):
    """A chain of six states with a coin at every step; values are known in closed form, and written into both
    halves."""
    rng = random.Random(seed)
    rows, hidden = [], []
    for group in range(groups):
        for rollout in range(rollouts):
            place = 0
            for t in range(6):
                right = rng.random() < 0.6
                value = 0.9 ** (3 - place)
                ids, reward = (0, group, group * rollouts + rollout, t), float(right and place == 2)
                rows.append((*ids, reward, value, value, f"room {place}", "right" if right else "wait"))
                hidden.append(np.eye(4)[place] + 3.0)
                place += right
                if place == 3:
                    break
    meta = {"name": path.stem, "role": role, "gamma": 0.95, "policy": "coin", "continuations": 2, "rollouts": rollouts}
    gradient = np.random.default_rng(seed).normal(size=(len(hidden), 5)) if gradients else None
    truth_sets.write(path, meta, rows, {3: np.array(hidden, np.float16)}, gradient)
    return truth_sets.read(path)


def every_record(batch):
    """An estimator of one's own: the truth itself."""
    return batch.truth


OWN = bk.Config.gigpo()


def wrong_length(batch):
    return np.zeros(len(batch) + 1)


def of_records(records: bk.StepRecords) -> torch.Tensor:
    return records.returns


@pytest.mark.parametrize("path", COMMITTED, ids=lambda path: path.stem)
def test_a_committed_set_is_what_its_page_promises(path):
    found = truth_sets.read(path)
    assert found.name == path.stem and found.meta["role"] == path.stem.rpartition("_")[2]
    whole = truth_batches.batches(found)
    assert sum(map(len, whole)) >= 1000 and all(len(np.unique(batch.group)) >= 16 for batch in whole)
    assert found.meta["continuations"] >= 32
    for batch in whole:
        groups = np.unique(np.stack([batch.group, batch.trajectory]), axis=1)[0]  # of each trajectory
        assert "planner" not in path.stem or np.unique(groups, return_counts=True)[1].min() == 16
        last = np.append(batch.trajectory[1:] != batch.trajectory[:-1], True)
        assert set(np.unique(batch.reward)) <= {0.0, 1.0} and not batch.reward[~last].any()
        assert ((batch.exact >= 0) & (batch.exact <= 1)).all()
        assert batch.truth.mean() == pytest.approx(0, abs=0.02)  # an advantage has mean 0 under its policy


def test_sets_stay_small_and_choose_and_hold_share_no_task():
    sizes = {path: path.stat().st_size for path in truth_sets.FOLDER.rglob("*.npz")}
    of_language_models = sum(size for path, size in sizes.items() if path.parent.name == "smollm2")
    assert of_language_models <= 14e6 and sum(sizes.values()) - of_language_models <= 24e6
    assert len(COMMITTED) >= 6
    for path in COMMITTED:
        if path.stem.endswith("_choose"):
            tasks = [
                truth_sets.read(path.with_stem(path.stem.replace("_choose", role))).meta["tasks"]
                for role in ("_choose", "_hold")
            ]
            names = [{task if isinstance(task, str) else task[0] for task in found} for found in tasks]
            assert names[0].isdisjoint(names[1]), path.stem


def test_what_is_written_is_read(tmp_path):
    found = small_set(tmp_path / "coin_hold.npz")
    assert found.observation[0] == "room 0" and found.action[0] in ("right", "wait")
    assert found.hidden[3].dtype == np.float32 and found.hidden[3].shape == (len(found), 4)
    part = found.select(found.group == 1)
    assert set(part.group) == {1} and part.observation[0] == "room 0" and len(part.hidden[3]) == len(part)
    refused("sorted by group", truth_sets.write, tmp_path / "x.npz", {}, [[1] * 9, [0] * 9], {})


@pytest.mark.parametrize("rollouts", [1, 2, 4, 8])
def test_parts_are_disjoint_and_hold_so_many_rollouts_of_every_prompt(tmp_path, rollouts):
    (batch,) = truth_batches.batches(small_set(tmp_path / "coin_hold.npz"))
    parts = list(truth_batches.parts(batch, rollouts))
    assert len(parts) == 4 // rollouts
    seen = [t for part in parts for t in np.unique(part.trajectory)]
    assert len(seen) == len(set(seen)) == (0 if rollouts > 4 else 16)
    for part in parts:
        assert {len(np.unique(part.trajectory[part.group == g])) for g in range(4)} == {rollouts}


def test_a_window_ends_with_its_own_observation_and_stays_in_its_trajectory(tmp_path):
    (batch,) = truth_batches.batches(small_set(tmp_path / "coin_hold.npz"))
    windows = batch.window(3)
    starts = np.flatnonzero(batch.step == 0)
    assert all(windows[i] == batch.observation[i] for i in starts)
    i = int(np.flatnonzero(batch.step == 3)[0])
    expected = "".join(f"{batch.observation[j]}\n> {batch.action[j]}\n" for j in (i - 2, i - 1)) + batch.observation[i]
    assert windows[i] == expected


def test_measures_are_those_of_the_drawn_records():
    """r as NumPy has it, and the area under the ROC curve by its pairs, of all groups and of a bootstrap's draw."""
    rng = np.random.default_rng(3)
    a, b, group = rng.integers(-3, 4, 60).astype(float), rng.normal(size=60), np.repeat(np.arange(6), 10)
    b[::7] = 0.0
    sums, wins = (kind.make(a, b, group) for kind in (truth_measures.Sums, truth_measures.Wins))
    for drawn in ([0, 1, 2, 3, 4, 5], [0, 0, 3, 5, 1, 1]):
        rows = np.concatenate([np.flatnonzero(group == g) for g in drawn])
        weight = truth_measures.counts(np.array([drawn]))
        assert sums.value(weight)[0] == pytest.approx(np.corrcoef(a[rows], b[rows])[0, 1], abs=1e-12)
        above, other = a[rows][b[rows] > 0], a[rows][b[rows] <= 0]
        pairs = np.sign(above[:, None] - other)
        assert wins.value(weight)[0] == pytest.approx((pairs.mean() + 1) / 2, abs=1e-12)
    assert truth_measures.Sums.make(np.zeros(60), b, group).r() == 0.0
    assert truth_measures.ranks(np.array([3.0, 1.0, 3.0, 2.0])).tolist() == [3.5, 1.0, 3.5, 2.0]


def test_a_set_has_the_rank_correlation_and_the_one_inside_trajectories(tmp_path):
    path = tmp_path / "coin_hold.npz"
    (batch,) = truth_batches.batches(small_set(path))
    luck = np.random.default_rng(6).normal(size=len(batch))
    rows = [
        truth_rows.Estimator("luck", lambda b: np.exp(b.truth + luck), (4,)),
        truth_rows.Estimator("constant", truth_rivals.limit, (4,), reads_truth=True),
    ]
    found = truth_measures.measure(path, rows, [4]).measures
    noisy, mean = np.exp(batch.truth + luck), truth_rivals.limit(batch)
    ranked = [np.array([(x < y).sum() + (x == y).sum() / 2 for y in x]) for x in (noisy, batch.truth)]
    assert found["luck", 4]["Spearman"].r() == pytest.approx(np.corrcoef(*ranked)[0, 1], abs=1e-12)
    inside = [x - truth_batches.mean_of(batch.trajectory, x) for x in (noisy, batch.truth)]
    assert found["luck", 4]["within"].r() == pytest.approx(np.corrcoef(*inside)[0, 1], abs=1e-12)
    assert found["constant", 4]["within"].r() == 0.0  # exactly: rounding is no difference between turns
    for constant in (mean, truth_batches.mean_of(batch.trajectory, luck), mean + 0.1 * batch.group):
        assert np.corrcoef(constant, batch.truth)[0, 1] <= found["constant", 4]["r"].r() + 1e-12


def test_regressions_of_a_batch_average_equal_turns_on_ngrams_only(tmp_path):
    """On n-grams equal turns of a prompt get one advantage; on hidden states they keep the luck of their rollouts."""
    pytest.importorskip("sklearn")
    (batch,) = truth_batches.batches(small_set(tmp_path / "coin_hold.npz", groups=16))
    turns = truth_rivals.equal_turns(batch)
    for name, call in truth_rivals.rivals().items():
        on_states, on_ngrams = call(batch), call(dataclasses.replace(batch, hidden={}, cache={}))
        assert np.corrcoef(on_states, batch.truth)[0, 1] > 0.4, name
        assert not np.allclose(on_states, truth_batches.mean_of(turns, on_states), atol=1e-3)
        np.testing.assert_allclose(on_ngrams, truth_batches.mean_of(turns, on_ngrams), atol=1e-12)


def cosine(x, y):
    return x @ y / np.sqrt((x @ x) * (y @ y))


def test_products_with_the_expected_gradient_have_no_rollout_on_both_sides(tmp_path):
    """Each is a mean over pairs of different batches, but for one's own square; baselines know other rollouts only."""
    (whole,) = truth_batches.batches(small_set(tmp_path / "coin_hold.npz", gradients=True))
    rng, parts = np.random.default_rng(5), list(truth_batches.parts(whole, 1))
    each, own = ([rng.normal(size=len(part)) for part in parts] for _ in range(2))
    found = truth_measures.Expected.make(parts, each, own)
    for groups in ([0, 1, 2, 3], [0, 0, 3, 1]):
        products = [x[0] for x in found.products(truth_measures.counts(np.array([groups])))]
        rows = [np.concatenate([np.flatnonzero(part.group == g) for g in groups]) for part in parts]
        e, m = ([x[r] @ part.gradient[r] for x, r, part in zip(of, rows, parts, strict=True)] for of in (each, own))
        pairs = [(i, j) for i in range(4) for j in range(4) if i != j]
        wanted = [
            np.mean([x @ x for x in e]),
            *(np.mean([x[i] @ y[j] for i, j in pairs]) for x, y in ((e, e), (e, m), (m, m))),
        ]
        np.testing.assert_allclose(np.array(products), wanted, rtol=1e-9, atol=1e-12)
    one, aa, ag, gg = map(float, found.products(np.ones(4)))
    assert found.bias_and_variance() == pytest.approx((1 - ag**2 / (aa * gg), one / aa - 1))
    assert found.cosine() == pytest.approx(ag / np.sqrt(one * gg) if gg > 0 else 0.0)
    before, own_rows = truth_measures.others_mean(whole), whole.trajectory == 5
    whole.returns = whole.returns + own_rows
    changed = truth_measures.others_mean(whole) - before
    np.testing.assert_allclose(changed[own_rows], 0.0, atol=1e-12)
    assert (changed[(whole.group == 1) & ~own_rows] > 0).all() and not changed[whole.group != 1].any()


def test_a_sample_of_turns_is_judged_on_them_alone(tmp_path, capsys):
    """What has no value counts for no correlation, and only rows that read the truth may leave it out."""
    path = tmp_path / "coin_hold.npz"
    found = small_set(path, gradients=True)
    columns = (found.batch, found.group, found.trajectory, found.step, found.reward)
    sampled = found.trajectory % 4 < 2
    values = np.where(sampled, found.value_a, np.nan)
    rows = list(zip(*columns, values, values, found.observation, found.action, strict=True))
    truth_sets.write(path, found.meta | {"target": "other rollouts"}, rows, {3: found.hidden[3]}, found.gradient)
    (batch,) = truth_batches.batches(truth_sets.read(path))
    assert (batch.measured == sampled).all()
    rows = [row for row in truth_rows.table() if row.reads_truth or row.name == "GRPO"]
    result = truth_measures.measure(path, rows, [2, 4])
    grpo = next(row for row in rows if row.name == "GRPO").call(next(truth_batches.parts(batch, 2)))
    of = batch.truth[sampled]
    assert result.measures["GRPO", 2]["r"].r() == pytest.approx(np.corrcoef(grpo, of)[0, 1], abs=1e-9)
    with_cosine = [key for key, of in result.measures.items() if "cosine" in of]
    assert with_cosine == [("GRPO", 2)]  # of four rollouts there is one batch, and no other
    assert ("exact V as baseline of whole returns", 4) in result.measures and result.reliability == pytest.approx(1)
    refused("finite", truth_measures.checked, truth_rows.Estimator("mine", lambda b: b.returns - b.exact), batch)
    assert truth.main(["--folder", str(tmp_path), "--only", "GRPO", "--processes", "1", "--rollouts", "2"]) == 0
    assert "## Expected policy gradient, coin_hold" in capsys.readouterr().out


def test_cosines_from_gradients_by_group_are_those_of_the_whole_sums(tmp_path):
    (batch,) = truth_batches.batches(small_set(tmp_path / "coin_hold.npz", gradients=True))
    rng = np.random.default_rng(5)
    a, draw = rng.normal(size=len(batch)), np.array([[0, 0, 3, 1]])
    found = truth_measures.Gradients.make([batch], [a], [batch.truth])
    assert found.cosine() == pytest.approx(cosine(a @ batch.gradient, batch.truth @ batch.gradient), abs=1e-12)
    rows = np.concatenate([np.flatnonzero(batch.group == g) for g in draw[0]])
    of_rows = [x[rows] @ batch.gradient[rows] for x in (a, batch.truth)]
    assert found.value(truth_measures.counts(draw))[0] == pytest.approx(cosine(*of_rows), abs=1e-12)
    parts = list(truth_batches.parts(batch, 2))
    each = [rng.normal(size=len(part)) for part in parts]
    several = truth_measures.Gradients.make(parts, each, [part.truth for part in parts])
    alone = [truth_measures.Gradients.make([part], [x], [part.truth]) for part, x in zip(parts, each, strict=True)]
    assert several.cosine() == pytest.approx(np.mean([one.cosine() for one in alone]), abs=1e-12)
    (other,) = truth_batches.batches(small_set(tmp_path / "coin_choose.npz", groups=2, seed=1, gradients=True))
    other.group = other.group + 4  # two batches of unequal groups: draws are of all of them
    both = truth_measures.Gradients.make([batch, other], [a, other.truth], [batch.truth, other.truth])
    assert both.cosine() == pytest.approx((found.cosine() + 1) / 2)
    assert truth_measures.Gradients.make([batch], [-batch.truth], [batch.truth]).cosine() == pytest.approx(-1)
    assert truth_measures.Gradients.make([batch], [0 * a], [batch.truth]).cosine() == 0.0


def test_gradients_have_a_table_where_a_set_has_them(tmp_path):
    small_set(tmp_path / "a/coin_hold.npz", rollouts=8, gradients=True)
    words = ["--estimator", f"{__name__}:every_record", "--rollouts", "8", "--only", "GRPO", "--processes", "1"]
    truth.main(["--folder", str(tmp_path / "a"), *words, "--out", str(tmp_path / "out")])
    page = (tmp_path / "out/truth.md").read_text(encoding="utf-8")
    table = re.sub(" {2,}", " ", page.partition("## Policy gradient at 8")[2])
    best = f"| {__name__}:every_record | 1.000 (1.00 to 1.00) | "
    assert best in table and table.index(best) < table.index("| Config.gae() |") and "| GRPO | " in table
    rows = json.loads((tmp_path / "out/truth.json").read_text(encoding="utf-8"))["rows"]
    assert {row["estimator"]: row["gradient"]["cosine"] for row in rows}[f"{__name__}:every_record"] == 1.0
    small_set(tmp_path / "b/coin_hold.npz", rollouts=8)
    truth.main(["--folder", str(tmp_path / "b"), *words, "--out", str(tmp_path / "out")])
    assert "## Policy gradient" not in (tmp_path / "out/truth.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("path", sorted(truth_sets.FOLDER.glob("along/*.npz")), ids=lambda path: path.stem)
def test_a_committed_set_along_a_run_has_gradients(path):
    (batch,) = truth_batches.batches(truth_sets.read(path))
    length = (batch.gradient**2).sum(axis=1)
    assert len(batch) >= 1000 and len(np.unique(batch.group)) == 18 and np.isfinite(length).all()
    assert length.mean() == pytest.approx(1, abs=0.05)  # in units of their mean square


def test_the_program_takes_an_estimator_of_ones_own(tmp_path, capsys):
    small_set(tmp_path / "coin_hold.npz")
    small_set(tmp_path / "coin_choose.npz", role="choose", seed=1)
    own = f"{__name__}:every_record"
    words = ["--folder", str(tmp_path), "--estimator", own, "--rollouts", "2", "4", "--only", "GRPO"]
    words += ["--processes", "1", "--out", str(tmp_path / "out")]
    assert truth.main(words) == 0
    page = (tmp_path / "out/truth.md").read_text(encoding="utf-8")
    assert "coin_hold" in page and "coin_choose" not in page
    assert (tmp_path / "out/truth.png").stat().st_size > 10_000
    rows = json.loads((tmp_path / "out/truth.json").read_text(encoding="utf-8"))["rows"]
    r = {(row["estimator"], row["rollouts"]): row["r"] for row in rows}
    assert r[own, 2] == r[own, 4] == 1.0 and -1 < r["GRPO", 2] < 1
    assert {(name, 4) for name in truth_rows.BASELINES} <= set(r)  # whatever --only says
    table, rest = page[page.index("Correlation with") :].split("Less that of Config.gae()")
    assert capsys.readouterr().out.startswith(table)  # the other tables are for the file
    names = [line.split("|")[1].strip() for line in table.splitlines() if line.startswith("| ")][2:]
    assert names == sorted({own, *truth_rows.BASELINES}, key=lambda name: -r[name, 4])
    less = re.search(r"\| GRPO .*\| +([-+][\d.]+) \(", rest)
    assert float(less[1]) == pytest.approx(r["GRPO", 4] - r["Config.gae()", 4], abs=1e-3)
    for wrong, message in (
        ("nothing", "--estimator wants MODULE:NAME or FILE.py:NAME, got 'nothing'"),
        ("no_such_module:f", "No module named 'no_such_module'"),
        (f"{__name__}:absent", "has no attribute 'absent'"),
        (f"{__name__}:of_records", "bk.Config.gae(value=FUNCTION)"),
        (f"{__name__}:__name__", "must name a bk.Config"),
    ):
        with pytest.raises(SystemExit):
            truth.main([*words[:2], "--estimator", wrong, "--processes", "1"])
        assert message in capsys.readouterr().err
    truth.main([*words[:2], "--estimator", f"{__name__}:OWN", "--only", "GiGPO", *words[-4:]])
    page = (tmp_path / "out/truth.md").read_text(encoding="utf-8")
    page = page[page.index("## r at 4 rollouts a prompt") :]
    lines = [line for line in page.splitlines() if re.match(r"\| (GiGPO|.*:OWN) +\|", line)]
    assert lines[0].split("|", 2)[2] == lines[1].split("|", 2)[2]
    short = ["--only", "GRPO", "--rollouts", "2", "--processes", "1"]
    for wrong, message in (
        (["--estimator", f"{__name__}:wrong_length", *short], "must give [N] ="),
        (["--only", "Config.gea()"], "did you mean 'Config.gae()'?"),
        (["--sets", "paper"], "--role hold and --sets 'paper'; there are coin_choose, coin_hold."),
    ):
        with pytest.raises(SystemExit):
            truth.main([*words[:2], *wrong])
        assert message in " ".join(capsys.readouterr().err.split())


def test_a_file_of_the_current_folder_holds_ones_own(tmp_path, capsys, monkeypatch):
    small_set(tmp_path / "coin_hold.npz")
    code = "import bipace_kernels as bk\nKNN = bk.Config.gae()\ndef fails(batch):\n    1 / 0\n"
    (tmp_path / "mine.py").write_text(code)
    monkeypatch.chdir(tmp_path)
    words = ["--folder", ".", "--rollouts", "4", "--only", "GRPO", "--processes", "1", "--estimator"]
    assert truth.main([*words, "mine.py:KNN"]) == 0
    assert re.search(r"\| mine.py:KNN .*\+0\.000 \(\+0\.000 to \+0\.000\)", capsys.readouterr().out)
    with pytest.raises(SystemExit):
        truth.main([*words, "mine.py:fails"])
    error = " ".join(capsys.readouterr().err.split())
    assert re.search(r"mine.py:fails on the \d+ records of coin_hold: ZeroDivisionError.*mine.py, line 4\)", error)


def test_marked_tables_are_those_of_the_committed_results(capsys):
    assert truth.main(["--leaderboard"]) == 0
    assert capsys.readouterr().out in truth_tables.PAGES[0].read_text(encoding="utf-8")
    for path in truth_tables.PAGES:
        page = path.read_text(encoding="utf-8")
        assert "<!-- bench truth --pages: " in page and truth_tables.rewritten(page) == page


def test_a_memory_holds_the_batch_before(tmp_path):
    """The value with a memory is that of one batch over both, the earlier one first."""
    (batch,) = truth_batches.batches(small_set(tmp_path / "coin_hold.npz", seed=1))
    (batch.past,) = truth_batches.batches(small_set(tmp_path / "coin_choose.npz", seed=2))
    got = truth_batches.advantages(batch, bk.Config.gae(share="memory"), "hidden3").value
    both = [np.concatenate([getattr(batch.past, k), getattr(batch, k) + 100]) for k in ("group", "trajectory")]
    states = torch.from_numpy(np.concatenate([batch.past.fingerprint("hidden3"), batch.fingerprint("hidden3")]))
    reward, step = (np.concatenate([getattr(b, name) for b in (batch.past, batch)]) for name in ("reward", "step"))
    want = bk.advantage(*both, reward, step=step, fingerprint=states, config=bk.Config.gae()).value
    assert torch.equal(got, want[-len(batch) :])


def test_rollout_equivalents_are_read_off_the_reference_curve(tmp_path):
    path = tmp_path / "coin_hold.npz"
    small_set(path, groups=8, rollouts=16)
    of_returns = truth_rows.Estimator(truth_rows.BIPACE, lambda b: b.returns, truth_rows.SIZES)
    rows = [of_returns, truth_rows.Estimator("truth", every_record, truth_rows.SIZES)]
    found = truth_measures.measure(path, rows, truth_rows.SIZES)
    summary = truth_measures.Summary([found])
    curve = [found.measures[truth_rows.BIPACE, g]["r"].r() for g in truth_rows.SIZES]
    assert len(set(np.round(curve, 12))) == 1  # returns need no peers: one r for every G
    assert summary.equivalent([found.name], "truth", 2) == "> 16"
    assert summary.equivalent([found.name], "nowhere", 2) == "–"


def test_goals_of_alfworld_are_read_from_their_sentences():
    for task, goal in (
        ("put a clean plate in countertop.", ("plate", "countertop", "clean", 1)),
        ("heat some egg and put it in diningtable.", ("egg", "diningtable", "heat", 1)),
        ("put a hot apple in fridge.", ("apple", "fridge", "heat", 1)),
        ("find two newspaper and put them in drawer.", ("newspaper", "drawer", None, 2)),
        ("put two soapbar in garbagecan.", ("soapbar", "garbagecan", None, 2)),
        ("put some saltshaker on drawer.", ("saltshaker", "drawer", None, 1)),
        ("examine the alarmclock with the desklamp.", ("alarmclock", "desklamp", "light", 1)),
        ("look at bowl under the desklamp.", ("bowl", "desklamp", "light", 1)),
    ):
        assert tuple(goal_of(task)[name] for name in ("object", "place", "change", "count")) == goal


def test_the_searcher_does_what_its_memory_says():
    policy, rng = Searcher("put a hot apple in fridge.", noise=0.0), random.Random(0)
    go = ("go to cabinet 1", "go to fridge 1", "go to microwave 1", "look")
    memory = policy.remember(Memory(), "go to cabinet 1", "The cabinet 1 is closed.")
    assert memory.closed and policy.act(memory, (*go, "open cabinet 1"), rng) == "open cabinet 1"
    opened = "You open the cabinet 1. The cabinet 1 is open. In it, you see a apple 2, and a cup 1."
    memory = policy.remember(memory, "open cabinet 1", opened)
    assert memory.seen == {("apple 2", "cabinet 1")}
    take = "take apple 2 from cabinet 1"
    assert policy.act(memory, (*go, take), rng) == take
    memory = policy.remember(memory, take, "You pick up the apple 2 from the cabinet 1.")
    assert memory.held == "apple 2" and not memory.seen
    assert policy.act(memory, go, rng) == "go to microwave 1"
    heat = "heat apple 2 with microwave 1"
    memory = policy.remember(memory, "go to microwave 1", "The microwave 1 is closed.")
    assert policy.act(memory, (*go, heat), rng) == heat
    memory = policy.remember(memory, heat, "You heat the apple 2 using the microwave 1.")
    assert policy.act(memory, go, rng) == "go to fridge 1"
    assert hash(memory) == hash(policy.remember(memory, "look", "Nothing happens."))
    assert not policy.remember(memory, "cool apple 2 with fridge 1", "You cool the apple 2 using the fridge 1.").changed
