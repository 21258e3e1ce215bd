"""Clusters of a batch by its partition, a row of PARTITIONS (rows.py)."""

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from ..backends.dispatch import Backend
from ..backends.records import Records
from ..config import Config
from ..inputs.columns import Inputs
from ..inputs.layout import Layout
from ..inputs.observations import observation_texts
from ..inputs.transfer import to_device
from .memory import ValueMemory


@dataclass(frozen=True)
class Batch:
    """The records of a call, after returns, episode term and the check of the fingerprints."""

    backend: Backend
    config: Config
    inputs: Inputs  # the arguments that the configuration uses, by row
    layout: Layout  # the records that count, on the CPU
    records: Records  # the same on the tensors' device, with the masks
    returns: Tensor  # [M] float32 R, discounted return-to-go
    episode: Tensor  # [M] float32 A_ep
    memory: ValueMemory | None = None  # of share="memory"
    at_end: list[Callable[[], None]] = field(default_factory=list)  # of a call that succeeds: its batch is kept

    def by_record(self, column: Tensor) -> Tensor:
        """[N, …] of rows -> [M, …] of records."""
        return column.index_select(0, self.records.order)  # column[order] would enter torch's thread pool

    def by_record_or_none(self, column: Tensor | None) -> Tensor | None:
        return None if column is None else self.by_record(column)


def labels_of(batch: Batch) -> Tensor:
    """[M] int64 clusters by the configuration's partition."""
    cfg, records = batch.config, batch.records
    match cfg.partition:
        case "exact":
            return batch.backend.observations.cluster_exact(records, _codes(batch))
        case "history":
            depths = histories(batch)
            return cluster_histories(batch, depths, (depths >= 0).sum(dim=0))
        case "similar":
            return _similar(batch)
        case "cosine":
            assert batch.inputs.fingerprint is not None
            return batch.backend.clusters.cluster_cosine(records, batch.inputs.fingerprint, float(cfg.epsilon))
    if records.taken is None:  # "none": every record by itself
        return torch.arange(records.n_records, device=records.device)
    return torch.where(records.taken, records.taken.cumsum(0) - 1, -1)


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
