"""The step term by the compiled kernels (csrc/cpu/values.cpp)."""

from __future__ import annotations

import torch

from .. import threads
from ..native_loader import load
from ..records import Records
from ..schema import KERNELS
from .clusters import address

Tensor = torch.Tensor


def step_advantage(
    records: Records, returns: Tensor, labels: Tensor, action_key: Tensor | None, estimator: str, step_norm: str,
    delta: float,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    m = returns.shape[0]
    step, branch = torch.zeros(m, dtype=torch.float32), torch.zeros(m, dtype=torch.uint8)  # where a label is −1
    load().step_advantage(
        returns.data_ptr(), labels.data_ptr(), m, int(labels.max()) + 1 if m else 0, address(action_key),
        KERNELS.index(estimator), step_norm == "std", delta, step.data_ptr(), branch.data_ptr(), threads.count(),
    )  # fmt: skip
    return step, branch


def hgpo_advantage(
    records: Records, returns: Tensor, depth_labels: Tensor, episode_advantage: Tensor, step_norm: str, delta: float,
    alpha: float, base_group: bool,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    depth, m = depth_labels.shape
    advantage, branch = torch.empty(m, dtype=torch.float32), torch.empty(m, dtype=torch.uint8)
    deepest = torch.empty(m, dtype=torch.int64)
    load().hgpo_advantage(
        returns.data_ptr(), depth_labels.data_ptr(), depth, m, episode_advantage.data_ptr(), step_norm == "std", delta,
        alpha, base_group, advantage.data_ptr(), deepest.data_ptr(), branch.data_ptr(), threads.count(),
    )  # fmt: skip
    return advantage, deepest, branch
