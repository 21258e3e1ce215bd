"""What advantage() gives back."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from .layout import Layout
from .value_r2 import ValueR2, value_r2

Tensor = torch.Tensor


@dataclass(frozen=True, eq=False)
class Records:
    """The records behind a result, in processing order; metrics are read off them when someone asks."""

    layout: Layout
    returns: Tensor  # [M] float32
    labels: Tensor  # [M] int64
    branch: Tensor  # [M] uint8
    advantage: Tensor  # [M] float32
    action_key: Tensor | None  # [M] int64
    action_parsed: Tensor | None  # [M] bool
    n_checked: int  # records before any was set aside
    n_invalid: int  # of these, set aside or alone because of bad values
    partition: str


@dataclass(frozen=True, eq=False)
class AdvantageResult:
    """Advantages in the caller's row order.  Padding and rows set aside hold 0, cluster −1, branch SINGLETON.

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
    records: Records = field(repr=False)

    def metrics(self) -> dict[str, float]:
        """Plain floats for a trainer's logger, keys "bipace/…"; docs/metrics.md defines each.

        Warns once per process where the partition looks degenerate: at least 90 % of groups with 8 or more records in
        one cluster (the paper's failure mode F1), or at least 95 % of rows alone.
        """
        from .metrics import compute_metrics

        return compute_metrics(self.records)

    def value_r2(self) -> ValueR2:
        """How well the partition predicts returns it has not seen; see `ValueR2`."""
        lay = self.records.layout
        return value_r2(
            self.records.returns, self.records.labels, lay.trajectory_of_record(), lay.group_of_record(), lay.n_groups
        )

    def check(self) -> None:
        """Raises what a deferred value check found.  On the CPU values are checked at the call: nothing is left."""
