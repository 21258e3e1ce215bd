"""The arrows of the device chain: stages on GPU tensors, and what stands between them.

Nothing here reads a value: sizes come from the layout, bad rows stay in place behind masks.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from . import value_checks as values
from ._inputs import Inputs
from .device_layout import DeviceLayout
from .observations import history_codes, history_depth

Tensor = torch.Tensor


class Doubts(NamedTuple):
    """What is wrong with returns and rewards, beyond what shows in the returns themselves; None where nothing can be."""

    bad_record: Tensor | None  # [M] bool: records that spoil their trajectory
    episode_differs: Tensor | None  # [M] bool: its episode return is not that of its trajectory's first record
    copy_differs: Tensor | None  # [all records] bool: its reward is not that of the step it copies


class Rows(NamedTuple):
    """What the device chain gives: results in the caller's row order, and what a later check needs."""

    advantage: Tensor  # [N] float32
    step_advantage: Tensor  # [N] float32
    episode_advantage: Tensor  # [N] float32
    returns: Tensor  # [N] float32
    cluster: Tensor  # [N] int64
    branch: Tensor  # [N] uint8
    state: Tensor | None  # [M] uint8   of the fingerprints, from scan_rows(); None without
    episode_differs: Tensor | None  # as in Doubts
    copy_differs: Tensor | None


def returns(kernels: Any, x: Inputs, everyone: DeviceLayout, lay: DeviceLayout) -> tuple[Tensor, Tensor, Doubts]:
    """Return-to-go of each record [M] and return of each trajectory [T], float32, rounded once; and doubts."""
    ordered = None if x.rewards is None else x.rewards[lay.order]
    if x.returns is not None:
        step_return = x.returns[lay.order].to(torch.float32)
    else:
        step_return = kernels.returns.discounted_returns(
            ordered, lay.step, lay.trajectory_offsets, float(x.config.gamma), n_trajectories=lay.n_trajectories
        )
    bad = episode_differs = copy_differs = None
    if x.episode_return is None:
        trajectory_return = kernels.returns.trajectory_returns(
            ordered, lay.step, lay.trajectory_offsets, n_trajectories=lay.n_trajectories
        )
    else:
        per_record = x.episode_return[lay.order]
        per_trajectory = per_record[lay.trajectory_offsets[:-1]]
        episode_differs = values.unlike_first(per_record, per_trajectory[lay.trajectory_of_record])
        bad = episode_differs | ~per_record.isfinite()
        trajectory_return = per_trajectory.to(torch.float32)
    if everyone.first is not None and x.rewards is not None:
        by_copy = x.rewards[everyone.order]
        copy_differs = values.unlike_first(by_copy, by_copy[everyone.first])
        bad_copy = copy_differs | values.out_of_range(by_copy)
        # Any copy spoils the record that its row gets its results from.
        hits = torch.zeros(lay.n_records, dtype=torch.int32, device=bad_copy.device)
        hits.index_add_(0, lay.source[everyone.order], bad_copy.to(torch.int32))
        bad = hits > 0 if bad is None else bad | (hits > 0)
    return step_return, trajectory_return, Doubts(bad, episode_differs, copy_differs)


def usable(kernels: Any, x: Inputs, lay: DeviceLayout) -> tuple[Tensor | None, Tensor | None]:
    """State [M] uint8 of the fingerprints and whether they can be compared [M] bool; None without fingerprints."""
    if x.fingerprint is None:
        return None, None
    state = kernels.clusters.scan_rows(x.fingerprint, lay.order)
    return state, state == 0


def partition(kernels: Any, x: Inputs, lay: DeviceLayout, taken: Tensor, usable: Tensor | None) -> Tensor:
    """[M] int64 cluster of each record taken, numbered over the batch by first appearance; −1 for the others."""
    cfg, sizes = x.config, {"n_groups": lay.n_groups, "longest_group": lay.longest_group}
    labels: Tensor
    if cfg.partition == "cosine":
        labels = kernels.clusters.cluster_cosine(
            x.fingerprint, lay.order, lay.group_offsets, usable, float(cfg.epsilon), taken=taken, **sizes
        )
    elif cfg.partition == "none":
        labels = torch.where(taken, taken.cumsum(0) - 1, -1)
    else:
        if cfg.partition == "exact":
            assert x.codes is not None
            codes = x.codes[lay.order]
        else:
            depths = _histories(kernels, x, lay, taken)
            codes = history_codes(depths, (depths >= 0).sum(dim=0).clamp(min=1))
        labels = kernels.observations.cluster_exact(codes, lay.group_offsets, taken=taken, **sizes)
    return labels


def _histories(kernels: Any, x: Inputs, lay: DeviceLayout, taken: Tensor) -> Tensor:
    """[H, M] int64 clusters by the last 1, 2, … observations; −1 where a record has fewer, or is not taken."""
    assert x.codes is not None
    labels: Tensor = kernels.observations.cluster_history(
        x.codes[lay.order], lay.step, lay.trajectory_offsets, lay.group_offsets,
        history_depth(x.config, lay.longest_trajectory), n_trajectories=lay.n_trajectories, n_groups=lay.n_groups,
        longest_group=lay.longest_group, taken=taken,
    )  # fmt: skip
    return labels


def hgpo(
    kernels: Any, x: Inputs, lay: DeviceLayout, taken: Tensor, step_return: Tensor, episode: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """HGPO's aggregate and branch of each record, and its cluster: that of its deepest depth in company, or of depth 1."""
    cfg, sizes = x.config, {"n_groups": lay.n_groups, "longest_group": lay.longest_group}
    depths = _histories(kernels, x, lay, taken)
    step_term, deepest, branch = kernels.values.hgpo_advantage(
        step_return, depths, episode, lay.group_offsets, step_norm=cfg.step_norm, delta=cfg.delta,
        alpha=float(cfg.length_weight_alpha), base_group=cfg.base_group, **sizes,
    )  # fmt: skip
    codes = history_codes(depths, deepest.clamp(min=1))
    labels = kernels.observations.cluster_exact(codes, lay.group_offsets, taken=taken, **sizes)
    return labels, step_term, branch


def step_term(kernels: Any, x: Inputs, lay: DeviceLayout, step_return: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """A_S [M] float32 and branch [M] uint8 of each record."""
    if x.config.estimator == "none":
        return torch.zeros_like(step_return), torch.zeros_like(labels, dtype=torch.uint8)  # Branch.SINGLETON
    keys = None if x.action_key is None else x.action_key[lay.order]
    step_term, branch = kernels.values.step_advantage(
        step_return, labels, keys, lay.group_offsets, n_groups=lay.n_groups, longest_group=lay.longest_group,
        estimator=x.config.estimator, step_norm=x.config.step_norm, delta=x.config.delta,
    )  # fmt: skip
    return step_term, branch
