"""Observations as the partitions need them: codes of equal ones, texts, labels of histories."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from . import _checks
from ._objects import number_objects
from .layout import Layout

Tensor = torch.Tensor


def observation_codes(observation: Any) -> Tensor:
    """[N] int64, equal where the observations are equal.

    Strings, bytes and any hashable objects by Python's own equality; arrays and images by dtype, shape and bytes;
    integer arrays and tensors are codes already.
    """
    return number_objects(observation)


def observation_texts(observation: Any) -> list[str]:
    """The observations as a list of str; TypeError names the first that is none."""
    items = observation.tolist() if isinstance(observation, (np.ndarray, torch.Tensor)) else list(observation)
    for i, item in enumerate(items):
        if not isinstance(item, str):
            raise TypeError(
                f"observation must hold str for partition='similar', got {_checks.type_name(item)} at row {i}; "
                "decode it, or use partition='exact'."
            )
    return items


def history_labels(kernels: Any, depths: Tensor, lay: Layout, depth: Tensor) -> Tensor:
    """[M] labels by the history of the given depth of each record; histories of different length are never equal.

    depths   [H+1, M] from cluster_history()
    depth    [M] in 1 … H+1
    """
    m = depths.shape[1]
    if m == 0:
        return torch.zeros(0, dtype=torch.int64)
    own = depths.gather(0, (depth - 1).unsqueeze(0)).squeeze(0)
    labels: Tensor = kernels.observations.cluster_exact(depth * m + own, lay.group_offsets)
    return labels
