"""Decisions of groups in order, from their Gram matrices: the launch of csrc/cuda/clusters.cu, and its scratch."""

import torch
from torch import Tensor

from ..triton.clusters import on_device
from . import _launch
from ._launch import launch
from .gram import Groups

PANEL = 32
_THREADS = 512
# Of csrc/cuda/clusters.cu: bytes that stand before S in shared memory, and the least capacity with room for join_few.
_BEFORE, _FEW = 46_416, 207
#: Values of scratch for a record under one ε: S of two panels where it does not fit into shared memory, and decisions.
SCRATCH = 2 * PANEL + 6


def decide(
    products: Tensor,  # [slots, side, side] float32
    kind: Tensor,  # [M] uint8
    groups: Groups,
    reciprocal: Tensor,  # [M] float32
    lowest: list[float],  # E: 1 − ε − τ
    first: Tensor,  # [E, M] int64, written
    most_shared: int,  # bytes of shared memory
) -> None:
    """The decisions of some groups under E values of ε."""
    device, e, (slots, side, _) = kind.device, len(lowest), products.shape
    clusters = capacity(device, side, most_shared)
    similar = None
    if clusters < side + 2 * PANEL:
        similar = torch.empty((e, slots, 2, PANEL, side + 1), dtype=torch.float32, device=device)
    decisions = torch.empty((e, slots, 6, side), dtype=torch.float32, device=device)
    launch(
        "scan_groups", (slots, e), _THREADS, device=device, shared=_BEFORE + 2 * PANEL * clusters * 4,
        gram=products, side=side, reciprocal=reciprocal, kind=kind,
        lowest=on_device(lowest, device) if e > 1 else None, only_lowest=lowest[0],
        capacity=clusters, similar=similar, decisions=decisions, first=first, first_stride=first.stride(0),
        **groups._asdict(),
    )  # fmt: skip


def capacity(device: torch.device, side: int, most_shared: int) -> int:
    """Clusters whose similarities fit into a block's shared memory; not positive where not even its stages do."""
    most = min(most_shared, _launch.shared_memory(device)) - _BEFORE
    # Odd, so that neither a record's nor a cluster's similarities share a bank.
    return min((most // (2 * PANEL * 4) - 1) | 1, max(side + 2 * PANEL + 1, _FEW))
