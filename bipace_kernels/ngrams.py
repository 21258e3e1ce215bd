"""n-gram fingerprints: the paper's HashNgram, a state vector from text alone."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from . import _dispatch


def ngram_fingerprint(
    texts: Any, *, n: int = 3, dim: int = 4096, backend: str = "auto", num_threads: int | None = None
) -> torch.Tensor:
    """Unit vectors of hashed byte n-gram counts.

        c[(h >> 1) mod dim] += +1 if h is even else −1,  h = XXH64(n bytes, seed 5);  x = c / ‖c‖

    over every n bytes of the UTF-8 text with n − 1 bytes 0x02 before it and n − 1 bytes 0x03 after it.

    texts        list, tuple or array of N str or bytes
    n, dim       n-gram length in [1, 4096] and number of buckets in [1, 2^24]
    num_threads  threads of the cpu backend; None: torch.get_num_threads()

    Returns [N, dim] float32 on the CPU.  Counts are integers, the norm is taken in float64, each entry is rounded to
    float32 once: same text, same bits, on every backend.  A vector that cancels to zero gets 1 in bucket 0.  Lone
    surrogates are encoded as by Python's "surrogatepass".  For clusters of these vectors use epsilon = 0.25.
    TypeError names the first item that is neither str nor bytes.
    """
    for name, value, most in (("n", n, 1 << 12), ("dim", dim, 1 << 24)):
        if isinstance(value, bool) or not isinstance(value, (int, np.integer)) or not 1 <= value <= most:
            raise ValueError(f"{name} must be an int in [1, {most}], got {value!r}.")
    threads = _dispatch.threads(num_threads)
    if isinstance(texts, np.ndarray) and texts.ndim == 1:
        texts = texts.tolist()
    if not isinstance(texts, (list, tuple)):
        raise TypeError(
            f"texts must be a list of str or bytes, got {type(texts).__name__}; put a single text into a list."
        )
    items = tuple(texts)
    if not set(map(type, items)) <= {str, bytes}:
        for i, text in enumerate(items):
            if not isinstance(text, (str, bytes)):
                raise TypeError(
                    f"texts must all be str or bytes, got {type(text).__name__} at index {i}; render it first."
                )
    stage = _dispatch.choose(backend, None).ngrams
    out: torch.Tensor = stage.ngram_fingerprints(items, n=int(n), dim=int(dim), num_threads=threads)
    return out
