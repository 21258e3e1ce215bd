"""Dense cluster numbers by first appearance; the host need not know the number of clusters."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from ._launch import launch

FEW = 8192  # records that one program numbers by itself: one launch, where torch's operators take eight
_OPTIONS = {"num_warps": 16, "enable_fp_fusion": False}


def dense_labels(first: Tensor) -> Tensor:
    """Clusters numbered over the batch from 0 by first appearance in processing order.

    first   [M] or [E, M] int64   the record that began the record's cluster: first[i] ≤ i and
            first[first[i]] = first[i]; −1: the record has no cluster.  Each row of [E, M] has its own numbering.
    Returns labels of the same shape, int64; −1 where first is −1.
    """
    m = first.shape[-1]
    if m > FEW:
        begun = (first == torch.arange(m, device=first.device)).cumsum(-1)
        return torch.where(first < 0, first, begun.gather(-1, first.clamp(min=0)) - 1)
    labels = torch.empty_like(first)
    if first.numel():
        launch(_label, (first.numel() // m,), first, labels, m, LANES=FEW, **_OPTIONS)
    return labels


@triton.jit(do_not_specialize=["m"])
def _label(
    first,  # [E, M] int64
    labels,  # [E, M] int64, written
    m,
    LANES: tl.constexpr,  # ≥ M
):
    row = tl.program_id(0).to(tl.int64) * m
    i = tl.arange(0, LANES)
    begin = tl.load(first + row + i, mask=i < m, other=-1).to(tl.int32)
    begun = tl.cumsum((begin == i).to(tl.int32), axis=0)  # clusters begun by this record and those before
    number = tl.where(begin >= 0, tl.gather(begun, tl.maximum(begin, 0), axis=0) - 1, -1)
    tl.store(labels + row + i, number.to(tl.int64), mask=i < m)
