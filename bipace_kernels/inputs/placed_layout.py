"""PlacedLayout: a layout on the tensors' device, copied there once."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property

import torch

from ..backends.masks import runs
from .transfer import Copied

Tensor = torch.Tensor


@dataclass(frozen=True, eq=False)
class PlacedLayout:
    """The tensors of a `Layout` on one device, which may be the CPU.  Made and kept by `Layout.on()`.

    Sizes are plain ints, so reading them does not synchronize.

    device                 where the tensors are
    n_rows                 N, rows that the caller passes
    n_records              M ≤ N, rows that take part
    n_groups               G
    n_trajectories         T
    longest_group          most records in one group
    longest_trajectory     most records in one trajectory
    order                  [M] int64   row of each record
    group_offsets          [G+1] int64
    trajectory_offsets     [T+1] int64
    group_trajectories     [G+1] int64
    trajectory_of_record   [M] int64
    source                 [N] int64   record whose results each row gets: its own, or that of the step it copies;
                           −1 for padding
    step                   [M] int64 or None
    first                  [M] int64 or None   the first record with the same ids; None without duplicates
    valid                  [N] bool or None
    """

    device: torch.device
    n_rows: int
    n_records: int
    n_groups: int
    n_trajectories: int
    longest_group: int
    longest_trajectory: int
    order: Tensor
    group_offsets: Tensor
    trajectory_offsets: Tensor
    group_trajectories: Tensor
    source: Tensor
    step: Tensor | None
    first: Tensor | None
    valid: Tensor | None
    _trajectory_of_record: Tensor | None = field(default=None, repr=False)  # None on the CPU: made on demand
    _copied: Copied | None = field(default=None, repr=False)

    def wait(self) -> None:
        """Makes the current stream wait for the copy, if another stream made it; the host does not wait."""
        if self._copied is not None:
            self._copied.wait(self.order)

    @cached_property
    def trajectory_of_record(self) -> Tensor:
        moved = self._trajectory_of_record
        return runs(self.trajectory_offsets) if moved is None else moved

    def time(self) -> Tensor:
        """[M] int64 step number of each record, or its place in the trajectory where no step was given."""
        if self.step is not None:
            return self.step
        begins = self.trajectory_offsets[:-1][self.trajectory_of_record]
        return torch.arange(self.n_records, device=begins.device) - begins
