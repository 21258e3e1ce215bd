"""The total, and everything back in the caller's row order."""

from __future__ import annotations

import torch

from ._launch import launch

Tensor = torch.Tensor

_THREADS = 128  # kThreads of csrc/cuda/combine.cu


def combine(
    episode: Tensor,  # [M] float32
    step_term: Tensor,  # [M] float32
    returns: Tensor,  # [M] float32
    labels: Tensor,  # [M] int64
    branch: Tensor,  # [M] uint8
    source: Tensor,  # [N] int64: the record whose results each row gets; −1: none
    taken: Tensor | None,  # [M] bool: False for records set aside
    *,
    weight: float,
    total_is_step: bool,
    n_rows: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """(advantage, step, episode, returns [N] float32, cluster [N] int64, branch [N] uint8) of each row.

    A = A_ep + w · A_S in float64, rounded once, saturating at the largest float32; w = 0 gives A_ep back bit for bit.
    total_is_step: A = A_S.  Rows without a record, and those of records set aside: 0, cluster −1, SINGLETON.
    """
    advantage, step_out, episode_out, returns_out = (
        torch.empty(n_rows, dtype=torch.float32, device=source.device) for _ in range(4)
    )
    cluster = torch.empty(n_rows, dtype=torch.int64, device=source.device)
    kind = torch.empty(n_rows, dtype=torch.uint8, device=source.device)
    launch(
        "combine", -(-n_rows // _THREADS), _THREADS,
        episode, step_term, returns, labels, branch, source, taken, float(weight), total_is_step, n_rows,
        advantage, step_out, episode_out, returns_out, cluster, kind, device=source.device,
    )  # fmt: skip
    return advantage, step_out, episode_out, returns_out, cluster, kind
