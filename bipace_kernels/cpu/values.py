"""The step term by the compiled kernels."""

from __future__ import annotations

import torch

from .._native_loader import load

Tensor = torch.Tensor


def step_advantage(
    returns: Tensor,  # [M] float32
    labels: Tensor,  # [M] int64 in [0, C)
    n_clusters: int,
    action_key: Tensor | None,  # [M] int64; None for "mean"
    *,
    estimator: str,
    step_norm: str,
    delta: float,
    num_threads: int = 1,
) -> tuple[Tensor, Tensor]:  # [M] float32, [M] uint8
    """A_S and branch of each record (paper eq. 7 to 9)."""
    native = load()
    m = returns.shape[0]
    step, branch = torch.empty(m, dtype=torch.float32), torch.empty(m, dtype=torch.uint8)
    native.step_advantage(
        returns.data_ptr(), labels.data_ptr(), m, n_clusters, 0 if action_key is None else action_key.data_ptr(),
        getattr(native.Estimator, estimator), step_norm == "std", delta, step.data_ptr(), branch.data_ptr(), num_threads,
    )  # fmt: skip
    return step, branch


def hgpo_advantage(
    returns: Tensor,  # [M] float32
    depth_labels: Tensor,  # [depth, M] int64, -1: fewer observations than the depth
    episode_advantage: Tensor,  # [M] float32
    *,
    step_norm: str,
    delta: float,
    alpha: float,
    base_group: bool,
    num_threads: int = 1,
) -> tuple[Tensor, Tensor, Tensor]:  # [M] float32, [M] int64, [M] uint8
    """HGPO's aggregate, each record's deepest depth in company (0: none), and its branch."""
    depth, m = depth_labels.shape
    advantage, branch = torch.empty(m, dtype=torch.float32), torch.empty(m, dtype=torch.uint8)
    deepest = torch.empty(m, dtype=torch.int64)
    load().hgpo_advantage(
        returns.data_ptr(), depth_labels.data_ptr(), depth, m, episode_advantage.data_ptr(), step_norm == "std", delta,
        alpha, base_group, advantage.data_ptr(), deepest.data_ptr(), branch.data_ptr(), num_threads,
    )  # fmt: skip
    return advantage, deepest, branch
