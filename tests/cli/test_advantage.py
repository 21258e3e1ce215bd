"""`bipace advantage`: a table worked by hand, every option, all formats, and no partial files left."""

import csv
import dataclasses
import gzip
import json
import os
import signal
import subprocess
import sys
import time
from unittest.mock import Mock

import numpy as np
import pyarrow.csv
import pyarrow.parquet as pq
import pytest
import typer
from bipace_cli.commands import app
from cli_runs import GOLDEN, PRESETS, direct, fail, observations, record, run, write
from marks import slow
from paths import ROOT
from typer.testing import CliRunner

import bipace_kernels as bk
from bipace_kernels.cli import advantage, output, rollouts, states
from bipace_kernels.cli._console import number
from bipace_kernels.cli.outcomes import format_r2
from bipace_kernels.diagnostics.value_r2 import ValueR2
from bipace_kernels.settings import settings_of
from bipace_kernels.support import files
from bipace_kernels.support.errors import InputError, Named, Rows

COLUMNS = [
    "file", "line", "task_id", "rollout", "step", "cluster", "branch", "return", "episode_advantage", "step_advantage",
    "advantage",
]  # fmt: skip
# γ = 0.5: returns 0.5 1 | 0 0 | 0 0.  Returns of the trajectories 1 0 0: μ = 1/3, σ = √(1/3).
HIGH, LOW = (1 - 1 / 3) / (3**-0.5 + 1e-6), (-1 / 3) / (3**-0.5 + 1e-6)


@pytest.fixture
def golden(tmp_path):
    return write(tmp_path / "rollouts.jsonl", GOLDEN)


@pytest.fixture
def out(tmp_path):
    return tmp_path / "out.parquet"


def table(path):
    return dict(pq.read_table(path).to_pydict())


def made(path, out, *options):
    """The table of a run that must end well."""
    result = run("advantage", path, "--out", out, *options)
    assert result.exit_code == 0, result.output
    return table(out)


def config_of(out):
    return json.loads(pq.read_schema(out).metadata[b"bipace"])["config"]


def test_golden_table(golden, out):
    result = run("advantage", golden, "--out", out, "--partition", "exact", "--gamma", 0.5)
    assert result.exit_code == 0, result.output
    read = table(out)
    assert list(read) == COLUMNS
    assert read["file"] == [str(golden)] * 6 and read["line"] == [1, 2, 3, 4, 5, 6]
    assert read["task_id"] == ["key"] * 6 and read["rollout"] == [0, 0, 1, 1, 2, 2] and read["step"] == [0, 1] * 3
    assert read["cluster"] == [0, 1, 0, 2, 0, 1]
    # room: "go" twice (mean 1/4), "wait" once: leave-one-out 0 − 1/4; mean 1/6.  hall: "take" twice, mean of both.
    assert read["branch"] == ["pace", "pace", "pace", "singleton", "leave_one_out", "pace"]
    assert read["return"] == [0.5, 1, 0, 0, 0, 0]
    np.testing.assert_allclose(read["step_advantage"], [1 / 12, 0, 1 / 12, 0, -0.25, 0], atol=1e-7)
    np.testing.assert_allclose(read["episode_advantage"], [HIGH, HIGH, LOW, LOW, LOW, LOW], rtol=1e-6)
    total = np.add(read["episode_advantage"], read["step_advantage"])
    np.testing.assert_allclose(read["advantage"], total, rtol=1e-6)
    for text in ("records", "singleton clusters", "33.3%", "66.7%", "16.7%", "mean |A|", "value R²"):
        assert text in result.output


def test_metadata_tells_how_the_table_was_made(golden, out):
    run("advantage", golden, "--out", out, "--epsilon", 0.3)
    meta = json.loads(pq.read_schema(out).metadata[b"bipace"])
    assert meta["version"] == bk.__version__ and meta["config"] == dataclasses.asdict(bk.Config.bipace(0.3))
    assert meta["inputs"][0]["path"] == str(golden) and meta["inputs"][0]["records"] == 6
    assert len(meta["inputs"][0]["sha256"]) == 64
    assert meta["state"] == "observation" and meta["fingerprint"] == "ngram"


@pytest.mark.parametrize("suffix", [".parquet", ".csv", ".jsonl", ".jsonl.gz"])
def test_formats_hold_the_same_table_and_the_same_run_gives_the_same_bytes(golden, tmp_path, suffix):
    base, out = tmp_path / "base.parquet", tmp_path / f"out{suffix}"
    for path in (base, out):
        assert run("advantage", golden, "--out", path).exit_code == 0
    if suffix == ".csv":
        read = pyarrow.csv.read_csv(out).to_pydict()
    elif suffix != ".parquet":
        data = gzip.decompress(out.read_bytes()) if suffix.endswith(".gz") else out.read_bytes()
        rows = [json.loads(line) for line in data.splitlines()]
        read = {name: [row[name] for row in rows] for name in rows[0]}
    else:
        read = table(out)
    expected = table(base)
    assert list(read) == list(expected)
    for name in COLUMNS:
        if name in ("return", "episode_advantage", "step_advantage", "advantage"):
            assert np.array_equal(np.float32(read[name]), np.float32(expected[name])), name  # same float32, bit for bit
        else:
            assert read[name] == expected[name], name
    before = out.read_bytes()
    time.sleep(0.01)
    assert run("advantage", golden, "--out", out).exit_code == 0 and out.read_bytes() == before


@pytest.mark.parametrize("preset", advantage.PRESETS)
def test_presets(games, out, preset):
    read, config = made(games, out, "--preset", preset), PRESETS[preset]
    seen = observations(games)
    expected = direct(games, config, observation=seen, fingerprint=bk.ngram_fingerprint(seen))
    assert read["cluster"] == expected.cluster.tolist()
    assert read["branch"] == [advantage.BRANCHES[branch] for branch in expected.branch.tolist()]
    for name, column in (("advantage", "advantage"), ("returns", "return"), ("episode_advantage", "episode_advantage")):
        assert np.array_equal(np.float32(read[column]), getattr(expected, name).numpy())


OPTIONS_TOGETHER = [  # each has an effect together with the others
    {
        "partition": "similar", "estimator": "mean", "gamma": 0.5, "step_weight": 0.3, "similarity": 0.7, "delta": 1e-3,
        "step_norm": "std", "episode_norm": "none", "episode_scope": "step", "lone_trajectory": "raw",
        "longest_text": 50, "duplicates": "count", "on_invalid": "singleton",
    },
    {"partition": "history", "estimator": "hgpo", "history_length": 3, "length_weight_alpha": 0.5, "base_group": True},
    {"partition": "cosine", "epsilon": 0.4},
    {
        "partition": "none", "estimator": "gae", "value": "kernel", "share": "group", "kernel_width": 0.5,
        "kernel_time": 2.0, "kernel_noise": 1.0, "gae_lambda": 0.3, "episode_weight": 0.5,
    },
    {"partition": "none", "estimator": "gae", "share": "batch", "kernel_same": 0.5, "action_noise": 1.0,
     "luck_noise": 0.1, "kernel_directions": 3, "kernel_inside": 0.5},
    {"partition": "exact", "estimator": "gae", "value": "cluster", "shrinkage": 2.0},
]  # fmt: skip
WITHOUT_EFFECT = {
    "epsilon": (["--partition", "exact", "--epsilon", 0.3], "partition exact", "choose --partition cosine"),
    "history_length": (["--history-length", 2], "partition cosine", "choose --partition history"),
    "action_mode": (["--preset", "grpo", "--action-mode", "first_n"], "partition none", "leave it out"),
    "length_weight_alpha": (["--length-weight-alpha", 1], "estimator q_style", "choose --preset hgpo"),
    "no_base_group": (["--preset", "gigpo", "--no-base-group"], "estimator mean", "choose --preset hgpo"),
    "step_weight": (["--preset", "grpo", "--step-weight", 1], "estimator none", "choose --preset bipace"),
    "value": (["--value", "group"], "estimator q_style", "choose --preset gae"),
    "shrinkage": (["--preset", "gae", "--shrinkage", 1], "estimator gae", "choose --preset gae --value step"),
    "kernel_noise": (["--preset", "gae", "--value", "group", "--kernel-noise", 1], "estimator gae", "--preset gae"),
    "episode_weight": (["--preset", "hgpo", "--episode-weight", 1], "estimator hgpo", "choose --preset bipace"),
    "delta": (["--episode-norm", "none", "--delta", 1e-4], "estimator q_style", "choose --episode-norm std"),
}


@pytest.mark.parametrize("name", WITHOUT_EFFECT)
def test_an_option_without_effect_is_refused(golden, tmp_path, name):
    options, where, cure = WITHOUT_EFFECT[name]
    message = fail("advantage", golden, "--out", tmp_path / "out.parquet", *options)
    flag = "" if name == "no_base_group" else f"--{name.strip().replace('_', '-')} "
    assert message.startswith(f"error: {flag or '--base-group '}has no effect with")
    assert where in message and cure in message


@pytest.mark.parametrize("name", ["action_noise", "kernel_time"])
def test_zero_turns_off_what_none_turns_off(games, out, name):
    zero = [f"--{name.replace('_', '-')}", 0]
    found = [made(games, out, "--preset", "gae", *options)["advantage"] for options in ([], zero)]
    config = bk.Config.gae(embedder="ngram", **{name: None})
    expected = direct(games, config, fingerprint=bk.ngram_fingerprint(observations(games)))
    assert np.array_equal(np.float32(found[1]), expected.advantage.numpy()) and found[0] != found[1]


def test_errors_of_the_package_name_file_line_and_option(tmp_path):
    """Each reward is within the limit, their sum is not; and a huge one is named when it is read."""
    rows = [record(0, 0, "a", "x"), record(1, 0, "a", "x", 9e36), record(1, 1, "b", "y", 9e36)]
    path, out = write(tmp_path / "a.jsonl", [rows[0], *rows[1:]]), tmp_path / "out.parquet"
    for command in (["advantage", path, "--out", out], ["report", path, "--out", tmp_path / "report"]):
        message = fail(*command, "--gamma", 1)
        assert f"got other sums at {path}, line 2 and {path}, line 3;" in message and "rows 1" not in message
        assert "set --on-invalid singleton to set" in message and "Config(" not in message
    assert run("advantage", path, "--out", out, "--on-invalid", "singleton").exit_code == 0
    huge = write(tmp_path / "b.jsonl", [rows[0], record(0, 1, "a", "x", 1e300)])
    message = fail("advantage", huge, "--out", out)
    assert f'{huge}, line 2, field "reward": expected a finite number within ±1e37' in message


def test_words_of_the_package():
    """Rows become files and lines, fields of Config options; columns keep their names."""
    records = rollouts.Rollouts(sources=[rollouts.Source("f", "", 9, "row")], file=[0] * 9, line=list(range(1, 10)))
    for error, wanted in {
        InputError("got {} at {}; correct it", "{nan}", Rows([3])): "got {nan} at f, row 4; correct it",
        InputError("{} share {}", Rows([0, 2]), Named("step")): "f, row 1 and f, row 3 share step",
        InputError("{} is", Rows(range(7))): "f, row 1, f, row 2, f, row 3, f, row 4, f, row 5 and 2 more is",
        InputError("set {}.", Named("step_norm", ("none",), in_config=True)): "set --step-norm none.",
        ValueError("row {3}"): "row {3}",
    }.items():
        assert advantage.message_of(error, records) == wanted


def test_numbers_have_a_minus_sign_and_no_negative_zero():
    given = {(-0.0881, ".3f"): "−0.088", (-0.0001, ".3f"): "0.000", (-0.0, ".1%"): "0.0%", (-1234.0, ",.0f"): "−1,234"}
    for (value, form), text in given.items():
        assert number(value, form) == text
    assert format_r2(ValueR2(r2=-0.0001, stderr=0.02, coverage=0.9)) == "0.000 ± 0.020 (90%)"
    assert format_r2(ValueR2(r2=-0.088, stderr=None, coverage=1.0)) == "−0.088 (100%)"


@pytest.mark.parametrize("options", OPTIONS_TOGETHER, ids=lambda options: options["partition"])
def test_every_field_of_the_configuration_has_an_option(golden, out, options):
    assert {name for given in OPTIONS_TOGETHER for name in given} == {f.name for f in dataclasses.fields(bk.Config)}
    args = []
    for name, value in options.items():
        flag = "--" + name.replace("_", "-")
        args += [flag] if value is True else [flag, value]
    made(golden, out, *args)
    config = config_of(out)
    assert {name: config[name] for name in options} == options
    assert run("advantage", golden, "--out", out, "--preset", "hgpo", "--no-base-group").exit_code == 0


@pytest.mark.parametrize(
    ("preset", "flag", "choice"),
    [("gae", "--value", value) for value in ("group", "cluster", "kernel")]
    + [("gigpo", "--gigpo-mode", mode) for mode in ("mean_norm", "mean_std_norm")],
)
def test_a_preset_s_own_choice(golden, out, preset, flag, choice):
    """The configuration has it; of gae the values are a column."""
    read = made(golden, out, "--preset", preset, flag, choice)
    of_states = {"embedder": "ngram"} if preset == "gae" else {}
    assert config_of(out) == dataclasses.asdict(getattr(bk.Config, preset)(choice, **of_states))
    assert any(read["advantage"]) and len(read.get("value", [])) == (preset == "gae") * len(read["advantage"])


def test_help_names_every_choice():
    """The choices in the help are those of Config."""
    options = typer.main.get_command(app).commands["advantage"].params
    helps = {option.opts[0]: option.help for option in options if hasattr(option, "help")}
    for name, row in settings_of(bk.Config).items():
        for choice in row.accepts if row.kind is str else ():
            assert choice in helps["--" + name.replace("_", "-")], (name, choice)


def test_state_history_of_an_exact_partition_is_the_history_partition(games, out):
    one = made(games, out, "--partition", "exact", "--state", "history:2")
    two = made(games, out, "--partition", "history", "--history-length", 2)
    assert one["advantage"] == two["advantage"] and one["cluster"] == two["cluster"]


def test_state_texts():
    """Histories go by step inside a trajectory; padding takes no part; a repeated step counts once."""
    records = rollouts.Rollouts(
        file=[0] * 7, line=list(range(7)), task=["t"] * 7, rollout=[0, 0, 0, 1, 0, 0, 1], step=[2, 0, 1, 0, 1, 9, 4],
        observation=list("cabxBpy"), reward=[0.0] * 7, valid=[True] * 5 + [False, True],
    )  # fmt: skip
    records.number()
    assert states.observations(records, 2) == [
        ("a", "b", "c"), ("a",), ("a", "b"), ("x",), ("a", "B"), ("p",), ("x", "y"),
    ]  # fmt: skip
    assert states.texts(records, 1) == [
        "b\x1ec", "a", "a\x1eb", "x", "a\x1eB", "p", "x\x1ey",
    ]  # fmt: skip
    assert states.texts(records, states.depth_of("observation")) == list("cabxBpy")
    assert states.name_of(states.depth_of("history:2")) == "history:2" and states.name_of(0) == "observation"


def test_cosine_of_histories(games, out):
    texts = states.texts(rollouts.read([str(games)]), 1)
    expected = direct(games, bk.Config.bipace(0.25), fingerprint=bk.ngram_fingerprint(texts))
    assert made(games, out, "--state", "history:1")["cluster"] == expected.cluster.tolist()


@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64, ">f4"])
def test_hidden_states_from_a_file(games, tmp_path, out, dtype):
    n = len(observations(games))
    hidden = np.random.default_rng(0).normal(size=(n, 8)).astype(dtype)
    np.save(tmp_path / "hidden.npy", hidden)
    read = made(games, out, "--fingerprint", tmp_path / "hidden.npy")
    expected = direct(games, bk.Config.bipace(), fingerprint=hidden)  # ε of hidden states: 0.10
    assert read["cluster"] == expected.cluster.tolist() and config_of(out)["epsilon"] == 0.10


def test_bad_hidden_states(golden, tmp_path):
    npy, out = tmp_path / "h.npy", tmp_path / "out.parquet"

    def message(array):
        np.save(npy, array, allow_pickle=True)
        return fail("advantage", golden, "--out", out, "--fingerprint", npy)

    assert "N = 6 records, got [5, 3]" in message(np.ones((5, 3), np.float32))
    assert "N = 6 records, got [6]" in message(np.ones(6, np.float32))
    assert "N = 6 records, got [6, 0]" in message(np.ones((6, 0), np.float32))
    assert "got int64" in message(np.ones((6, 3), np.int64))
    assert "cannot be read as a .npy file" in message(np.array([{}], dtype=object))
    bad = np.ones((6, 3), np.float32)
    bad[4, 1] = np.nan
    assert f"{golden}, line 5" in message(bad)
    bad[4] = 0
    assert f"{golden}, line 5" in message(bad) and "zeros, which have no direction" in message(bad)
    for junk in (b"junk", b"PK\x03\x04 of an archive"):
        npy.write_bytes(junk)
        assert "cannot be read as a .npy file" in fail("advantage", golden, "--out", out, "--fingerprint", npy)
    assert "cannot be read" in fail("advantage", golden, "--out", out, "--fingerprint", tmp_path / "none.npy")
    assert not out.exists()
    np.save(npy, np.zeros((6, 3), np.float32))
    result = run("advantage", golden, "--out", out, "--fingerprint", npy, "--on-invalid", "singleton")
    assert result.exit_code == 0 and "set aside as invalid" in result.output


def test_duplicated_records_and_padding(tmp_path):
    path, out = write(tmp_path / "a.jsonl", [*GOLDEN, GOLDEN[0]]), tmp_path / "out.parquet"
    for command in (["advantage", path, "--out", out], ["report", path, "--out", tmp_path / "report"]):
        message = fail(*command)
        assert f"{path}, line 1 and {path}, line 7 share group, trajectory and step" in message
        assert "set --duplicates once to count copies once" in message
    for rule in ("once", "count"):
        read = made(path, out, "--duplicates", rule, "--partition", "exact")
        assert read["advantage"][6] == read["advantage"][0] and len(read["line"]) == 7
    unlike = write(tmp_path / "b.jsonl", [*GOLDEN, {**GOLDEN[0], "reward": 2}])
    message = fail("advantage", unlike, "--out", out, "--duplicates", "once", "--on-invalid", "singleton")
    assert f"{unlike}, line 1 and {unlike}, line 7 record one step with" in message
    padded = write(tmp_path / "c.jsonl", [*GOLDEN, {**GOLDEN[0], "real": False}])  # padding repeats nothing
    read = made(padded, out, "--partition", "exact", "--valid-column", "real")
    assert read["cluster"][6] == -1 and read["advantage"][6] == 0


def test_action_column_mode_and_who_needs_actions(tmp_path):
    rows = [{**row, "response": f"hm {i} <action> {row['action']} </action>"} for i, row in enumerate(GOLDEN)]
    path, out = write(tmp_path / "a.jsonl", rows), tmp_path / "out.parquet"
    base = [path, out, "--partition", "exact"]
    of_responses = [*base, "--action-column", "response"]
    assert made(*of_responses, "--action-mode", "action_tag") == made(*base)
    assert "pace" not in made(*of_responses)["branch"]  # the whole responses differ everywhere
    made(*base, "--action-mode", "first_n")
    rows = [{name: value for name, value in row.items() if name != "action"} for row in GOLDEN]
    path, out = write(tmp_path / "a.jsonl", rows), tmp_path / "out.parquet"
    assert '"action" is missing; name its column with --action-column' in fail("advantage", path, "--out", out)
    for preset in ("grpo", "gigpo", "hgpo", "bigpo"):
        made(path, out, "--preset", preset)


def test_columns_and_files(tmp_path):
    names = {"task_id": "q", "rollout": "r", "step": "s", "observation": "o", "reward": "w", "action": "a"}
    rows = [{names[name]: value for name, value in row.items()} | {"r": f"r{row['rollout']}"} for row in GOLDEN]
    one, two, out = write(tmp_path / "1.jsonl", rows), write(tmp_path / "2.jsonl", rows), tmp_path / "out.parquet"
    flags = []
    for name, column in names.items():
        flags += [f"--{name.removesuffix('_id')}-column", column]
    options = [one, out, two, "--partition", "exact", *flags]
    assert made(*options)["cluster"] == [0, 1, 0, 2, 0, 1, 3, 4, 3, 5, 3, 4]  # each file has its own groups
    read = made(*options, "--merge-files")
    assert read["cluster"] == [0, 1, 0, 2, 0, 1] * 2 and read["file"] == [str(one)] * 6 + [str(two)] * 6
    assert read["rollout"] == ["r0", "r0", "r1", "r1", "r2", "r2"] * 2  # ids may be strings
    ids = [f'"{i}",\r' for i in range(len(GOLDEN))]  # CSV needs quotes around each of these characters
    rows = [dict(row, rollout=name) for row, name in zip(GOLDEN, ids, strict=True)]
    assert run("advantage", write(one, rows), "--out", tmp_path / "out.csv", "--preset", "grpo").exit_code == 0
    with open(tmp_path / "out.csv", newline="") as file:
        assert [row["rollout"] for row in csv.DictReader(file)] == ids


def test_shuffled_lines_change_nothing(games, tmp_path):
    """Integer rollouts and steps are ordered by their numbers, wherever their lines stand."""
    lines = games.read_text().splitlines()
    order = np.random.default_rng(3).permutation(len(lines))
    shuffled = tmp_path / "shuffled.jsonl"
    shuffled.write_text("".join(lines[i] + "\n" for i in order))
    a, b = made(games, tmp_path / "a.parquet"), made(shuffled, tmp_path / "b.parquet")
    for name in ("advantage", "step_advantage", "branch", "return"):
        assert [a[name][i] for i in order] == b[name]
    pairs = set(zip([a["cluster"][i] for i in order], b["cluster"], strict=True))
    assert len(pairs) == len({one for one, _ in pairs}) == len({two for _, two in pairs})  # the same up to numbering


def test_backends_and_threads(golden, out):
    choices = (["--backend", "reference"], ["--backend", "cpu"], ["--backend", "cpu", "--threads", 1])
    tables = [made(golden, out, *more) for more in choices]
    assert tables[0]["cluster"] == tables[1]["cluster"] and tables[1] == tables[2]
    np.testing.assert_allclose(tables[0]["advantage"], tables[1]["advantage"], atol=2e-5)


BAD_OPTIONS = {
    "preset": (["--preset", "gea"], "bipace, gae, got 'gea'; did you mean 'gae'?"),
    "partition": (["--partition", "fuzzy"], "partition must be one of none, exact, history, similar, cosine"),
    "epsilon": (["--epsilon", "3"], "epsilon must be"),
    "pair": (["--estimator", "hgpo"], "needs --partition history"),
    "no partition": (["--preset", "grpo", "--partition", "exact"], "has no use under --estimator none"),
    "step norm": (["--step-norm", "std"], "--step-norm std goes with"),
    "memory": (["--preset", "gae", "--share", "memory"], "--share memory needs earlier batches"),
    "epsilon of a kernel": (["--preset", "gae", "--epsilon", 0.2], "choose --value cluster --partition cosine"),
    "gigpo mode": (["--preset", "gigpo", "--gigpo-mode", "x"], "mode must be"),
    "gigpo mode alone": (["--gigpo-mode", "mean_norm"], "--gigpo-mode goes with --preset gigpo"),
    "state": (["--state", "memory"], "--state must be observation or history:K"),
    "state of nothing": (["--preset", "grpo", "--state", "history:2"], "leave it out"),
    "state of history": (["--preset", "hgpo", "--state", "history:2"], "use --history-length"),
    "state of hidden": (["--state", "history:2", "--fingerprint", "x.npy"], "leave --state out"),
    "hidden off cosine": (["--partition", "exact", "--fingerprint", "x.npy"], "go with --partition cosine"),
    "two sources": (["--fingerprint", "x.npy", "--fingerprint-column", "h"], "give one of them"),
    "absent backend": (["--backend", "cuda"], "cannot run here"),
    "suffix": (["--out", "table.xlsx"], "must end in one of .parquet"),
}


@pytest.mark.parametrize("name", BAD_OPTIONS)
def test_bad_options(golden, tmp_path, name):
    options, part = BAD_OPTIONS[name]
    before = set(tmp_path.iterdir())
    message = fail("advantage", golden, "--out", tmp_path / "out.parquet", *options)
    assert part in message and "Traceback" not in message
    assert set(tmp_path.iterdir()) == before


def test_output_path(golden, tmp_path):
    os.umask(umask := os.umask(0))
    assert "is a folder" in fail("advantage", golden, "--out", (tmp_path / "d.csv").mkdir() or tmp_path / "d.csv")
    assert "is one of the inputs" in fail("advantage", golden, "--out", golden)
    assert "is not a folder" in fail("advantage", golden, "--out", golden / "x.csv")
    out = tmp_path / "new" / "folder" / "out.csv"
    assert run("advantage", golden, "--out", out).exit_code == 0 and out.exists()
    assert out.stat().st_mode & 0o777 == 0o666 & ~umask


def test_a_folder_refused_by_the_system(golden, tmp_path, monkeypatch):
    """As for root: access() says no, or the file cannot be created although access() said yes."""
    monkeypatch.setattr(os, "access", lambda *_: False)
    assert "is not writable" in fail("advantage", golden, "--out", tmp_path / "out.csv")
    monkeypatch.undo()
    monkeypatch.setattr(files.tempfile, "mkdtemp", Mock(side_effect=PermissionError(13, "Permission denied")))
    assert "cannot be written: Permission denied" in fail("advantage", golden, "--out", tmp_path / "out.csv")


@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), KeyboardInterrupt(), MemoryError()])
@pytest.mark.parametrize("suffix", [".parquet", ".csv"])
def test_a_failure_in_the_middle(golden, tmp_path, monkeypatch, error, suffix):
    out = tmp_path / f"out{suffix}"
    out.write_text("the table of yesterday")
    before = {path.name for path in tmp_path.iterdir()}

    def half(path, *_):
        path.write_text("half")
        raise error

    monkeypatch.setattr(output, "write_table", half)
    result = CliRunner().invoke(app, ["advantage", str(golden), "--out", str(out)])
    assert result.exit_code == {OSError: 2, KeyboardInterrupt: 130, MemoryError: 1}[type(error)]
    if isinstance(error, OSError):
        assert "No space left on device" in result.output
    assert {path.name for path in tmp_path.iterdir()} == before and out.read_text() == "the table of yesterday"


KILLED = """
import sys, time
from pathlib import Path
from bipace_cli import main
from bipace_kernels.cli import output
def half(path, *_):
    path.write_text("half")
    print("writing", flush=True)
    time.sleep(60)
output.write_table = half
main(sys.argv[1:])
"""


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, slow(signal.SIGKILL)])
def test_killed_while_writing(golden, tmp_path, out, number):
    out.write_text("the table of yesterday")
    before = {path.name for path in tmp_path.iterdir()}
    command = [sys.executable, "-c", KILLED, "advantage", str(golden), "--out", str(out), "--preset", "gigpo"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, env=environment, **pipes) as process:
        assert process.stdout.readline() == "writing\n"
        process.send_signal(number)
        errors = process.stderr.read()
    assert "Traceback" not in errors and out.read_text() == "the table of yesterday"
    if number != signal.SIGKILL:
        assert process.returncode == 130 and "stopped" in errors
    else:  # no cleanup, but the old table is unchanged, and the next run cleans up
        assert {path.name for path in tmp_path.iterdir()} > before
        assert run("advantage", golden, "--out", out, "--preset", "gigpo").exit_code == 0
    assert {path.name for path in tmp_path.iterdir()} == before


def test_two_runs_at_once_keep_each_others_files_and_a_link_gives_way(tmp_path):
    for target in (tmp_path / "a.csv", tmp_path):
        write_one = files.atomic_folder if target.is_dir() else files.atomic_file
        with write_one(target) as first, write_one(target) as second:
            for place, text in ((first, "first"), (second, "second")):
                (place / "a.csv" if target.is_dir() else place).write_text(text)
        assert (tmp_path / "a.csv").read_text() == "first"  # the last to end
        assert [path.name for path in tmp_path.iterdir()] == ["a.csv"]
    # docs/cli.md says so: results are moved to their place, never written through a link.
    rollouts, kept, out = write(tmp_path / "a.jsonl", GOLDEN), tmp_path / "kept.csv", tmp_path / "out.csv"
    kept.write_text("kept")
    out.symlink_to(kept)
    assert run("advantage", rollouts, "--out", out, "--preset", "grpo").exit_code == 0
    assert not out.is_symlink() and out.read_text().startswith('"file",')
    assert kept.read_text() == "kept"


def test_a_note_where_the_partition_looks_degenerate(tmp_path, capfd):
    rows = [record(r, s, "always the same", "go", float(r == 0 and s == 9)) for r in range(2) for s in range(10)]
    result = run("advantage", write(tmp_path / "a.jsonl", rows), "--out", tmp_path / "o.csv", "--partition", "exact")
    assert result.exit_code == 0
    assert "note:" in result.output and "one single cluster" in result.output and "RuntimeWarning" not in result.output
