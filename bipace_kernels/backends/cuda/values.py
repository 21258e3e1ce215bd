"""The step term: Q̂(s, a) − V̂(s) and its relatives, over all pairs inside a cluster.

A thread is a record; it walks over the records of its group and sums returns in float64 and in processing order, so
each sum equals that of the reference.  In long groups the records are first sorted by label (stably) and a block
only walks over its own clusters.
"""

from __future__ import annotations

import torch

from ..records import Records
from ._launch import launch

Tensor = torch.Tensor

# As in csrc/cuda/values.cu.
_THREADS = 64
_SHARED = 2 * _THREADS * (8 + 8 + 4)  # bytes: two records a thread

SORT_FROM = 4096  # groups longer than this are sorted: that of the Triton kernels, not measured here


def step_advantage(
    records: Records, returns: Tensor, labels: Tensor, action_key: Tensor | None, estimator: str, step_norm: str,
    delta: float,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    divide = step_norm == "std" and estimator == "mean"
    return _step_rows(records, returns, labels, action_key, estimator, divide=divide, delta=delta, unbiased=True)


def hgpo_advantage(
    records: Records, returns: Tensor, depth_labels: Tensor, episode_advantage: Tensor, step_norm: str, delta: float,
    alpha: float, base_group: bool,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    depth, m = depth_labels.shape
    divide = step_norm == "std"
    term, company = _step_rows(records, returns, depth_labels, None, "mean", divide=divide, delta=delta, unbiased=False)
    advantage, branch = torch.empty_like(returns), torch.empty(m, dtype=torch.uint8, device=returns.device)
    deepest = torch.empty(m, dtype=torch.int64, device=returns.device)
    launch(
        "aggregate_depths", -(-m // _THREADS), _THREADS,
        term=term, company=company, episode_advantage=episode_advantage if base_group else None, advantage=advantage,
        deepest=deepest, branch=branch, depth=depth, m=m, delta=float(delta), alpha=float(alpha), device=returns.device,
    )  # fmt: skip
    return advantage, deepest, branch


def _step_rows(
    records: Records,
    returns: Tensor,  # [M] float32
    labels: Tensor,  # [M] or [E, M] int64
    action_key: Tensor | None,  # [M] int64
    estimator: str,
    *,
    divide: bool,
    delta: float,
    unbiased: bool,
) -> tuple[Tensor, Tensor]:
    """The step term [float32] and branch [uint8] of each record under each row of labels, in the shape of labels."""
    rows, m = labels.shape if labels.ndim == 2 else (1, labels.shape[0])
    step = torch.empty(labels.shape, dtype=torch.float32, device=returns.device)
    branch = torch.empty(labels.shape, dtype=torch.uint8, device=returns.device)
    order, segments, longest_group = None, records.n_groups, records.longest_group
    if longest_group > SORT_FROM:
        labels, order = torch.sort(labels, dim=-1, stable=True)
        # Sorted records are cut into blocks regardless of groups, since a cluster is in one group anyway.
        segments, longest_group = 1, m
    blocks = -(-longest_group // _THREADS)
    launch(
        f"step_{estimator}", rows * segments * blocks, _THREADS,
        returns=returns, labels=labels, action_key=action_key, order=order, group_offsets=records.group_offsets,
        step=step, branch=branch, m=m, segments=segments, blocks=blocks, delta=float(delta), divide=divide,
        unbiased=unbiased, device=returns.device, shared=_SHARED,
    )  # fmt: skip
    return step, branch
