"""The runner of the checks: what it makes of logs and exit statuses."""

import importlib.util
import sys

from paths import ROOT

spec = importlib.util.spec_from_file_location("run_of_checks", ROOT / "tests/run.py")
run = importlib.util.module_from_spec(spec)
sys.modules[spec.name] = run  # dataclasses look their module up
spec.loader.exec_module(run)

TESTS, TARGET = run.Part("tests", pytest=("-m", "not slow")), run.Part("target", make="target")


def test_outcomes_are_read():
    for part, status, log, counts in (
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
    ):
        found, notes = run.judge(part, status, log.splitlines())
        assert tuple(found[word] for word in ("passed", "failed", "skipped")) == counts
        assert bool(notes) == bool(counts[1])
