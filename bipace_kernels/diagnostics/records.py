"""The records behind a result, for metrics and for late checks."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from torch import Tensor

from ..inputs import checks
from ..inputs.columns import Inputs
from ..inputs.layout import Layout
from ..inputs.transfer import to_host
from ..inputs.values import check_fingerprint, raise_copies, raise_episode_return, raise_spoilt

if TYPE_CHECKING:
    from ..result import AdvantageResult


class RecordSource(Protocol):
    """Gives the records of a result on the CPU, which synchronizes with a GPU; both raise errors of late checks."""

    def read(self, rows: AdvantageResult) -> Records: ...
    def check(self, rows: AdvantageResult) -> None: ...


@dataclass(frozen=True, eq=False)
class Records:
    """The records that took part, in processing order on the CPU."""

    layout: Layout
    returns: Tensor  # [M] float32
    labels: Tensor  # [M] int64
    branch: Tensor  # [M] uint8
    advantage: Tensor  # [M] float32
    action_key: Tensor | None  # [M] int64
    action_parsed: Tensor | None  # [M] bool
    n_checked: int  # records before any was set aside
    usable: Tensor | None  # [M] bool: False where a bad fingerprint made the record a singleton; None: all are usable
    partition: str
    value: Tensor | None = None  # [M] float32 V̂, of estimators that have one
    raw_rms: float | None = None  # root mean square of A_S before step_norm, of the same

    def read(self, rows: AdvantageResult) -> Records:
        return self

    def check(self, rows: AdvantageResult) -> None:
        """Nothing is left to check."""


@dataclass(frozen=True, eq=False)
class Unread:
    """What a result also needs to give its records, and the errors not yet read from a GPU."""

    everyone: Layout  # all records, including copies of a step
    layout: Layout  # those that count
    inputs: Inputs  # of errors and metrics: without fingerprints and observations
    state: Tensor | None  # [M] uint8 of the fingerprints: 0 fine, 1 not finite, 2 zero; None: all fine, or no such
    episode_differs: Tensor | None  # [M] bool: not the episode return of its trajectory's first record
    copy_differs: Tensor | None  # [records of everyone] bool: not the reward of the step that it copies
    checked: bool = False  # at the call
    value: Tensor | None = None  # [M] float64 V̂, of estimators that have one
    raw: Tensor | None = None  # [M] float64 A_S before step_norm, of the same
    source: Tensor | None = None  # [N] int64 record of `value` and `raw` whose results each row gets; −1: none

    def read(self, rows: AdvantageResult) -> Records:
        lay = self.layout
        names = ("labels", "branch", "returns", "advantage", "value", "action_key", "action_parsed", "raw")
        results = (rows.cluster, rows.branch, rows.returns, rows.advantage, rows.value)
        read = to_host((*results, self.inputs.action_key, self.inputs.action_parsed, self.raw, *self._flags()))
        columns, flags = dict(zip(names, read, strict=False)), read[len(names) :]
        cluster, raw = columns["labels"], columns.pop("raw")  # raw is in processing order already
        self._raise(cluster, flags)
        state: Tensor | None = flags[0]
        keep = cluster.index_select(0, lay.order) >= 0  # records that are set aside are in no cluster
        part = lay if bool(keep.all()) else lay.restrict(keep)
        at = part.order  # column[at] would enter torch's thread pool
        by_record: dict[str, Any] = {name: None if x is None else x.index_select(0, at) for name, x in columns.items()}
        usable = None if state is None else state.masked_select(keep) == 0
        rms = None if raw is None else math.sqrt(float((raw.numpy() ** 2).mean())) if raw.numel() else 0.0
        partition = self.inputs.config.partition
        return Records(part, n_checked=lay.n_records, usable=usable, partition=partition, raw_rms=rms, **by_record)

    def check(self, rows: AdvantageResult) -> None:
        if not self.checked:
            cluster, *flags = to_host((rows.cluster, *self._flags()))
            self._raise(cluster, flags)

    def _flags(self) -> tuple[Tensor | None, ...]:
        return self.state, self.episode_differs, self.copy_differs, *(check.failed for check in self.inputs.late)

    def _raise(self, cluster: Tensor, flags: list[Tensor | None]) -> None:
        if not self.checked:
            lay = self.layout
            first = lay.order.index_select(0, lay.trajectory_offsets[:-1])
            self.raise_for(cluster.index_select(0, first) < 0, flags)

    def raise_for(self, spoilt: Tensor, flags: Sequence[Tensor | None] | None = None) -> None:
        """Raises for trajectories [T] bool and flags on the CPU, in one order on every device; None: its own flags."""
        x = self.inputs
        state, episode_differs, copy_differs, *late = self._flags() if flags is None else flags
        for check, failed in zip(x.late, late, strict=True):
            assert failed is not None
            checks.unless(failed, check.error, check.text, None)
        if copy_differs is not None and bool(copy_differs.any()):
            raise_copies(self.everyone, to_host([x.rewards])[0], copy_differs)
        if episode_differs is not None and bool(episode_differs.any()):
            raise_episode_return(self.layout, to_host([x.episode_return])[0], episode_differs)
        if x.config.on_invalid == "raise":
            if bool(spoilt.any()):
                unused = x.returns is not None and x.episode_return is not None and "rewards" not in x.config.needs
                read = [None if unused else x.rewards, x.returns, x.episode_return]
                raise_spoilt(self.everyone, spoilt, *to_host(read))
            if state is not None:
                check_fingerprint(self.layout, state)
