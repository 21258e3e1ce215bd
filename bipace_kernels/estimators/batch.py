"""Batch: the data of one call, in processing order and on the tensors' device."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ..backends.dispatch import Backend
from ..config import Config
from ..inputs.columns import Inputs
from ..inputs.layout import Layout
from ..inputs.placed_layout import PlacedLayout
from .memory import ValueMemory

Tensor = torch.Tensor


@dataclass(frozen=True)
class Batch:
    """The records of a call, after returns, episode term and the check of the fingerprints.

    backend    the backend whose modules run the stages
    inputs     the arguments that the configuration uses, by row
    layout     the records that count, on the CPU; placed: the same on the tensors' device
    taken      [M] bool or None: False for records set aside; None: all are taken
    usable     [M] bool or None: False where the fingerprint has no direction; None: all have one, or there are none
    returns    [M] float32   R, discounted return-to-go
    episode    [M] float32   A_ep
    state      [M] uint8 or None: written by the cosine partition, which looks at the fingerprints itself; usable is then None
    memory     of share="memory", or None
    """

    backend: Backend
    inputs: Inputs
    layout: Layout
    placed: PlacedLayout
    taken: Tensor | None
    usable: Tensor | None
    returns: Tensor
    episode: Tensor
    state: Tensor | None = None
    memory: ValueMemory | None = None

    @property
    def config(self) -> Config:
        return self.inputs.config

    @property
    def groups(self) -> dict[str, int]:
        """Sizes of the prompt groups, as stages need them."""
        return {"n_groups": self.placed.n_groups, "longest_group": self.placed.longest_group}

    def by_record(self, column: Tensor) -> Tensor:
        """[N, …] of rows -> [M, …] of records."""
        return column.index_select(0, self.placed.order)  # column[order] would enter torch's thread pool

    @property
    def action_key(self) -> Tensor | None:
        """[M] int64 or None."""
        return self.by_record_or_none(self.inputs.action_key)

    def by_record_or_none(self, column: Tensor | None) -> Tensor | None:
        """[N, …] of rows -> [M, …] of records."""
        return None if column is None else self.by_record(column)
