"""Memory beyond the inputs, each case in a separate process."""

import functools
import multiprocessing
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from typing import Any

import torch

import bipace_kernels as bk

from . import workloads as w
from .measure import high_water

ALLOWED_EXTRA = 64 << 20


@dataclass(frozen=True)
class Case:
    name: str
    shape: w.Shape
    dtype: torch.dtype = torch.float32
    call: str = "advantage"  # advantage | cluster | gigpo
    shuffled: bool = False  # rows in random order, as trainers that balance their batches give them


def cases(*, quick: bool) -> list[Case]:
    if quick:
        return [Case("tiny", w.TINY), Case("tiny gigpo", w.TINY, call="gigpo")]
    alfworld, _, _, textcraft = w.TRAINING
    lonely = w.Shape("all-singletons", 16, 8, 50, 3584, 400, "every record a state of its own")
    return [
        Case("BiPACE float32", alfworld),
        Case("BiPACE float32, rows shuffled", alfworld, shuffled=True),
        Case("BiPACE bfloat16", alfworld, torch.bfloat16),
        Case("BiPACE float32, every record a singleton", lonely),
        Case("BiPACE float32, TextCraft", textcraft),
        Case("bk.cluster float32, 2 × 4,096", w.CLUSTERING[3], call="cluster"),
        Case("BiPACE bfloat16, 131,072 records", w.LONG, torch.bfloat16),
        Case("BiPACE float32, 131,072 records", w.LONG),
        Case("GiGPO, 6,400 observations", alfworld, call="gigpo"),
    ]


@dataclass(frozen=True)
class Peak:
    name: str
    shape: str
    dtype: str
    peak_bytes: int
    allowed_bytes: int  # half of the fingerprints + 4·K·D + 64 MB
    clusters: int


def measure(case: Case, *, threads: int) -> Peak:
    """Runs one case in a fresh process."""
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        return pool.submit(_measure, case, threads).result()


def _measure(case: Case, threads: int) -> Peak:
    torch.set_num_threads(threads)
    warm, _ = _prepare(Case("warm-up", w.TINY, case.dtype, case.call))
    warm()  # imports, thread pool, allocator arenas: paid once per process, not per call
    run, bytes_ = _prepare(case)
    peak = high_water(run)
    result = run()
    clusters = len((result if isinstance(result, torch.Tensor) else result.cluster).unique())
    dim = case.shape.dim if case.call != "gigpo" else 0
    allowed = bytes_ // 2 + 4 * clusters * dim + ALLOWED_EXTRA
    return Peak(case.name, case.shape.text(), str(case.dtype).removeprefix("torch."), peak, allowed, clusters)


def _prepare(case: Case) -> tuple[Callable[[], Any], int]:
    """The call, ready to run, and the bytes of its fingerprints."""
    from .stages import Hidden, Observed

    if case.call == "gigpo":
        seen = Observed(case.shape)
        return functools.partial(seen.ours(bk.Config.gigpo()), seen.with_integers()), 0
    x = Hidden(case.shape, case.dtype)
    if case.shuffled:
        order = torch.randperm(case.shape.records, generator=torch.Generator().manual_seed(5))
        x.ids = {name: ids[order] for name, ids in x.ids.items()}
        x.rewards, x.action_key, x.fingerprint = x.rewards[order], x.action_key[order], x.fingerprint[order]
    size = x.fingerprint.numel() * x.fingerprint.element_size()
    if case.call == "cluster":
        return lambda: bk.cluster(x.fingerprint, epsilon=w.EPSILON, **x.ids), size
    return x.advantage, size
