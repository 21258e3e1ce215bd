"""The parts of a GPU run that measure no time: tests, a small run of everything, sanitizer, counters of the hardware.

An analysis tool is tried on a one-line program first. What a machine refuses is "not available", with the tool's own
words, and no failure.
"""

from __future__ import annotations

import csv
import importlib.util
import io
import os
import re
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
from .gpu_measure import all_cores
from .gpu_report import ACCURACY
from .gpu_rows import Part
from .report import _markdown

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
    "cupy": "the micro-kernel by NVRTC (nvcc is tried instead), CUDA kernels where the build has none",
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
    """Every test marked gpu; for the CUDA backend those of stages and chain. The log grows with each: a kill loses none."""
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
    found = outcomes(log.read_text(errors="replace"))
    counts = ", ".join(f"{len(found[k])} {k.lower()}" for k in ("PASSED", "FAILED", "ERROR", "SKIPPED"))
    part.lines += [f"- pytest {'was stopped at the limit' if status is None else f'ended with {status}'}: {counts}"]
    part.lines += [f"- FAILED: {name}" for name in found["FAILED"] + found["ERROR"]]
    part.lines += [f"- skipped: {reason}" for reason in found["reasons"]]
    say("\n".join(part.lines))
    return status == 0


def outcomes(log: str) -> dict[str, list[str]]:
    """Names of the tests by outcome, from pytest's verbose lines, with or without xdist; and the reasons of skips."""
    found: dict[str, list[str]] = {"PASSED": [], "FAILED": [], "ERROR": [], "SKIPPED": [], "reasons": []}
    seen = set()
    for line in log.splitlines():
        spread = re.match(r"\[gw\d+\] \[\s*\d+%\] (PASSED|FAILED|ERROR|SKIPPED) (\S.*)", line)
        plain = re.match(r"(\S+::.+?) (PASSED|FAILED|ERROR|SKIPPED)\b", line)
        summary = re.match(r"SKIPPED \[\d+\] (.*)", line)
        broken = re.match(r"ERROR (\S+\.py)\b", line)
        if summary:
            found["reasons"].append(summary[1])
            continue
        if broken:
            outcome, name = "ERROR", broken[1]
        elif spread or plain:
            outcome, name = (spread[1], spread[2]) if spread else (plain[2], plain[1])  # type: ignore[index]
        else:
            continue
        if (outcome, name.strip()) not in seen:
            seen.add((outcome, name.strip()))
            found[outcome].append(name.strip())
    return found


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


def find_tool(name: str) -> str | None:
    """A tool of the CUDA toolkit: on the PATH or where the toolkit is usually installed."""
    places = [Path("/usr/local/cuda/bin") / name, *sorted(Path("/opt/nvidia").glob(f"*/*/{name}"))]
    return shutil.which(name) or next((str(p) for p in places if p.exists()), None)


def sanitize(part: Part, folder: Path, seconds: float, dry: bool, say: Say, backend: str) -> bool:
    """memcheck, racecheck and initcheck over the small run; each on a one-line program first."""
    if why := absent(backend):
        return _not_available(part, say, why, fine=not expected(backend))
    deadline = time.monotonic() + seconds
    log = folder / f"{part.name}.log"
    log.unlink(missing_ok=True)
    tool = find_tool("compute-sanitizer")
    if tool is None or dry:
        return _not_available(part, say, "compute-sanitizer is not installed" if tool is None else "no GPU")
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
            # Triton's wide loads reach beyond what was written into their scratch memory, and what comes of it is thrown
            # away.  That no bit depends on it, tests show with scratch memory full of NaN.  CUDA's load what was written.
            line += " (no failure: loads are wider than what they need of scratch memory)"
        else:
            fine &= status in (0, None)
        part.lines.append(f"- {name}: {line}")
        say(part.lines[-1])
    return fine


# Metrics that explain a kernel's time; optional, since another generation of GPUs may lack them.
MORE_METRICS = (
    "smsp__cycles_elapsed.avg.per_second",
    "sm__inst_executed_pipe_tensor.sum",
    "lts__t_sector_hit_rate.pct",
    "smsp__average_warps_issue_stalled_long_scoreboard_per_issue_active.ratio",
    "smsp__average_warps_issue_stalled_short_scoreboard_per_issue_active.ratio",
    "smsp__average_warps_issue_stalled_barrier_per_issue_active.ratio",
)
METRICS = (
    "gpu__time_duration.sum",
    "dram__bytes_read.sum",
    "dram__bytes_write.sum",
    "gpu__dram_throughput.avg.pct_of_peak_sustained_elapsed",
    "sm__throughput.avg.pct_of_peak_sustained_elapsed",
    "sm__warps_active.avg.pct_of_peak_sustained_active",
    "launch__registers_per_thread",
    "launch__grid_size",
    "launch__block_size",
)


def ncu(part: Part, folder: Path, seconds: float, dry: bool, say: Say, backend: str) -> bool:
    """Counters of every kernel of one whole chain at 16 × 400."""
    if why := absent(backend):
        return _not_available(part, say, why, fine=not expected(backend))
    log = folder / f"{part.name}.log"
    log.unlink(missing_ok=True)
    tool = find_tool("ncu")
    if tool is None or dry:
        return _not_available(part, say, "ncu is not installed" if tool is None else "no GPU")
    command = [tool, "--clock-control", "none", "--csv", "--page", "raw", "--print-units", "base"]
    one = [*command, "--metrics", METRICS[0], sys.executable, "-c", ONE_LINE]
    if run_to_end(one, log, seconds=120) != 0 or METRICS[0] not in log.read_text(errors="replace"):
        return _not_available(part, say, f"ncu on one line: {tail(log)}")
    log.unlink()
    chain = [sys.executable, "-m", f"{PACKAGE}.gpu_smoke", "--profile", "--backend", backend]
    status, rows, metrics = None, [], METRICS
    for metrics in ((*METRICS, *MORE_METRICS), METRICS):
        log.unlink(missing_ok=True)
        argv = [*command, "--profile-from-start", "off", "--metrics", ",".join(metrics), *chain]
        status = run_to_end(argv, log, seconds=(seconds - 130) / 2)
        rows = counters(log.read_text(errors="replace"), metrics)
        if status == 0 and rows:
            break
    if status != 0 or not rows:
        return _not_available(part, say, f"ncu on the chain, status {status}: {tail(log)}")
    part.lines += ["One whole chain at 16 × 400, kernel by kernel, cold and without a graph (ncu, its own clocks):", ""]
    part.lines += _markdown(("kernel", *(_metric_name(m) for m in metrics)), rows)
    say("\n".join(part.lines))
    return True


def counters(log: str, metrics: Sequence[str] = METRICS) -> list[tuple[str, ...]]:
    """One line per kernel from ncu's CSV, which follows whatever the program printed."""
    lines = log.splitlines()
    start = next((i for i, line in enumerate(lines) if line.startswith('"ID"')), None)
    if start is None:
        return []
    table = [line for line in lines[start:] if line.startswith('"')]
    rows = []
    for row in csv.DictReader(io.StringIO("\n".join(table))):
        if row.get("ID"):  # the line below the header holds the units
            rows.append((f"`{row['Kernel Name']}`", *(_number(row.get(m)) for m in metrics)))
    return rows


def _number(text: str | None) -> str:
    try:
        return f"{float((text or '').replace(',', '')):,.4g}"
    except ValueError:
        return text or ""


def _metric_name(metric: str) -> str:
    return {
        "gpu__time_duration.sum": "ns",
        "dram__bytes_read.sum": "bytes read",
        "dram__bytes_write.sum": "bytes written",
        "gpu__dram_throughput.avg.pct_of_peak_sustained_elapsed": "% DRAM",
        "sm__throughput.avg.pct_of_peak_sustained_elapsed": "% SM",
        "sm__warps_active.avg.pct_of_peak_sustained_active": "% warps active",
        "launch__registers_per_thread": "registers",
        "launch__grid_size": "programs",
        "launch__block_size": "threads",
        "smsp__cycles_elapsed.avg.per_second": "SM Hz",
        "sm__inst_executed_pipe_tensor.sum": "tensor instructions",
        "lts__t_sector_hit_rate.pct": "% L2 hits",
        "smsp__average_warps_issue_stalled_long_scoreboard_per_issue_active.ratio": "warps waiting for memory",
        "smsp__average_warps_issue_stalled_short_scoreboard_per_issue_active.ratio": "for shared memory",
        "smsp__average_warps_issue_stalled_barrier_per_issue_active.ratio": "at a barrier",
    }[metric]


def _not_available(part: Part, say: Say, why: str, *, fine: bool = True) -> bool:
    part.status = "not available"
    part.lines.append(f"not available: {why}")
    say(part.lines[-1])
    return fine
