"""Measurement of time on a GPU, and ceilings of that GPU: bench/README.md, "On a GPU", says how."""

import hashlib
import importlib
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

import bipace_kernels as bk

from .measure import Timing, timed

_AHEAD = 50_000_000  # clock cycles, about 30 ms: the device sleeps while the host queues the first rounds


def gpu() -> dict[str, Any]:
    """The current device and the software that drives it; without one, empty fields."""
    found: dict[str, Any] = {
        "name": "none", "capability": "", "multiprocessors": 0, "l2_mib": 0.0, "memory_gib": 0.0, "driver": "",
        "clocks": "",  # highest, of the multiprocessors and the memory
        "cuda": str(torch.version.cuda),  # that torch was built with
        "triton": _version("triton"),
        "kernels": bk.backends()["cuda"].detail,  # the CUDA ones: who compiled them and for what, or why there are none
        "sources": sources_hash(),  # for checkouts that say no commit
    }  # fmt: skip
    if torch.cuda.is_available():
        p = torch.cuda.get_device_properties(torch.cuda.current_device())
        found |= {
            "name": p.name, "capability": f"{p.major}.{p.minor}", "multiprocessors": p.multi_processor_count,
            "l2_mib": p.L2_cache_size / 2**20, "memory_gib": round(p.total_memory / 2**30, 1),
            "driver": _ask_smi("driver_version"), "clocks": _ask_smi("clocks.max.sm,clocks.max.mem"),
        }  # fmt: skip
    return found


def _ask_smi(query: str) -> str:
    argv = ["nvidia-smi", f"--query-gpu={query}", "--format=csv,noheader", "--id=0"]
    try:
        done = subprocess.run(argv, capture_output=True, text=True, check=True, timeout=30)
    except (OSError, subprocess.SubprocessError) as error:
        return f"not available: {type(error).__name__}"
    return done.stdout.strip()


def sm_mhz() -> int | None:
    """The multiprocessors' clock in MHz, still that of the work just done; None where nvidia-smi does not say."""
    found = _ask_smi("clocks.sm").partition(" ")[0]
    return int(found) if found.isdigit() else None


def _version(name: str) -> str:
    try:
        return str(importlib.import_module(name).__version__)
    except ImportError as error:
        return f"not available: {error}"


def sources_hash() -> str:
    """First digits of the SHA-256 over the package's Python files and csrc, names and contents."""
    package = Path(str(importlib.import_module("bipace_kernels").__file__)).parent
    digest = hashlib.sha256()
    for path in sorted([*package.rglob("*.py"), *(package / "csrc").glob("*/*.*")]):
        digest.update(str(path.relative_to(package)).encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()[:16]


@dataclass(frozen=True)
class GpuCeilings:
    """Measured in the same process as the other figures; the best of several tries, because these are ceilings."""

    copy_gb_s: float  # device to device, bytes read + bytes written
    gemm_tflop_s: float  # torch.mm, bfloat16, square, random values
    empty_us: float  # a captured graph with one kernel that does next to nothing


class Clock:
    """Times calls on the current CUDA device."""

    sm_mhz = staticmethod(sm_mhz)

    def __init__(self) -> None:
        l2 = torch.cuda.get_device_properties(torch.cuda.current_device()).L2_cache_size
        self._scratch = torch.empty(max(4 * l2, 256 << 20), dtype=torch.uint8, device="cuda")

    def replay(self, call: Callable[[], Any], *, rounds: int, seconds: float) -> tuple[Timing, Any]:
        """Captures the call and replays it; returns the figures and the tensors of the last replay."""
        graph, result = capture(call)
        graph.replay()
        torch.cuda.synchronize()
        probe = self._between_events(graph.replay, 3)
        possible = int(seconds * 1e3 / max(probe.median, 1e-3))
        return self._between_events(graph.replay, max(3, min(rounds, possible))), result

    def _between_events(self, run: Callable[[], Any], rounds: int) -> Timing:
        pairs = [(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(rounds)]
        torch.cuda.synchronize()
        sleep: Any = torch.cuda._sleep
        sleep(_AHEAD)
        for start, end in pairs:
            self._scratch.zero_()
            start.record()
            run()
            end.record()
        torch.cuda.synchronize()
        return Timing([start.elapsed_time(end) for start, end in pairs])

    def wall(self, call: Callable[[], Any], *, rounds: int, seconds: float, warm_up: bool = True) -> tuple[Timing, Any]:
        """Wall-clock time of the call to the end of the device's work; stops after `seconds`, once it has run once."""
        result = call() if warm_up else None
        timing, spent = Timing(), 0.0
        while len(timing.samples) < rounds and (not timing.samples or spent < seconds):
            self._scratch.zero_()
            took, _, result = timed(call, _synchronized)
            timing.samples.append(took * 1e3)
            spent += took
        return timing, result

    def ceilings(self) -> GpuCeilings:
        """Copies a block far larger than the L2 cache and multiplies two large matrices of random values."""
        size, side = 4 << 30, 8192
        source = torch.empty(size, dtype=torch.uint8, device="cuda").random_(0, 256)
        target = torch.empty_like(source)
        copy = min(self._between_events(lambda: target.copy_(source), 10).samples)
        a, b = (torch.randn(side, side, device="cuda", dtype=torch.bfloat16) for _ in range(2))
        c = torch.mm(a, b)
        gemm = min(self._between_events(lambda: torch.mm(a, b, out=c), 10).samples)
        one = torch.zeros(1, device="cuda")
        empty, _ = self.replay(lambda: one.add_(1), rounds=50, seconds=1.0)
        return GpuCeilings(2 * size / copy / 1e6, 2 * side**3 / gemm / 1e9, empty.median * 1e3)


class DryClock:
    """A dry run without a GPU: calls once or twice, captures nothing. Its times mean nothing."""

    def sm_mhz(self) -> int | None:
        return None

    def replay(self, call: Callable[[], Any], **_: Any) -> tuple[Timing, Any]:
        began = time.perf_counter()
        result = call()
        return Timing([(time.perf_counter() - began) * 1e3]), result

    wall = replay

    def ceilings(self) -> GpuCeilings:
        return GpuCeilings(copy_gb_s=1.0, gemm_tflop_s=1.0, empty_us=1.0)


def capture(call: Callable[[], Any]) -> tuple[torch.cuda.CUDAGraph, Any]:
    """The call as a CUDA graph, after warm-up calls on a side stream, and the tensors that its replays fill."""
    new_stream: Any = torch.cuda.Stream
    side = new_stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            call()
    torch.cuda.current_stream().wait_stream(side)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = call()
    return graph, result


def _synchronized() -> float:
    """Seconds, once the device has done what it was asked for."""
    torch.cuda.synchronize()
    return time.perf_counter()
