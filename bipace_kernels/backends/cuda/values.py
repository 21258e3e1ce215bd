"""The step term: Q̂(s, a) − V̂(s) and its relatives, over all pairs inside a cluster.

A thread is a record; it walks over the records of its group and sums returns in float64 and in processing order, so
each sum equals that of the reference.  In long groups the records are first sorted by label (stably) and a block
only walks over its own clusters.
"""

from __future__ import annotations

import torch

from ._launch import launch

Tensor = torch.Tensor

# As in csrc/cuda/values.cu.
_THREADS = 64
_SHARED = 2 * _THREADS * (8 + 8 + 4)  # bytes: two records a thread

SORT_FROM = 4096  # groups longer than this are sorted: that of the Triton kernels, not measured here


def step_advantage(
    returns: Tensor,
    labels: Tensor,
    action_key: Tensor | None,
    group_offsets: Tensor,
    *,
    n_groups: int,
    longest_group: int,
    estimator: str,
    step_norm: str,
    delta: float,
) -> tuple[Tensor, Tensor]:
    return _step_rows(
        returns, labels, action_key, group_offsets, n_groups=n_groups, longest_group=longest_group, estimator=estimator,
        divide=step_norm == "std" and estimator == "mean", delta=delta, unbiased=True,
    )  # fmt: skip


def hgpo_advantage(
    returns: Tensor,
    depth_labels: Tensor,
    episode_advantage: Tensor,
    group_offsets: Tensor,
    *,
    n_groups: int,
    longest_group: int,
    step_norm: str,
    delta: float,
    alpha: float,
    base_group: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    depth, m = depth_labels.shape
    term, company = _step_rows(
        returns, depth_labels, None, group_offsets, n_groups=n_groups, longest_group=longest_group,
        estimator="mean", divide=step_norm == "std", delta=delta, unbiased=False,
    )  # fmt: skip
    advantage, branch = torch.empty_like(returns), torch.empty(m, dtype=torch.uint8, device=returns.device)
    deepest = torch.empty(m, dtype=torch.int64, device=returns.device)
    launch(
        "aggregate_depths", -(-m // _THREADS), _THREADS,
        term=term, company=company, episode_advantage=episode_advantage if base_group else None, advantage=advantage,
        deepest=deepest, branch=branch, depth=depth, m=m, delta=float(delta), alpha=float(alpha), device=returns.device,
    )  # fmt: skip
    return advantage, deepest, branch


def _step_rows(
    returns: Tensor,  # [M] float32
    labels: Tensor,  # [M] or [E, M] int64
    action_key: Tensor | None,  # [M] int64
    group_offsets: Tensor,  # [G+1] int64
    *,
    n_groups: int,
    longest_group: int,
    estimator: str,
    divide: bool,
    delta: float,
    unbiased: bool,
) -> tuple[Tensor, Tensor]:
    """The step term [float32] and branch [uint8] of each record under each row of labels, in the shape of labels."""
    rows, m = labels.shape if labels.ndim == 2 else (1, labels.shape[0])
    step = torch.empty(labels.shape, dtype=torch.float32, device=returns.device)
    branch = torch.empty(labels.shape, dtype=torch.uint8, device=returns.device)
    order, segments = None, n_groups
    if longest_group > SORT_FROM:
        labels, order = torch.sort(labels, dim=-1, stable=True)
        # Sorted records are cut into blocks regardless of groups, since a cluster is in one group anyway.
        segments, longest_group = 1, m
    blocks = -(-longest_group // _THREADS)
    launch(
        f"step_{estimator}", rows * segments * blocks, _THREADS,
        returns=returns, labels=labels, action_key=action_key, order=order, group_offsets=group_offsets, step=step,
        branch=branch, m=m, segments=segments, blocks=blocks, delta=float(delta), divide=divide, unbiased=unbiased,
        device=returns.device, shared=_SHARED,
    )  # fmt: skip
    return step, branch
