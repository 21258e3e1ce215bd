"""Values of states and GAE(λ) over them by the compiled kernels (csrc/cpu/critic.cpp)."""

from __future__ import annotations

import torch

from .. import threads
from ..masks import Kept
from ..native_loader import load
from .clusters import address_of_rows

Tensor = torch.Tensor

_SHARES = ("group", "batch")
_NORMS = ("none", "batch", "group")


def cluster_values(
    returns: Tensor,
    labels: Tensor | None,
    group_offsets: Tensor,
    *,
    n_groups: int,
    longest_group: int,
    taken: Tensor | None,
    shrinkage: float,
) -> Tensor:
    kept = Kept(taken)
    returns, labels, offsets = kept.rows(returns), kept.rows(labels), kept.offsets(group_offsets)
    value = torch.empty(returns.shape[0], dtype=torch.float64)
    load().cluster_values(
        returns.data_ptr(), 0 if labels is None else labels.data_ptr(), offsets.data_ptr(), offsets.shape[0] - 1,
        shrinkage, value.data_ptr(), threads.count(),
    )  # fmt: skip
    return kept.spread(value, 0.0)


def kernel_values(
    fingerprint: Tensor,
    order: Tensor,
    returns: Tensor,
    time: Tensor,
    group_offsets: Tensor,
    usable: Tensor | None,
    landmarks: Tensor | None,
    *,
    n_groups: int,
    longest_group: int,
    taken: Tensor | None,
    share: str,
    width: float,
    horizon: float,
    noise: float,
    same: float,
    products: Tensor | None = None,
) -> Tensor:
    """Under share "group" a group's bits only depend on its own rows, D, dtype and instruction set.  MemoryError if scratch
    cannot be allocated: a thread holds n (4 D + 8 n + 2,200) bytes for a block of n records, the call 1,100 bytes per record and,
    under share "batch", 8 D per group.
    """
    kept = Kept(taken)
    order, returns, time, usable = kept.rows(order), kept.rows(returns), kept.rows(time), kept.rows(usable)
    offsets = kept.offsets(group_offsets)
    value = torch.empty(returns.shape[0], dtype=torch.float64)
    chosen = None if landmarks is None else kept.places(landmarks[landmarks >= 0]).contiguous()
    load().kernel_values(
        *address_of_rows(fingerprint), order.data_ptr(), returns.data_ptr(), time.data_ptr(), offsets.data_ptr(),
        offsets.shape[0] - 1, 0 if usable is None else usable.data_ptr(), 0 if chosen is None else chosen.data_ptr(),
        0 if chosen is None else chosen.shape[0], _SHARES.index(share), width, horizon, noise, same, value.data_ptr(),
        0 if products is None else products.data_ptr(), threads.count(),
    )  # fmt: skip
    return kept.spread(value, 0.0)


def gae_advantage(
    rewards: Tensor,
    value: Tensor,
    step: Tensor | None,
    trajectory_offsets: Tensor,
    truncated: Tensor | None,
    gamma: float,
    gae_lambda: float,
    *,
    n_trajectories: int,
    taken: Tensor | None,
) -> Tensor:
    kept = Kept(taken)
    rewards, value, step, truncated = kept.rows(rewards), kept.rows(value), kept.rows(step), kept.rows(truncated)
    trajectories = kept.offsets(trajectory_offsets)
    out = torch.empty(rewards.shape[0], dtype=torch.float64)
    load().gae_advantage(
        rewards.data_ptr(), value.data_ptr(), 0 if step is None else step.data_ptr(), trajectories.data_ptr(),
        trajectories.shape[0] - 1, 0 if truncated is None else truncated.data_ptr(), gamma, gae_lambda, out.data_ptr(),
        threads.count(),
    )  # fmt: skip
    return kept.spread(out, 0.0)


def same_action_advantage(
    fingerprint: Tensor,
    order: Tensor,
    advantage: Tensor,
    time: Tensor,
    action_key: Tensor,
    group_offsets: Tensor,
    usable: Tensor | None,
    parsed: Tensor | None,
    *,
    n_groups: int,
    longest_group: int,
    taken: Tensor | None,
    width: float,
    horizon: float,
    noise: float,
    products: Tensor | None = None,
) -> Tensor:
    """Bits of a group as those of kernel_values; MemoryError likewise, of a set of n records with equal actions."""
    kept = Kept(taken)
    order, advantage, time, usable = kept.rows(order), kept.rows(advantage), kept.rows(time), kept.rows(usable)
    action_key, parsed, offsets = kept.rows(action_key), kept.rows(parsed), kept.offsets(group_offsets)
    out = torch.empty(advantage.shape[0], dtype=torch.float64)
    load().same_action_advantage(
        *address_of_rows(fingerprint), order.data_ptr(), advantage.data_ptr(), time.data_ptr(), action_key.data_ptr(),
        offsets.data_ptr(), offsets.shape[0] - 1, 0 if usable is None else usable.data_ptr(),
        0 if parsed is None else parsed.data_ptr(), width, horizon, noise,
        0 if products is None else products.data_ptr(), out.data_ptr(), threads.count(),
    )  # fmt: skip
    return kept.spread(out, 0.0)


def normed_advantage(
    advantage: Tensor,
    returns: Tensor,
    group_offsets: Tensor,
    *,
    n_groups: int,
    longest_group: int,
    taken: Tensor | None,
    step_norm: str,
) -> Tensor:
    kept = Kept(taken)
    advantage, returns, offsets = kept.rows(advantage), kept.rows(returns), kept.offsets(group_offsets)
    out = torch.empty(advantage.shape[0], dtype=torch.float32)
    load().normed_advantage(
        advantage.data_ptr(), returns.data_ptr(), offsets.data_ptr(), offsets.shape[0] - 1, _NORMS.index(step_norm),
        out.data_ptr(), threads.count(),
    )  # fmt: skip
    return kept.spread(out, 0.0)
