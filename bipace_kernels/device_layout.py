"""A layout where the tensors are: what a device must know of the ids, moved there once."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from ._transfer import Copied, to_device_together

if TYPE_CHECKING:
    from .layout import Layout

Tensor = torch.Tensor


@dataclass(frozen=True, eq=False)
class DeviceLayout:
    """The tensors of a `Layout` on one device.  Made by `Layout.on()`, which keeps it: later calls copy nothing.

    Sizes are plain ints, so that nobody has to ask the device for them.

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
    merges_copies          bool   several rows may share a record
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
    trajectory_of_record: Tensor
    source: Tensor
    step: Tensor | None
    first: Tensor | None
    valid: Tensor | None
    merges_copies: bool
    _copied: Copied | None = field(default=None, repr=False)

    def wait(self) -> None:
        """Makes the current stream wait for the copy, where another stream made it; the host waits for nothing."""
        if self._copied is not None:
            self._copied.wait(self.order)


def make_device_layout(lay: Layout, device: torch.device) -> DeviceLayout:
    """Copies a layout to a device: one copy, from pinned memory."""
    tensors: dict[str, Tensor | None] = {
        "order": lay.order,
        "group_offsets": lay.group_offsets,
        "trajectory_offsets": lay.trajectory_offsets,
        "group_trajectories": lay.group_trajectories,
        "trajectory_of_record": lay.trajectory_of_record(),
        "source": lay.source(),
        "step": lay.step,
        "first": lay.first,
        "valid": lay.valid,
    }
    present = {name: tensor for name, tensor in tensors.items() if tensor is not None}
    moved = to_device_together(list(present.values()), device, "layout")
    parts: dict[str, Any] = {**dict.fromkeys(tensors), **dict(zip(present, moved, strict=True))}
    return DeviceLayout(
        device=device,
        n_rows=lay.n_rows,
        n_records=lay.n_records,
        n_groups=lay.n_groups,
        n_trajectories=lay.n_trajectories,
        longest_group=lay.longest_group,
        longest_trajectory=lay.longest_trajectory,
        merges_copies=lay.merges_copies,
        _copied=Copied.to(device),
        **parts,
    )
