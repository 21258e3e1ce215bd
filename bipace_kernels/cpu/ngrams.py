"""n-gram fingerprints by csrc/cpu/ngrams.cpp."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from .. import _native_loader


def ngram_fingerprints(texts: Sequence[str | bytes], *, n: int, dim: int, num_threads: int = 1) -> torch.Tensor:
    """Unit vectors of signed, hashed n-gram counts, [N, dim] float32."""
    out = torch.empty((len(texts), dim), dtype=torch.float32)
    _native_loader.load().ngram_fingerprints(texts, n, dim, out.data_ptr(), num_threads)
    return out
