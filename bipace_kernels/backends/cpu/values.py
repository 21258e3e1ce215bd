"""The step term by the compiled kernels (csrc/cpu/values.cpp)."""

import torch
from torch import Tensor

from .. import threads
from ..native_loader import load
from ..records import Records
from ..schema import KERNELS


def step_advantage(
    records: Records, returns: Tensor, labels: Tensor, action_key: Tensor | None, estimator: str, step_norm: str,
    delta: float,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    m = returns.shape[0]
    step, branch = torch.zeros(m, dtype=torch.float32), torch.zeros(m, dtype=torch.uint8)  # without peers
    clusters, code = int(labels.max()) + 1 if m else 0, KERNELS.index(estimator)
    divide, count = step_norm == "std", threads.count()
    load().step_advantage(returns, labels, m, clusters, action_key, code, divide, delta, step, branch, count)
    return step, branch


def hgpo_advantage(
    records: Records, returns: Tensor, depth_labels: Tensor, episode_advantage: Tensor, step_norm: str, delta: float,
    alpha: float, base_group: bool,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    depth, m = depth_labels.shape
    out = [torch.empty(m, dtype=dtype) for dtype in (torch.float32, torch.int64, torch.uint8)]
    load().hgpo_advantage(
        returns, depth_labels, depth, m, episode_advantage, step_norm == "std", delta, alpha, base_group, *out,
        threads.count(),
    )  # fmt: skip
    advantage, deepest, branch = out
    return advantage, deepest, branch
