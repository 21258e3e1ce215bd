"""The device's stage functions on the CPU: rows set aside stay in place behind masks, sizes come as ints.

The stages of the CPU have bad rows taken out before; those of the device cannot, for that would wait.  These take rows
out, run a stage of the CPU and put its results back in place, so that each torch op means the same on every device.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import torch

from . import host_stages as host
from . import value_checks as values
from .schema import Branch

Tensor = torch.Tensor


class MaskedStages:
    """The stages of a CPU backend by their names in the device's packages; triton_kernels/ explains the arguments.

    kernels   bipace_kernels.cpu or .reference
    threads   of the cpu backend
    """

    def __init__(self, kernels: Any, threads: int = 1) -> None:
        self.kernels = kernels
        self.threads = {"num_threads": threads}

    def discounted_returns(
        self,
        rewards: Tensor,  # [M] float64
        step: Tensor | None,  # [M] int64
        trajectory_offsets: Tensor,  # [T+1] int64
        gamma: float,
        *,
        n_trajectories: int,
    ) -> Any:
        return self.kernels.returns.discounted_returns(rewards, step, trajectory_offsets, gamma, **self.threads)

    def trajectory_returns(
        self,
        rewards: Tensor,  # [M] float64
        step: Tensor | None,  # [M] int64
        trajectory_offsets: Tensor,  # [T+1] int64
        *,
        n_trajectories: int,
    ) -> Any:
        return self.kernels.returns.trajectory_returns(rewards, step, trajectory_offsets, **self.threads)

    def spoilt_trajectories(
        self,
        step_return: Tensor,  # [M] float32
        trajectory_return: Tensor,  # [T] float32
        bad_record: Tensor | None,  # [M] bool
        trajectory_offsets: Tensor,  # [T+1] int64
        *,
        n_trajectories: int,
    ) -> Tensor:  # [T] bool
        bad = values.out_of_range(step_return)
        if bad_record is not None:
            bad = bad | bad_record
        spoilt = values.out_of_range(trajectory_return)
        spoilt[_run_of(trajectory_offsets)[bad]] = True
        return spoilt

    def episode_advantage(
        self,
        episode_return: Tensor,  # [T] float32
        trajectory_offsets: Tensor,  # [T+1] int64
        group_trajectories: Tensor,  # [G+1] int64
        *,
        n_groups: int,
        n_records: int,
        scope: str,
        norm: str,
        lone: str,
        delta: float,
        spoilt: Tensor | None,  # [T] bool
    ) -> Tensor:  # [M] float32
        kept = _kept(None if spoilt is None else ~spoilt, episode_return.shape[0])
        lengths = trajectory_offsets.diff()
        part = self.kernels.episode.episode_advantage(
            episode_return[kept], _offsets(lengths[kept]), _fewer(group_trajectories, kept), scope=scope, norm=norm,
            lone=lone, delta=delta, **self.threads,
        )  # fmt: skip
        taken = torch.zeros(lengths.shape[0], dtype=torch.bool)
        taken[kept] = True
        return _spread(part, torch.nonzero(taken[_run_of(trajectory_offsets)]).flatten(), n_records, 0.0)

    def scan_rows(
        self,
        fingerprint: Tensor,  # [N, D] float32 | bfloat16 | float16
        order: Tensor,  # [M] int64
    ) -> Any:
        return self.kernels.clusters.scan_rows(fingerprint, order, **self.threads)

    def cluster_cosine(
        self,
        fingerprint: Tensor,  # [N, D] float32 | bfloat16 | float16
        order: Tensor,  # [M] int64
        group_offsets: Tensor,  # [G+1] int64
        usable: Tensor | None,  # [M] bool
        epsilon: float,
        *,
        n_groups: int,
        longest_group: int,
        taken: Tensor | None,  # [M] bool
    ) -> Tensor:  # [M] int64
        kept = _kept(taken, order.shape[0])
        labels = self.kernels.clusters.cluster_cosine(
            fingerprint, order[kept], _fewer(group_offsets, kept), _of(usable, kept), epsilon, **self.threads
        )
        return _spread(labels, kept, order.shape[0], -1)

    def cluster_sweep(
        self,
        fingerprint: Tensor,  # [N, D] float32 | bfloat16 | float16
        order: Tensor,  # [M] int64
        group_offsets: Tensor,  # [G+1] int64
        usable: Tensor | None,  # [M] bool
        epsilons: Sequence[float],
        *,
        n_groups: int,
        longest_group: int,
        taken: Tensor | None,  # [M] bool
    ) -> Tensor:  # [E, M] int64
        kept = _kept(taken, order.shape[0])
        labels = self.kernels.clusters.cluster_sweep(
            fingerprint, order[kept], _fewer(group_offsets, kept), _of(usable, kept), list(epsilons), **self.threads
        )
        return _spread(labels, kept, order.shape[0], -1)

    def cluster_exact(
        self,
        codes: Tensor,  # [M] int64
        group_offsets: Tensor,  # [G+1] int64
        *,
        n_groups: int,
        longest_group: int,
        taken: Tensor | None,  # [M] bool
    ) -> Tensor:  # [M] int64
        kept = _kept(taken, codes.shape[0])
        labels = self.kernels.observations.cluster_exact(codes[kept], _fewer(group_offsets, kept), **self.threads)
        return _spread(labels, kept, codes.shape[0], -1)

    def cluster_history(
        self,
        codes: Tensor,  # [M] int64
        step: Tensor | None,  # [M] int64
        trajectory_offsets: Tensor,  # [T+1] int64
        group_offsets: Tensor,  # [G+1] int64
        depth: int,
        *,
        n_trajectories: int,
        n_groups: int,
        longest_group: int,
        taken: Tensor | None,  # [M] bool
    ) -> Tensor:  # [depth, M] int64
        kept = _kept(taken, codes.shape[0])
        labels = self.kernels.observations.cluster_history(
            codes[kept], _of(step, kept), _fewer(trajectory_offsets, kept),
            _fewer(group_offsets, kept), depth, **self.threads,
        )  # fmt: skip
        return _spread(labels, kept, codes.shape[0], -1)

    def step_advantage(
        self,
        returns: Tensor,  # [M] float32
        labels: Tensor,  # [M] int64
        action_key: Tensor | None,  # [M] int64
        group_offsets: Tensor,  # [G+1] int64
        *,
        n_groups: int,
        longest_group: int,
        estimator: str,
        step_norm: str,
        delta: float,
    ) -> tuple[Tensor, Tensor]:  # [M] float32, [M] uint8
        kept, m = torch.nonzero(labels >= 0).flatten(), labels.shape[0]
        step, branch = self.kernels.values.step_advantage(
            returns[kept], labels[kept], int(labels.max()) + 1 if m else 0, _of(action_key, kept), estimator=estimator,
            step_norm=step_norm, delta=delta, **self.threads,
        )  # fmt: skip
        return _spread(step, kept, m, 0.0), _spread(branch, kept, m, int(Branch.SINGLETON))

    def hgpo_advantage(
        self,
        returns: Tensor,  # [M] float32
        depth_labels: Tensor,  # [H, M] int64
        episode_advantage: Tensor,  # [M] float32
        group_offsets: Tensor,  # [G+1] int64
        *,
        n_groups: int,
        longest_group: int,
        step_norm: str,
        delta: float,
        alpha: float,
        base_group: bool,
    ) -> tuple[Tensor, Tensor, Tensor]:  # [M] float32, [M] int64, [M] uint8
        kept, m = torch.nonzero(depth_labels[0] >= 0).flatten(), returns.shape[0]
        step, deepest, branch = self.kernels.values.hgpo_advantage(
            returns[kept], depth_labels[:, kept].contiguous(), episode_advantage[kept], step_norm=step_norm, delta=delta,
            alpha=alpha, base_group=base_group, **self.threads,
        )  # fmt: skip
        return (
            _spread(step, kept, m, 0.0),
            _spread(deepest, kept, m, 0),
            _spread(branch, kept, m, int(Branch.SINGLETON)),
        )

    def combine(
        self,
        episode: Tensor,  # [M] float32
        step_term: Tensor,  # [M] float32
        returns: Tensor,  # [M] float32
        labels: Tensor,  # [M] int64
        branch: Tensor,  # [M] uint8
        source: Tensor,  # [N] int64
        taken: Tensor | None,  # [M] bool
        *,
        weight: float,
        total_is_step: bool,
        n_rows: int,
    ) -> tuple[Tensor, ...]:  # [N] float32 four times, [N] int64, [N] uint8
        total = step_term if total_is_step else host.combine(episode, step_term, weight)
        if taken is not None and taken.numel():
            source = torch.where((source >= 0) & taken[source.clamp(min=0)], source, -1)
        rows = tuple(host.scatter(each, source, 0.0) for each in (total, step_term, episode, returns))
        return *rows, host.scatter(labels, source, -1), host.scatter(branch, source, int(Branch.SINGLETON))

    def hash_token_ids(
        self,
        ids: Tensor,  # [N, T] any integer dtype and strides, or flat with row_offsets
        row_offsets: Tensor | None,  # [N+1] int64
        valid: Tensor | None,  # like ids: bool or any integer dtype
        table_offsets: Tensor | None,  # [V+1] int64
        table_bytes: Tensor | None,  # [B] uint8
        *,
        mode: str,
        n: int,
        longest_row: int,
    ) -> tuple[Tensor, Tensor, Tensor]:  # [N] int64, [N] bool, [1] int64
        """ValueError for an id that the table does not hold; `outside` is −1 then always."""
        mask = None if valid is None else _wide(valid)
        table = None if table_offsets is None else (table_offsets, table_bytes)
        keys, parsed, outside = self.kernels.action_keys.hash_token_ids(
            _wide(ids), row_offsets, mask, table, mode=mode, n=n, **self.threads
        )
        if outside is not None:
            row, column, token = outside
            raise ValueError(f"ids must be in the table, got {token} in row {row}, column {column}; mask padding out.")
        return keys, parsed, torch.full((1,), -1, dtype=torch.int64)

    def ngram_fingerprints(
        self,
        data: Tensor,  # [B] uint8
        offsets: Tensor,  # [S+1] int64
        *,
        n: int,
        dim: int,
    ) -> Any:
        whole, at = data.numpy().tobytes(), offsets.tolist()
        texts = [whole[begin:end] for begin, end in pairwise(at)]
        return self.kernels.ngrams.ngram_fingerprints(texts, n=n, dim=dim, **self.threads)


def _wide(tensor: Tensor) -> Tensor:
    """Token ids or their mask in a dtype that the CPU's stage takes."""
    return tensor if tensor.dtype in (torch.bool, torch.int32, torch.int64) else tensor.to(torch.int64)


def _kept(taken: Tensor | None, m: int) -> Tensor:
    """Positions taken."""
    return torch.arange(m) if taken is None else torch.nonzero(taken).flatten()


def _of(tensor: Tensor | None, kept: Tensor) -> Tensor | None:
    """What is left of an argument that need not be given."""
    return None if tensor is None else tensor[kept]


def _fewer(offsets: Tensor, kept: Tensor) -> Tensor:
    """Offsets [≤ S+1] of what is left of some runs, from the positions left in them; runs left empty go."""
    left: Tensor = torch.unique_consecutive(torch.searchsorted(kept, offsets))
    return left


def _offsets(lengths: Tensor) -> Tensor:
    return torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])


def _run_of(offsets: Tensor) -> Tensor:
    """[M] int64 number of the run that each position stands in."""
    return torch.repeat_interleave(torch.arange(offsets.shape[0] - 1), offsets.diff())


def _spread(part: Tensor, kept: Tensor, m: int, absent: float) -> Tensor:
    """Results of the positions taken, in place among all m; the others get `absent`."""
    if kept.shape[0] == m:
        return part
    out = torch.full((*part.shape[:-1], m), absent, dtype=part.dtype)
    out[..., kept] = part
    return out
