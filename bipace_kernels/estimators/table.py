"""Step terms of a batch: a function for each row of ESTIMATORS and VALUES (rows.py).

A new estimator is a row there, a function here, and its kernel in each backend (docs/development.md walks through one).
A user's own estimator or value needs none of that: `Config(estimator=function)`, `Config.gae(value=function)`; see
`StepRecords`.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ..backends.contract import Critic
from ..backends.records import Records
from ..backends.schema import BLOCK, FOLDED, LONGEST, Branch, Kernel, Terms
from ..config import Config
from ..inputs.values import check_kernel_steps
from .landmarks import choose_landmarks
from .memory import Readings
from .partitions import Batch, cluster_histories, histories, labels_of


def terms_of(batch: Batch) -> Terms:
    """Clusters and step term of a batch by the configuration's estimator."""
    return _TERMS[batch.config.estimator_row.name](batch)


def _nothing(batch: Batch) -> Terms:
    labels = labels_of(batch)
    return Terms(labels, torch.zeros_like(batch.returns), torch.zeros_like(labels, dtype=torch.uint8))  # SINGLETON


def _of_clusters(batch: Batch) -> Terms:
    """mean, diff_peer and q_style: one kernel each, over the clusters of the partition."""
    cfg, labels = batch.config, labels_of(batch)
    step_term, branch = batch.backend.values.step_advantage(
        batch.records, batch.returns, labels, batch.by_record_or_none(batch.inputs.action_key),
        cfg.estimator_row.name, cfg.step_norm, cfg.delta,
    )  # fmt: skip
    return Terms(labels, step_term, branch)


def _hgpo(batch: Batch) -> Terms:
    """The aggregate over depths; a record's cluster is that of its deepest depth with peers, or of depth 1."""
    cfg, depths = batch.config, histories(batch)
    step_term, deepest, branch = batch.backend.values.hgpo_advantage(
        batch.records, batch.returns, depths, batch.episode, cfg.step_norm, cfg.delta, float(cfg.length_weight_alpha),
        cfg.base_group,
    )  # fmt: skip
    return Terms(cluster_histories(batch, depths, deepest), step_term, branch)


def _gae(batch: Batch) -> Terms:
    """GAE(λ) over a value of each record's state (docs/gae.md)."""
    labels, cfg, row, critic = labels_of(batch), batch.config, batch.config.value_row, batch.backend.critic
    assert row is not None
    value, raw = batch.by_record_or_none(batch.inputs.value), batch.by_record_or_none(batch.inputs.raw_advantage)
    if value is None or raw is None:
        (value, rows), rewards = _VALUES[row.name](batch, labels), batch.by_record_or_none(batch.inputs.rewards)
        assert rewards is not None
        truncated = batch.by_record_or_none(batch.inputs.truncated)
        raw = critic.gae_advantage(batch.records, rewards, value, truncated, float(cfg.gamma), float(cfg.gae_lambda))
        x = batch.inputs
        if rows is not None and cfg.action_noise is not None and x.action_key is not None:
            raw = critic.same_action_advantage(
                batch.records, rows, raw, batch.by_record(x.action_key), batch.by_record_or_none(x.action_parsed),
                kernel_of(cfg, cfg.action_noise),
            )  # fmt: skip
    step_term = critic.normed_advantage(batch.records, raw, batch.returns, cfg.step_norm)
    branch = torch.zeros_like(labels, dtype=torch.uint8)  # SINGLETON
    if row.has_clusters:
        sizes = torch.zeros_like(labels).index_add_(0, labels.clamp(min=0), (labels >= 0).to(labels.dtype))
        branch = torch.where((labels >= 0) & (sizes.index_select(0, labels.clamp(min=0)) > 1), int(Branch.PACE), branch)
    return Terms(labels, step_term, branch, value, raw)


def kernel_of(cfg: Config, noise: float) -> Kernel:
    """The Gaussian process of a configuration."""
    share = "group" if cfg.share == "group" else "batch"
    return Kernel(
        float(cfg.kernel_width), float(cfg.kernel_time or 0.0), float(noise), float(cfg.kernel_same), share,
        float(cfg.kernel_inside), float(cfg.luck_noise), float(cfg.gamma),
        LONGEST if share == "group" or cfg.kernel_directions is None else BLOCK,
    )  # fmt: skip


def kernel_rows(
    critic: Critic, cfg: Config, records: Records, fingerprint: Tensor, inside: Tensor | None
) -> tuple[Tensor | None, tuple[Tensor, Tensor | None, Tensor]]:
    """Landmarks, None under share "group"; and [M, w] rows of value="kernel", of its kernel inside groups (None: there
    is none), and of averages over equal actions.

    inside   [M] bool or None, all: records that may be landmarks
    """
    folded, keys = 0 if cfg.kernel_directions is None else FOLDED, torch.empty_like(records.time)
    if cfg.share == "group":
        own = critic.centred_rows(records, critic.unit_rows(records, fingerprint, folded), "group")
        return None, (own, None, own)
    rows = critic.unit_rows(records, fingerprint, folded, keys)
    landmarks = choose_landmarks(keys, records.time, inside)
    if cfg.kernel_directions is not None:
        rows = critic.whitened_rows(records, rows, landmarks, cfg.kernel_directions)
    shared, own = (critic.centred_rows(records, rows, share) for share in ("batch", "group"))
    return landmarks, (shared, own if cfg.kernel_inside else None, own if cfg.kernel_directions is None else shared)


def _rows(batch: Batch) -> tuple[Tensor | None, tuple[Tensor, Tensor | None, Tensor]]:
    """kernel_rows() of a batch by itself."""
    fingerprint, usable = batch.inputs.fingerprint, replace(batch.records, usable=_inside_groups(batch))
    assert fingerprint is not None
    check_kernel_steps(batch.layout)
    inside = None if batch.config.share == "group" else _inside(batch)
    return kernel_rows(batch.backend.critic, batch.config, usable, fingerprint, inside)


def _mean_values(batch: Batch, labels: Tensor | None) -> tuple[Tensor, None]:
    """[M] float64 shrunk means of the records of a prompt group with equal labels; without labels, of the group."""
    shrinkage = float(batch.config.shrinkage)
    return batch.backend.critic.cluster_values(batch.records, batch.returns, labels, shrinkage), None


def _kernel_values(batch: Batch, labels: Tensor) -> tuple[Tensor, Tensor]:
    """[M] float64 V̂ of value="kernel", and the rows of averages; with a memory, also estimated from its records."""
    cfg, records, fingerprint = batch.config, batch.records, batch.inputs.fingerprint
    assert fingerprint is not None
    critic, kernel = batch.backend.critic, kernel_of(cfg, cfg.kernel_noise)
    if cfg.share != "memory" or batch.memory is None:
        landmarks, (rows, own, averaged) = _rows(batch)
        return critic.kernel_values(records, rows, own, batch.returns, landmarks, kernel), averaged
    lay = batch.layout
    check_kernel_steps(lay)
    groups, trajectories = (tuple(x.diff().tolist()) for x in (lay.group_offsets, lay.trajectory_offsets))
    time = records.time.clone()  # a layout's own
    now = Readings(batch.by_record(fingerprint), batch.returns, time, _inside(batch), groups, trajectories)
    held = batch.memory.state()
    both = batch.memory.before(held, now)
    every = both.records()
    earlier = every.n_records - records.n_records
    if records.taken is not None:
        every = replace(every, taken=torch.cat([torch.ones_like(both.usable[:earlier]), records.taken]))
    landmarks, (rows, own, averaged) = kernel_rows(critic, cfg, every, both.fingerprint, both.usable)
    value = critic.kernel_values(every, rows, own, both.returns, landmarks, kernel)
    batch.at_end.append(partial(batch.memory.keep, held, now, both))
    return value[earlier:], averaged[earlier:].contiguous()


def _inside(batch: Batch) -> Tensor:
    """[M] bool: taken, and usable."""
    inside = torch.ones_like(batch.returns, dtype=torch.bool)
    for mask in (batch.records.taken, batch.records.usable):
        inside = inside if mask is None else inside & mask
    return inside


def _inside_groups(batch: Batch) -> Tensor | None:
    """[M] bool or None, all: usable and, under share="group", of a group of several trajectories (one: only a mean)."""
    records = batch.records
    if batch.config.share != "group":
        return records.usable
    first = records.trajectory_offsets[:-1]  # a trajectory is taken as a whole
    taken = torch.ones_like(first) if records.taken is None else records.taken[first]
    counts = torch.nn.functional.pad(taken.cumsum(0), (1, 0))[records.group_trajectories].diff()
    at = torch.arange(records.n_records, device=records.device)
    several = (counts > 1)[torch.searchsorted(records.group_offsets, at, right=True) - 1]
    return several if records.usable is None else several & records.usable


@dataclass(frozen=True)
class StepRecords:
    """Argument of a user's own estimator or value: the records that take part, in processing order, on their device.

    returns              [M] float32   R, discounted return-to-go
    rewards              [M] float64 or None
    episode_advantage    [M] float32   A_ep
    cluster              [M] int64     cluster by the configuration's partition, dense from 0; "none": one record each
    group_offsets        [G+1] int64   records of prompt group g are group_offsets[g] : group_offsets[g+1]
    trajectory_offsets   [T+1] int64   likewise of trajectories, in time order
    step                 [M] int64     step number inside the trajectory
    action_key           [M] int64 or None
    fingerprint          [M, D] or None; zeros where a state was zero or not finite
    config               the configuration of the call
    """

    returns: Tensor
    rewards: Tensor | None
    episode_advantage: Tensor
    cluster: Tensor
    group_offsets: Tensor
    trajectory_offsets: Tensor
    step: Tensor
    action_key: Tensor | None
    fingerprint: Tensor | None
    config: Config


def _function(batch: Batch) -> Terms:
    labels = labels_of(batch)
    term = _of_function("estimator", batch, labels).to(torch.float32)
    branch = torch.full_like(labels, int(Branch.PACE), dtype=torch.uint8)
    return Terms(labels, term, branch if batch.records.taken is None else branch * batch.records.taken)


def _function_values(batch: Batch, labels: Tensor) -> tuple[Tensor, Tensor | None]:
    value = _of_function("value", batch, labels)
    averages = batch.config.averages_actions and batch.inputs.action_key is not None
    return value, _rows(batch)[1][2] if averages else None


def _of_function(argument: str, batch: Batch, labels: Tensor) -> Tensor:
    """[M] float64, finite in float32, of the function that is this argument of Config; 0 for records set aside.

    Those are removed before it is called, which synchronizes with a GPU once.
    """
    x, records, taken, state = batch.inputs, batch.records, batch.records.taken, batch.records.state
    usable = records.usable if state is None else state == 0
    kept: Tensor | None = None
    if taken is not None:
        kept = torch.nonzero(taken).flatten()
        records = batch.layout.restrict(taken.cpu()).on(labels.device)

    def of_rows(column: Tensor | None) -> Tensor | None:
        return None if column is None else column[records.order]

    def of_taken(column: Tensor) -> Tensor:
        return column.clone() if kept is None else column[kept]  # the function may write into what it gets

    fingerprint = of_rows(x.fingerprint)
    if fingerprint is not None and usable is not None:
        fingerprint = fingerprint.masked_fill(~of_taken(usable)[:, None], 0)
    step_records = StepRecords(
        returns=of_taken(batch.returns), rewards=of_rows(x.rewards), episode_advantage=of_taken(batch.episode),
        cluster=of_taken(labels), group_offsets=records.group_offsets.clone(),
        trajectory_offsets=records.trajectory_offsets.clone(), step=records.time.clone(),
        action_key=of_rows(x.action_key), fingerprint=fingerprint, config=batch.config,
    )  # fmt: skip
    name = f"{argument} {getattr(batch.config, f'{argument}_name')}"
    try:
        made = getattr(batch.config, argument)(step_records)
    except Exception as error:
        kind = type(error) if type(error) in (ValueError, TypeError) else RuntimeError
        raise kind(
            f"{name} raised {type(error).__name__} on a batch (records: {records.n_records}, rollouts: "
            f"{records.n_trajectories}, prompt groups: {records.n_groups}): {error}"
        ) from error
    term = _checked(made, records, name)
    return term if kept is None else torch.zeros_like(batch.returns, dtype=torch.float64).index_copy_(0, kept, term)


def _checked(made: Any, records: Records, name: str) -> Tensor:
    """The result of a user's function as [M] float64; TypeError or ValueError if it is not valid."""
    if not isinstance(made, Tensor):
        raise TypeError(f"{name} must return a tensor [M] like records.returns, got {type(made).__name__}.")
    alike = made.shape == (records.n_records,) and made.device == records.device and made.layout == torch.strided
    if not alike or not made.dtype.is_floating_point:
        raise ValueError(
            f"{name} must return float values of shape [{records.n_records}] on {records.device}, one for each record, "
            f"got {made.dtype} {list(made.shape)} on {made.device}, {made.layout}."
        )
    term = torch.empty(made.shape, dtype=torch.float64, device=made.device).copy_(made.detach())  # dense, and ours
    bad = torch.nonzero(~term.to(torch.float32).isfinite()).flatten()
    if bad.numel():
        raise ValueError(
            f"{name} must return values that are finite in float32, got {float(made[bad[0]]):g} for record {bad[0]} "
            f"and {bad.numel()} such values in all; check its divisions."
        )
    return term


_TERMS: dict[str, Callable[[Batch], Terms]] = {
    "none": _nothing, "mean": _of_clusters, "diff_peer": _of_clusters, "q_style": _of_clusters, "hgpo": _hgpo,
    "gae": _gae, "function": _function,
}  # fmt: skip
#: [M] float64 V̂ of a batch, given its clusters, and the rows [M, w] of its kernel or None.
_VALUES: dict[str, Callable[[Batch, Tensor], tuple[Tensor, Tensor | None]]] = {
    "group": lambda batch, labels: _mean_values(batch, None), "cluster": _mean_values, "kernel": _kernel_values,
    "step": lambda batch, labels: _mean_values(batch, batch.records.time), "function": _function_values,
}  # fmt: skip
