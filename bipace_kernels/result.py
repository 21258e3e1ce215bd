"""The result of advantage()."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from .backends import threads
from .diagnostics.metrics import compute_metrics
from .diagnostics.records import Records, RecordSource
from .diagnostics.value_r2 import ValueR2, value_r2
from .inputs import checks

ROWS = ("advantage", "step_advantage", "episode_advantage", "returns", "value", "cluster", "branch")


@dataclass(frozen=True, eq=False, repr=False)
class AdvantageResult:
    """Advantages in the caller's row order.  Padding and rows set aside hold 0, cluster −1, branch SINGLETON.

    The tensors are on the arguments' device.  On a GPU, metrics(), value_r2() and check() read them and the flags of
    bad values at the time of the call, and synchronize; nothing else does.

    advantage           [N] float32   A, what the trainer multiplies with the log-probabilities' gradient
    step_advantage      [N] float32   A_S (hgpo: the aggregate, equal to advantage)
    episode_advantage   [N] float32   A_ep
    returns             [N] float32   R, discounted return-to-go
    cluster             [N] int64     dense over the batch, numbered by first appearance in processing order
    branch              [N] uint8     Branch.SINGLETON | PACE | LEAVE_ONE_OUT
    value               [N] float32   V̂, value of the record's state, with estimator "gae"; else None
    """

    advantage: Tensor
    step_advantage: Tensor
    episode_advantage: Tensor
    returns: Tensor
    cluster: Tensor
    branch: Tensor
    records: RecordSource
    tensors: AdvantageResult | None = None  # this result as tensors, if its fields are not
    value: Tensor | None = None

    def __repr__(self) -> str:
        """A few lines; nothing is read from a GPU."""
        there = (self.tensors or self).advantage
        named = ", ".join(name for name in ROWS if getattr(self, name) is not None)
        return (
            f"AdvantageResult of {there.shape[0]} rows on {there.device}\n"
            f"  fields: {named}\n"
            "  .metrics() for a logger, .value_r2() of the partition, .check() for deferred errors"
        )

    def as_arrays(self, from_dlpack: Callable[[Tensor], Any]) -> AdvantageResult:
        """The same memory as arrays of another library, e.g. of from_dlpack=jax.numpy.from_dlpack."""
        return self._with_rows(from_dlpack, tensors=self)

    def _with_rows(self, change: Callable[[Tensor], Any], **more: Any) -> AdvantageResult:
        """The result with change(rows) of each field by row."""
        more |= {name: change(getattr(self, name)) for name in ROWS if getattr(self, name) is not None}
        return replace(self, **more)

    @threads.using()
    def metrics(self) -> dict[str, float]:
        """Plain floats for a trainer's logger, keys "bipace/…"; docs/metrics.md defines each.

        They are of the result's tensors as they are now: scale a copy of advantage, not it, if they are read later.
        Warns once per process where the partition looks degenerate: at least 90 % of groups with 8 or more records in
        one cluster (the paper's failure mode F1), or at least 95 % of rows alone.
        """
        return compute_metrics(self._records())

    @threads.using()
    def value_r2(self) -> ValueR2:
        """How well the partition predicts held-out returns; see `ValueR2`.  Of the tensors as they are now."""
        records = self._records()
        lay = records.layout
        ids = lay.trajectory_of_record(), lay.group_of_record(), lay.n_groups
        return value_r2(records.returns, records.labels, *ids)

    @threads.using()
    def check(self) -> None:
        """Raises the error of a deferred value check: the ValueError that the same values raise at the call on the CPU.

        On CPU tensors values are checked at the call, and this does nothing.  Under on_invalid="singleton" values that
        are not finite are not an error; contradictions (copies of a step, episode returns of one trajectory) still are.
        """
        self.records.check(self.tensors or self)

    @threads.using()
    def with_bad_states(self, bad: Tensor) -> AdvantageResult:
        """The same result, which counts these rows [N] bool as invalid: its clusters were made of states elsewhere.

        Synchronizes with a GPU.  ValueError for a result of bipace_kernels.distributed.
        """
        rows = checks.bool_vector(bad, "bad", (self.tensors or self).advantage.shape[0])
        records = self._records()
        if records.layout.n_rows != len(rows):
            raise ValueError(
                "with_bad_states() must have the result of one process, but this is of bipace_kernels.distributed; "
                "there, pass the states to advantage(on_invalid='singleton')."
            )
        usable = ~rows.cpu().index_select(0, records.layout.order)
        usable = usable if records.usable is None else usable & records.usable
        return replace(self, records=replace(records, usable=usable))

    def _records(self) -> Records:
        """The records that took part, on the CPU, for metrics() and value_r2().  Synchronizes with a GPU."""
        return self.records.read(self.tensors or self)
