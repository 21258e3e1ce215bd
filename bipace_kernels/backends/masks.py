"""Rows set aside, for stages that compute over compact rows: they are removed, and the results put back in place."""

from __future__ import annotations

from typing import overload

import numpy as np
import torch

from .schema import LIMIT

Tensor = torch.Tensor


class Kept:
    """The positions of M that a mask keeps.  Without a mask everything passes through unchanged.

    taken   [M] bool or None: all
    """

    def __init__(self, taken: Tensor | None) -> None:
        self.size = 0 if taken is None else taken.shape[0]
        self.positions: Tensor | None = None  # [kept] int64, rising; None: all
        if taken is not None:
            positions = torch.nonzero(taken).flatten()
            if positions.shape[0] < self.size:
                self.positions = positions

    @overload
    def rows(self, values: Tensor) -> Tensor: ...
    @overload
    def rows(self, values: None) -> None: ...
    def rows(self, values: Tensor | None) -> Tensor | None:
        """[…, M] -> […, kept]."""
        return values if values is None or self.positions is None else values[..., self.positions]

    def places(self, positions: Tensor) -> Tensor:
        """Positions among M that are kept -> among the kept."""
        return positions if self.positions is None else torch.searchsorted(self.positions, positions)

    def offsets(self, offsets: Tensor) -> Tensor:
        """Offsets [S+1] of runs -> offsets [≤ S+1] of their kept positions; empty runs are dropped."""
        if self.positions is None:
            return offsets
        left: Tensor = torch.unique_consecutive(torch.searchsorted(self.positions, offsets))
        return left

    def spread(self, values: Tensor, absent: float) -> Tensor:
        """[…, kept] -> […, M], with `absent` at the positions set aside."""
        if self.positions is None:
            return values
        out = torch.full((*values.shape[:-1], self.size), absent, dtype=values.dtype)
        out[..., self.positions] = values
        return out


def runs(offsets: Tensor) -> Tensor:
    """[M] int64 number of the run of each position.  offsets: [S+1], on the CPU.

    By NumPy: torch's threads would hang in a forked child.
    """
    lengths = np.diff(offsets.numpy())
    return torch.from_numpy(np.repeat(np.arange(lengths.size), lengths))


def out_of_range(values: Tensor) -> Tensor:
    """True where values are not finite, or beyond ±1e37."""
    return ~(values.abs() <= LIMIT)
