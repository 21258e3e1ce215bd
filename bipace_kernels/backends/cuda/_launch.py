"""launch(): one CUDA kernel by name with named arguments, for any provider.

A kernel's one argument is a struct of 8-byte fields (csrc/cuda/intrinsics.h), which is packed here: tensors give their
address, None gives 0, ints and bools are int64_t and floats are double.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping
from typing import Any

import torch

from . import _provider, _sources

Tensor = torch.Tensor
Word = Tensor | int | float | None

WARP = 32


def launch(
    kernel: str,
    grid: int | tuple[int, int],
    threads: int,
    /,
    *,
    device: torch.device,
    shared: int = 0,
    **arguments: Word,
) -> None:
    """Launches on the tensors' device; an empty grid launches nothing.

    arguments   the fields of the kernel's struct.  TypeError names the one that is missing, unknown or of another kind.
    """
    x, y = grid if isinstance(grid, tuple) else (grid, 1)
    found = _sources.kernels().get(kernel)
    if found is None:
        raise RuntimeError(f"no CUDA kernel is named {kernel}; there are {', '.join(sorted(_sources.kernels()))}.")
    words = pack(kernel, found, arguments)
    if x and y:
        _provider.current().launch(kernel, (x, y), threads, shared, words, device)


def pack(name: str, kernel: _sources.Kernel, arguments: Mapping[str, Word]) -> bytes:
    """The kernel's struct."""
    fields = kernel.fields
    if arguments.keys() != fields.keys():
        missing, unknown = [*(fields.keys() - arguments.keys())], [*(arguments.keys() - fields.keys())]
        raise TypeError(f"CUDA kernel {name}: missing arguments {sorted(missing)}, unknown ones {sorted(unknown)}.")
    words: list[Any] = [arguments[field] for field in fields]
    try:
        for i in kernel.pointers:
            words[i] = 0 if words[i] is None else words[i].data_ptr()
        return kernel.form.pack(*words)
    except (AttributeError, struct.error):
        raise TypeError(f"CUDA kernel {name}: {_wrong(fields, arguments)}.") from None


def _wrong(fields: Mapping[str, str], arguments: Mapping[str, Word]) -> str:
    """What is wrong with the first argument of another kind than its field."""
    for field, kind in fields.items():
        value = arguments[field]
        if kind is _sources.POINTER:
            if value is not None and not isinstance(value, Tensor):
                return f"{field} must be a tensor or None, got {value!r}"
        elif not isinstance(value, int) and not (isinstance(value, float) and kind == _sources.REAL):
            return f"{field} must be {kind}, got {value!r}"
    return "a value does not fit its field"
