"""The parts of a GPU run that measure no time: tests, a small run of everything, accuracy, sanitizer.

The sanitizer is tried on a one-line program first. What a machine refuses is "not available", with the tool's words,
and no failure.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import torch

from . import gpu_stages
from .gpu_cases import BACKENDS, absent, expected
from .gpu_report import ACCURACY
from .gpu_rows import Part
from .measure import all_cores

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = str(__package__)
ONE_LINE = "import torch; torch.ones(8, device='cuda').add_(1).sum().item()"
Say = Callable[[str], None]

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


def missing() -> list[str]:
    """Missing packages, and what is left out without them."""
    return [f"{name} is not installed; left out: {what}" for name, what in OPTIONAL.items()
            if importlib.util.find_spec(name) is None]  # fmt: skip


def run_to_end(argv: Sequence[str], log: Path, *, seconds: float, env: Mapping[str, str] | None = None) -> int | None:
    """Runs a program with its output going to `log` as it comes; None where it was stopped after `seconds`."""
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("ab") as out:
        out.write(f"\n$ {' '.join(argv)}\n".encode())
        out.flush()
        process = subprocess.Popen(
            argv, stdout=out, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL, cwd=ROOT, preexec_fn=os.setpgrp,
            env={**os.environ, "PYTHONUNBUFFERED": "1", **(env or {})},
        )  # fmt: skip
        try:
            return process.wait(timeout=max(seconds, 1.0))
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)  # its own group: its children end with it
            process.wait()
            return None


def tail(log: Path, lines: int = 6) -> str:
    """The end of a log on one line, for a table."""
    text = log.read_text(errors="replace").splitlines() if log.exists() else []
    return " / ".join(line.strip() for line in text[-lines:] if line.strip())[-600:]


# --------------------------------------------------------------------------------------------------------------- tests


def tests(part: Part, folder: Path, seconds: float, dry: bool, say: Say, backend: str) -> bool:
    """Every test marked gpu; for the CUDA backend those of stages and chain. The log grows with each."""
    if why := absent(backend):
        return _not_available(part, say, why, fine=not expected(backend))
    part.lines += [f"- {line}" for line in missing()]
    log = folder / f"{part.name}.log"
    log.unlink(missing_ok=True)
    short = {"triton": "backends/test_device_triton_available.py", "cuda": "values/test_device_values.py"}[backend]
    of_stages = ["-o", "python_files=test_device_*.py"] if backend == "cuda" else []
    where = [f"tests/{short}"] if dry else ["tests", "-m", "gpu", *of_stages]
    more = {"BIPACE_EMULATOR": "1"} if dry else {"BIPACE_REQUIRE": "gpu"}
    # Most tests are in one file, and compiling takes most of the time: files are not kept together.
    spread = ["-n", str(min(8, all_cores())), "--dist", "load"]
    if dry or any("xdist" in line for line in part.lines):
        spread = []
    argv = [sys.executable, "-m", "pytest", *where, "-v", "-ra", "--tb=short", "-p", "no:cacheprovider", *spread,
            "--continue-on-collection-errors"]  # fmt: skip
    status = run_to_end(argv, log, seconds=seconds, env={"BIPACE_TEST_BACKEND": backend, **more})
    ended = f"was stopped at the limit; {log.name} has its results" if status is None else f"ended with {status}"
    part.lines += [f"- pytest {ended}", *outcomes(log.read_text(errors="replace"))]
    say("\n".join(part.lines))
    return status == 0


def outcomes(log: str) -> list[str]:
    """pytest's summary, as a list: failed and skipped tests with their reasons, and the counts."""
    summary = log.partition("short test summary info")[2].splitlines()[1:]
    return [f"- {line.strip('= ')}" for line in summary if line.strip()]


def smoke(part: Part, folder: Path, seconds: float, dry: bool, say: Say) -> bool:
    """Each stage and preset of each backend once on a small ragged batch, against the CPU backend."""
    from . import gpu_smoke

    del folder, seconds
    lines, fine = gpu_smoke.run(torch.device("cpu" if dry else "cuda"), BACKENDS)
    part.lines += [f"- {line}" for line in lines]
    say("\n".join(lines))
    return fine


def accuracy(part: Part, folder: Path, seconds: float, dry: bool, say: Say) -> bool:
    """The largest |cosine − float64| out of the CUDA kernels' Gram matrices, at 16 × 400 × 3,584 and at D = 8,192."""
    del folder, seconds
    if why := absent("cuda"):
        return _not_available(part, say, why, fine=not expected("cuda"))
    fine = True
    for groups, records, dim in ((2, 20, 64),) if dry else ((16, 400, 3584), (4, 400, 8192)):
        worst = gpu_stages.worst_cosine(torch.device("cpu" if dry else "cuda"), groups, records, dim)
        part.figures.setdefault(ACCURACY, worst)
        fine &= worst <= 2e-6
        part.lines.append(
            f"- {groups} × {records} × {dim:,}, bfloat16: largest |cosine − float64| {worst:.3g}, wanted ≤ 2e-6"
        )
        say(part.lines[-1])
    return fine


# --------------------------------------------------------------------------------------------------------------- tools


def sanitize(part: Part, folder: Path, seconds: float, dry: bool, say: Say, backend: str) -> bool:
    """memcheck, racecheck and initcheck over the small run; each on a one-line program first."""
    if why := absent(backend):
        return _not_available(part, say, why, fine=not expected(backend))
    deadline = time.monotonic() + seconds
    log = folder / f"{part.name}.log"
    log.unlink(missing_ok=True)
    tool = shutil.which("compute-sanitizer", path=f"{os.environ.get('PATH', '')}:/usr/local/cuda/bin")
    if tool is None or dry:
        return _not_available(
            part, say, "no GPU" if dry else "compute-sanitizer is not on the PATH or in /usr/local/cuda/bin"
        )
    # Without torch's own memory pool every tensor is an allocation of its own, whose end the tool can see.
    env = {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
    command = [tool, "--error-exitcode", "99", "--print-limit", "20"]
    status = run_to_end([*command, sys.executable, "-c", ONE_LINE], log, seconds=120, env=env)
    if status != 0:
        return _not_available(part, say, f"compute-sanitizer on one line: {tail(log)}")
    small = [sys.executable, "-m", f"{PACKAGE}.gpu_smoke", "--small", "--backend", backend]
    fine = True
    for name in ("memcheck", "racecheck", "initcheck"):
        left = deadline - time.monotonic()
        status = run_to_end([*command, "--tool", name, *small], log, seconds=min(left, seconds / 3), env=env)
        if status is None:
            line = f"stopped at the limit; what it had checked by then stands in {log.name}"
        else:
            line = "nothing found" if status == 0 else f"status {status}: {tail(log)}"
        if name == "initcheck" and backend == "triton" and status not in (0, None):
            # Triton's wide loads reach beyond what was written into their scratch memory, and what comes of it is
            # thrown away.  That no bit depends on it, tests show with scratch memory full of NaN.  CUDA's load what was
            # written.
            line += " (no failure: loads are wider than what they need of scratch memory)"
        else:
            fine &= status in (0, None)
        part.lines.append(f"- {name}: {line}")
        say(part.lines[-1])
    return fine


def _not_available(part: Part, say: Say, why: str, *, fine: bool = True) -> bool:
    part.status = "not available"
    part.lines.append(f"not available: {why}")
    say(part.lines[-1])
    return fine
