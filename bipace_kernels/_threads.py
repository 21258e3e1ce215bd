"""How many threads the cpu backend takes: set once at the edge of a call, read where a native kernel is called."""

from __future__ import annotations

import contextlib
import numbers
import os
from collections.abc import Iterator
from contextvars import ContextVar
from typing import Any

import torch

from . import _env

_chosen: ContextVar[int | None] = ContextVar("bipace_num_threads", default=None)


def checked(num_threads: Any) -> int | None:
    """The argument `num_threads` of a public function: None, or an int of at least 1; ValueError for anything else."""
    if num_threads is None:
        return None
    if isinstance(num_threads, bool) or not isinstance(num_threads, numbers.Integral) or num_threads < 1:
        raise ValueError(f"num_threads must be None or an int of at least 1, got {num_threads!r}.")
    return int(num_threads)


@contextlib.contextmanager
def using(num_threads: Any) -> Iterator[None]:
    """The count for all native calls inside; None keeps what is set, by BIPACE_NUM_THREADS or torch."""
    count = checked(num_threads)
    if count is None:
        _env.num_threads()  # a bad value is an error of the call, not of its first kernel
        yield
        return
    token = _chosen.set(count)
    try:
        yield
    finally:
        _chosen.reset(token)


def count() -> int:
    """Threads of the next native call: using()'s, then BIPACE_NUM_THREADS, then torch.get_num_threads().

    Never more than there are cores (16 at least): more only wait for each other, and the results are the same.
    """
    chosen = _chosen.get() or _env.num_threads() or torch.get_num_threads()
    return min(chosen, max(16, os.cpu_count() or 1))
