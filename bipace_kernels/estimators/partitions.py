"""Clusters of a batch by its partition: a function for each row of PARTITIONS (rows.py)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from ..backends.dispatch import Backend
from ..backends.records import Records
from ..config import Config
from ..inputs.columns import Inputs
from ..inputs.layout import Layout
from ..inputs.observations import observation_texts
from ..inputs.transfer import to_device
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


def labels_of(batch: Batch) -> Tensor:
    """[M] int64 clusters by the configuration's partition."""
    return _LABELS[batch.config.partition](batch)


def _none(batch: Batch) -> Tensor:
    taken = batch.records.taken
    if taken is None:
        return torch.arange(batch.records.n_records, device=batch.returns.device)
    return torch.where(taken, taken.cumsum(0) - 1, -1)


def _exact(batch: Batch) -> Tensor:
    return batch.backend.observations.cluster_exact(batch.records, _codes(batch))


def _history(batch: Batch) -> Tensor:
    depths = histories(batch)
    return cluster_histories(batch, depths, (depths >= 0).sum(dim=0))


def _similar(batch: Batch) -> Tensor:
    """On the host, as difflib compares texts; records set aside must not seed clusters.  Synchronizes with a GPU."""
    cfg, lay, taken = batch.config, batch.layout, batch.records.taken
    keep: Tensor | None = None if taken is None else taken.cpu()
    if keep is not None:
        lay = lay.restrict(keep)
    texts = observation_texts(batch.inputs.observation, lay, cfg.longest_text)
    labels = batch.backend.similar.cluster_similar(texts, lay.group_offsets, float(cfg.similarity))
    if keep is not None:
        labels = torch.full((batch.layout.n_records,), -1).masked_scatter_(keep, labels)
    return to_device(labels, batch.returns.device, "observation")


def _cosine(batch: Batch) -> Tensor:
    assert batch.inputs.fingerprint is not None
    return batch.backend.clusters.cluster_cosine(batch.records, batch.inputs.fingerprint, float(batch.config.epsilon))


def histories(batch: Batch) -> Tensor:
    """[H, M] int64 clusters by the last 1, 2, … H observations; −1 where a record has fewer, or is set aside.

    H is at most history_length + 1, or the longest trajectory's length if that is less.
    """
    depth = min(batch.config.history_length + 1, max(batch.records.longest_trajectory, 1))
    return batch.backend.observations.cluster_history(batch.records, _codes(batch), depth)


def cluster_histories(batch: Batch, depths: Tensor, depth: Tensor) -> Tensor:
    """[M] int64 clusters of equal histories of the given depth; histories of different length are never equal.

    depths   [H, M] of histories()
    depth    [M] in 0 … H; 0 counts as 1
    """
    if not depths.shape[1]:
        return depths[0]
    depth = depth.clamp(min=1)
    codes = depth * depths.shape[1] + depths.gather(0, (depth - 1).unsqueeze(0)).squeeze(0)
    return batch.backend.observations.cluster_exact(batch.records, codes)


def _codes(batch: Batch) -> Tensor:
    """[M] int64, equal where the observations are equal."""
    assert batch.inputs.codes is not None
    return batch.by_record(batch.inputs.codes)


_LABELS: dict[str, Callable[[Batch], Tensor]] = {
    "none": _none, "exact": _exact, "history": _history, "similar": _similar, "cosine": _cosine,
}  # fmt: skip
