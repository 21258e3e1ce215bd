"""Surroundings of a public call: threads of native kernels, one of torch in a forked child, the CPU as default."""

import contextlib
import numbers
import os
import threading
from collections.abc import Iterator
from contextvars import ContextVar
from typing import Any

import torch

from ..support import env

_chosen: ContextVar[int] = ContextVar("bipace_num_threads", default=0)  # 0: not set
_MOST = max(16, os.cpu_count() or 1)  # more threads than cores only wait for each other; results are the same
_forked = threading.Event()  # set in a forked child
os.register_at_fork(after_in_child=_forked.set)
# No other thread forks meanwhile: no child begins with a module half imported, or with the lock of a lost thread.
unforked = threading.RLock()
os.register_at_fork(before=unforked.acquire, after_in_parent=unforked.release, after_in_child=unforked.release)


def checked(num_threads: Any) -> int | None:
    """The argument `num_threads` of a public function: None, or an int of at least 1; ValueError for anything else."""
    if num_threads is None:
        return None
    if isinstance(num_threads, bool) or not isinstance(num_threads, numbers.Integral) or num_threads < 1:
        raise ValueError(f"num_threads must be None or an int of at least 1, got {num_threads!r}.")
    return int(num_threads)


@contextlib.contextmanager
def using(num_threads: Any = None, *, alone: bool = False) -> Iterator[None]:
    """The count of all native calls inside; None keeps the outer one.  ValueError for a bad BIPACE_NUM_THREADS.

    Every public function runs inside: a forked child inherits torch's pool without its threads, for which torch would
    wait forever, so there it works alone, as in DataLoader's workers.  Whatever torch.set_default_device() says (in a
    child torch cannot say which "cuda"), tensors without a device are on the CPU, where native code reads them.  With
    alone, forks and other such calls wait: NumPy's linear algebra never ends if another thread forks, and a second
    extract() or a child would take a model that extract() has shortened for a whole one.
    """
    forked, none = _forked.is_set(), contextlib.nullcontext()
    of_torch, elsewhere = (torch.get_num_threads(), True) if forked else (1, torch.get_default_device().type != "cpu")
    token = _chosen.set(checked(num_threads) or count())
    try:
        if of_torch > 1:
            torch.set_num_threads(1)
        with torch.device("cpu") if elsewhere else none, unforked if alone else none:
            yield
    finally:
        if of_torch > 1:
            torch.set_num_threads(of_torch)
        _chosen.reset(token)


def count() -> int:
    """Threads of the next native call: using()'s, BIPACE_NUM_THREADS, or torch's; at most the cores, or 16."""
    return min(_chosen.get() or env.num_threads() or torch.get_num_threads(), _MOST)
