"""Runs the checks of this project in parts, in parallel where there are cores, and ends with one summary line.

    python tests/run.py SUITE [--python PYTHON] [--jobs N] [PYTEST ARGUMENTS]

    quick   the CPU tests of the computations (`make test-quick`)
    test    CPU tests; device tests by Triton's interpreter; device tests by the CPU emulator of CUDA (`make test`)
    check   longer checks: slow tests of all three, sanitizers, fuzzing, every architecture, the oldest Triton (`make
    check`)
    ci      lint and types first, then test and nearly all of check (`.ci/run`)

Each part writes a log to out/checks.  A part fails by its exit status, or if it is pytest and no test passed.  The
last line counts tests over all parts; a part that is not pytest counts as one.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import re
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import FIRST_COMPLETED, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
MINUTE = 60.0
LIMIT = 3600.0  # seconds of a part: one that hangs is stopped
TAIL = 1000  # lines shown of the log of a part that failed

ON_DEVICE = ["-o", "python_files=test_device_*.py"]
ELSEWHERE = ["--ignore-glob=*/test_device_*.py"]  # without a GPU they would all be skipped here
TRITON, EMULATOR = {"TRITON_INTERPRET": "1"}, {"BIPACE_TEST_BACKEND": "cuda", "BIPACE_EMULATOR": "1"}
# Of the CPU tests, those that compute nothing, run models, compile, run benchmarks, build or start many processes.
LONGER = ["backends/test_triton_compile.py", "backends/test_triton_launch.py", "backends/test_cuda_emulator.py",
          "bench", "cli", "distributed", "docs", "examples", "hidden", "packaging"]  # fmt: skip


@dataclass(frozen=True)
class Part:
    """One command: arguments of pytest, or targets of make."""

    name: str
    pytest: tuple[str, ...] = ()
    make: str = ""
    environment: dict[str, str] = field(default_factory=dict)

    def command(self, python: str, workers: int, more: list[str]) -> list[str]:
        if self.make:
            return [os.environ.get("MAKE", "make"), *self.make.split()]
        spread = ["-n", str(workers), "--dist", "loadfile"] if workers > 1 else []
        return [python, "-m", "pytest", "-q", "--benchmark-disable", *self.pytest, *spread, *more]


def pytest(name: str, *arguments: str, **environment: str) -> Part:
    return Part(name, pytest=arguments, environment=environment)


FIGURES = "tests/docs/test_figures.py"  # its slow tests measure for minutes what the figures show

QUICK = [pytest("quick", "-m", "not slow", *ELSEWHERE, *(f"--ignore=tests/{path}" for path in LONGER))]
TEST = [
    pytest("cpu", "-m", "not slow", *ELSEWHERE),
    pytest("triton", "-m", "not slow", *ON_DEVICE, **TRITON),
    pytest("emulator", "-m", "not slow", *ON_DEVICE, **EMULATOR),
]
CHECK = [
    pytest("slow", "-m", "slow", *ELSEWHERE, f"--deselect={FIGURES}", BIPACE_HYPOTHESIS="long"),
    pytest("figures", "-m", "slow", FIGURES),
    pytest("slow-triton", "-m", "slow", *ON_DEVICE, **TRITON),
    Part("oldest-triton", make="oldest-triton"),
    Part("sanitize", make="sanitize fuzz"),  # one build serves both
    pytest("slow-emulator", "-m", "slow", *ON_DEVICE, **EMULATOR),
    Part("resources", make="resources"),
]
LINT = [Part("lint", make="lint")]
#: Checks required before a change is merged; slow device tests, slow figures and the oldest Triton are left to `make
# check`.
LEFT_TO_CHECK = ("figures", "slow-triton", "slow-emulator", "oldest-triton")
CI = [
    *(part for part in CHECK if part.name in ("slow", "sanitize")),
    Part("integrations", make="test-integrations"),
    Part("swift", make="test-swift"),
    Part("trinity", make="test-trinity"),
    Part("demo", make="demo"),
    Part("docs", make="docs"),
    *TEST,
    *(part for part in CHECK if part.name not in ("slow", "sanitize", *LEFT_TO_CHECK)),
]

#: Stages run one after the other; the parts of a stage run in parallel, the longest first.
SUITES: dict[str, list[list[Part]]] = {
    "quick": [QUICK],
    "test": [TEST],
    "check": [LINT, CHECK],
    "ci": [LINT, [Part("environments", make="all-environments")], CI],
}


@dataclass
class Outcome:
    part: Part
    status: int
    seconds: float
    cpu_seconds: float
    counts: dict[str, int]
    notes: list[str]  # names of failed tests, and what else went wrong

    @property
    def fine(self) -> bool:
        return not self.counts["failed"]


_WORDS = {"passed": "passed", "failed": "failed", "error": "failed", "errors": "failed", "skipped": "skipped"}
_CLOSING = re.compile(r"^(?:=+ )?((?:\d+ [a-z]+(?:, )?)+) in \d[\d.]*s\b")


def judge(part: Part, status: int, lines: list[str]) -> tuple[dict[str, int], list[str]]:
    """Tests by outcome, from every closing line of pytest, and messages about failures."""
    counts = {"passed": 0, "failed": 0, "skipped": 0}
    notes = [line for line in lines if line.startswith(("FAILED ", "ERROR "))]
    closing = [match[1] for line in lines if (match := _CLOSING.match(line))]
    for text in closing:
        for number, word in re.findall(r"(\d+) ([a-z]+)", text):
            if word in _WORDS:
                counts[_WORDS[word]] += int(number)
    if part.make and not closing:
        counts["passed" if status == 0 else "failed"] += 1
    if part.pytest and status == 0 and not counts["passed"]:
        counts["failed"] += 1
        notes.append("no test passed: nothing was collected, or all of it skipped")
    if status != 0 and not counts["failed"]:
        counts["failed"] += 1
    if status != 0 and not notes:
        notes.append(f"ended with status {status}")
    return counts, notes


class Runner:
    """Starts parts and follows them; `stream` shows their output as it comes."""

    def __init__(self, python: str, folder: Path, *, stream: bool, more: list[str]) -> None:
        self.python, self.folder, self.stream, self.more = python, folder, stream, more
        self.running: dict[str, tuple[subprocess.Popen[str], float]] = {}
        self.lock = threading.Lock()

    def say(self, text: str) -> None:
        with self.lock:
            print(text, flush=True)

    def run(self, part: Part, workers: int) -> Outcome:
        command = part.command(self.python, workers, self.more)
        # One thread a process: threads that wait for each other slow down the other parts and workers.
        environment = {"OMP_NUM_THREADS": "1", **os.environ, "PYTHONUNBUFFERED": "1", **part.environment}
        self.say(f"{part.name}: " + " ".join([*(f"{k}={v}" for k, v in part.environment.items()), *command]))
        began, lines = time.monotonic(), []
        with (self.folder / f"{part.name}.log").open("w", encoding="utf-8") as log:
            process = subprocess.Popen(
                command, cwd=ROOT, env=environment, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT, text=True, errors="replace", start_new_session=True,
            )  # fmt: skip
            self.running[part.name] = (process, began)
            timer = threading.Timer(LIMIT, self.stop, (process,))
            timer.start()
            assert process.stdout is not None
            for line in process.stdout:
                log.write(line)
                log.flush()
                lines.append(line.rstrip("\n"))
                if self.stream:
                    self.say(f"{part.name:>9} | {lines[-1]}")
            _, ended, usage = os.wait4(process.pid, 0)
            process.returncode = os.waitstatus_to_exitcode(ended)
            timer.cancel()
        del self.running[part.name]
        seconds = time.monotonic() - began
        counts, notes = judge(part, process.returncode, lines)
        if seconds >= LIMIT:
            notes.append(f"stopped after {LIMIT:.0f} s")
        return Outcome(part, process.returncode, seconds, usage.ru_utime + usage.ru_stime, counts, notes)

    def stop(self, process: subprocess.Popen[str]) -> None:
        """Ends a part with all its children."""
        with contextlib.suppress(ProcessLookupError):  # it has ended by itself
            os.killpg(process.pid, signal.SIGKILL)

    def stage(self, parts: list[Part], jobs: int, workers: int) -> list[Outcome]:
        found = []
        with ThreadPoolExecutor(jobs) as pool:
            waiting = {pool.submit(self.run, part, workers) for part in parts}
            try:
                while waiting:
                    ended, waiting = wait(waiting, timeout=MINUTE, return_when=FIRST_COMPLETED)
                    for future in ended:
                        found.append(future.result())
                        self.say(line_of(found[-1]))
                    if not ended and not self.stream:
                        since = ((name, time.monotonic() - began) for name, (_, began) in list(self.running.items()))
                        self.say("running: " + ", ".join(f"{name} ({seconds:.0f} s)" for name, seconds in since))
            except BaseException:
                for future in waiting:
                    future.cancel()
                for process, _ in list(self.running.values()):
                    self.stop(process)
                raise
        return found

    def show_logs(self, found: list[Outcome]) -> None:
        for outcome in found:
            path = self.folder / f"{outcome.part.name}.log"
            lines = path.read_text(encoding="utf-8").splitlines()[-TAIL:]
            self.say("\n".join([f"---- {outcome.part.name}: the end of {path.relative_to(ROOT)}", *lines, "----"]))


def words(counts: dict[str, int]) -> str:
    return ", ".join(f"{counts[word]} {word}" for word in ("passed", "failed", "skipped"))


def line_of(outcome: Outcome) -> str:
    name, state = outcome.part.name, "fine" if outcome.fine else "FAILED"
    return (
        f"{name:<14} {state:<7} {outcome.seconds:6.0f} s, {outcome.cpu_seconds:6.0f} s of CPU: {words(outcome.counts)}"
    )


def cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(allow_abbrev=False, description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("suite", choices=sorted(SUITES))
    parser.add_argument("--python", help="the interpreter of the tests; default: this one, for ci that of .venv")
    parser.add_argument("--jobs", type=int, default=0, help="parts at a time; default: as many as there are cores")
    options, more = parser.parse_known_args(argv)
    ci = options.suite == "ci"
    python = options.python or (str(ROOT / ".venv/bin/python") if ci else sys.executable)
    folder = ROOT / "out" / "checks"
    folder.mkdir(parents=True, exist_ok=True)
    runner = Runner(python, folder, stream=not ci, more=more)
    began, found = time.monotonic(), []
    for parts in SUITES[options.suite]:
        jobs = min(options.jobs or cores(), len(parts))
        found += runner.stage(parts, jobs, max(cores() // jobs, 1))
        if any(not outcome.fine for outcome in found):
            break  # later stages would fail likewise, or need it
    failed = [outcome for outcome in found if not outcome.fine]
    if not runner.stream:
        runner.show_logs(failed)
    runner.say("")
    for outcome in found:
        runner.say(line_of(outcome))
    for outcome in failed:
        for note in outcome.notes:
            runner.say(f"{outcome.part.name}: {note}")
    left = [part.name for parts in SUITES[options.suite] for part in parts][len(found) :]
    if left:
        runner.say(f"not run: {', '.join(left)}")
    runner.say(f"{time.monotonic() - began:.0f} s in all; logs are in {folder.relative_to(ROOT)}")
    total = {word: sum(outcome.counts[word] for outcome in found) for word in ("passed", "failed", "skipped")}
    runner.say(words(total))
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
