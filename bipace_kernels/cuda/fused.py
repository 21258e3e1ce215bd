"""From Gram matrices to the advantages of cosine clusters in one launch, or to the clusters alone, where the groups fit.

It stands for Gram matrices, decisions and numbers of clusters.py, and for step_advantage and combine, and has their bits:
decisions are made while the Gram matrices of later records are multiplied, and nothing between is written but what blocks
tell each other.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from . import _provider, gram, rows, scan
from ._launch import launch

Tensor = torch.Tensor

LONGEST = (
    1024  #: records of a group, as in csrc/cuda/fused.cu; longer ones have work enough of their own (not measured)
)
MOST_PARTS = 1024  # whose tiles are counted in shared memory
_ESTIMATORS = {"mean": 0, "diff_peer": 1, "q_style": 2}
_DESK = 256  # bytes; as in csrc/cuda/fused.cu


@dataclass(frozen=True)
class Plan:
    """How a batch is shared among the blocks of a launch."""

    side: int  # of a Gram matrix
    together: int  # groups whose tiles are taken column by column: all first columns, then all second ones
    parts: int  # of so many groups each
    blocks: int
    spare: int  # bytes of shared memory beside the scan's


def plan(device: torch.device, n_groups: int, n_records: int, longest_group: int, epsilon: float) -> Plan | None:
    """None where the groups do not fit: then stage after stage."""
    if not 0 < epsilon <= scan.WIDEST or not n_records or longest_group > LONGEST:
        return None
    side = scan.side_of(longest_group)
    processors = _provider.current().processors(device)
    tiles = gram.tiles_before(side // gram.UNIT)
    together = min(n_groups, -(-2 * processors // tiles))  # tiles for all blocks, twice
    parts = -(-n_groups // together)
    spare = _up(gram.shared_bytes(device)) + _DESK + _up(8 * (parts + 1))
    fits = scan.capacity(device, side, spare) > 0
    values = n_groups * side * (side + 2 * scan.PANEL)  # of the matrices, and of similarities without shared memory
    if not fits or parts > MOST_PARTS or values > scan.ROOM:
        return None
    return Plan(side, together, parts, min(processors, n_groups * tiles), spare)


def fused_clusters(
    how: Plan,
    fingerprint: Tensor,  # [N, D] float32 | bfloat16 | float16, any strides
    order: Tensor,  # [M] int64
    group_offsets: Tensor,  # [G+1] int64
    usable: Tensor | None,  # [M] bool
    epsilon: float,
    *,
    n_groups: int,
    taken: Tensor | None,  # [M] bool
) -> Tensor:
    """clusters.cluster_cosine()'s labels [M] int64, and nothing else."""
    batch = _Batch(how, fingerprint, order, group_offsets, n_groups, epsilon)
    batch.look(usable=usable, taken=taken)
    labels = torch.empty(order.shape[0], dtype=torch.int64, device=order.device)
    nothing = (None,) * 4, (0, 0, False, 0.0, 0.0), (None,) * 6
    batch.launch(*nothing, labels)
    return labels


def fused_advantage(
    how: Plan,
    fingerprint: Tensor,  # [N, D] float32 | bfloat16 | float16, any strides
    order: Tensor,  # [M] int64 row of the record; each record has a row of its own
    group_offsets: Tensor,  # [G+1] int64
    source: Tensor,  # [N] int64: −1 where a row has no record
    taken: Tensor,  # [M] bool
    returns: Tensor,  # [M] float32
    episode: Tensor,  # [M] float32
    action_key: Tensor | None,  # [N] int64, of rows; None for "mean"
    *,
    n_groups: int,
    longest_group: int,
    epsilon: float,
    estimator: str,
    step_norm: str,
    delta: float,
    weight: float,
) -> tuple[tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]:
    """combine()'s results by row, and scan_rows()'s state of each record [M] uint8."""
    n, device, n_rows = order.shape[0], order.device, source.shape[0]
    batch = _Batch(how, fingerprint, order, group_offsets, n_groups, epsilon)
    state = torch.empty(n, dtype=torch.uint8, device=device)
    batch.look(state=state, taken=taken)
    advantage, step, episode_out, returns_out = (
        torch.empty(n_rows, dtype=torch.float32, device=device) for _ in range(4)
    )
    cluster = torch.empty(n_rows, dtype=torch.int64, device=device)
    branch = torch.empty(n_rows, dtype=torch.uint8, device=device)
    out = advantage, step, episode_out, returns_out, cluster, branch
    options = n_rows, _ESTIMATORS[estimator], step_norm == "std", float(delta), float(weight)
    batch.launch((returns, episode, action_key, source), options, out, None)
    return out, state


class _Batch:
    """What a launch takes of the records, and its scratch."""

    def __init__(
        self, how: Plan, fingerprint: Tensor, order: Tensor, group_offsets: Tensor, n_groups: int, epsilon: float
    ) -> None:
        n, self.device = order.shape[0], order.device

        def empty(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
            return torch.empty(shape, dtype=dtype, device=self.device)

        self.how, self.fingerprint, self.order, self.n_groups = how, fingerprint, order, n_groups
        self.kind, self.scale = empty(n, dtype=torch.uint8), empty(n)
        self.progress = empty(2 + n_groups * (1 + how.side // gram.UNIT), dtype=torch.int32)
        begins, ends = group_offsets[:-1], group_offsets[1:]
        products, reciprocal = empty(n_groups, how.side, how.side), empty(n)
        decisions = scan.Scan(
            self.kind, begins, ends, reciprocal, [1.0 - epsilon - scan.BAND], how.side, how.side, LONGEST + 1,
            spare=how.spare,
        )  # fmt: skip
        self.shared = how.spare + decisions.shared
        self.words = (
            *gram.words(fingerprint, order, begins, ends, self.scale, products, reciprocal, 0, LONGEST + 1),
            *decisions.words(products, 0, None),
        )

    def look(self, *, taken: Tensor | None = None, usable: Tensor | None = None, state: Tensor | None = None) -> None:
        rows.look(
            self.fingerprint, self.order, state=state, kind=self.kind, scale=self.scale, usable=usable, taken=taken,
            zeroed=self.progress,
        )  # fmt: skip

    def launch(
        self,
        values: tuple[Tensor | None, ...],  # returns, episode, action keys, source
        options: tuple[int, int, bool, float, float],  # N, estimator, divide, δ, w
        out: tuple[Tensor | None, ...],  # RowResults
        labels: Tensor | None,  # [M] int64 in place of `out`
    ) -> None:
        """`FusedArgs` of csrc/cuda/fused.cu."""
        how = self.how
        launch(
            "fused_advantage", how.blocks, gram.THREADS,
            *self.words, *values, *options, *out, self.n_groups, how.together, how.parts, self.progress, labels,
            shared=self.shared, device=self.device,
        )  # fmt: skip


def _up(n: int) -> int:
    return -(-n // 128) * 128
