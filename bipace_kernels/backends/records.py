"""Records: what the stages know of a batch beside its values."""

from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from .schema import LIMIT

_NONE = torch.empty(0, dtype=torch.int64)


@dataclass(frozen=True, eq=False)
class Records:
    """The records of a batch in processing order: the fields of `Layout`, with the tensors on one device, and masks.

    Made by `Layout.on()`; the chain adds the masks.  Sizes are plain ints, so reading them does not synchronize.  A
    stage reads only what its docstring names, so the others may be left out.

    device                 where the tensors are
    source                 [N] int64   record whose results each row gets: its own, or that of its step; −1: none
    step                   [M] int64 or None   rising in a trajectory; None: neighbours are one step apart
    usable                 [M] bool or None   False where the fingerprint has no direction: a cluster of its own
    taken                  [M] bool or None   False for records set aside.  Only on a GPU, like the next: on the CPU
                           they are removed before the stages run
    spoilt                 [T] bool or None   the trajectories of these records
    state                  [M] uint8 or None   only on a GPU: where given, cluster_cosine writes there what scan_rows
                           finds, which then decides who is usable, so the rows are read once less
    """

    device: torch.device
    n_rows: int = 0
    n_records: int = 0
    n_groups: int = 0
    n_trajectories: int = 0
    longest_group: int = 0
    longest_trajectory: int = 0
    order: Tensor = _NONE
    group_offsets: Tensor = _NONE
    trajectory_offsets: Tensor = _NONE
    group_trajectories: Tensor = _NONE
    source: Tensor = _NONE
    step: Tensor | None = None
    first: Tensor | None = None
    valid: Tensor | None = None
    usable: Tensor | None = None
    taken: Tensor | None = None
    spoilt: Tensor | None = None
    state: Tensor | None = None
    _trajectory_of_record: Tensor | None = field(default=None, repr=False)  # None on the CPU: made on demand

    @property
    def trajectory_of_record(self) -> Tensor:
        """[M] int64 number of each record's trajectory."""
        if "_runs" not in self.__dict__:  # until Python 3.12 cached_property has a lock, which a fork may leave held
            moved = self._trajectory_of_record
            self.__dict__["_runs"] = runs(self.trajectory_offsets) if moved is None else moved
        return self.__dict__["_runs"]  # type: ignore[no-any-return]

    @property
    def time(self) -> Tensor:
        """[M] int64 step number of each record, or its place in the trajectory where no step was given."""
        if self.step is not None:
            return self.step
        if "_time" not in self.__dict__:
            begins = self.trajectory_offsets[:-1][self.trajectory_of_record]
            self.__dict__["_time"] = torch.arange(self.n_records, device=begins.device) - begins
        return self.__dict__["_time"]  # type: ignore[no-any-return]


def runs(offsets: Tensor) -> Tensor:
    """[M] int64 number of the run of each position.  offsets: [S+1], on the CPU.

    By NumPy: torch's threads would hang in a forked child.
    """
    lengths = np.diff(offsets.numpy())
    return torch.from_numpy(np.repeat(np.arange(lengths.size), lengths))


def check_offsets(name: str, offsets: Tensor, letter: str, end: int) -> None:
    """Raises ValueError for offsets on the CPU with which native code would read out of bounds."""
    values = offsets.numpy()
    if not values.size or values[0] != 0 or values[-1] != end or (values[1:] < values[:-1]).any():
        ends = values.tolist() if values.size <= 6 else [*values[:3].tolist(), "…", *values[-2:].tolist()]
        raise ValueError(
            f"{name} must increase from 0 to {letter} = {end}, got [{', '.join(map(str, ends))}]; use the layout's."
        )


def check_places(name: str, places: Tensor, letter: str, end: int, lowest: int) -> None:
    """Raises ValueError for places on the CPU at which native code would read out of bounds."""
    values = places.numpy()
    if values.size and (values.min() < lowest or values.max() >= end):
        raise ValueError(
            f"{name} must hold numbers from {lowest} to below {letter} = {end}, got {values.min()} to {values.max()}."
        )


def out_of_range(values: Tensor) -> Tensor:
    """True where values are not finite, or beyond ±1e37."""
    return ~(values.abs() <= LIMIT)
