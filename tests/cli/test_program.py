"""The program as a whole: help, version, info, bench, and how little it imports before a command runs."""

import inspect
import json
import os
import subprocess
import sys
import types

import pytest
from bipace_cli import commands
from bipace_cli.commands import app
from marks import slow
from paths import ROOT, program
from typer.testing import CliRunner

import bipace_kernels as bk
from bipace_kernels.cli import bench
from bipace_kernels.config import PRESETS
from bipace_kernels.estimators.rows import ESTIMATORS, PARTITIONS, VALUES
from bipace_kernels.features.embedders import EMBEDDERS
from bipace_kernels.settings import settings_of


def test_help_and_version():
    shown = CliRunner().invoke(app, ["--help"]).output
    for command in ("advantage", "report", "calibrate", "info", "bench", "truth"):
        assert command in shown
    assert CliRunner().invoke(app, ["--version"]).output.strip() == f"bipace-kernels {bk.__version__}"
    assert CliRunner().invoke(app, ["nonsense"]).exit_code == 2


def test_info_tells_what_runs_and_why_not():
    found = json.loads(CliRunner().invoke(app, ["info", "--json"]).output)
    assert found["bipace_kernels"] == bk.__version__ and set(found["backends"]) == set(bk.backends())
    assert found["backends"]["cpu"]["available"] and found["backends"]["cuda"]["reason"]
    assert found["packages"]["torch"] and found["cpu"]["threads"] >= 1 and found["cpu"]["instruction_set"]
    assert found["auto"]["cpu"] == {"backend": "cpu", "reason": ""}
    assert found["auto"]["cuda"]["backend"] or found["auto"]["cuda"]["reason"].startswith("cuda: ")
    assert "CUDA" in found["backends"]["cuda"]["detail"]  # for what the kernels are built, or why there are none
    misspelt = json.loads(CliRunner().invoke(app, ["info", "--json"], env={"BIPACE_BACKEND": "fast"}).output)
    assert "got 'fast'" in misspelt["auto"]["cpu"]["reason"]
    for text, status in (("1", 0), ("2", 0), ("two", 2)):  # those that calls take, and not torch's
        done = CliRunner().invoke(app, ["info", "--json"], env={"BIPACE_NUM_THREADS": text})
        assert done.exit_code == status and (f'"threads": {text}\n' in done.output or "got 'two'" in done.output)
    shown = CliRunner().invoke(app, ["info"], env={"BIPACE_BUILD_DIR": "/[/b]/c[dev]"}).output
    assert "/[/b]/c[dev]" in shown  # not markup
    assert "tensors on the CPU take" in shown and "tensors on a GPU take" in shown
    for name, status in bk.backends().items():
        assert name in shown and "".join(status.reason.split()[:1]) in shown


def test_bench_forwards_its_arguments(monkeypatch):
    given = []
    module = types.ModuleType("fake_bench")
    module.main = lambda args: given.append(args) or 3  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "fake_bench", module)
    monkeypatch.setattr(bench, "MODULE", "fake_bench")
    result = CliRunner().invoke(app, ["bench", "clusters", "--out", "x", "--help"])
    assert given == [["clusters", "--out", "x", "--help"]] and result.exit_code == 3
    monkeypatch.setattr(bench, "MODULE", "bipace_kernels.no_such_bench.__main__")
    result = CliRunner().invoke(app, ["bench"])
    assert result.exit_code == 2 and "has no benchmarks" in result.output


@pytest.mark.parametrize(
    ("where", "words"),
    [("full", "No space left on device"), slow("unread", "Broken pipe"), slow("closed", "it is closed")],
)
def test_a_stdout_that_takes_nothing_is_one_sentence(where, words):
    command = [sys.executable, "-m", "bipace_kernels.cli", "info"]
    if where == "closed":
        command = ["sh", "-c", 'exec "$@" >&-', "sh", *command]
    unread, stdout = os.pipe()
    os.close(unread)
    with open("/dev/full", "wb") as full, os.fdopen(stdout, "wb") as pipe:
        done = subprocess.run(command, stdout=full if where == "full" else pipe, stderr=subprocess.PIPE, text=True,
                              env={**os.environ, "PYTHONPATH": str(ROOT)}, check=False)  # fmt: skip
    assert done.returncode == 2
    assert done.stderr == f"error: stdout cannot be written: {words}; redirect it (> FILE, or > /dev/null).\n"


def test_quickstart_runs():
    done = program(sys.executable, ROOT / "examples" / "quickstart.py", cwd=ROOT, env={"PYTHONPATH": str(ROOT)})
    assert len(done.stdout.splitlines()) == 7 and "singleton" in done.stdout


def test_help_imports_neither_torch_nor_the_package():
    code = """
import sys
from bipace_cli import main
loud = "torch", "numpy", "bipace_kernels", "pyarrow", "matplotlib", "pandas"
for args in (["--help"], ["advantage", "--help"], ["report", "--help"]):
    try:
        main(args)
    except SystemExit as end:
        assert not end.code, end.code
print([name for name in sys.modules if name.partition(".")[0] in loud])
"""
    done = program(sys.executable, "-c", code, timeout=120, env={"PYTHONIOENCODING": "ascii"})  # also without ε
    assert done.stdout.splitlines()[-1] == "[]" and "\\u03b5" in done.stdout


def test_the_table_of_settings_names_what_the_tables_hold():
    """It has its own copies of their names, since they import torch; and the help names the presets."""
    rows = settings_of(bk.Config)
    assert rows["partition"].accepts == tuple(PARTITIONS)
    assert rows["estimator"].accepts == tuple(ESTIMATORS) and rows["value"].accepts == tuple(VALUES)
    assert ", ".join(PRESETS).replace(", gae", " or gae") in inspect.getsource(commands)
    assert EMBEDDERS["ngram"].epsilon == commands.NGRAM_EPSILON
