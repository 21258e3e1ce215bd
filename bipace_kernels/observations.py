"""Observations as the partitions need them: codes of equal ones, texts, labels of histories."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from . import _checks, _dispatch, _native_loader
from ._ids import as_sequence, is_integer, number_objects
from ._transfer import to_device, to_host
from .config import Config
from .layout import Layout

Tensor = torch.Tensor


def observation_codes(observation: Any, lay: Layout) -> Tensor:
    """[N] int64, equal where the observations are equal; padding may hold anything.

    Strings, bytes and any hashable objects by Python's own equality; arrays and images by dtype, shape and bytes;
    integer arrays and tensors are codes already, and stay on their device; other tensors are brought to the host.
    """
    if isinstance(observation, Tensor) and observation.ndim == 1 and is_integer(observation):
        return number_objects(observation)
    (observation,) = to_host([observation])
    if lay.valid is None:
        return number_objects(observation)
    taken = torch.nonzero(lay.valid).flatten()
    codes = torch.zeros(lay.n_rows, dtype=torch.int64)
    codes[taken] = number_objects(_checks.take_rows(as_sequence(observation, "observation"), taken))
    return codes


def observation_texts(observation: Any, lay: Layout) -> list[str]:
    """[M] the observations of the records, in processing order; TypeError names the first that is no str."""
    items = as_sequence(observation, "observation")
    if isinstance(items, (np.ndarray, torch.Tensor)):
        items = items.tolist()
    texts = []
    for row in lay.order.tolist():
        text = items[row]
        if not isinstance(text, str):
            raise TypeError(
                f"observation must hold str for partition='similar', got {_checks.type_name(text)} at row {row}; "
                "decode it, or use partition='exact'."
            )
        texts.append(text)
    return texts


def history_codes(depths: Tensor, depth: Tensor) -> Tensor:
    """[M] int64, equal where the histories of the given depth are equal; those of different length never are.

    depths   [H+1, M] from cluster_history()
    depth    [M] in 1 … H+1
    """
    m = depths.shape[1]
    if m == 0:
        return torch.zeros(0, dtype=torch.int64, device=depths.device)
    return depth * m + depths.gather(0, (depth - 1).unsqueeze(0)).squeeze(0)


def history_depth(config: Config, longest_trajectory: int) -> int:
    """Observations in the longest history: no record has more behind it than its trajectory is long."""
    return min(config.history_length + 1, max(longest_trajectory, 1))


def similar_on_host(observation: Any, lay: Layout, config: Config, threads: int, taken: Tensor) -> Tensor:
    """[M] int64 labels of partition "similar" on the device of `taken`; −1 for records that are not.

    taken   [M] bool
    difflib compares Python texts on the host, and records set aside must not found clusters there: this waits for the
    device once, as no other partition does.
    """
    (keep,) = to_host([taken])
    part = lay.restrict(keep)
    kernels = _dispatch.choose("cpu" if not _native_loader.reason() else "reference")
    labels = torch.full((lay.n_records,), -1, dtype=torch.int64)
    labels[keep] = kernels.similar.cluster_similar(
        observation_texts(observation, part), part.group_offsets, float(config.similarity), num_threads=threads
    )
    return to_device(labels, taken.device, "observation")
