"""The runner of the checks: what it makes of logs and exit statuses, and its last line."""

import importlib.util
import sys

import pytest
from paths import ROOT

spec = importlib.util.spec_from_file_location("run_of_checks", ROOT / "tests/run.py")
run = importlib.util.module_from_spec(spec)
sys.modules[spec.name] = run  # dataclasses look their module up
spec.loader.exec_module(run)

TESTS, TARGET = run.Part("tests", pytest=("-m", "not slow")), run.Part("target", make="target")


@pytest.mark.parametrize(
    ("part", "status", "log", "counts"),
    [
        (TESTS, 0, "3 passed, 2 skipped, 7 deselected, 1 warning in 1.20s", (3, 0, 2)),
        (TESTS, 0, "==== 3 passed in 61.20s (0:01:01) ====", (3, 0, 0)),
        (TESTS, 1, "FAILED a.py::b - no\n1 failed, 2 passed, 1 error in 0.1s", (2, 2, 0)),
        (TESTS, 5, "no tests ran in 0.01s", (0, 1, 0)),
        (TESTS, 0, "4 skipped in 0.01s", (0, 1, 4)),
        (TESTS, -9, "....", (0, 1, 0)),
        (TESTS, 1, "3 passed in 1.20s", (3, 1, 0)),
        (TARGET, 0, "all is well", (1, 0, 0)),
        (TARGET, 2, "make: *** [target] Error 1", (0, 1, 0)),
        (TARGET, 0, "2 passed in 1.0s\n3 passed in 1.0s", (5, 0, 0)),
    ],
)
def test_outcomes_are_read(part, status, log, counts):
    found, notes = run.judge(part, status, log.splitlines())
    assert tuple(found[word] for word in ("passed", "failed", "skipped")) == counts
    assert bool(notes) == bool(counts[1])


def test_parts_run_side_by_side_and_one_line_counts_them(monkeypatch, capsys, tmp_path):
    def own(code):
        return lambda self, python, workers, more: [sys.executable, "-c", code]

    class Good(run.Part):
        command = own("print('2 passed, 1 skipped in 0.1s')")

    class Bad(run.Part):
        command = own("import sys; print('what went wrong'); sys.exit(3)")

    monkeypatch.setitem(run.SUITES, "test", [[Good("good", pytest=("x",)), Bad("bad", make="x")], [Good("later")]])
    (tmp_path / "out").mkdir()
    monkeypatch.setattr(run, "ROOT", tmp_path)
    assert run.main(["test"]) == 1
    shown = capsys.readouterr().out
    assert "good | 2 passed" in shown and "bad | what went wrong" in shown
    assert "bad: ended with status 3" in shown and "not run: later" in shown
    assert shown.splitlines()[-1] == "2 passed, 1 failed, 1 skipped"
    assert (tmp_path / "out/checks/bad.log").read_text() == "what went wrong\n"
    monkeypatch.setitem(run.SUITES, "ci", [[Bad("bad", make="x")]])
    assert run.main(["ci"]) == 1
    assert "---- bad: the end of out/checks/bad.log\nwhat went wrong" in capsys.readouterr().out
