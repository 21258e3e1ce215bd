"""The parts of a GPU run that measure no time: small checks, tests, accuracy, sanitizer; and programs that are watched.

What a machine refuses is "not available", with the tool's words, and no failure.
"""

import contextlib
import ctypes
import importlib.util
import os
import re
import select
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from . import gpu_stages
from .gpu_cases import BACKENDS, absent, expected
from .gpu_report import ACCURACY
from .gpu_rows import Part
from .measure import all_cores

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = str(__package__)
ONE_LINE = "import torch; torch.ones(8, device='cuda').add_(1).sum().item()"
LIMITS = {"preparing": 120.0, "compiling": 120.0, "running": 30.0}  # seconds of a watched program, in all of each phase
AT_ONCE = 4  # checks of smoke
WATCHED = "print #preparing, #compiling and #running where these begin: for the program that watches this one"

# Missing, each takes something out of the run; what, stands here.
OPTIONAL = {
    "pytest": "tests: all of them",
    "hypothesis": "tests that draw their data",
    "xdist": "tests: run one after another",
    "xxhash": "tests of action keys against the library",
    "tokenizers": "action keys from token ids, the whole chain",
    "transformers": "action keys from token ids, the whole chain",
    "sentence_transformers": "community_detection as a competitor",
    "threadpoolctl": "setting the threads of NumPy's BLAS",
    "cupy": "CUDA kernels where the build has none",
}


@dataclass
class Run:
    """A part in the making: its lines are printed and written to the files as they come."""

    part: Part
    folder: Path
    seconds: float
    limit: float  # of each watched program, once it has what it needs
    dry: bool
    save: Callable[[], None]
    say: Callable[[str], None]

    def __post_init__(self) -> None:
        self.deadline, self.lock = time.monotonic() + self.seconds, threading.Lock()

    def line(self, text: str) -> None:
        with self.lock:
            self.part.lines.append(f"- {text}")
            self.save()
            self.say(text)

    def not_available(self, why: str, *, fine: bool = True) -> bool:
        self.part.status = "not available"
        self.line(f"not available: {why}")
        return fine

    @property
    def log(self) -> Path:
        return self.folder / f"{self.part.name}.log"

    def watch(self, name: str, arguments: Sequence[str]) -> bool:
        """Runs `python -m ... --watched`, line by line; a line says where it was ended if it hung or died."""
        argv = [sys.executable, "-X", "faulthandler", "-m", *arguments, "--watched", *["--dry"] * self.dry]
        log = self.folder / f"{re.sub(r'[^a-z0-9]+', '-', name.lower()).strip('-')}.log"
        fine, why = watch(argv, log, lambda text: self.line(f"{name}: {text}"),
                          limits={**LIMITS, "running": self.limit}, deadline=self.deadline)  # fmt: skip
        if why:
            self.line(f"{name}: {why}")
        return fine


@contextlib.contextmanager
def _started(argv: Sequence[str], log: Path, env: Mapping[str, str], **more: Any) -> Iterator[subprocess.Popen[bytes]]:
    """A program in a process group of its own that ends with the block, or with this process."""
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("ab") as out:
        out.write(f"\n$ {' '.join(argv)}\n".encode())
        out.flush()
        process = subprocess.Popen(
            argv, stderr=out, stdin=subprocess.DEVNULL, cwd=ROOT, preexec_fn=_ends_with_parent,
            env={**os.environ, "PYTHONUNBUFFERED": "1", **env}, **{"stdout": out, **more},
        )  # fmt: skip
    try:
        yield process
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        with contextlib.suppress(subprocess.TimeoutExpired):  # a driver may keep hold of it: the rest goes on
            process.wait(timeout=10)


_LIBC = ctypes.CDLL(None)  # not loaded by a child: another thread may hold a lock of the loader


def _ends_with_parent() -> None:
    os.setpgrp()
    _LIBC.prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG, of the thread that starts it


def run_to_end(argv: Sequence[str], log: Path, *, seconds: float, env: Mapping[str, str] | None = None) -> int | None:
    """Runs a program with its output going to `log` as it comes; None where it was stopped after `seconds`."""
    with _started(argv, log, env or {}) as process:
        try:
            return process.wait(timeout=max(seconds, 1.0))
        except subprocess.TimeoutExpired:
            return None


def watch(
    argv: Sequence[str], log: Path, on_line: Callable[[str], None], *, limits: Mapping[str, float], deadline: float
) -> tuple[bool, str]:
    """Runs a program and passes its lines on; whether it ended well, and why there is no line that says so.

    It begins with the phase "preparing", and says by a line "#running" that another one begins. Each phase has a limit
    of its own: a program that has used up one of them, or is there at the deadline (of time.monotonic()), is ended.
    """
    left, phase, lines, rest = dict(limits), "preparing", 0, b""
    with _started(argv, log, {}, stdout=subprocess.PIPE) as process:
        pipe = process.stdout
        assert pipe is not None
        while True:
            began = time.monotonic()
            ready, _, _ = select.select([pipe], [], [], max(0.0, min(left[phase], deadline - began)))
            left[phase] -= time.monotonic() - began
            if not ready:
                return False, f"STOPPED while {phase}, after {limits[phase] - left[phase]:.0f} s"
            text = os.read(pipe.fileno(), 1 << 16)
            *whole, rest = (rest + text).split(b"\n")
            for line in whole:
                if line.startswith(b"#") and line[1:].decode() in left:
                    phase = line[1:].decode()
                else:
                    lines += 1
                    on_line(line.decode(errors="replace"))
            if not text:
                break
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(timeout=10)
    status = process.returncode
    return status == 0, "" if status == 0 or (status == 1 and lines) else f"FAILED: status {status}: {tail(log, 1)}"


_said: list[Callable[[str], None]] = []  # how a watched program says its phase


def phase(name: str) -> None:
    """Says that this program, if it is watched, begins a phase of LIMITS."""
    for say in _said:
        say(name)


def watched() -> None:
    """Called by a watched program that has imported what it needs: from here on it says what it does."""
    _said.append(lambda name: print(f"#{name}", flush=True))
    with contextlib.suppress(ImportError):
        knobs = importlib.import_module("triton").knobs.runtime
        knobs.jit_cache_hook = lambda **_: phase("compiling")
        knobs.jit_post_compile_hook = lambda **_: phase("running")
    cupy = importlib.import_module("bipace_kernels.backends.cuda._cupy")

    def compile_source(*arguments: Any, compiled: Callable[..., bytes] = cupy.compile_source) -> bytes:
        phase("compiling")
        code = compiled(*arguments)
        phase("running")
        return code

    mock.patch.object(cupy, "compile_source", compile_source).start()
    phase("running")


def tail(log: Path, lines: int = 6) -> str:
    """The end of a log on one line, for a table."""
    text = log.read_text(errors="replace").splitlines() if log.exists() else []
    return " / ".join([line.strip() for line in text if line.strip()][-lines:])[-600:]


def smoke(run: Run) -> bool:
    """One tile of each kind, then each stage and preset of each backend on a small ragged batch; a process for each.

    Imports and compiling take most of their time, so some overlap; an illegal address ends only its own process.
    """
    from . import gpu_smoke

    fine, calls = True, []
    for backend in reversed(BACKENDS):
        if why := absent(backend):
            run.line(f"{backend}: not available: {why}")
            fine &= not expected(backend)
            continue
        for name in gpu_smoke.checks(torch.device("cpu"), backend):
            calls.append((f"{backend}: {name}", [f"{PACKAGE}.gpu_smoke", "--backend", backend, "--check", name]))
    with ThreadPoolExecutor(max(1, min(AT_ONCE, all_cores() // 2))) as pool:
        return all([fine, *pool.map(run.watch, *zip(*calls, strict=True))])


def accuracy(run: Run) -> bool:
    """The largest |cosine − float64| out of the CUDA kernels' Gram matrices, at 16 × 400 × 3,584 and at D = 8,192."""
    if why := absent("cuda"):
        return run.not_available(why, fine=not expected("cuda"))
    fine = True
    for groups, records, dim in ((2, 20, 64),) if run.dry else ((16, 400, 3584), (4, 400, 8192)):
        worst = gpu_stages.worst_cosine(torch.device("cpu" if run.dry else "cuda"), groups, records, dim)
        run.part.figures.setdefault(ACCURACY, worst)
        fine &= worst <= gpu_stages.COSINE
        run.line(f"{groups} × {records} × {dim:,}, bfloat16: largest |cosine − float64| {worst:.3g}, "
                 f"wanted ≤ {gpu_stages.COSINE:g}")  # fmt: skip
    return fine


def tests(run: Run, backend: str) -> bool:
    """Every test marked gpu; for the CUDA backend those of stages and chain. The log grows with each."""
    if why := absent(backend):
        return run.not_available(why, fine=not expected(backend))
    missing = [name for name in OPTIONAL if importlib.util.find_spec(name) is None]
    for name in missing:
        run.line(f"{name} is not installed; left out: {OPTIONAL[name]}")
    run.log.unlink(missing_ok=True)
    short = {"triton": "backends/test_device_triton_available.py", "cuda": "values/test_device_values.py"}[backend]
    of_stages = ["-o", "python_files=test_device_*.py"] if backend == "cuda" else []
    where = [f"tests/{short}"] if run.dry else ["tests", "-m", "gpu", *of_stages]
    more = {"BIPACE_EMULATOR": "1"} if run.dry else {"BIPACE_REQUIRE": "gpu"}
    # Most tests are in one file, and compiling takes most of the time: files are not kept together.
    spread = [] if run.dry or "xdist" in missing else ["-n", str(min(8, all_cores())), "--dist", "load"]
    argv = [sys.executable, "-m", "pytest", *where, "-v", "-ra", "--tb=short", "-p", "no:cacheprovider", *spread,
            "--continue-on-collection-errors"]  # fmt: skip
    status = run_to_end(argv, run.log, seconds=run.seconds, env={"BIPACE_TEST_BACKEND": backend, **more})
    ended = f"was stopped at the limit; {run.log.name} has its results" if status is None else f"ended with {status}"
    for line in (f"pytest {ended}", *outcomes(run.log.read_text(errors="replace"))):
        run.line(line)
    return status == 0


def outcomes(log: str) -> list[str]:
    """pytest's summary: failed and skipped tests with their reasons, and the counts."""
    summary = log.partition("short test summary info")[2].splitlines()[1:]
    return [line.strip("= ") for line in summary if line.strip()]


def sanitize(run: Run, backend: str) -> bool:
    """racecheck, memcheck and initcheck over the small checks; each on a one-line program first."""
    if why := absent(backend):
        return run.not_available(why, fine=not expected(backend))
    run.log.unlink(missing_ok=True)
    tool = shutil.which("compute-sanitizer", path=f"{os.environ.get('PATH', '')}:/usr/local/cuda/bin")
    if tool is None or run.dry:
        missing = "compute-sanitizer is not on the PATH or in /usr/local/cuda/bin"
        return run.not_available("no GPU" if run.dry else missing)
    # Without torch's own memory pool every tensor is an allocation of its own, whose end the tool can see.
    env = {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
    command = [tool, "--error-exitcode", "99", "--print-limit", "20"]
    status = run_to_end([*command, sys.executable, "-c", ONE_LINE], run.log, seconds=min(120, run.seconds / 4), env=env)
    if status != 0:
        return run.not_available(f"compute-sanitizer on one line: {tail(run.log)}")
    small = [sys.executable, "-m", f"{PACKAGE}.gpu_smoke", "--small", "--backend", backend]
    fine = True
    for name in ("racecheck", "memcheck", "initcheck"):
        seconds = min(run.deadline - time.monotonic(), run.seconds / 3)
        status = run_to_end([*command, "--tool", name, *small], run.log, seconds=seconds, env=env)
        if status is None:
            line = f"stopped at the limit; what it had checked by then stands in {run.log.name}"
        else:
            line = "nothing found" if status == 0 else f"status {status}: {tail(run.log)}"
        if name == "initcheck" and backend == "triton" and status not in (0, None):
            # Triton's wide loads reach beyond what was written into their scratch memory, and what comes of it is
            # thrown away.  That no bit depends on it, tests show with scratch memory full of NaN.  CUDA's load what was
            # written.
            line += " (no failure: loads are wider than what they need of scratch memory)"
        else:
            fine &= status in (0, None)
        run.line(f"{name}: {line}")
    return fine
