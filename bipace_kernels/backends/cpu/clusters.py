"""Greedy cosine clusters by the compiled kernels: labels of reference.clusters, blocked (csrc/cpu/clusters.cpp) or for
many ε at once (csrc/cpu/sweep.cpp)."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from .. import threads
from ..masks import Kept
from ..native_loader import load

Tensor = torch.Tensor

_DTYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}


def address_of_rows(fingerprint: Tensor) -> tuple[int, int, int, int, int]:
    """Address, dtype, strides in elements, D: rows are read in place, with any strides."""
    row_stride, column_stride = fingerprint.stride()
    return fingerprint.data_ptr(), _DTYPES[fingerprint.dtype], row_stride, column_stride, fingerprint.shape[1]


def scan_rows(fingerprint: Tensor, order: Tensor) -> Tensor:
    state = torch.empty(order.shape[0], dtype=torch.uint8)
    load().scan_rows(*address_of_rows(fingerprint), order.data_ptr(), order.shape[0], threads.count(), state.data_ptr())
    return state


def cluster_cosine(
    fingerprint: Tensor,
    order: Tensor,
    group_offsets: Tensor,
    usable: Tensor | None,
    epsilon: float,
    *,
    n_groups: int,
    longest_group: int,
    taken: Tensor | None,
    state: Tensor | None = None,
) -> Tensor:
    """From float32 products summed in one fixed order, decided in float64.

    Bits only depend on the group's rows, D, dtype and instruction set.  MemoryError if scratch cannot be allocated.
    """
    if state is not None:
        usable = state.copy_(scan_rows(fingerprint, order)) == 0
    kept = Kept(taken)
    order, usable, group_offsets = kept.rows(order), kept.rows(usable), kept.offsets(group_offsets)
    labels = torch.empty(order.shape[0], dtype=torch.int64)
    load().cluster_cosine(
        *address_of_rows(fingerprint), order.data_ptr(), group_offsets.data_ptr(), group_offsets.shape[0] - 1,
        0 if usable is None else usable.data_ptr(), epsilon, threads.count(), labels.data_ptr(),
    )  # fmt: skip
    return kept.spread(labels, -1)


def cluster_sweep(
    fingerprint: Tensor,
    order: Tensor,
    group_offsets: Tensor,
    usable: Tensor | None,
    epsilons: Sequence[float],
    *,
    n_groups: int,
    longest_group: int,
    taken: Tensor | None,
) -> Tensor:
    """From one Gram matrix per group (float32 of the same products).

    Bits only depend on the group's rows, D, dtype, instruction set and its own ε.  MemoryError as above.
    """
    kept = Kept(taken)
    order, usable, group_offsets = kept.rows(order), kept.rows(usable), kept.offsets(group_offsets)
    labels = torch.empty(len(epsilons), order.shape[0], dtype=torch.int64)
    values = torch.tensor(epsilons, dtype=torch.float64)
    load().cluster_sweep(
        *address_of_rows(fingerprint), order.data_ptr(), group_offsets.data_ptr(), group_offsets.shape[0] - 1,
        0 if usable is None else usable.data_ptr(), values.data_ptr(), len(epsilons), threads.count(),
        labels.data_ptr(),
    )  # fmt: skip
    return kept.spread(labels, -1)
