"""Choice of the records that carry the kernel's value between prompt groups: by content, the same in any row order."""

import torch
from torch import Tensor

from ..backends.schema import LANDMARKS

_LAST = torch.iinfo(torch.int64).max


def choose_landmarks(keys: Tensor, time: Tensor, inside: Tensor | None) -> Tensor:
    """[min(M, 128)] int64 records: distinct pairs (fingerprint, time) with the smallest keys; −1 if there are fewer.

    keys, time   [M] int64   of the records' rows, by schema.state_keys; their steps
    inside       [M] bool or None   records that may be chosen

    A key is a sum of integers, so the choice depends on the rows' content and not on their order, and is as good as
    random.  Of two rows whose keys collide only one can be chosen.  Nothing synchronizes with a GPU.
    """
    key = (low := (keys & 0x7FFFFFFF) * 0x2545F4914F6CDD1D + time * 0x5851F42D4C957F2D) ^ (keys >> 31 & 0xFFFFFFFF)
    key = key if inside is None else torch.where(inside, key, _LAST)
    ascending, record = key.sort(stable=True)
    new, low = ascending != _LAST, low.index_select(0, record)
    new[1:].logical_and_(ascending[1:] != ascending[:-1])  # of equal ones the first
    # Low bits of codes of signs tell only their steps: without this all landmarks would be of one or two steps.
    ascending[1:] = torch.where(low[1:] == low[:-1], ascending[1:] * 0x2545F4914F6CDD1D, ascending[1:])
    chosen = torch.where(new, ascending, _LAST).argsort(stable=True)[:LANDMARKS]
    return torch.where(new[chosen], record[chosen], -1)
