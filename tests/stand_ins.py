"""Stage functions with the signatures of bipace_kernels/triton_kernels, run by the cpu backend.

They let the device chain be tested without Triton and without a GPU: what the chain does around its stages, whatever
the stages are.  `Watched` makes every reading of a tensor outside a stage an error, as a GPU's would be that waits.
"""

from __future__ import annotations

import contextlib
import functools
from itertools import pairwise
from types import SimpleNamespace

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from bipace_kernels import _dispatch, cpu
from bipace_kernels.schema import LIMIT

_AT = torch.ops.aten
_READING = {
    _AT._local_scalar_dense, _AT.nonzero, _AT.equal, _AT.is_nonzero, _AT.masked_select, _AT.unique_dim, _AT._unique2,
    _AT.unique_consecutive,
}  # fmt: skip


def _kept(group_offsets, taken):
    """Positions taken, and offsets of what is left of the groups; groups that are left empty go."""
    kept = torch.nonzero(taken).flatten()
    sizes = torch.tensor([int(taken[a:b].sum()) for a, b in pairwise(group_offsets.tolist())])
    sizes = sizes[sizes > 0] if sizes.numel() else sizes
    return kept, torch.cat([torch.zeros(1, dtype=torch.int64), sizes.to(torch.int64).cumsum(0)])


def _spread(values, kept, m, absent):
    out = torch.full((*values.shape[:-1], m), absent, dtype=values.dtype)
    out[..., kept] = values
    return out


def discounted_returns(rewards, step, trajectory_offsets, gamma, *, n_trajectories):
    assert n_trajectories == trajectory_offsets.numel() - 1
    return cpu.returns.discounted_returns(rewards, step, trajectory_offsets, gamma)


def trajectory_returns(rewards, step, trajectory_offsets, *, n_trajectories):
    assert n_trajectories == trajectory_offsets.numel() - 1
    return cpu.returns.trajectory_returns(rewards, step, trajectory_offsets)


def spoilt_trajectories(step_return, trajectory_return, bad_record, trajectory_offsets, *, n_trajectories):
    bad = ~(step_return.abs() <= LIMIT)
    if bad_record is not None:
        assert bad_record.dtype == torch.bool
        bad |= bad_record
    spoilt = ~(trajectory_return.abs() <= LIMIT)
    for t in range(n_trajectories):
        spoilt[t] |= bad[trajectory_offsets[t] : trajectory_offsets[t + 1]].any()
    return spoilt


def episode_advantage(
    episode_return, trajectory_offsets, group_trajectories, *, n_groups, n_records, scope, norm, lone, delta, spoilt
):
    assert n_groups == group_trajectories.numel() - 1
    lengths = trajectory_offsets.diff()
    taken = torch.repeat_interleave(~spoilt, lengths)
    kept, groups = _kept(group_trajectories, ~spoilt)
    offsets = torch.cat([torch.zeros(1, dtype=torch.int64), lengths[kept].cumsum(0)])
    part = cpu.episode.episode_advantage(
        episode_return[kept], offsets, groups, scope=scope, norm=norm, lone=lone, delta=delta
    )
    return _spread(part, torch.nonzero(taken).flatten(), n_records, 0.0)


def scan_rows(fingerprint, order):
    return cpu.clusters.scan_rows(fingerprint, order)


def cluster_cosine(fingerprint, order, group_offsets, usable, epsilon, *, n_groups, longest_group, taken):
    return _clusters("cluster_cosine", fingerprint, order, group_offsets, usable, epsilon, longest_group, taken)


def cluster_sweep(fingerprint, order, group_offsets, usable, epsilons, *, n_groups, longest_group, taken):
    assert n_groups == group_offsets.numel() - 1
    return _clusters("cluster_sweep", fingerprint, order, group_offsets, usable, epsilons, longest_group, taken)


def _clusters(name, fingerprint, order, group_offsets, usable, epsilon, longest_group, taken):
    assert longest_group == int(group_offsets.diff().max() if group_offsets.numel() > 1 else 0)
    kept, groups = _kept(group_offsets, torch.ones_like(order, dtype=torch.bool) if taken is None else taken)
    usable = None if usable is None else usable[kept]
    labels = getattr(cpu.clusters, name)(fingerprint, order[kept], groups, usable, epsilon)
    return _spread(labels, kept, order.numel(), -1)


def cluster_exact(codes, group_offsets, *, n_groups, longest_group, taken):
    kept, groups = _kept(group_offsets, taken)
    return _spread(cpu.observations.cluster_exact(codes[kept], groups), kept, codes.numel(), -1)


def cluster_history(
    codes, step, trajectory_offsets, group_offsets, depth, *, n_trajectories, n_groups, longest_group, taken
):
    kept, groups = _kept(group_offsets, taken)
    _, trajectories = _kept(trajectory_offsets, taken)
    steps = None if step is None else step[kept]
    labels = cpu.observations.cluster_history(codes[kept], steps, trajectories, groups, depth)
    return _spread(labels, kept, codes.numel(), -1)


def step_advantage(returns, labels, action_key, group_offsets, *, n_groups, longest_group, estimator, step_norm, delta):
    kept = torch.nonzero(labels >= 0).flatten()
    n_clusters = int(labels.max()) + 1 if labels.numel() else 0
    keys = None if action_key is None else action_key[kept]
    step, branch = cpu.values.step_advantage(
        returns[kept], labels[kept], n_clusters, keys, estimator=estimator, step_norm=step_norm, delta=delta
    )
    return _spread(step, kept, labels.numel(), 0.0), _spread(branch, kept, labels.numel(), 0)


def hgpo_advantage(
    returns, depth_labels, episode_advantage, group_offsets, *,
    n_groups, longest_group, step_norm, delta, alpha, base_group,
):  # fmt: skip
    kept = torch.nonzero(depth_labels[0] >= 0).flatten()
    m = returns.numel()
    step, deepest, branch = cpu.values.hgpo_advantage(
        returns[kept], depth_labels[:, kept].contiguous(), episode_advantage[kept], step_norm=step_norm, delta=delta,
        alpha=alpha, base_group=base_group,
    )  # fmt: skip
    return _spread(step, kept, m, 0.0), _spread(deepest, kept, m, 0), _spread(branch, kept, m, 0)


def combine(episode, step_term, returns, labels, branch, source, taken, *, weight, total_is_step, n_rows):
    if total_is_step:
        total = step_term
    elif weight == 0:
        total = episode
    else:
        limit = torch.finfo(torch.float32).max
        total = (episode.double() + weight * step_term.double()).clamp(-limit, limit).float()
    absent = source < 0
    if taken is not None and taken.numel():
        absent = absent | ~taken[source.clamp(min=0)]
    out = []
    for values, nothing in ((total, 0.0), (step_term, 0.0), (episode, 0.0), (returns, 0.0), (labels, -1), (branch, 0)):
        row = torch.full((n_rows,), nothing, dtype=values.dtype)
        row[~absent] = values[source[~absent]]
        out.append(row)
    return tuple(out)


class Watched:
    """The stages as a backend's package; inside watch() a tensor may be read in a stage and nowhere else."""

    __name__ = "bipace_kernels.triton_kernels"

    def __init__(self) -> None:
        self.inside = 0
        self.calls: list[str] = []
        for stage, functions in {
            "returns": (discounted_returns, trajectory_returns, spoilt_trajectories),
            "episode": (episode_advantage,),
            "clusters": (scan_rows, cluster_cosine, cluster_sweep),
            "observations": (cluster_exact, cluster_history),
            "values": (step_advantage, hgpo_advantage),
            "combine": (combine,),
        }.items():
            setattr(self, stage, SimpleNamespace(**{f.__name__: self._watched(f) for f in functions}))
        self.clusters.LONGEST_SWEEP = 1000

    def _watched(self, function):
        @functools.wraps(function)
        def run(*args, **kwargs):
            self.calls.append(function.__name__)
            with self.stage():
                return function(*args, **kwargs)

        return run

    @contextlib.contextmanager
    def stage(self):
        self.inside += 1
        try:
            yield
        finally:
            self.inside -= 1

    @contextlib.contextmanager
    def watch(self):
        """Every reading of a tensor on the host raises, outside a stage."""
        with pytest.MonkeyPatch.context() as patch, _Reading(self):
            for name in ("tolist", "numpy", "cpu", "__array__"):  # no operator of torch is called for these on the CPU
                patch.setattr(torch.Tensor, name, self._refusing(name, getattr(torch.Tensor, name)))
            yield

    def _refusing(self, name, function):
        @functools.wraps(function)
        def read(*args, **kwargs):
            if not self.inside:
                raise AssertionError(f"{name} reads a tensor and waits for the device")
            return function(*args, **kwargs)

        return read


class _Reading(TorchDispatchMode):
    """Refuses the operators that would wait for a GPU: those that read values, or whose shape depends on them."""

    def __init__(self, stages: Watched) -> None:
        super().__init__()
        self.stages = stages

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        op = func.overloadpacket
        masked = op in (_AT.index, _AT.index_put, _AT.index_put_) and any(
            i is not None and i.dtype in (torch.bool, torch.uint8) for i in args[1]
        )
        repeated = op is _AT.repeat_interleave and kwargs.get("output_size") is None
        if not self.stages.inside and (op in _READING or masked or repeated):
            raise AssertionError(f"{func} reads a tensor and waits for the device")
        return func(*args, **kwargs)


@pytest.fixture
def stand_ins(monkeypatch):
    """backend="triton" runs the stand-ins."""
    package = Watched()
    choose = _dispatch.choose
    monkeypatch.setattr(
        _dispatch, "choose", lambda backend, where=None: package if backend == "triton" else choose(backend, where)
    )
    return package
