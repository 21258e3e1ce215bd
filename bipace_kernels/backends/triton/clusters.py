"""Greedy cosine clusters on the device of the hidden states (labels of reference.clusters), without synchronizing.

    one pass over the rows (rows.py) ─► Gram matrix of every group (gram.py) ─► decisions in order (scan.py) ─► numbers
                                                                              ε = 0: equal rows (equal.py)

ε is only a threshold in the scan, so a sweep is the same launches with one more grid axis.  Results only depend on a
record's own group, D and dtype, so a group has the same labels in any batch.  A group of n records takes 4 n² bytes.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from ..records import Records
from ..schema import BAND
from . import equal, gram, rows, scan
from ._launch import ceil_div, device_guard
from .numbering import dense_labels

#: Float32 values of the Gram matrices, and of the scan's state under a sweep, that are made at a time: 1 GiB.
ROOM = 1 << 28
LONGEST = 46_080  #: records of a group: places in its Gram matrix are 32-bit


@dataclass(frozen=True)
class Cut:
    """How the work is split among launches and programs."""

    room: int = ROOM
    tile: dict[str, int] | None = None  # of the Gram matrices; None: by dtype and GPU
    scan: dict[str, int] = field(default_factory=lambda: scan.TILE)  # tiles of the scan


CUT = Cut()


def scan_rows(records: Records, fingerprint: Tensor) -> Tensor:
    state = torch.empty(records.n_records, dtype=torch.uint8, device=records.device)
    rows.read(fingerprint, records.order, state=state)
    return state


def cluster_cosine(records: Records, fingerprint: Tensor, epsilon: float) -> Tensor:
    """A record whose row has no direction is a cluster of its own even if it is not marked as unusable."""
    return cluster_sweep(records, fingerprint, [epsilon])[0]


def cluster_sweep(records: Records, fingerprint: Tensor, epsilons: Sequence[float], cut: Cut = CUT) -> Tensor:
    """The same bits as cluster_cosine, from one Gram matrix per group."""
    return sweep_with(partial(_decide, cut=cut), records, fingerprint, epsilons)


class Rows(NamedTuple):
    """The records' rows, and what one pass over them has found."""

    fingerprint: Tensor  # [N, D]
    kind: Tensor  # [M] uint8
    scale: Tensor  # [M] float32


#: Writes first [E, M] int64, the record that began each record's cluster, under E thresholds 1 − ε − τ of ε > 0.
Decide = Callable[[Records, Rows, list[float], Tensor], None]


def sweep_with(decide: Decide, records: Records, fingerprint: Tensor, epsilons: Sequence[float]) -> Tensor:
    """cluster_sweep(), with any kernels for ε > 0."""
    n, device = records.n_records, records.device
    first = torch.empty((len(epsilons), n), dtype=torch.int64, device=device)
    if not first.numel():
        return first
    zero = [e for e, epsilon in enumerate(epsilons) if epsilon == 0]
    rest = [e for e, epsilon in enumerate(epsilons) if epsilon != 0]
    kind = torch.empty(n, dtype=torch.uint8, device=device)
    scale = torch.empty(n, dtype=torch.float32, device=device)
    row_hash = torch.empty(n, dtype=torch.int64, device=device) if zero else None
    rows.read(
        fingerprint, records.order, state=records.state, kind=kind, scale=scale, row_hash=row_hash,
        usable=records.usable, taken=records.taken,
    )  # fmt: skip
    if row_hash is not None:
        equal.first_equal(records, fingerprint, kind, row_hash, first[zero[0]])
        for e in zero[1:]:
            first[e].copy_(first[zero[0]])
    if rest:
        decided = torch.empty((len(rest), n), dtype=torch.int64, device=device) if zero else first
        decide(records, Rows(fingerprint, kind, scale), [1.0 - epsilons[e] - BAND for e in rest], decided)
        if zero:
            for e, row in zip(rest, decided, strict=True):
                first[e].copy_(row)
    return dense_labels(first)


def _decide(records: Records, rows: Rows, lowest: list[float], first: Tensor, *, cut: Cut) -> None:
    """ValueError for a group of more than LONGEST records."""
    longest, n_groups, device = records.longest_group, records.n_groups, first.device
    if longest > LONGEST:
        raise ValueError(
            f"a prompt group must have at most {LONGEST} records for Triton, got {longest}; use 'cuda' or .cpu()."
        )
    # As many groups and ε at a time as there is room for, at least one matrix.
    side = max(ceil_div(longest, gram.UNIT), 1) * gram.UNIT
    matrices = max(cut.room // side**2, 1)
    sweep = min(len(lowest), matrices)
    chunk = matrices // sweep
    lowest_of = rows.scale if len(lowest) == 1 else on_device(lowest, device)
    with device_guard(first):
        for group in range(0, n_groups, chunk):
            groups = min(chunk, n_groups - group)
            products = torch.empty((groups, side, side), dtype=torch.float32, device=device)
            reciprocal = torch.empty((groups, side), dtype=torch.float32, device=device)
            gram.multiply_groups(
                rows.fingerprint, records.order, records.group_offsets, rows.scale, products, reciprocal,
                first_group=group, tile=cut.tile,
            )  # fmt: skip
            for e in range(0, len(lowest), sweep):
                some, state = lowest[e : e + sweep], products
                if len(lowest) > 1:
                    state = torch.empty((len(some), *products.shape), dtype=torch.float32, device=device)
                scan.decide_groups(
                    records, rows.kind, products, reciprocal, state, first[e : e + sweep], some, lowest_of[e:], group,
                    cut.scan,
                )  # fmt: skip


def on_device(values: Sequence[float], device: torch.device) -> Tensor:
    """[E] float32, by launches: a copy from the host would synchronize, or have to outlive a captured graph."""
    out = torch.empty(len(values), dtype=torch.float32, device=device)
    for e, value in enumerate(values):
        out[e : e + 1].fill_(value)
    return out
