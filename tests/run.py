"""Runs the checks of this project in parts, in parallel where there are cores, and ends with one summary line.

    python tests/run.py SUITE [--python PYTHON] [--jobs N] [PYTEST ARGUMENTS]

    quick   the CPU tests of the computations (`make test-quick`)
    test    CPU tests; device tests by Triton's interpreter; device tests by the CPU emulator of CUDA (`make test`)
    check   longer checks (`make check`): slow tests, sanitizers, fuzzing, every architecture, the oldest Triton
    ci      lint and types first, then test and nearly all of check (`.ci/run`)

Each part writes a log to out/checks.  A part fails by its exit status, or if it is pytest and no test passed.  The
last line counts tests over all parts; a part that is not pytest counts as one.
"""

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
LONGER = [
    "backends/test_triton_compile.py", "backends/test_cuda_*.py", "backends/test_runtime.py", "bench", "cli",
    "distributed", "docs", "embedders", "examples", "hidden", "packaging", "pipeline/test_promises.py",
]  # fmt: skip


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
        return [python, "-m", "pytest", "-q", *self.pytest, *spread, *more]


def pytest(name: str, *arguments: str, **environment: str) -> Part:
    return Part(name, pytest=arguments, environment=environment)


FIGURES = "tests/docs/test_figures.py"  # its slow tests measure for minutes what the figures show

QUICK = [pytest("quick", "-m", "not slow", *ELSEWHERE, *(f"--ignore-glob=tests/{path}" for path in LONGER))]
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
#: Of the checks, what is not required before a change is merged.
LEFT_TO_CHECK = ("figures", "slow-triton", "slow-emulator", "oldest-triton")
CI = [
    *(part for part in CHECK if part.name in ("slow", "sanitize")),
    Part("integrations", make="test-integrations"),
    Part("swift", make="test-swift"),
    Part("trinity", make="test-trinity"),
    Part("sources", make="test-sources"),
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
    seconds: float
    counts: dict[str, int]
    notes: list[str]  # names of failed tests, and what else went wrong

    def __str__(self) -> str:
        state = "FAILED" if self.counts["failed"] else "fine"
        return f"{self.part.name:<14} {state:<7} {self.seconds:6.0f} s: {words(self.counts)}"


def words(counts: dict[str, int]) -> str:
    return ", ".join(f"{counts[word]} {word}" for word in ("passed", "failed", "skipped"))


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
    """Starts parts and follows them; `stream` shows their output as it comes, else the end of it where one fails."""

    def __init__(self, python: str, folder: Path, *, stream: bool, more: list[str]) -> None:
        self.python, self.folder, self.stream, self.more = python, folder, stream, more
        self.running: dict[str, tuple[subprocess.Popen[str], float]] = {}
        self.lock = threading.Lock()

    def say(self, *lines: object) -> None:
        with self.lock:
            print(*lines, sep="\n", flush=True)

    def run(self, part: Part, workers: int) -> Outcome:
        command = part.command(self.python, workers, self.more)
        # One thread a process: threads that wait for each other slow down the other parts and workers.
        environment = {"OMP_NUM_THREADS": "1", **os.environ, "PYTHONUNBUFFERED": "1", **part.environment}
        self.say(f"{part.name}: " + " ".join([*(f"{k}={v}" for k, v in part.environment.items()), *command]))
        began, lines, path = time.monotonic(), [], self.folder / f"{part.name}.log"
        with path.open("w", encoding="utf-8") as log, subprocess.Popen(
            command, cwd=ROOT, env=environment, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT, text=True, errors="replace", start_new_session=True,
        ) as process:  # fmt: skip
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
            status = process.wait()
            timer.cancel()
        del self.running[part.name]
        seconds = time.monotonic() - began
        counts, notes = judge(part, status, lines)
        if seconds >= LIMIT:
            notes.append(f"stopped after {LIMIT:.0f} s")
        found = Outcome(part, seconds, counts, notes)
        self.say(found)
        if counts["failed"] and not self.stream:
            self.say(f"---- {part.name}: the end of {path.relative_to(ROOT)}", *lines[-TAIL:], "----")
        return found

    def stop(self, process: subprocess.Popen[str]) -> None:
        """Ends a part with all its children."""
        with contextlib.suppress(ProcessLookupError):  # it has ended by itself
            os.killpg(process.pid, signal.SIGKILL)

    def stage(self, parts: list[Part], jobs: int, workers: int) -> list[Outcome]:
        with ThreadPoolExecutor(jobs) as pool:
            every = [pool.submit(self.run, part, workers) for part in parts]
            waiting = set(every)
            try:
                while waiting:
                    ended, waiting = wait(waiting, timeout=MINUTE, return_when=FIRST_COMPLETED)
                    if not ended and not self.stream:
                        since = ((name, time.monotonic() - began) for name, (_, began) in list(self.running.items()))
                        self.say("running: " + ", ".join(f"{name} ({seconds:.0f} s)" for name, seconds in since))
                return [future.result() for future in every]
            except BaseException:
                for future in waiting:
                    future.cancel()
                for process, _ in list(self.running.values()):
                    self.stop(process)
                raise


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
    began, found, stages = time.monotonic(), [], SUITES[options.suite]
    for parts in stages:
        jobs = min(options.jobs or cores(), len(parts))
        found += runner.stage(parts, jobs, max(cores() // jobs, 1))
        if any(outcome.counts["failed"] for outcome in found):
            break  # later stages would fail likewise, or need it
    notes = [f"{outcome.part.name}: {note}" for outcome in found if outcome.counts["failed"] for note in outcome.notes]
    runner.say("", *found, *notes)
    if left := [part.name for parts in stages for part in parts if part not in [outcome.part for outcome in found]]:
        runner.say(f"not run: {', '.join(left)}")
    runner.say(f"{time.monotonic() - began:.0f} s in all; logs are in {folder.relative_to(ROOT)}")
    total = {word: sum(outcome.counts[word] for outcome in found) for word in ("passed", "failed", "skipped")}
    runner.say(words(total))
    return 1 if total["failed"] else 0


if __name__ == "__main__":
    sys.exit(main())
