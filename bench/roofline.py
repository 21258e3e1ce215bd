"""What this machine can do at best, measured, and how much work a stage needs at least.

A row's bytes are the inputs it cannot avoid to read plus the outputs it cannot avoid to write, each once; its FLOP are
those of the paper's algorithm on these data. Both sides of a comparison are charged with the same work, so that shares
can be compared. They are no bounds for a side that does less: ours ends products early that cannot change a decision,
and where there are many clusters that takes it past 100 % of the product rate.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import astuple, dataclass
from itertools import pairwise

import numpy as np
import torch

from .workloads import Ints


@dataclass(frozen=True)
class Ceilings:
    """Measured at the run's thread count; the best of a few tries, because these are ceilings."""

    copy_gb_s: float  # bytes read + bytes written, into memory that exists (STREAM's copy)
    gemm_gflop_s: float  # torch.mm, float32, square
    copy_bytes: int
    gemm_size: int


def measure(*, quick: bool, clock: Callable[[], float] = time.perf_counter) -> Ceilings:
    """Copies a block far larger than any cache and multiplies two large matrices."""
    size = (16 if quick else 512) << 20
    side = 256 if quick else 3072
    source = torch.ones(size // 4)
    target = torch.empty_like(source)
    copy = _best(lambda: target.copy_(source), 2 if quick else 7, clock)
    a, b, c = torch.randn(side, side), torch.randn(side, side), torch.empty(side, side)
    gemm = _best(lambda: torch.mm(a, b, out=c), 2 if quick else 5, clock)
    return Ceilings(2 * size / copy / 1e9, 2 * side**3 / gemm / 1e9, size, side)


def best(one: Ceilings, other: Ceilings) -> Ceilings:
    """The higher of each: a ceiling measured while the machine was busy is too low."""
    return Ceilings(*map(max, astuple(one), astuple(other)))


def _best(call: Callable[[], object], tries: int, clock: Callable[[], float]) -> float:
    call()
    took = []
    for _ in range(tries):
        began = clock()
        call()
        took.append(clock() - began)
    return min(took)


@dataclass(frozen=True)
class Work:
    """The least a stage must move and compute."""

    bytes: int = 0  # inputs read once, outputs written once
    flop: int = 0


def clone_work(fingerprint: torch.Tensor) -> Work:
    return Work(bytes=2 * fingerprint.numel() * fingerprint.element_size())


def cluster_work(fingerprint: torch.Tensor, label: Ints, offsets: Sequence[int]) -> Work:
    """Read the fingerprints, write the labels; 2D per record and open centroid, 6D per record for norm and update."""
    n, d = fingerprint.shape
    label = np.asarray(label)
    pairs = 0  # (record, centroid open when it came)
    for start, end in pairwise(offsets):
        new = np.zeros(end - start, np.int64)
        new[np.unique(label[start:end], return_index=True)[1]] = 1
        pairs += int((np.cumsum(new) - new).sum())
    return Work(bytes=n * d * fingerprint.element_size() + 8 * n, flop=2 * d * pairs + 6 * n * d)


def advantage_work(clustering: Work, records: int) -> Work:
    """Clustering plus ids, steps, rewards and keys in (28 bytes a record) and five results out (25 bytes)."""
    return Work(bytes=clustering.bytes + 53 * records, flop=clustering.flop)


def value_work(fingerprint: torch.Tensor, offsets: Sequence[int]) -> Work:
    """Read the fingerprints, write a value each; a group's n (n + 1) D of products and n³ / 3 of a factorisation."""
    n, d = fingerprint.shape
    sizes = np.diff(np.asarray(offsets)).astype(np.float64)
    flop = float((sizes * (sizes + 1) * d + sizes**3 / 3).sum())
    return Work(bytes=n * d * fingerprint.element_size() + 8 * n, flop=int(flop))


def text_work(texts: Sequence[str], *, out_bytes: int) -> Work:
    """Read each character once, write the result."""
    return Work(bytes=sum(len(t.encode()) for t in texts) + out_bytes)
