"""Choice of the records that carry the kernel's value between prompt groups: by content, the same in any row order."""

import torch
from torch import Tensor

from ..backends.schema import LANDMARKS

_LAST = torch.iinfo(torch.int64).max


def choose_landmarks(fingerprint: Tensor, order: Tensor, time: Tensor, inside: Tensor | None) -> Tensor:
    """[min(M, 128)] int64 records: distinct pairs (fingerprint, time) with the smallest keys; −1 if there are fewer.

    fingerprint  [N, D] float32 | bfloat16 | float16
    order        [M] int64   row of each record
    time         [M] int64
    inside       [M] bool or None   records that may be chosen

    A key is a sum of integers, so the choice depends on the rows' content and not on their order, and is as good as
    random.  Of two rows whose keys collide only one can be chosen.  Nothing synchronizes with a GPU.
    """
    key = state_keys(fingerprint, order) * 0x2545F4914F6CDD1D + time * 0x5851F42D4C957F2D
    if inside is not None:
        key = torch.where(inside, key, _LAST)
    ascending, record = key.sort(stable=True)
    new = ascending != _LAST
    new[1:] &= ascending[1:] != ascending[:-1]  # of equal ones the first
    chosen = (~new).to(torch.uint8).argsort(stable=True)[:LANDMARKS]
    return torch.where(new[chosen], record[chosen], -1)


def state_keys(fingerprint: Tensor, order: Tensor) -> Tensor:
    """[M] int64, equal for rows of equal numbers (−0 is 0): Σ bits · odd number, modulo 2^31."""
    dim, device = fingerprint.shape[1], fingerprint.device
    weight = (torch.arange(1, dim + 1, device=device) * 0x1E3779B97F4A7C15 >> 24).to(torch.int32) | 1
    # A product with a vector of integers is one pass over the rows, but torch has it for CPUs only.
    on_cpu = device.type == "cpu"
    if on_cpu and fingerprint.dtype == torch.float32:
        # Each -0 adds 2^31 times an odd number, which is the top bit.
        return (fingerprint.view(torch.int32) @ weight).index_select(0, order).to(torch.int64) & 0x7FFFFFFF
    key = torch.empty(order.shape[0], dtype=torch.int64, device=device)
    together = 32 if on_cpu else 256  # rows; so few stay in a CPU's cache
    for first in range(0, order.shape[0], together):
        rows = fingerprint.index_select(0, order[first : first + together]).add_(0.0)
        bits = rows.view(torch.int32) if rows.dtype == torch.float32 else rows.view(torch.int16).to(torch.int32)
        found = bits @ weight if on_cpu else bits.mul_(weight).sum(dim=1, dtype=torch.int32)
        key[first : first + together] = found & 0x7FFFFFFF
    return key
