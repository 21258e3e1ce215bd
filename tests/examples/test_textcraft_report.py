"""What the TextCraft example says of its runs: areas, levels, intervals, differences; what its tuning chooses."""

import json

import campaign
import pytest
from settings import Settings

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
    assert report.area(run, 0.2) == pytest.approx(0.4)
    assert report.rollouts_to(run, 0.2, 0.3) == pytest.approx(320)
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
    assert "reference_minus_this" not in gae
    assert paired["share_of_rollouts"] == pytest.approx([0.5, 1 / 2 + 1 / 4])
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


def test_an_oracle_stands_beside_the_runs_of_its_seed_after_as_many_updates(tmp_path):
    runs = {("gae", 8): {s: a_run("gae", s, [0.5, 0.6]) for s in (0, 1)}}
    runs["grpo", 4] = {0: a_run("grpo", 0, [0.9, 0.9], group=4)}
    oracle = a_run("oracle", 0, [0.7]) | {"continuations": 16}
    (tmp_path / "oracle").mkdir()
    (tmp_path / "oracle" / "oracle-g8-seed0.json").write_text(json.dumps(oracle))
    lines = report.oracle_table(tmp_path, runs).strip().splitlines()[2:]
    assert [line.split(" | ")[-1] for line in lines] == ["70.0 |", "50.0 |"]
    assert lines[0].startswith("| measured advantages, 16 continuations | 0 |") and "Config.gae()" in lines[1]
    assert report.oracle_table(tmp_path / "nothing", runs) == ""


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
