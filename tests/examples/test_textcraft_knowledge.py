"""TextCraft's second campaign: equal tuning for every method, an endpoint that only validation tasks decide, rivals by
hand."""

import json
from pathlib import Path

import baselines
import campaign
import numpy as np
import pytest
from settings import Settings

import bipace_kernels as bk

pytest.importorskip("typer", reason="the program of the comparison needs typer, which is not installed")
import comparison
import comparison_report
from train_knowledge import COMPARISON

RESULTS = Path(__file__).resolve().parents[2] / "examples/textcraft/results"


def batch(seed=0):
    """Rows of 3 prompts x 4 rollouts of different lengths, the last one rewarded in half of them."""
    rng = np.random.default_rng(seed)
    lengths = rng.integers(1, 6, 12)
    trajectory = np.repeat(np.arange(12), lengths)
    step = np.concatenate([np.arange(n) for n in lengths])
    reward = np.zeros(len(step))
    reward[np.cumsum(lengths)[::2] - 1] = 1.0
    return trajectory // 4, trajectory, step, reward


def test_means_by_step_are_gae_over_clusters_of_equal_steps():
    """The package's own GAE over clusters, told that the step is the observation, gives the same advantages."""
    group, trajectory, step, reward = batch()
    returns = baselines.gae(reward, np.zeros(len(reward)), trajectory, gamma=0.9, gae_lambda=1.0)
    value = baselines.step_means(returns, group, step)
    for gae_lambda in (0.0, 0.7, 1.0):
        config = bk.Config.gae("cluster", step_norm="none", gamma=0.9, gae_lambda=gae_lambda)
        wanted = bk.advantage(group, trajectory, reward, step=step, observation=step, config=config).advantage.numpy()
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
