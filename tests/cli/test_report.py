"""`bipace report`: its numbers are those of the package's functions, its files come whole, its figures are drawn."""

import json
import re
from types import SimpleNamespace
from unittest.mock import Mock

import numpy as np
import pytest
from cli_runs import GOLDEN, direct, fail, observations, record, run, unpack, write

import bipace_kernels as bk
from bipace_kernels.cli import figures, report, rollouts, states
from bipace_kernels.cli.outcomes import Outcome
from bipace_kernels.support import files

PNG = b"\x89PNG\r\n\x1a\n"
CURVE = "0.1,0.25"


@pytest.fixture(scope="module")
def made(games, tmp_path_factory):
    """A report's folder and what the terminal showed."""
    folder = tmp_path_factory.mktemp("report") / "out"
    result = run("report", games, "--out", folder, "--epsilons", CURVE)
    assert result.exit_code == 0, result.output
    return folder, result.output


def test_files(made):
    folder, shown = made
    figures = {"games_steps.png", "games_epsilon.png", "games_embedders.png"}
    names = {"report.md", "report.json", *figures}
    assert {path.name for path in folder.iterdir()} == names
    text = (folder / "report.md").read_text()
    for name in names - {"report.md", "report.json"}:
        assert (folder / name).read_bytes().startswith(PNG) and f"]({name})" in text
    assert f"{folder} has more tables" in shown and shown.count("┏") == 1


def test_the_end_is_a_verdict_and_what_to_open_also_where_there_is_nothing_to_compare(made, tmp_path, undrawn):
    (section,) = json.loads((made[0] / "report.json").read_text())["sections"]
    r2 = [entry["value_r2"]["r2"] for entry in section["partitions"].values()]
    r2 += [entry["r2"] for entry in section["values"].values()]
    *_, verdict, last = made[1].strip().splitlines()
    assert verdict.startswith("games.jsonl: ") and f"best (value R² {max(r2):.3f} ± " in verdict
    constant = f"{section['constant']['r2']:.3f}".replace("-", "−")
    assert f"; one value for the whole batch has {constant});" in verdict
    assert last.endswith(f"Open {made[0] / 'report.md'}.")
    rows = [record(rollout, step, f"s{step}", "go") for rollout in range(2) for step in range(3)]
    done = run("report", write(tmp_path / "a.jsonl", rows), "--out", tmp_path / "out", "--no-similar")
    assert done.exit_code == 0, done.output
    assert "a.jsonl: returns do not differ within prompt groups, so there is no credit to divide." in done.output
    metrics = {"singleton_row_fraction": 0.5}
    exact = SimpleNamespace(label="exact", value_r2=bk.ValueR2(0.2, 1.0, 0.1), metrics=metrics)
    section = report.Section("a", "a", None, [exact], constant=bk.ValueR2(0.5, 1.0, 0.01))
    best = "a: one value for the whole batch predicts the returns of other rollouts best (value R² 0.500 ± 0.010; "
    assert report._verdict(section).startswith(best + "exact has 0.200); ")


def test_json_is_a_direct_computation(made, games):
    content = json.loads((made[0] / "report.json").read_text())
    (section,) = content["sections"]
    seen = observations(games)
    assert section["records"] == len(seen) and section["groups"] == 4 and section["trajectories"] == 32
    records = rollouts.read([str(games)])
    histories = states.texts(records, 2)
    ngrams = {"observation": bk.ngram_fingerprint(seen), "history": bk.ngram_fingerprint(histories)}
    q_style = {"estimator": "q_style"}
    expected = {
        "exact": direct(games, bk.Config(partition="exact", **q_style), observation=seen),
        "history": direct(games, bk.Config(partition="history", **q_style), observation=seen),
        "hgpo": direct(games, bk.Config(partition="history", estimator="hgpo"), observation=seen),
        "similar": direct(games, bk.Config(partition="similar", **q_style), observation=seen),
        "cosine_observation": direct(games, bk.Config.bipace(0.25), fingerprint=ngrams["observation"]),
        "cosine_history": direct(games, bk.Config.bipace(0.25), fingerprint=ngrams["history"]),
    }
    assert list(section["partitions"]) == list(expected)
    for name, result in expected.items():
        check(section["partitions"][name], result)
    for name, curve in section["epsilon_curve"].items():
        assert [point["epsilon"] for point in curve] == [0.1, 0.25]
        for point in curve:
            check(point, direct(games, bk.Config.bipace(point["epsilon"]), fingerprint=ngrams[name]))


@pytest.mark.usefixtures("undrawn")
@pytest.mark.parametrize("rule", ["once", "count"])
def test_the_curve_of_records_that_do_not_all_take_part(tmp_path, rule):
    """Copies of steps and rollouts set aside: one sweep gives what a clustering of the rest gives at each ε."""
    rng = np.random.default_rng(0)
    words = ["a long hall", "a long hall!", "a short hall", "a garden", "the garden"]
    rows = [
        record(r, s, words[rng.integers(5)], f"go {rng.integers(2)}", float("nan") if r == 2 and s else float(r % 2))
        for r in range(6)
        for s in (0, 1, 2, 3)
    ]
    rows += [dict(rows[i]) for i in (1, 6, 8, 20)]  # copies of a step, one of a rollout set aside
    path = write(tmp_path / "a.jsonl", rows)
    options = ["--epsilons", "0,0.1,0.3", "--duplicates", rule, "--on-invalid", "singleton", "--no-similar"]
    assert run("report", path, "--out", tmp_path / "out", *options).exit_code == 0
    (section,) = json.loads((tmp_path / "out" / "report.json").read_text())["sections"]
    fields = {"duplicates": rule, "on_invalid": "singleton"}
    records = rollouts.read([str(path)], allow_nonfinite=True)
    for name, depth in (("observation", 0), ("history", 2)):
        fingerprint = bk.embedders.Ngram().embed(states.texts(records, depth))
        for point in section["epsilon_curve"][name]:
            check(point, direct(path, bk.Config.bipace(point["epsilon"], **fields), fingerprint=fingerprint))


def check(entry, result):
    assert entry["metrics"] == {name.removeprefix("bipace/"): value for name, value in result.metrics().items()}
    r2 = result.value_r2()
    assert entry["value_r2"] == {"r2": r2.r2, "stderr": r2.stderr, "coverage": r2.coverage}


def test_markdown_and_terminal_hold_the_numbers(made):
    folder, shown = made
    (section,) = json.loads((folder / "report.json").read_text())["sections"]
    text = (folder / "report.md").read_text()
    for entry in section["partitions"].values():
        (row,) = [line for line in text.splitlines() if line.startswith(f"| {entry['label']} |")]
        metrics = entry["metrics"]
        assert f"| {metrics['singleton_cluster_fraction']:.1%} |" in row and f"| {metrics['pairs']:,.0f} |" in row
        r2 = f"{entry['value_r2']['r2']:.3f}".replace("-", "−")
        assert f"| {r2} ± {entry['value_r2']['stderr']:.3f} (" in row
        (line,) = [line for line in shown.splitlines() if line.startswith(f"│ {entry['label']} ")]
        assert f"{r2} ±" in line and f" {metrics['mean_cluster_size']:.1f} " in line
        for name in ("singleton_row_fraction", "singleton_cluster_fraction"):
            assert f" {metrics[name]:.1%} " in line
    constant = f"{section['constant']['r2']:.3f}".replace("-", "−")
    assert re.search(f"one value for the whole batch [ │]+{constant}", shown)
    assert max(len(line) for line in shown.splitlines() if line[:1] in "┃│") <= 100


def test_the_same_run_gives_the_same_bytes(made, games, tmp_path):
    again = tmp_path / "again"
    assert run("report", games, "--out", again, "--epsilons", CURVE).exit_code == 0
    for path in made[0].iterdir():
        assert path.read_bytes() == (again / path.name).read_bytes(), path.name


@pytest.mark.usefixtures("undrawn")
def test_sections_and_merged_files(games, tmp_path):
    (tmp_path / "a").mkdir()
    other = tmp_path / "a" / "games.jsonl"  # the same name in another folder
    other.write_bytes(games.read_bytes())
    args = ["report", games, other, "--epsilons", "0.25", "--no-similar"]
    assert run(*args, "--out", tmp_path / "apart").exit_code == 0
    apart = json.loads((tmp_path / "apart" / "report.json").read_text())
    assert [section["name"] for section in apart["sections"]] == [str(games), str(other)]
    assert "similar" not in apart["sections"][0]["partitions"]
    assert (tmp_path / "apart" / "games_2_steps.png").exists()
    one, two = apart["sections"]
    assert one["partitions"] == two["partitions"]
    assert run(*args, "--out", tmp_path / "merged", "--merge-files").exit_code == 0
    (merged,) = json.loads((tmp_path / "merged" / "report.json").read_text())["sections"]
    assert merged["groups"] == 4 and merged["trajectories"] == 64


@pytest.mark.usefixtures("undrawn")
def test_without_actions_or_outcomes(tmp_path):
    """No action, no success column, one step per rollout, all returns equal: tables and figures still come."""
    rows = [{k: v for k, v in record(i, 0, f"o{i % 3}$", "x").items() if k != "action"} for i in range(5)]
    out = tmp_path / "out"
    assert run("report", write(tmp_path / "a.jsonl", rows), "--out", out, "--html").exit_code == 0
    page = unpack((out / "inspector.html").read_text(encoding="utf-8"))
    assert [row["key"] for row in page["estimators"]] == ["grpo", "gigpo", "hgpo", "bigpo", "gae"]
    assert page["has_actions"] is False
    (section,) = json.loads((out / "report.json").read_text())["sections"]
    assert section["partitions"]["exact"]["value_r2"] == {"r2": None, "stderr": None, "coverage": 1 - 1 / 5}
    (row,) = [line for line in (out / "report.md").read_text().splitlines() if line.startswith("| exact")]
    assert row.endswith("| – |") and row.count("–") == 4
    assert (out / "a_steps.png").read_bytes().startswith(PNG)


def test_similar_runs_by_itself_only_where_it_is_cheap():
    records = rollouts.Rollouts(observation=["abc", "abc", "de"])
    options = SimpleNamespace(similar=None)
    assert report._runs_similar(records, options, cheap=5) and not report._runs_similar(records, options, cheap=4)
    assert report._runs_similar(records, SimpleNamespace(similar=True))


BAD = {
    "similarity of nothing": (["--no-similar", "--similarity", "0.9"], "--similarity has no effect with --no-similar"),
    "epsilons": (["--epsilons", "0.1,x"], "--epsilons must be numbers"),
    "epsilon": (["--epsilon", "5"], "--epsilon"),
    "action mode": (["--action-mode", "x"], "--action-mode must be one of"),
    "history": (["--history-length", "0"], "--history-length"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_options(tmp_path, name):
    path = write(tmp_path / "a.jsonl", GOLDEN)
    options, part = BAD[name]
    assert part in fail("report", path, "--out", tmp_path / "out", *options)
    assert {p.name for p in tmp_path.iterdir()} == {"a.jsonl"}


@pytest.mark.parametrize("exists", [False, True])
@pytest.mark.usefixtures("undrawn")
def test_a_failure_in_the_middle(tmp_path, monkeypatch, exists):
    path, out = write(tmp_path / "a.jsonl", GOLDEN), tmp_path / "out"
    if exists:
        out.mkdir()
        (out / "report.md").write_text("yesterday")
    monkeypatch.setattr(figures, "embedders", Mock(side_effect=OSError(28, "No space left on device")))
    assert "No space left on device" in fail("report", path, "--out", out, "--epsilons", "0.25")
    assert {p.name for p in tmp_path.iterdir()} == ({"a.jsonl", "out"} if exists else {"a.jsonl"})
    if exists:
        assert {p.name: p.read_text() for p in out.iterdir()} == {"report.md": "yesterday"}


def test_other_files_of_the_folder_stay(tmp_path):
    out = tmp_path / "out"
    out.mkdir()
    (out / "notes.txt").write_text("mine")
    with files.atomic_folder(out) as folder:
        (folder / "report.md").write_text("new")
    assert {p.name: p.read_text() for p in out.iterdir()} == {"notes.txt": "mine", "report.md": "new"}
    for path in (out / "notes.txt", ""):
        assert "is not a folder" in fail("report", write(tmp_path / "a.jsonl", GOLDEN), "--out", path)


def test_figures_of_extremes(tmp_path):
    shares = dict.fromkeys(("pace_row_fraction", "leave_one_out_row_fraction", "singleton_row_fraction"), 0.0)
    sizes = "mean_cluster_size", "median_cluster_size"
    outcomes = [
        Outcome("key", f"p{i}", {"epsilon": 0.1},
                {**shares, "singleton_cluster_fraction": i % 2, **dict.fromkeys(sizes, size)},
                bk.ValueR2((None, -0.2)[i % 2], 0.0, 0.08 if i == 3 else None))
        for i, size in enumerate([1.0, 1e4, 1e8, 0.0])
    ]  # fmt: skip
    figures.step_shares(tmp_path / "a.png", "$x_1$ and _y_^z", outcomes)
    figures.epsilon_curve(tmp_path / "b.png", "t", {"c": outcomes[:1]}, outcomes[1:2], 0.1)
    figures.embedders(tmp_path / "c.png", "$a_b$", outcomes, (4, 8))
    for name in "abc":
        assert (tmp_path / f"{name}.png").read_bytes().startswith(PNG)


def test_names_are_no_markup(tmp_path, undrawn):
    path = write(tmp_path / "<script>x<!-- [a](b) `c` :smile:.jsonl", GOLDEN)
    shown = run("report", path, "--out", tmp_path / "out", "--epsilons", "0.25").output
    text = (tmp_path / "out/report.md").read_text()
    assert ":smile:" in shown
    assert "\n## &lt;script&gt;x&lt;!-- \\[a\\](b) \\`c\\` :smile:.jsonl\n" in text and "<" not in text
