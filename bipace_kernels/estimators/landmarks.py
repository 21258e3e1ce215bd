"""Choice of the records that carry the kernel's value between prompt groups: by content, the same in any row order."""

import torch
from torch import Tensor

from ..backends.schema import LANDMARKS

_LAST = torch.iinfo(torch.int64).max


def choose_landmarks(keys: Tensor, time: Tensor, inside: Tensor | None) -> Tensor:
    """[min(M, 128)] int64 records: distinct pairs (fingerprint, time) with the smallest keys; −1 if there are fewer.

    keys     [M] int64   of the records' rows, by schema.state_keys
    time     [M] int64
    inside   [M] bool or None   records that may be chosen

    A key is a sum of integers, so the choice depends on the rows' content and not on their order, and is as good as
    random.  Of two rows whose keys collide only one can be chosen.  Nothing synchronizes with a GPU.
    """
    key = (keys & 0x7FFFFFFF) * 0x2545F4914F6CDD1D + time * 0x5851F42D4C957F2D ^ (keys >> 31 & 0xFFFFFFFF)
    if inside is not None:
        key = torch.where(inside, key, _LAST)
    ascending, record = key.sort(stable=True)
    new = ascending != _LAST
    new[1:].logical_and_(ascending[1:] != ascending[:-1])  # of equal ones the first
    chosen = new.to(torch.uint8).argsort(stable=True, descending=True)[:LANDMARKS]
    return torch.where(new[chosen], record[chosen], -1)
