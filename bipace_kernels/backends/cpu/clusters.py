"""Greedy cosine clusters by the compiled kernels: labels of reference.clusters, blocked (csrc/cpu/clusters.cpp) or for
many ε at once (csrc/cpu/sweep.cpp)."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from .. import threads
from ..native_loader import load
from ..records import Records

Tensor = torch.Tensor

_DTYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}


def address_of_rows(records: Records, fingerprint: Tensor) -> tuple[int, int, int, int, int, int]:
    """Address, dtype, strides in elements, D, address of the order: rows are read in place, with any strides."""
    row_stride, column_stride = fingerprint.stride()
    dtype, dim = _DTYPES[fingerprint.dtype], fingerprint.shape[1]
    return fingerprint.data_ptr(), dtype, row_stride, column_stride, dim, records.order.data_ptr()


def groups(records: Records) -> tuple[int, int]:
    """Address and number of the groups' offsets."""
    return records.group_offsets.data_ptr(), records.n_groups


def address(values: Tensor | None) -> int:
    return 0 if values is None else values.data_ptr()


def scan_rows(records: Records, fingerprint: Tensor) -> Tensor:
    state = torch.empty(records.n_records, dtype=torch.uint8)
    rows = address_of_rows(records, fingerprint)
    load().scan_rows(*rows, records.n_records, threads.count(), state.data_ptr())
    return state


def cluster_cosine(records: Records, fingerprint: Tensor, epsilon: float) -> Tensor:
    """From float32 products summed in one fixed order, decided in float64.

    Bits only depend on the group's rows, D, dtype and instruction set.  MemoryError if scratch cannot be allocated.
    """
    labels = torch.empty(records.n_records, dtype=torch.int64)
    load().cluster_cosine(
        *address_of_rows(records, fingerprint), *groups(records), address(records.usable), epsilon, threads.count(),
        labels.data_ptr(),
    )  # fmt: skip
    return labels


def cluster_sweep(records: Records, fingerprint: Tensor, epsilons: Sequence[float]) -> Tensor:
    """From one Gram matrix per group (float32 of the same products).

    Bits only depend on the group's rows, D, dtype, instruction set and its own ε.  MemoryError as above.
    """
    labels = torch.empty(len(epsilons), records.n_records, dtype=torch.int64)
    values = torch.tensor(epsilons, dtype=torch.float64)
    load().cluster_sweep(
        *address_of_rows(records, fingerprint), *groups(records), address(records.usable), values.data_ptr(),
        len(epsilons), threads.count(), labels.data_ptr(),
    )  # fmt: skip
    return labels
