"""From Gram matrices to the advantages of cosine clusters in one launch, where the groups fit.

It stands for cluster_cosine, step_advantage and combine, and has their bits: decisions are made while the Gram matrices of
later records are multiplied, and nothing between is written but what blocks tell each other.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from . import _provider, clusters, gram, rows
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
    if not 0 < epsilon <= clusters.WIDEST or not n_records or longest_group > LONGEST:
        return None
    side = clusters.side_of(longest_group)
    processors = _provider.current().processors(device)
    tiles = gram.tiles_before(side // gram.UNIT)
    together = min(n_groups, -(-2 * processors // tiles))  # tiles for all blocks, twice
    parts = -(-n_groups // together)
    spare = _up(gram.shared_bytes(device)) + _DESK + _up(8 * (parts + 1))
    fits = clusters.capacity(device, side, spare) > 0
    values = n_groups * side * (side + 2 * clusters.PANEL)  # of the matrices, and of similarities without shared memory
    if not fits or parts > MOST_PARTS or values > clusters.ROOM:
        return None
    return Plan(side, together, parts, min(processors, n_groups * tiles), spare)


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
    state, kind = (torch.empty(n, dtype=torch.uint8, device=device) for _ in range(2))
    scale = torch.empty(n, dtype=torch.float32, device=device)
    progress = torch.empty(2 + n_groups * (1 + how.side // gram.UNIT), dtype=torch.int32, device=device)
    rows.look(fingerprint, order, state=state, kind=kind, scale=scale, taken=taken, zeroed=progress)
    begins, ends = group_offsets[:-1], group_offsets[1:]
    products = torch.empty((n_groups, how.side, how.side), dtype=torch.float32, device=device)
    reciprocal = torch.empty(n, dtype=torch.float32, device=device)
    batch = clusters.Batch(fingerprint, order, group_offsets, kind, scale, n_groups, longest_group)
    lowest = [1.0 - epsilon - clusters.BAND]
    scan = clusters.Scan(batch, begins, ends, reciprocal, lowest, how.side, how.side, LONGEST + 1, spare=how.spare)
    advantage, step, episode_out, returns_out = (
        torch.empty(n_rows, dtype=torch.float32, device=device) for _ in range(4)
    )
    cluster = torch.empty(n_rows, dtype=torch.int64, device=device)
    branch = torch.empty(n_rows, dtype=torch.uint8, device=device)
    out = advantage, step, episode_out, returns_out, cluster, branch
    launch(
        "fused_advantage", how.blocks, gram.THREADS,
        *gram.words(fingerprint, order, begins, ends, scale, products, reciprocal, 0, LONGEST + 1),
        *scan.words(products, 0, None), returns, episode, action_key, source, n_rows, _ESTIMATORS[estimator],
        step_norm == "std", float(delta), float(weight), *out, n_groups, how.together, how.parts, progress,
        shared=how.spare + scan.shared, device=device,
    )  # fmt: skip
    return out, state


def _up(n: int) -> int:
    return -(-n // 128) * 128
