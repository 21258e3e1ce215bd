"""What advantage() gives back."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch

from . import _checks
from . import value_checks as values
from ._checks import LateCheck
from ._transfer import to_host
from .config import Config
from .layout import Layout
from .value_r2 import ValueR2, value_r2

if TYPE_CHECKING:
    from ._compiled import CompiledRecords

Tensor = torch.Tensor


@dataclass(frozen=True, eq=False)
class Records:
    """The records behind a result, in processing order on the CPU; metrics are read off them when someone asks."""

    layout: Layout
    returns: Tensor  # [M] float32
    labels: Tensor  # [M] int64
    branch: Tensor  # [M] uint8
    advantage: Tensor  # [M] float32
    action_key: Tensor | None  # [M] int64
    action_parsed: Tensor | None  # [M] bool
    n_checked: int  # records before any was set aside
    usable: Tensor | None  # [M] bool: False where a bad fingerprint left the record alone; None: all are
    partition: str

    @property
    def n_invalid(self) -> int:
        """Records set aside, or left alone, because of bad values."""
        alone = 0 if self.usable is None else int((~self.usable).sum())
        return self.n_checked - self.layout.n_records + alone


@dataclass(frozen=True, eq=False)
class DeviceRecords:
    """What a result on a GPU needs besides itself to give its records, and the errors that nobody has looked for yet."""

    everyone: Layout  # all records, copies of a step too
    layout: Layout  # those that count
    config: Config
    rewards: Tensor | None  # [N] float64, as given; likewise the next two: an error tells their values
    returns: Tensor | None
    episode_return: Tensor | None
    action_key: Tensor | None  # [N] int64
    action_parsed: Tensor | None  # [N] bool
    state: Tensor | None  # [M] uint8 of the fingerprints: 0 fine, 1 not finite, 2 zero
    episode_differs: Tensor | None  # [M] bool: not the episode return of its trajectory's first record
    copy_differs: Tensor | None  # [records of everyone] bool: not the reward of the step that it copies
    late: tuple[LateCheck, ...]

    def records(self, result: AdvantageResult) -> Records:
        """The records on the CPU, as the host chain has them; waits for the device once.  Raises like check()."""
        lay = self.layout
        cluster, branch, returns, advantage, key, parsed, *flags = to_host(
            (result.cluster, result.branch, result.returns, result.advantage, self.action_key, self.action_parsed,
             *self._flags())
        )  # fmt: skip
        state = self._raise(cluster, flags)
        keep = cluster[lay.order] >= 0  # records that are set aside are in no cluster
        part = lay.restrict(keep)
        rows = part.order
        return Records(
            layout=part,
            returns=returns[rows],
            labels=cluster[rows],
            branch=branch[rows],
            advantage=advantage[rows],
            action_key=None if key is None else key[rows],
            action_parsed=None if parsed is None else parsed[rows],
            n_checked=lay.n_records,
            usable=None if state is None else state[keep] == 0,
            partition=self.config.partition,
        )

    def check(self, cluster: Tensor) -> None:
        """Raises what the host chain raises for these values; waits for the device.  cluster: the result's, [N]."""
        cluster, *flags = to_host((cluster, *self._flags()))
        self._raise(cluster, flags)

    def _flags(self) -> tuple[Tensor | None, ...]:
        return self.state, self.episode_differs, self.copy_differs, *(check.failed for check in self.late)

    def _raise(self, cluster: Tensor, flags: list[Any]) -> Any:
        """Raises for flags that were brought to the CPU, in the order of the host chain; else gives the state."""
        state, episode_differs, copy_differs, *late = flags
        for check, failed in zip(self.late, late, strict=True):
            _checks.unless(failed, check.error, check.text, None)
        if copy_differs is not None and bool(copy_differs.any()):
            values.raise_copies(self.everyone, to_host([self.rewards])[0], copy_differs)
        if episode_differs is not None and bool(episode_differs.any()):
            values.raise_episode_return(self.layout, to_host([self.episode_return])[0], episode_differs)
        if self.config.on_invalid == "raise":
            lay = self.layout
            spoilt = cluster[lay.order[lay.trajectory_offsets[:-1]]] < 0
            if bool(spoilt.any()):
                values.raise_spoilt(self.everyone, spoilt, *to_host([self.rewards, self.returns, self.episode_return]))
            if state is not None:
                values.check_fingerprint(lay, state)
        return state


@dataclass(frozen=True, eq=False)
class AdvantageResult:
    """Advantages in the caller's row order.  Padding and rows set aside hold 0, cluster −1, branch SINGLETON.

    The tensors are where the arguments were.  On a GPU, metrics(), value_r2() and check() read them, and the flags of bad
    values, as they are when asked, and wait for the device; nothing else does.

    advantage           [N] float32   A, what the trainer multiplies with the log-probabilities' gradient
    step_advantage      [N] float32   A_S (hgpo: the aggregate, equal to advantage)
    episode_advantage   [N] float32   A_ep
    returns             [N] float32   R, discounted return-to-go
    cluster             [N] int64     dense over the batch, numbered by first appearance in processing order
    branch              [N] uint8     Branch.SINGLETON | PACE | LEAVE_ONE_OUT
    """

    advantage: Tensor
    step_advantage: Tensor
    episode_advantage: Tensor
    returns: Tensor
    cluster: Tensor
    branch: Tensor
    records: Records | DeviceRecords | CompiledRecords = field(repr=False)
    tensors: AdvantageResult | None = field(default=None, repr=False)  # this result, where its fields are no tensors

    def as_arrays(self, from_dlpack: Callable[[Tensor], Any]) -> AdvantageResult:
        """The same memory as arrays of another library, e.g. of from_dlpack=jax.numpy.from_dlpack."""
        return replace(
            self,
            advantage=from_dlpack(self.advantage),
            step_advantage=from_dlpack(self.step_advantage),
            episode_advantage=from_dlpack(self.episode_advantage),
            returns=from_dlpack(self.returns),
            cluster=from_dlpack(self.cluster),
            branch=from_dlpack(self.branch),
            tensors=self,
        )

    def metrics(self) -> dict[str, float]:
        """Plain floats for a trainer's logger, keys "bipace/…"; docs/metrics.md defines each.

        Warns once per process where the partition looks degenerate: at least 90 % of groups with 8 or more records in
        one cluster (the paper's failure mode F1), or at least 95 % of rows alone.
        """
        from .metrics import compute_metrics

        return compute_metrics(self._records())

    def value_r2(self) -> ValueR2:
        """How well the partition predicts returns it has not seen; see `ValueR2`."""
        records = self._records()
        lay = records.layout
        return value_r2(
            records.returns, records.labels, lay.trajectory_of_record(), lay.group_of_record(), lay.n_groups
        )

    def check(self) -> None:
        """Raises what a deferred value check found: the ValueError that the same values raise at the call on the CPU.

        On CPU tensors values are checked at the call, and nothing is left.  Under on_invalid="singleton" values that are
        not finite are no error; what contradicts itself (copies of a step, episode returns of one trajectory) still is.
        """
        if not isinstance(self.records, Records):
            self.records.check((self.tensors or self).cluster)

    def _records(self) -> Records:
        return self.records if isinstance(self.records, Records) else self.records.records(self.tensors or self)
