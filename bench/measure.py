"""Measurement of time and memory, and description of the machine: bench/README.md, "How it is measured"."""

import ctypes
import datetime
import gc
import importlib
import os
import platform
import re
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch


@dataclass(frozen=True)
class Side:
    """One implementation in a comparison. `prepare` makes its inputs and is not timed."""

    name: str
    call: Callable[[Any], Any]
    prepare: Callable[[], Any] = lambda: None


@dataclass
class Timing:
    """Milliseconds of the calls of one side: wall clock, and CPU time of all threads of the process."""

    samples: list[float] = field(default_factory=list)
    cpu_samples: list[float] = field(default_factory=list)

    @property
    def cpu_median(self) -> float:
        return statistics.median(self.cpu_samples) if self.cpu_samples else 0.0

    @property
    def rounds(self) -> int:
        return len(self.samples)

    @property
    def median(self) -> float:
        return statistics.median(self.samples)

    @property
    def iqr(self) -> float:
        if len(self.samples) < 2:
            return 0.0
        low, _, high = statistics.quantiles(self.samples, n=4, method="inclusive")
        return high - low


@dataclass(frozen=True)
class Effort:
    """How long to measure: rounds at most, and seconds after which a side that has `fewest` rounds sits out."""

    rounds: int = 15
    seconds: float = 6.0
    fewest: int = 3
    warm_up: bool = True
    clock: Callable[[], float] = time.perf_counter
    flush_bytes: int = 96 << 20  # three times the last-level cache of the machine the defaults were chosen on


def compare(sides: Sequence[Side], effort: Effort, *, tick: Callable[[], None] = lambda: None) -> dict[str, Timing]:
    """Times the sides in turns; `tick` is called after each call."""
    timings = {side.name: Timing() for side in sides}
    spent = dict.fromkeys(timings, 0.0)
    if effort.warm_up:
        for side in sides:
            began = effort.clock()
            side.call(side.prepare())
            spent[side.name] = (effort.clock() - began) / 2  # a slow warm-up shortens what follows
            tick()
    scratch = np.zeros(max(effort.flush_bytes // 8, 1))
    for round_ in range(effort.rounds):
        for side in sides:
            if round_ >= effort.fewest and spent[side.name] > effort.seconds:
                continue
            inputs = side.prepare()
            scratch += 1.0
            took, cpu = timed(lambda: side.call(inputs), effort.clock)[:2]  # noqa: B023
            timings[side.name].samples.append(took * 1e3)
            timings[side.name].cpu_samples.append(cpu * 1e3)
            spent[side.name] += took
            tick()
    return timings


def timed(call: Callable[[], Any], clock: Callable[[], float]) -> tuple[float, float, Any]:
    """Seconds of one call by the clock, and by the CPU time of all threads; its result, to be freed afterwards."""
    gc.collect()
    gc.disable()
    try:
        cpu, began = time.process_time(), clock()
        result = call()
        return clock() - began, time.process_time() - cpu, result
    finally:
        gc.enable()


@contextmanager
def threads(count: int) -> Iterator[dict[str, Any]]:
    """`count` threads for torch (and with it the package), and for NumPy's BLAS through threadpoolctl: the machine."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        with blas_threads(count) as limited:
            blas = str(count) if limited else "as set (threadpoolctl is not installed)"
            yield machine(count, f"torch {count}, NumPy's BLAS {blas}")
    finally:
        torch.set_num_threads(before)


@contextmanager
def busy(count: int) -> Iterator[None]:
    """So many processes that do nothing but compute."""
    processes = [subprocess.Popen([sys.executable, "-S", "-c", "while True: pass"]) for _ in range(count)]
    try:
        yield
    finally:
        for process in processes:
            process.kill()
            process.wait()


@contextmanager
def blas_threads(count: int) -> Iterator[bool]:
    """NumPy's BLAS at `count` threads; False where threadpoolctl, which can set that, is not installed."""
    try:
        control = importlib.import_module("threadpoolctl")
    except ImportError as error:
        if error.name != "threadpoolctl":
            raise
        yield False
    else:
        with control.threadpool_limits(limits=count, user_api="blas"):
            yield True


def high_water(run: Callable[[], Any]) -> int:
    """Bytes by which run() raises this process's resident size at its highest; needs Linux's /proc."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)  # or the call would be served from memory that counts as present already
    Path("/proc/self/clear_refs").write_text("5")  # VmHWM := VmRSS
    before = _in_proc("self/status", "VmRSS")
    result = run()
    high = _in_proc("self/status", "VmHWM")
    del result
    return max(high - before, 0)


def _in_proc(file: str, name: str) -> int:
    """Bytes of an entry of a file of /proc that has kilobytes."""
    for line in Path("/proc", file).read_text().splitlines():
        if line.startswith(name + ":"):
            return int(line.split()[1]) * 1024
    raise RuntimeError(f"/proc/{file} has no {name}")


def available_memory() -> int:
    """Bytes that can be used without swapping; 8 GiB where the system does not say."""
    try:
        return _in_proc("meminfo", "MemAvailable")
    except FileNotFoundError:
        return 8 << 30


def machine(count: int, thread_note: str) -> dict[str, Any]:
    """What the figures depend on, for every output: this machine, the versions, the state of the checkout."""
    import bipace_kernels

    return {
        "cpu": _cpu_model(),
        "cores": all_cores(),
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
        "system": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
        "package": bipace_kernels.__version__,
        "native": _native_isa(),
        "torch": torch.__version__,
        "numpy": np.__version__,
        "blas": _blas(),
        "commit": _commit(),
        "date": now(),
        "threads": count,
        "thread_note": thread_note,
        "load": " ".join(f"{x:.2f}" for x in os.getloadavg()),
    }


def all_cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def now() -> str:
    return datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%d %H:%M UTC")


def _cpu_model() -> str:
    info = Path("/proc/cpuinfo")
    said = dict(re.findall(r"^(\w[\w ]*?)\s*: (.*)$", info.read_text(), re.MULTILINE)) if info.exists() else {}
    model = said.get("model name") or platform.processor() or platform.machine()
    best = next((isa for isa in ("avx512f", "avx2") if isa in said.get("flags", "").split()), "")
    return f"{model} ({best})" if best else model


def _native_isa() -> str:
    try:
        return str(importlib.import_module("bipace_kernels._native").isa())
    except ImportError as error:
        return f"not available: {error}"


def _blas() -> str:
    config: Any = np.show_config(mode="dicts")
    blas = config.get("Build Dependencies", {}).get("blas", {})
    mkl = next((part.strip() for part in torch.__config__.show().split(" - ") if "Math Kernel" in part), "no MKL")
    return f"NumPy: {blas.get('name', 'unknown')} {blas.get('version', '')}".strip() + f"; torch: {mkl}"


def _commit() -> str:
    def git(*arguments: str) -> str:
        argv = ["git", "-C", str(Path(__file__).resolve().parent), *arguments]
        return subprocess.run(argv, capture_output=True, text=True, check=True).stdout.strip()

    try:
        git("ls-files", "--error-unmatch", __file__)
        return git("rev-parse", "--short=12", "HEAD") + (" + changes" if git("status", "--porcelain", "-uno") else "")
    except (FileNotFoundError, subprocess.CalledProcessError):
        return "none (not a checkout)"
