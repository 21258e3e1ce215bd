"""The arrows of the host chain: stages on CPU tensors, and what stands between them.

Values are looked at as they come: bad rows raise, or are taken out of the layout.
"""

from __future__ import annotations

from typing import Any

import torch

from . import value_checks as values
from ._inputs import Inputs
from .config import Config
from .layout import Layout
from .observations import history_codes, history_depth, observation_texts
from .schema import Branch

Tensor = torch.Tensor


def records_of(x: Inputs, everyone: Layout) -> Layout:
    """The layout of what counts as a record; ValueError for copies of a step that may not be, or that disagree."""
    if everyone.first is None:
        return everyone
    if x.config.duplicates == "raise":
        values.raise_duplicates(everyone)
    if x.rewards is not None:
        values.check_copies(everyone, x.rewards)
    return everyone.once() if x.config.duplicates == "once" else everyone


def returns(kernels: Any, x: Inputs, lay: Layout, threads: int) -> tuple[Tensor, Tensor]:
    """Return-to-go of each record [M] and return of each trajectory [T], float32, rounded once."""
    ordered = None if x.rewards is None else x.rewards[lay.order]
    if x.returns is not None:
        step_return = x.returns[lay.order].to(torch.float32)
    else:
        step_return = kernels.returns.discounted_returns(
            ordered, lay.step, lay.trajectory_offsets, float(x.config.gamma), num_threads=threads
        )
    if x.episode_return is None:
        return step_return, kernels.returns.trajectory_returns(
            ordered, lay.step, lay.trajectory_offsets, num_threads=threads
        )
    per_record = x.episode_return[lay.order]
    per_trajectory = per_record[lay.trajectory_offsets[:-1]]
    trajectory = lay.trajectory_of_record()
    differ = values.unlike_first(per_record, per_trajectory[trajectory])
    if bool(differ.any()):
        values.raise_episode_return(lay, x.episode_return, differ)
    # One bad row spoils its trajectory even where the first row is fine.
    bad = ~per_record.isfinite()
    if bool(bad.any()):
        per_trajectory = per_trajectory.clone()
        per_trajectory[trajectory[bad]] = float("nan")
    return step_return, per_trajectory.to(torch.float32)


def spoilt_trajectories(
    x: Inputs, everyone: Layout, lay: Layout, step_return: Tensor, trajectory_return: Tensor
) -> Tensor | None:
    """[T] bool: trajectories with a return that is not finite (or beyond ±1e37); None where there is none."""
    bad_step, spoilt = values.out_of_range(step_return), values.out_of_range(trajectory_return)
    if bool(bad_step.any()):
        spoilt[lay.trajectory_of_record()[bad_step]] = True
    if everyone.first is not None and x.rewards is not None:
        # A bad reward in any copy of a step, also one that will not count.
        bad_copy = values.out_of_range(x.rewards[everyone.order])
        spoilt[everyone.trajectory_of_record()[bad_copy]] = True
    if not bool(spoilt.any()):
        return None
    if x.config.on_invalid == "raise":
        values.raise_spoilt(everyone, spoilt, x.rewards, x.returns, x.episode_return)
    return spoilt


def usable(kernels: Any, x: Inputs, lay: Layout, threads: int) -> Tensor | None:
    """[M] bool: records whose fingerprint is finite and not zero; None where all are."""
    if x.fingerprint is None:
        return None
    state: Tensor = kernels.clusters.scan_rows(x.fingerprint, lay.order, num_threads=threads)
    if not bool(state.any()):
        return None
    if x.config.on_invalid == "raise":
        values.check_fingerprint(lay, state)
    return state == 0


def partition(kernels: Any, x: Inputs, lay: Layout, usable: Tensor | None, threads: int) -> Tensor:
    """[M] int64 cluster of each record, numbered over the batch by first appearance."""
    cfg = x.config
    labels: Tensor
    if cfg.partition == "cosine":
        labels = kernels.clusters.cluster_cosine(
            x.fingerprint, lay.order, lay.group_offsets, usable, float(cfg.epsilon), num_threads=threads
        )
    elif cfg.partition == "similar":
        texts = observation_texts(x.observation, lay)
        labels = kernels.similar.cluster_similar(texts, lay.group_offsets, float(cfg.similarity), num_threads=threads)
    elif cfg.partition == "none":
        labels = torch.arange(lay.n_records)
    else:
        if cfg.partition == "exact":
            assert x.codes is not None
            codes = x.codes[lay.order]
        else:
            depths = _histories(kernels, x, lay, threads)
            codes = history_codes(depths, (depths >= 0).sum(dim=0))
        labels = kernels.observations.cluster_exact(codes, lay.group_offsets, num_threads=threads)
    return labels


def _histories(kernels: Any, x: Inputs, lay: Layout, threads: int) -> Tensor:
    """[H, M] int64 clusters by the last 1, 2, … observations; −1 where a record has fewer."""
    assert x.codes is not None
    labels: Tensor = kernels.observations.cluster_history(
        x.codes[lay.order], lay.step, lay.trajectory_offsets, lay.group_offsets,
        history_depth(x.config, lay.longest_trajectory), num_threads=threads,
    )  # fmt: skip
    return labels


def hgpo(
    kernels: Any, x: Inputs, lay: Layout, step_return: Tensor, episode: Tensor, threads: int
) -> tuple[Tensor, Tensor, Tensor]:
    """HGPO's aggregate and branch of each record, and its cluster: that of its deepest depth in company, or of depth 1."""
    cfg = x.config
    depths = _histories(kernels, x, lay, threads)
    step_term, deepest, branch = kernels.values.hgpo_advantage(
        step_return, depths, episode, step_norm=cfg.step_norm, delta=cfg.delta, alpha=float(cfg.length_weight_alpha),
        base_group=cfg.base_group, num_threads=threads,
    )  # fmt: skip
    labels = kernels.observations.cluster_exact(history_codes(depths, deepest.clamp(min=1)), lay.group_offsets)
    return labels, step_term, branch


def step_term(
    kernels: Any, cfg: Config, step_return: Tensor, labels: Tensor, keys: Tensor | None, threads: int
) -> tuple[Tensor, Tensor]:
    if cfg.estimator == "none":
        return torch.zeros_like(step_return), torch.full(labels.shape, int(Branch.SINGLETON), dtype=torch.uint8)
    n_clusters = int(labels.max()) + 1 if labels.numel() else 0
    step_term, branch = kernels.values.step_advantage(
        step_return, labels, n_clusters, keys, estimator=cfg.estimator, step_norm=cfg.step_norm, delta=cfg.delta,
        num_threads=threads,
    )  # fmt: skip
    return step_term, branch


def combine(episode: Tensor, step_term: Tensor, weight: float) -> Tensor:
    """A = A_ep + w · A_S in float64, rounded once; w = 0 gives A_ep back bit for bit.  Saturates, never overflows."""
    if weight == 0:
        return episode.clone()  # adding 0 would turn −0.0 into 0.0
    total = episode.to(torch.float64) + weight * step_term.to(torch.float64)
    limit = torch.finfo(torch.float32).max
    return total.clamp(-limit, limit).to(torch.float32)


def source(everyone: Layout, lay: Layout) -> Tensor:
    """[N] int64: the record whose results each row gets; −1 for padding and for rows set aside."""
    source = torch.full((everyone.n_rows,), -1, dtype=torch.int64)
    source[lay.order] = torch.arange(lay.n_records)
    if everyone.merges_copies and everyone.n_records:
        record = everyone.source()
        own = source[everyone.order[record.clamp(min=0)]]
        source = torch.where(record >= 0, own, -1)
    elif everyone.first is not None:
        # Copies of a record that counts once get its results; where each copy counts, each has its own already.
        own = source[everyone.order]
        source[everyone.order] = torch.where(own >= 0, own, own[everyone.first])
    return source


def scatter(values: Tensor, source: Tensor, absent: float) -> Tensor:
    """The results of records in the caller's row order."""
    if not values.numel():
        return torch.full(source.shape, absent, dtype=values.dtype)
    out = values[source.clamp(min=0)]
    return out.masked_fill_(source < 0, absent)
