"""Values of states and GAE(λ) over them by the compiled kernels (csrc/cpu/critic.cpp)."""

import torch
from torch import Tensor

from .. import threads
from ..native_loader import load
from ..records import Records
from ..schema import Kernel, key_weights, signs

_SHARES = ("group", "batch")
_NORMS = ("none", "batch", "group")


def cluster_values(records: Records, returns: Tensor, labels: Tensor | None, shrinkage: float) -> Tensor:
    value = torch.empty(returns.shape[0], dtype=torch.float64)
    load().cluster_values(returns, labels, records.group_offsets, records.n_groups, shrinkage, value, threads.count())
    return value


def unit_rows(records: Records, fingerprint: Tensor, width: int, keys: Tensor | None = None) -> Tensor:
    dim = fingerprint.shape[1]
    folded = min(width or dim, dim)
    rows = torch.empty((records.n_records, folded), dtype=torch.float32)
    load().unit_rows(
        fingerprint, records.order, records.n_records, records.usable, signs(dim, folded), folded, rows,
        None if keys is None else key_weights(dim), keys, threads.count(),
    )  # fmt: skip
    return rows


def whitened_rows(records: Records, rows: Tensor, landmarks: Tensor, directions: int) -> Tensor:
    out, chosen = torch.empty((records.n_records, directions), dtype=torch.float32), landmarks[landmarks >= 0]
    load().whitened_rows(rows, *rows.shape, chosen, chosen.shape[0], directions, out, threads.count())
    return out


def centred_rows(records: Records, rows: Tensor, share: str) -> Tensor:
    out = torch.empty_like(rows)
    load().centred_rows(
        rows, rows.shape[1], records.group_offsets, records.n_groups, _SHARES.index(share), out, threads.count()
    )
    return out


def kernel_values(
    records: Records, rows: Tensor, inside: Tensor | None, returns: Tensor, landmarks: Tensor | None, kernel: Kernel
) -> Tensor:
    """Under share "group" a group's bits only depend on its own rows and the instruction set.  MemoryError if scratch
    cannot be allocated: a thread holds n (4 D + 16 n + 2,200) bytes for a block of n records, the call 1,200 per record
    and up to 128 MB.
    """
    value = torch.empty(returns.shape[0], dtype=torch.float64)
    chosen = None if landmarks is None else landmarks[landmarks >= 0]
    load().kernel_values(
        rows, inside, rows.shape[1], returns, records.time, records.group_offsets, records.n_groups,
        records.trajectory_of_record if kernel.luck else None, chosen, 0 if chosen is None else chosen.shape[0],
        _SHARES.index(kernel.share), _numbers(kernel), value, threads.count(),
    )  # fmt: skip
    return value


def _numbers(kernel: Kernel) -> Tensor:
    """ValueKernel of csrc/cpu/critic.h."""
    return torch.tensor(
        [kernel.width, kernel.horizon, kernel.noise, kernel.same, kernel.inside, kernel.luck, kernel.gamma,
         kernel.longest], dtype=torch.float64,
    )  # fmt: skip


def gae_advantage(
    records: Records, rewards: Tensor, value: Tensor, truncated: Tensor | None, gamma: float, gae_lambda: float
) -> Tensor:
    out = torch.empty(rewards.shape[0], dtype=torch.float64)
    load().gae_advantage(
        rewards, value, records.step, records.trajectory_offsets,
        records.n_trajectories, truncated, gamma, gae_lambda, out, threads.count(),
    )  # fmt: skip
    return out


def same_action_advantage(
    records: Records, rows: Tensor, advantage: Tensor, action_key: Tensor, parsed: Tensor | None, kernel: Kernel
) -> Tensor:
    """Bits of a group as those of kernel_values; MemoryError likewise, of a set of n records with equal actions."""
    out = torch.empty(advantage.shape[0], dtype=torch.float64)
    load().same_action_advantage(
        rows, rows.shape[1], advantage, records.time, action_key, records.group_offsets, records.n_groups, parsed,
        _numbers(kernel), out, threads.count(),
    )  # fmt: skip
    return out


def normed_advantage(records: Records, advantage: Tensor, returns: Tensor, step_norm: str) -> Tensor:
    out = torch.empty(advantage.shape[0], dtype=torch.float32)
    load().normed_advantage(
        advantage, returns, records.group_offsets, records.n_groups, _NORMS.index(step_norm), out, threads.count()
    )
    return out
