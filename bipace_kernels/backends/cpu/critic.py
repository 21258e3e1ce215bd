"""Values of states and GAE(λ) over them by the compiled kernels (csrc/cpu/critic.cpp)."""

from __future__ import annotations

import torch

from .. import threads
from ..native_loader import load
from ..records import Records
from ..schema import Kernel, signs
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


def unit_rows(records: Records, fingerprint: Tensor, width: int) -> Tensor:
    dim = fingerprint.shape[1]
    folded = min(width or dim, dim)
    rows, sign = torch.empty((records.n_records, folded)), signs(dim, folded)
    load().unit_rows(
        *address_of_rows(records, fingerprint), records.n_records, address(records.usable), sign.data_ptr(), folded,
        rows.data_ptr(), threads.count(),
    )  # fmt: skip
    return rows


def whitened_rows(records: Records, rows: Tensor, landmarks: Tensor, directions: int) -> Tensor:
    out, chosen = torch.empty((records.n_records, directions)), landmarks[landmarks >= 0]
    load().whitened_rows(
        rows.data_ptr(), *rows.shape, chosen.data_ptr(), chosen.shape[0], directions, out.data_ptr(), threads.count()
    )
    return out


def kernel_values(records: Records, rows: Tensor, returns: Tensor, landmarks: Tensor | None, kernel: Kernel) -> Tensor:
    """Under share "group" a group's bits only depend on its own rows and the instruction set.  MemoryError if scratch
    cannot be allocated: a thread holds n (4 D + 16 n + 2,200) bytes for a block of n records, the call 1,100 per record.
    """
    value = torch.empty(returns.shape[0], dtype=torch.float64)
    chosen = None if landmarks is None else landmarks[landmarks >= 0]
    load().kernel_values(
        rows.data_ptr(), rows.shape[1], returns.data_ptr(), records.time.data_ptr(), *groups(records),
        records.trajectory_offsets.data_ptr(), address(records.usable), address(chosen),
        0 if chosen is None else chosen.shape[0], _SHARES.index(kernel.share), kernel.whitened, kernel.width,
        kernel.horizon, kernel.noise, kernel.same, kernel.inside, kernel.luck, kernel.gamma, value.data_ptr(),
        threads.count(),
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
    records: Records, rows: Tensor, advantage: Tensor, action_key: Tensor, parsed: Tensor | None, kernel: Kernel
) -> Tensor:
    """Bits of a group as those of kernel_values; MemoryError likewise, of a set of n records with equal actions."""
    out = torch.empty(advantage.shape[0], dtype=torch.float64)
    load().same_action_advantage(
        rows.data_ptr(), rows.shape[1], advantage.data_ptr(), records.time.data_ptr(), action_key.data_ptr(),
        *groups(records), address(records.usable), address(parsed), kernel.whitened, kernel.width, kernel.horizon,
        kernel.noise, out.data_ptr(), threads.count(),
    )  # fmt: skip
    return out


def normed_advantage(records: Records, advantage: Tensor, returns: Tensor, step_norm: str) -> Tensor:
    out = torch.empty(advantage.shape[0], dtype=torch.float32)
    load().normed_advantage(
        advantage.data_ptr(), returns.data_ptr(), *groups(records), _NORMS.index(step_norm), out.data_ptr(),
        threads.count(),
    )  # fmt: skip
    return out
