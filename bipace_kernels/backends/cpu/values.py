"""The step term by the compiled kernels (csrc/cpu/values.cpp)."""

from __future__ import annotations

import torch

from .. import threads
from ..native_loader import load
from ..schema import KERNELS

Tensor = torch.Tensor


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
    m = returns.shape[0]
    step, branch = torch.zeros(m, dtype=torch.float32), torch.zeros(m, dtype=torch.uint8)  # of records set aside
    load().step_advantage(
        returns.data_ptr(), labels.data_ptr(), m, int(labels.max()) + 1 if m else 0,
        0 if action_key is None else action_key.data_ptr(), KERNELS.index(estimator), step_norm == "std", delta,
        step.data_ptr(), branch.data_ptr(), threads.count(),
    )  # fmt: skip
    return step, branch


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
    advantage, branch = torch.empty(m, dtype=torch.float32), torch.empty(m, dtype=torch.uint8)
    deepest = torch.empty(m, dtype=torch.int64)
    load().hgpo_advantage(
        returns.data_ptr(), depth_labels.data_ptr(), depth, m, episode_advantage.data_ptr(), step_norm == "std", delta,
        alpha, base_group, advantage.data_ptr(), deepest.data_ptr(), branch.data_ptr(), threads.count(),
    )  # fmt: skip
    return advantage, deepest, branch
