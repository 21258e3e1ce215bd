"""Sequence parallelism (Ulysses): each rank's forward sees a slice of the packed tokens, so each state is on one rank."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from .positions import Positions
from .tap import Tap

Tensor = torch.Tensor


def expect(
    tapped: Tap, positions: Positions | int, begin: Tensor | None = None, tokens: int = 0, group: Any = None
) -> Callable[[], Tensor]:
    """Sets which positions of the next forward a tap keeps: on padded rows, a packed row [1, tokens], or the rank's slice of it.

    positions   [n] columns of each of R sequences
    begin       [R] int64, the sequences' first columns in the packed row; None: rows are padded, the rest is ignored
    tokens      in the packed row, including padding
    group       process group of the ranks, each with a slice of ceil(tokens / ranks) columns; None: the row is not sliced

    Returns a function that gives every rank the states [n, D] after the forward: the sum of each rank's own and the others'
    zeros, which is exact.  Only n rows are sent, not all tokens.
    """
    tapped.clear()
    if begin is None or isinstance(positions, int):
        tapped.expect(positions)
        return tapped.rows
    ranks, rank = (1, 0) if group is None else (dist.get_world_size(group), dist.get_rank(group))
    width = max(1, -(-tokens // ranks))
    column = positions.column.cpu() + begin.cpu()[positions.row()]
    mine = column // width == rank
    tapped.expect(Positions(column[mine] - rank * width, torch.tensor([0, int(mine.sum())])))

    def states() -> Tensor:
        own = tapped.rows()
        if group is None:
            return own
        found = own.new_zeros(len(mine), own.shape[1])
        found[mine.to(own.device)] = own
        dist.all_reduce(found, group=group)
        return found

    return states
