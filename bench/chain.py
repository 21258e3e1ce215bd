"""The floor under any greedy scan: what one dependent step costs on this GPU (chain.cu), measured beside the figures.

A step finds the largest of K values in shared memory, tells everybody, and changes the winner by one fused
multiply-add; the next step needs the outcome. Of all widths of the block that hold K values, the quickest counts.
"""

import ctypes
import functools
import hashlib
import os
import re
import statistics
import subprocess
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from .cuda_resources import nvcc

SOURCE = Path(__file__).resolve().with_name("chain.cu")
SIZES = (16, 128, 512, 2048)
FACTOR, SUMMAND = 0.5, -0.25  # v/2 − 1/4 is exact but for one rounding, so that NumPy finds the same bits

# (threads, values a thread, values, checksum, K, steps, stream): one launch on the given stream.
Launcher = Callable[[int, int, torch.Tensor, torch.Tensor, int, int], None]


class NotAvailable(RuntimeError):
    """The micro-kernel cannot be compiled here; the message says why."""


@dataclass(frozen=True)
class Step:
    """One dependent step over K values."""

    k: int
    ns: float
    threads: int  # of the quickest variant


def variants() -> list[tuple[int, int]]:
    """(threads of the block, values of a thread) of each kernel in chain.cu."""
    text = SOURCE.read_text().partition("#define FOR_EACH_VARIANT")[2].partition("#define DEFINE")[0]
    return [(int(t), int(p)) for t, p in re.findall(r"DO\((\d+), (\d+)\)", text)]


def fitting(k: int) -> list[tuple[int, int]]:
    """The variants with the least room that holds k values."""
    rooms = {t * p for t, p in variants() if t * p >= k}
    if not rooms:
        raise ValueError(f"k must be at most {max(t * p for t, p in variants())}, got {k}")
    return [(t, p) for t, p in variants() if t * p == min(rooms)]


def expected(values: np.ndarray[Any, Any], steps: int) -> tuple[np.ndarray[Any, Any], int]:
    """What a kernel must leave behind: the values and the checksum of the winners."""
    held, checksum = values.astype(np.float32), 0
    for _ in range(steps):
        winner = int(held.argmax())
        checksum = (checksum * 31 + winner) & 0xFFFFFFFF
        held[winner] = held[winner] * np.float32(FACTOR) + np.float32(SUMMAND)
    return held, checksum


def run(launch: Launcher, variant: tuple[int, int], values: torch.Tensor, steps: int) -> tuple[torch.Tensor, int]:
    """The values after `steps` steps of one variant, and the checksum of the winners."""
    held = values.clone()
    checksum = torch.zeros(1, dtype=torch.int32, device=values.device)
    launch(*variant, held, checksum, len(values), steps)
    return held, int(checksum.item()) & 0xFFFFFFFF


def measure(sizes: Sequence[int] = SIZES, *, rounds: int = 15) -> list[Step]:
    """Nanoseconds of a step for each K, from the difference of a long and a short chain.  NotAvailable says why not."""
    launch = launcher()
    return [min((_step(launch, v, k, rounds) for v in fitting(k)), key=lambda s: s.ns) for k in sizes]


def _step(launch: Launcher, variant: tuple[int, int], k: int, rounds: int) -> Step:
    values = torch.rand(k, device="cuda", generator=torch.Generator("cuda").manual_seed(k))
    checksum = torch.zeros(1, dtype=torch.int32, device="cuda")
    short, long = 1024, 5120
    medians = []
    for steps in (short, long):
        took = []
        for _ in range(rounds + 2):
            held = values.clone()
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            start.record()
            launch(*variant, held, checksum, k, steps)
            end.record()
            end.synchronize()
            took.append(start.elapsed_time(end))
        medians.append(statistics.median(took[2:]))
    return Step(k, (medians[1] - medians[0]) * 1e6 / (long - short), variant[0])


@functools.cache
def launcher() -> Launcher:
    """The micro-kernel, compiled by nvcc; it counts once it has run right."""
    try:
        library = ctypes.CDLL(str(build_by_nvcc(torch.cuda.get_device_capability())))
    except Exception as error:  # whatever a compiler or driver dislikes is a reason in the report
        reason = " ".join(str(error).split())[:300]
        raise NotAvailable(f"nvcc: {type(error).__name__}: {reason}") from error

    def launch(threads: int, per: int, values: torch.Tensor, checksum: torch.Tensor, k: int, steps: int) -> None:
        status = library.chain_launch(
            ctypes.c_int(threads), ctypes.c_int(per), ctypes.c_void_p(values.data_ptr()),
            ctypes.c_void_p(checksum.data_ptr()), ctypes.c_int(k), ctypes.c_int(steps), ctypes.c_float(FACTOR),
            ctypes.c_float(SUMMAND), ctypes.c_void_p(torch.cuda.current_stream().cuda_stream),
        )  # fmt: skip
        if status != 0:
            raise RuntimeError(f"the launch failed with CUDA error {status}")

    values = torch.rand(16, device="cuda", generator=torch.Generator("cuda").manual_seed(1))
    held, checksum = run(launch, fitting(16)[0], values, 100)
    want, want_checksum = expected(values.cpu().numpy(), 100)
    if checksum != want_checksum or not np.array_equal(held.cpu().numpy(), want):
        raise NotAvailable("the compiled micro-kernel computes something else")
    return launch


def build_by_nvcc(capability: tuple[int, int]) -> Path:
    """The shared library for one architecture, in a folder of this user's temporary files, built once per source."""
    arch = f"{capability[0]}{capability[1]}"
    digest = hashlib.sha256(SOURCE.read_bytes()).hexdigest()[:16]
    folder = Path(tempfile.gettempdir()) / f"bipace-chain-{os.getuid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    target = folder / f"chain-{digest}-{arch}.so"
    if not target.exists():
        fresh = target.with_suffix(f".{os.getpid()}.tmp")
        argv = [nvcc(), "-std=c++17", "-O3", "-shared", "-Xcompiler", "-fPIC",
                f"-gencode=arch=compute_{arch},code=sm_{arch}", "-o", str(fresh), str(SOURCE)]  # fmt: skip
        done = subprocess.run(argv, capture_output=True, text=True, check=False)
        if done.returncode != 0:
            raise RuntimeError(f"nvcc failed: {done.stderr.strip()[-300:]}")
        fresh.rename(target)
    return target
