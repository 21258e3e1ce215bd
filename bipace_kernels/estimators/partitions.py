"""Partitions, a row each: name, argument, and how it clusters the steps of a prompt group.

Config, checks, the command line and the adapters read this table.  docs/estimator.md, section 3, defines each.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from ..inputs.observations import observation_texts
from ..inputs.transfer import to_device

if TYPE_CHECKING:
    from .batch import Batch

Tensor = torch.Tensor


@dataclass(frozen=True)
class Partition:
    """A row of the table.

    name       as in Config.partition
    meaning    description in one line
    labels     computes [M] int64: clusters numbered by first appearance, −1 for records set aside
    argument   of advantage() that it reads, or None
    by_code    it compares codes of observations, which are made before anything is computed
    greedy     clusters depend on the order of rollouts
    """

    name: str
    meaning: str
    labels: Callable[[Batch], Tensor]
    argument: str | None = None
    by_code: bool = False
    greedy: bool = False

    @property
    def has_clusters(self) -> bool:
        """Whether a cluster can hold several records."""
        return self.argument is not None


def labels_of(batch: Batch) -> Tensor:
    """[M] int64 clusters by the configuration's partition."""
    return PARTITIONS[batch.config.partition].labels(batch)


def _none(batch: Batch) -> Tensor:
    taken = batch.records.taken
    if taken is None:
        return torch.arange(batch.records.n_records, device=batch.returns.device)
    return torch.where(taken, taken.cumsum(0) - 1, -1)


def _exact(batch: Batch) -> Tensor:
    return _equal_codes(batch, batch.by_record(_codes(batch)))


def _history(batch: Batch) -> Tensor:
    depths = histories(batch)
    return cluster_histories(batch, depths, (depths >= 0).sum(dim=0))


def _similar(batch: Batch) -> Tensor:
    """difflib compares Python texts on the host, where records set aside must not seed clusters: synchronizes with a GPU."""
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
    return batch.backend.observations.cluster_history(batch.records, batch.by_record(_codes(batch)), depth)


def cluster_histories(batch: Batch, depths: Tensor, depth: Tensor) -> Tensor:
    """[M] int64 clusters of equal histories of the given depth; histories of different length are never equal.

    depths   [H, M] of histories()
    depth    [M] in 0 … H; 0 counts as 1
    """
    if not depths.shape[1]:
        return depths[0]
    depth = depth.clamp(min=1)
    codes = depth * depths.shape[1] + depths.gather(0, (depth - 1).unsqueeze(0)).squeeze(0)
    return _equal_codes(batch, codes)


def _equal_codes(batch: Batch, codes: Tensor) -> Tensor:
    """[M] int64 clusters of equal codes [M] inside each group."""
    return batch.backend.observations.cluster_exact(batch.records, codes)


def _codes(batch: Batch) -> Tensor:
    assert batch.inputs.codes is not None
    return batch.inputs.codes


PARTITIONS: dict[str, Partition] = {
    row.name: row
    for row in (
        Partition("none", "every step by itself", _none),
        Partition("exact", "equal observations", _exact, "observation", by_code=True),
        Partition("history", "equal last observations", _history, "observation", by_code=True),
        Partition("similar", "similar texts (difflib's ratio)", _similar, "observation", greedy=True),
        Partition("cosine", "cosine distance of fingerprints", _cosine, "fingerprint", greedy=True),
    )
}
