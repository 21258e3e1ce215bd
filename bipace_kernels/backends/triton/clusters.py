"""Greedy cosine clusters on the device of the hidden states (labels of reference.clusters), without synchronizing.

    one pass over the rows (rows.py) ─► Gram matrix of every group (gram.py) ─► decisions in order (scan.py) ─► numbers
                                                                              ε = 0: equal rows (equal.py)

ε is only a threshold in the scan, so a sweep is the same launches with one more grid axis.  Results only depend on a
record's own group, D and dtype, so a group has the same labels in any batch.  A group of n records takes 4 n² bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import triton
import triton.language as tl

from ..records import Records
from ..schema import BAND
from . import equal, gram, rows, scan
from ._launch import ceil_div, device_guard
from .numbering import dense_labels

Tensor = torch.Tensor

#: Float32 values of the Gram matrices, and of the scan's state under a sweep, that are made at a time: 1 GiB.
ROOM = 1 << 28
LONGEST = 46_080  #: records of a group: places in its Gram matrix are 32-bit
_WRITE = 8  # values that one launch of _write takes


@dataclass(frozen=True)
class Cut:
    """How the work is split among launches and programs."""

    room: int = ROOM
    tile: gram.Tile | None = None  # of the Gram matrices; None: by dtype and GPU
    scan: dict[str, Any] | None = None  # constants and warps of the scan; None: by the longest group


CUT = Cut()

_WRITE_OPTIONS: dict[str, Any] = {"num_warps": 1, "enable_fp_fusion": False}


def scan_rows(records: Records, fingerprint: Tensor) -> Tensor:
    state = torch.empty(records.n_records, dtype=torch.uint8, device=records.device)
    rows.look(fingerprint, records.order, state=state)
    return state


def cluster_cosine(records: Records, fingerprint: Tensor, epsilon: float) -> Tensor:
    """A record whose row has no direction is a cluster of its own even if it is not marked as unusable."""
    return cluster_sweep(records, fingerprint, [epsilon])[0]


def cluster_sweep(records: Records, fingerprint: Tensor, epsilons: Sequence[float], cut: Cut = CUT) -> Tensor:
    """The same bits as cluster_cosine, from one Gram matrix per group."""
    return sweep_with(partial(Clustering, cut=cut), records, fingerprint, epsilons)


def sweep_with(
    batch_of: Callable[..., Clustering],  # whose `cluster` does it
    records: Records,
    fingerprint: Tensor,
    epsilons: Sequence[float],
) -> Tensor:
    """cluster_sweep(), with any kernels for ε > 0."""
    order, group_offsets, n, device = records.order, records.group_offsets, records.n_records, records.device
    n_groups, longest_group = records.n_groups, records.longest_group
    first = torch.empty((len(epsilons), n), dtype=torch.int64, device=device)
    if not first.numel():
        return first
    zero = [e for e, epsilon in enumerate(epsilons) if epsilon == 0]
    rest = [e for e, epsilon in enumerate(epsilons) if epsilon != 0]
    kind = torch.empty(n, dtype=torch.uint8, device=device)
    scale = torch.empty(n, dtype=torch.float32, device=device)
    row_hash = torch.empty(n, dtype=torch.int64, device=device) if zero else None
    rows.look(
        fingerprint, order, state=records.state, kind=kind, scale=scale, row_hash=row_hash, usable=records.usable,
        taken=records.taken,
    )  # fmt: skip
    if row_hash is not None:
        equal.first_equal(
            fingerprint, order, group_offsets, kind, row_hash, n_groups=n_groups, longest_group=longest_group,
            first=first[zero[0]],
        )  # fmt: skip
        for e in zero[1:]:
            first[e].copy_(first[zero[0]])
    if rest:
        found = torch.empty((len(rest), n), dtype=torch.int64, device=device) if zero else first
        batch = batch_of(fingerprint, order, group_offsets, kind, scale, n_groups, longest_group)
        batch.cluster([epsilons[e] for e in rest], found)
        if zero:
            for e, row in zip(rest, found, strict=True):
                first[e].copy_(row)
    return dense_labels(first)


@dataclass(frozen=True)
class Clustering:
    """The records' data for all launches below."""

    fingerprint: Tensor  # [N, D]
    order: Tensor  # [M] int64
    group_offsets: Tensor  # [G+1] int64
    kind: Tensor  # [M] uint8
    scale: Tensor  # [M] float32
    n_groups: int
    longest_group: int
    cut: Cut = CUT

    def cluster(
        self,
        epsilons: Sequence[float],  # E, none of them 0
        first: Tensor,  # [E, M] int64, written
    ) -> None:
        """The record that began each record's cluster, for ε > 0.  ValueError for a group of more than LONGEST records."""
        if self.longest_group > LONGEST:
            raise ValueError(
                f"a prompt group must have at most {LONGEST} records for Triton's clusters, got {self.longest_group}; use "
                "backend='cuda' or move the tensors with .cpu()."
            )
        side, chunk, sweep = _chunks(self.longest_group, self.n_groups, len(epsilons), self.cut.room)
        lowest = [1.0 - epsilon - BAND for epsilon in epsilons]
        lowest_of = self.scale if len(lowest) == 1 else on_device(lowest, first.device)
        with device_guard(first):
            for group in range(0, self.n_groups, chunk):
                groups = min(chunk, self.n_groups - group)
                products = torch.empty((groups, side, side), dtype=torch.float32, device=first.device)
                reciprocal = torch.empty((groups, side), dtype=torch.float32, device=first.device)
                gram.multiply_groups(
                    self.fingerprint, self.order, self.group_offsets, self.scale, products, reciprocal,
                    first_group=group, tile=self.cut.tile,
                )  # fmt: skip
                for e in range(0, len(lowest), sweep):
                    some = lowest[e : e + sweep]
                    state = products
                    if len(lowest) > 1:
                        state = torch.empty((len(some), *products.shape), dtype=torch.float32, device=first.device)
                    scan.decide_groups(
                        products, reciprocal, state, self.kind, self.group_offsets, first[e : e + sweep], some,
                        lowest_of[e:], first_group=group, shape=self.cut.scan,
                    )  # fmt: skip


def _chunks(longest: int, n_groups: int, n_epsilons: int, room: int) -> tuple[int, int, int]:
    """Side of a Gram matrix, groups per launch, ε per launch, within the memory limit if one matrix fits."""
    side = max(ceil_div(longest, gram.UNIT), 1) * gram.UNIT
    matrices = max(room // side**2, 1)
    sweep = min(n_epsilons, matrices)
    return side, min(n_groups, max(matrices // sweep, 1)), sweep


def on_device(values: Sequence[float], device: torch.device) -> Tensor:
    """[E] float32, passed as arguments: a copy from the host would synchronize, or have to outlive a captured graph."""
    out = torch.empty(len(values), dtype=torch.float32, device=device)
    with device_guard(out):
        for start in range(0, len(values), _WRITE):
            some = [*values[start : start + _WRITE], *[0.0] * _WRITE][:_WRITE]
            _write[(1,)](out[start:], *some, min(len(values) - start, _WRITE), WRITE=_WRITE, **_WRITE_OPTIONS)
    return out


@triton.jit(do_not_specialize=["n"])
def _write(out, v0, v1, v2, v3, v4, v5, v6, v7, n, WRITE: tl.constexpr):
    i = tl.arange(0, WRITE)
    low = tl.where(i == 0, v0, tl.where(i == 1, v1, tl.where(i == 2, v2, v3)))
    high = tl.where(i == 4, v4, tl.where(i == 5, v5, tl.where(i == 6, v6, v7)))
    tl.store(out + i, tl.where(i < 4, low, high), mask=i < n)


def main_path() -> Iterator[tuple[Any, dict[str, str], dict[str, Any], dict[str, Any]]]:
    """(kernel, signature, constexprs, options) of each launch on the main path, for compiling ahead of time."""
    values = {f"v{i}": "fp32" for i in range(_WRITE)}
    yield _write, {"out": "*fp32", **values, "n": "i32"}, {"WRITE": _WRITE}, _WRITE_OPTIONS
