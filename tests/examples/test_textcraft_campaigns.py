"""TextCraft's campaigns: what is said of runs, what tuning chooses, an endpoint that only validation tasks decide."""

import json
from pathlib import Path

import baselines
import campaign
import numpy as np
import pytest
from batches import make_batch
from settings import Settings

import bipace_kernels as bk

pytest.importorskip("typer", reason="the program of the comparison needs typer, which is not installed")
import comparison
import comparison_report
from train_knowledge import COMPARISON

report = pytest.importorskip("report", reason="the report draws with matplotlib", exc_type=ImportError)


def a_run(method, seed, tests, group=8):
    settings = Settings().changed(updates=10 * len(tests), group=group).as_json()
    updates = [{"update": i + 1, "train": 0.5} for i in range(10 * len(tests))]
    checks = [{"update": 10 * (i + 1), "test": value} for i, value in enumerate(tests)]
    run = {"method": method, "seed": seed, "settings": settings, "updates": updates, "checks": checks}
    return {**run, "seconds": {"rollouts": 1.0, "scoring": 1.0, "checks": 1.0, "cpu": 60.0, "wall": 10.0}}


def finish(run, share):
    """Its file, as if this share of the train tasks had been solved, but for the first updates."""
    run.folder.mkdir(parents=True, exist_ok=True)
    updates = [{"train": 1.0}] * 5 + [{"train": share}] * 15
    run.write({"method": run.method, "settings": run.settings.as_json(), "checks": [], "updates": updates})


def test_areas_levels_and_intervals():
    run = a_run("gae", 0, [0.4, 0.6])
    assert report.area(run, 0.2) == pytest.approx(0.4) and report.rollouts_to(run, 0.2, 0.3) == pytest.approx(320)
    assert report.rollouts_to(run, 0.2, 0.5) == pytest.approx(960)
    assert report.rollouts_to(run, 0.2, 0.2) == 0 and report.rollouts_to(run, 0.2, 0.7) is None
    assert report.interval([1.0]) == (1.0, None)
    mean, half = report.interval([1.0, 2.0, 3.0])
    assert mean == 2.0 and half == pytest.approx(4.303 / 3**0.5)


def test_differences_are_paired_by_seed_and_every_row_says_its_seeds(tmp_path):
    runs = [a_run("grpo", s, [0.3, 0.4 + 0.1 * s]) for s in range(3)]
    runs += [a_run("gae", s, [0.5, 0.5 + 0.1 * s]) for s in (1, 2)]
    for run in [*runs, a_run("grpo", 0, [0.3, 0.3], group=4)]:
        (tmp_path / f"{run['method']}-g{run['settings']['group']}-seed{run['seed']}.json").write_text(json.dumps(run))
    (tmp_path / "start").mkdir()
    (tmp_path / "start" / "warm_start.json").write_text(json.dumps({"test": 0.2}))
    names = [path.name for path in report.write_report(tmp_path, tmp_path / "start")]
    assert names == ["results.md", "results.json", "success.png", "fewer.png"]
    grpo, gae, fewer = json.loads((tmp_path / "results.json").read_text())
    assert (grpo["seeds"], gae["seeds"], fewer["group"]) == ([0, 1, 2], [1, 2], 4)
    paired = grpo["reference_minus_this"]
    assert paired["seeds"] == [1, 2] and paired["final"] == pytest.approx([0.1, 0.1])
    assert "reference_minus_this" not in gae and paired["share_of_rollouts"] == pytest.approx([0.5, 1 / 2 + 1 / 4])
    text = (tmp_path / "results.md").read_text()
    assert "+10.0 ± 0.0" in text and "95 % interval" in text and "The warm start solves 20.0%." in text


@pytest.mark.parametrize(("best", "taken"), [(0.615, 0.5), (0.63, 0.8)])
def test_tuning_from_three_rates_to_lower_ones_to_the_method_s_own_number(tmp_path, monkeypatch, best, taken):
    """The rate that solved most, halved until a lower one is no better; another λ must beat the default by a margin."""
    settings, tuned, begun = Settings(), tmp_path / "tuned.json", []
    shares = {3e-4: 0.5, 6e-4: 0.4, 1.2e-3: 0.3, 1.5e-4: 0.6, 7.5e-5: 0.6}

    def work_through(runs, *_):
        for run in (run for run in runs if not run.done):
            rate, own = run.settings.learning_rate, run.settings.gae_lambda
            assert run.seed not in campaign.SEEDS
            campaign.choose("gae", settings, tmp_path, tuned)
            assert tuned.exists() == (len(begun) >= 3)  # not before all are there
            assert not tuned.exists() or "gae_lambda" not in json.loads(tuned.read_text())["gae"]
            begun.append((rate, own))
            finish(run, {0.5: shares[rate], 0.3: 0.4, 0.8: best}[own])
        return []

    monkeypatch.setattr(campaign, "work_through", work_through)
    monkeypatch.setattr(campaign.signal, "signal", lambda *_: None)
    given = ([], [], settings, tmp_path, tuned, ["gae"], campaign.final, 1, print)
    campaign.complete(*given, tune_only=True)
    assert begun == [(rate, 0.5) for rate in shares] + [(1.5e-4, 0.3), (1.5e-4, 0.8)]
    choice = json.loads(tuned.read_text())["gae"]
    assert (choice["learning_rate"], choice["gae_lambda"]) == (1.5e-4, taken)
    table = report.tuning_table(tmp_path / "tuning")
    assert "Config.gae(), first form | 60.0 | 60.0 | 50.0 | 40.0 | 30.0 |" in table
    assert "by gae_lambda | 0.3 | 0.5 | 0.8 |" in table and f"| 40.0 | 60.0 | {100 * best:.1f} |" in table
    assert {(r.method, r.settings.gae_lambda) for r in campaign.final(settings, tmp_path, tuned)} == {("gae", taken)}
    before = tuned.read_text()
    for run in campaign.tuning("gae", settings, tmp_path):
        run.path.unlink()
    campaign.choose("gae", settings, tmp_path, tuned)
    assert tuned.read_text() == before  # what stands is kept
    tuned.write_text(json.dumps({"gae": choice | {"learning_rate": 3e-4, "scores": {"0.0003": 0.5}}}))
    campaign.choose("gae", settings, tmp_path, tuned)
    found = json.loads(tuned.read_text())["gae"]
    assert found == {"learning_rate": 1.5e-4, "scores": {"0.00015": 0.6, "0.0003": 0.5}}  # λ was of the former rate
    assert campaign.tuning_own("grpo", 6e-4, settings, tmp_path) == {}


def test_the_queue_runs_what_is_missing_and_names_what_failed(tmp_path):
    """A program that writes a run's file, or fails for one method; finished ones are not started."""
    program = tmp_path / "program.py"
    program.write_text(
        "import json, sys, pathlib\n"
        "a = dict(zip(sys.argv[2::2], sys.argv[3::2]))\n"
        "sets = dict(v.split('=') for n, v in zip(sys.argv, sys.argv[1:]) if n == '--set')\n"
        "if a['--method'] == 'gigpo': sys.exit(3)\n"
        "settings = {**json.loads(a['--base']), 'learning_rate': float(sets['learning_rate'])}\n"
        "path = pathlib.Path(a['--out'], a['--method'] + '-g8-seed' + a['--seed'] + '.json')\n"
        "path.write_text(json.dumps({'settings': settings}))\n"
    )
    runs = [campaign.Run(method, 0, Settings(), tmp_path) for method in ("grpo", "gigpo", "gae")]
    said = []
    base = ["--base", json.dumps(Settings().as_json())]
    failed = campaign.work_through(runs, [str(program)], base, 2, said.append)
    assert [run.method for run in failed] == ["gigpo"] and [run.done for run in runs] == [True, False, True]
    assert any("gigpo" in text and "FAILED" in text for text in said)
    said.clear()
    campaign.work_through(runs, [str(program)], base, 1, said.append)
    assert {text.split()[0].rstrip(":") for text in said} == {"gigpo-g8-seed0"}


RESULTS = Path(__file__).resolve().parents[2] / "examples/textcraft/results"


def test_means_by_step_are_gae_over_clusters_of_equal_steps():
    """What `step-means` trains with is the package's GAE over the value "step"."""
    batch = make_batch(0)
    group, trajectory, step, reward = batch.group, batch.trajectory, batch.step, batch.rewards
    returns = baselines.gae(reward, np.zeros(len(reward)), trajectory, gamma=0.9, gae_lambda=1.0)
    value = baselines.step_means(returns, group, step)
    for gae_lambda in (0.0, 0.7, 1.0):
        config = bk.Config.gae("step", step_norm="none", gamma=0.9, gae_lambda=gae_lambda)
        wanted = bk.advantage(group, trajectory, reward, step=step, config=config).advantage.numpy()
        found = baselines.gae(reward, value, trajectory, gamma=0.9, gae_lambda=gae_lambda)
        np.testing.assert_allclose(found, wanted, atol=2e-6)


def test_every_method_has_the_same_number_of_tuning_runs_whatever_rate_is_best(tmp_path):
    for rate in comparison.RATES:
        for method in COMPARISON.methods:
            asked = comparison.choices(method, rate, COMPARISON.defaults, tmp_path)
            assert len(asked) == 5
            runs = [run for _, of_setting in asked.values() for run in of_setting]
            assert len({run.path for run in runs}) == 10 and {run.seed for run in runs} == {100, 101}
            assert len({json.dumps(run.settings.as_json()) for run in runs}) == 5
            assert all(run.seed not in COMPARISON.primary_seeds for run in runs)


def rows(validation, test, *, sharp=0.0):
    """Success at temperature 1, and at the others less by `sharp`."""
    return [
        {"tasks": tasks, "temperature": t, "success": [value if t == 1.0 else value - sharp], "entropy": [0.1]}
        for tasks, value in (("validation", validation), ("test", test), ("new_goals", test / 2))
        for t in comparison.TEMPERATURES
    ]


def write(run, measured):
    run.folder.mkdir(parents=True, exist_ok=True)
    found = {"method": run.method, "seed": run.seed, "settings": run.settings.as_json()}
    run.write(found | {"measured": measured, "checks": [], "updates": []})


def test_tuning_takes_the_best_of_all_settings_by_validation_tasks(tmp_path):
    missing, chosen = comparison.decide("value-head", COMPARISON.defaults, tmp_path)
    assert len(missing) == 6 and chosen is None
    for run in missing:
        write(run, rows((0.3, 0.5, 0.4)[comparison.RATES.index(run.settings.learning_rate)], 1.0))
    missing, chosen = comparison.decide("value-head", COMPARISON.defaults, tmp_path)
    assert len(missing) == 4 and {run.settings.learning_rate for run in missing} == {comparison.RATES[1]}
    assert chosen is None
    for run in missing:
        # One seed alone is better at 0.3; a setting is judged by its mean over both.
        lucky = 0.6 if (run.settings.gae_lambda, run.seed) == (0.8, 100) else 0.1
        write(run, rows(0.55 if run.settings.gae_lambda == 0.95 else lucky, 0.0))
    missing, chosen = comparison.decide("value-head", COMPARISON.defaults, tmp_path)
    assert missing == [] and chosen is not None
    assert (chosen["learning_rate"], chosen["gae_lambda"]) == (comparison.RATES[1], 0.95) and len(chosen["scores"]) == 5


def test_the_rival_and_the_temperatures_are_those_of_the_validation_tasks(tmp_path):
    """step-means is better on the test tasks, value-head on the validation tasks: value-head is the rival.  Nothing is
    compared before the last of their runs is finished."""
    for seed in range(8):
        assert "primary" not in comparison.summary(COMPARISON, tmp_path)
        for method, validation, test in (("gae", 0.5, 0.6), ("value-head", 0.45, 0.4), ("step-means", 0.4, 0.9)):
            sharp = -0.2 if method == "gae" else 0.2
            run = campaign.Run(method, seed, Settings(), tmp_path)
            write(run, rows(validation + 0.01 * seed, test + 0.01 * seed, sharp=sharp))
    found = comparison.summary(COMPARISON, tmp_path)
    assert found["methods"]["gae"]["temperature"] == 0.3 and found["methods"]["value-head"]["temperature"] == 1.0
    primary = found["primary"]
    assert primary["rival"] == "value-head" and primary["lead"] == pytest.approx(0.4)
    low_noise = 2.145 * (2 * (0.01**2 * 6) / 8) ** 0.5  # Welch's interval for equal variances: 14 degrees of freedom
    assert primary["half"] == pytest.approx(low_noise, rel=1e-3)
    of = {(row["method"], row["tasks"]) for row in found["exploratory"]}
    assert of == {("step-means", "test"), ("step-means", "new_goals"), ("value-head", "new_goals")}
    page = next(path.read_text() for path in comparison_report.write(COMPARISON, tmp_path) if path.suffix == ".md")
    assert (
        "24 of 42 final runs" in page and "minus PPO's value head, test tasks, each at its temperature: +40.0 ±" in page
    )
    assert "| Config.gae() | 8 | 63.5 ± 2.0 | **83.5 ± 2.0** |" in page
    assert comparison.holm([0.01, 0.04, 0.03, 0.005]) == pytest.approx([0.03, 0.06, 0.06, 0.02])
    assert comparison.holm([0.9, 0.8]) == [1.0, 1.0]  # Holm's correction


def test_finished_runs_that_are_older_than_a_setting_count_as_finished():
    """Their files do not name it: they had its default."""
    path = RESULTS / "gae-g8-seed0.json"
    before = json.loads(path.read_text())["settings"]
    assert "shrinkage" not in before
    run = campaign.Run("gae", 0, Settings().changed(**before), RESULTS)
    assert run.done
    with pytest.raises(ValueError, match=r"shrinkage=3\.0"):
        _ = campaign.Run("gae", 0, run.settings.changed(shrinkage=1.0), RESULTS).done
