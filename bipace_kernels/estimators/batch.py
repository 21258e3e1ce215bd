"""Batch: the data of one call, in processing order and on the tensors' device."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ..backends.dispatch import Backend
from ..backends.records import Records
from ..config import Config
from ..inputs.columns import Inputs
from ..inputs.layout import Layout
from .memory import ValueMemory

Tensor = torch.Tensor


@dataclass(frozen=True)
class Batch:
    """The records of a call, after returns, episode term and the check of the fingerprints.

    backend    the backend whose modules run the stages
    config     of the call
    inputs     the arguments that the configuration uses, by row
    layout     the records that count, on the CPU; records: the same on the tensors' device, with the masks
    returns    [M] float32   R, discounted return-to-go
    episode    [M] float32   A_ep
    memory     of share="memory", or None
    """

    backend: Backend
    config: Config
    inputs: Inputs
    layout: Layout
    records: Records
    returns: Tensor
    episode: Tensor
    memory: ValueMemory | None = None

    def by_record(self, column: Tensor) -> Tensor:
        """[N, …] of rows -> [M, …] of records."""
        return column.index_select(0, self.records.order)  # column[order] would enter torch's thread pool

    def by_record_or_none(self, column: Tensor | None) -> Tensor | None:
        """[N, …] of rows -> [M, …] of records."""
        return None if column is None else self.by_record(column)
