"""Values of states and GAE(λ) over them by the compiled kernels (csrc/cpu/critic.cpp)."""

from __future__ import annotations

import torch

from .. import threads
from ..native_loader import load
from ..records import Records
from ..schema import Kernel
from .clusters import address, address_of_rows, groups

Tensor = torch.Tensor

_SHARES = ("group", "batch")
_NORMS = ("none", "batch", "group")


def cluster_values(records: Records, returns: Tensor, labels: Tensor | None, shrinkage: float) -> Tensor:
    value = torch.empty(returns.shape[0], dtype=torch.float64)
    load().cluster_values(
        returns.data_ptr(), address(labels), *groups(records), shrinkage, value.data_ptr(), threads.count()
    )
    return value


def kernel_values(
    records: Records, fingerprint: Tensor, returns: Tensor, landmarks: Tensor | None, kernel: Kernel,
    products: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Under share "group" a group's bits only depend on its own rows, D, dtype and instruction set.  MemoryError if scratch
    cannot be allocated: a thread holds n (4 D + 8 n + 2,200) bytes for a block of n records, the call 1,100 bytes per record and,
    under share "batch", 8 D per group.
    """
    value = torch.empty(returns.shape[0], dtype=torch.float64)
    chosen = None if landmarks is None else landmarks[landmarks >= 0]
    load().kernel_values(
        *address_of_rows(records, fingerprint), returns.data_ptr(), records.time.data_ptr(), *groups(records),
        address(records.usable), address(chosen), 0 if chosen is None else chosen.shape[0],
        _SHARES.index(kernel.share), kernel.width, kernel.horizon, kernel.noise, kernel.same, value.data_ptr(),
        address(products), threads.count(),
    )  # fmt: skip
    return value


def gae_advantage(
    records: Records, rewards: Tensor, value: Tensor, truncated: Tensor | None, gamma: float, gae_lambda: float
) -> Tensor:
    out = torch.empty(rewards.shape[0], dtype=torch.float64)
    load().gae_advantage(
        rewards.data_ptr(), value.data_ptr(), address(records.step), records.trajectory_offsets.data_ptr(),
        records.n_trajectories, address(truncated), gamma, gae_lambda, out.data_ptr(), threads.count(),
    )  # fmt: skip
    return out


def same_action_advantage(
    records: Records, fingerprint: Tensor, advantage: Tensor, action_key: Tensor, parsed: Tensor | None,
    kernel: Kernel, products: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Bits of a group as those of kernel_values; MemoryError likewise, of a set of n records with equal actions."""
    out = torch.empty(advantage.shape[0], dtype=torch.float64)
    load().same_action_advantage(
        *address_of_rows(records, fingerprint), advantage.data_ptr(), records.time.data_ptr(), action_key.data_ptr(),
        *groups(records), address(records.usable), address(parsed), kernel.width, kernel.horizon, kernel.noise,
        address(products), out.data_ptr(), threads.count(),
    )  # fmt: skip
    return out


def normed_advantage(records: Records, advantage: Tensor, returns: Tensor, step_norm: str) -> Tensor:
    out = torch.empty(advantage.shape[0], dtype=torch.float32)
    load().normed_advantage(
        advantage.data_ptr(), returns.data_ptr(), *groups(records), _NORMS.index(step_norm), out.data_ptr(),
        threads.count(),
    )  # fmt: skip
    return out
