"""Greedy cosine clusters by the compiled kernels: labels of reference.clusters, blocked (csrc/cpu/clusters.cpp) or for
many ε at once (csrc/cpu/sweep.cpp)."""

from collections.abc import Sequence

import torch
from torch import Tensor

from .. import threads
from ..native_loader import load
from ..records import Records


def scan_rows(records: Records, fingerprint: Tensor) -> Tensor:
    state = torch.empty(records.n_records, dtype=torch.uint8)
    load().scan_rows(fingerprint, records.order, records.n_records, threads.count(), state)
    return state


def cluster_cosine(records: Records, fingerprint: Tensor, epsilon: float) -> Tensor:
    """From float32 products summed in one fixed order, decided in float64.

    Bits only depend on the group's rows, D, dtype and instruction set.  MemoryError if scratch cannot be allocated.
    """
    r, labels = records, torch.empty(records.n_records, dtype=torch.int64)
    load().cluster_cosine(fingerprint, r.order, r.group_offsets, r.n_groups, r.usable, epsilon, threads.count(), labels)
    return labels


def cluster_sweep(records: Records, fingerprint: Tensor, epsilons: Sequence[float]) -> Tensor:
    """From one Gram matrix per group (float32 of the same products).

    Bits only depend on the group's rows, D, dtype, instruction set and its own ε.  MemoryError as above.
    """
    r, n, labels = records, len(epsilons), torch.empty(len(epsilons), records.n_records, dtype=torch.int64)
    radii = torch.tensor(epsilons, dtype=torch.float64)
    load().cluster_sweep(fingerprint, r.order, r.group_offsets, r.n_groups, r.usable, radii, n, threads.count(), labels)
    return labels
