"""The paper's HashNgram fingerprint, one n-gram at a time."""

import math
from itertools import pairwise

import torch

from .xxh64 import xxh64

SEED_NGRAM = 5


def ngram_fingerprints(bytes: torch.Tensor, offsets: torch.Tensor, *, n: int, dim: int) -> torch.Tensor:
    out = torch.zeros((offsets.shape[0] - 1, dim), dtype=torch.float32)
    data = bytes.numpy().tobytes()
    for row, (begin, end) in enumerate(pairwise(offsets.tolist())):
        padded = b"\x02" * (n - 1) + data[begin:end] + b"\x03" * (n - 1)
        counts: dict[int, int] = {}
        for i in range(len(padded) - n + 1):
            h = xxh64(padded[i : i + n], SEED_NGRAM)
            bucket = (h >> 1) % dim
            counts[bucket] = counts.get(bucket, 0) + (1 if h % 2 == 0 else -1)
        norm = math.sqrt(sum(count * count for count in counts.values()))
        if norm == 0.0:
            out[row, 0] = 1.0
            continue
        for bucket, count in counts.items():
            out[row, bucket] = count / norm
    return out
