"""n-gram fingerprints: the paper's HashNgram, a state vector from text only."""

from typing import Any

import numpy as np
import torch

from ..backends import dispatch, threads
from ..inputs import checks, transfer


@threads.using()
def ngram_fingerprint(
    texts: Any,
    *,
    n: int = 3,
    dim: int = 4096,
    device: torch.device | str | None = None,
    backend: str = "auto",
    num_threads: int | None = None,
) -> torch.Tensor:
    """Unit vectors of hashed byte n-gram counts.

        c[(h >> 1) mod dim] += +1 if h is even else −1,  h = XXH64(n bytes, seed 5);  x = c / ‖c‖

    over every n bytes of the UTF-8 text with n − 1 bytes 0x02 before it and n − 1 bytes 0x03 after it.

    texts        list, tuple or array of N str or bytes
    n, dim       n-gram length in [1, 4096] and number of buckets in [1, 2^24]
    device       of the result; None: the CPU.  The rows are computed on the host, where the texts are, and copied to a
                 GPU in one transfer, without synchronizing
    num_threads  threads of the cpu backend; None: torch.get_num_threads()

    Returns [N, dim] float32 on the device: same text, same bits, on every backend.  A vector that cancels to zero gets
    1 in bucket 0.  For clusters of these vectors use epsilon = 0.25.  TypeError names the first item of another type.
    """
    for name, value, most in (("n", n, 1 << 12), ("dim", dim, 1 << 24)):
        if isinstance(value, bool) or not isinstance(value, (int, np.integer)) or not 1 <= value <= most:
            raise ValueError(f"{name} must be an int in [1, {most}], got {value!r}.")
    threads.checked(num_threads)
    items = checks.texts(texts, "texts", (str, bytes))
    if not set(map(type, items)) <= {str, bytes}:
        # The real content of a subclass, whose __len__ and encode() may be wrong.
        items = tuple(str.__str__(text) if isinstance(text, str) else bytes(memoryview(text)) for text in items)
    try:
        place = torch.device("cpu" if device is None else device)
    except (RuntimeError, TypeError) as error:
        raise ValueError(f"device must be None or a torch device such as 'cuda', got {device!r}: {error}") from error
    chosen = dispatch.choose(backend, place)
    data, offsets = _encoded(items)
    with threads.using(num_threads):
        rows = chosen.ngrams.ngram_fingerprints(data, offsets, n=int(n), dim=int(dim))
    return transfer.to_device(rows, place, "texts")


def _encoded(items: tuple[str | bytes, ...]) -> tuple[torch.Tensor, torch.Tensor]:
    """The texts' bytes [E] uint8, one after the other, and their offsets [N+1] int64."""
    try:
        joined = "".join(items).encode("ascii")  # type: ignore[arg-type]  # the usual case: all texts encoded at once
        lengths = np.fromiter(map(len, items), np.int64, len(items))
    except (TypeError, UnicodeEncodeError):
        parts = [item.encode("utf-8", "surrogatepass") if isinstance(item, str) else item for item in items]
        joined, lengths = b"".join(parts), np.fromiter(map(len, parts), np.int64, len(parts))
    offsets = torch.from_numpy(np.concatenate(([0], lengths.cumsum())))
    data = torch.frombuffer(bytearray(joined), dtype=torch.uint8) if joined else torch.empty(0, dtype=torch.uint8)
    return data, offsets
