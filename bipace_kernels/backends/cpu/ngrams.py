"""n-gram fingerprints by csrc/cpu/ngrams.cpp."""

import torch

from .. import native_loader, threads


def ngram_fingerprints(bytes: torch.Tensor, offsets: torch.Tensor, *, n: int, dim: int) -> torch.Tensor:
    out = torch.empty((offsets.shape[0] - 1, dim), dtype=torch.float32)
    native_loader.load().ngram_fingerprints(bytes, offsets, out.shape[0], n, dim, out, threads.count())
    return out
