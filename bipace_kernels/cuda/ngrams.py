"""n-gram fingerprints on a device, bit for bit those of reference/ngrams.py."""

from __future__ import annotations

import torch

from ._launch import launch

_THREADS = 256  # kThreads of csrc/cuda/ngrams.cu
_ROOM = 8 * 32  # bytes of shared memory beside the counts

MOST_SHARED = 48 * 1024  # bytes that any GPU gives a block without asking; more counts than fit are kept in the result


def ngram_fingerprints(
    data: torch.Tensor,  # [E] uint8, the texts one after the other
    offsets: torch.Tensor,  # [N+1] int64, rising from 0 to E
    *,
    n: int,
    dim: int,
) -> torch.Tensor:
    """Unit vectors of signed, hashed n-gram counts, [N, dim] float32 on the device of the texts.

    Counts are int32: a text must be shorter than 2^31 bytes.
    """
    texts = offsets.numel() - 1
    out = torch.empty((texts, dim), dtype=torch.float32, device=data.device)
    in_shared = _ROOM + 4 * dim <= MOST_SHARED
    launch(
        "ngram_fingerprints", texts, _THREADS, data, offsets, out, n, dim, in_shared,
        device=data.device, shared=_ROOM + 4 * dim if in_shared else _ROOM,
    )  # fmt: skip
    return out
