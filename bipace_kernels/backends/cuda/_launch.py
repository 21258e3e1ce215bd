"""launch(): one CUDA kernel by name with named arguments, compiled by the build, else by CuPy at first use.

A kernel's one argument is a struct of 8-byte fields (csrc/cuda/arguments.h), which is packed here: tensors give their
address, None gives 0, ints and bools are int64_t and floats are double.
"""

import functools
import struct
from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from ...support.lazy import lazy
from .. import cuda_loader

Word = Tensor | int | float | None

SOURCES = Path(__file__).resolve().parents[2] / "csrc"
WARP = 32
_FORMATS = {"POINTER": "q", "INTEGER": "q", "REAL": "d"}


@dataclass(frozen=True)
class Kernel:
    """A kernel's source file (a stem of csrc/cuda/*.cu) and its fields in order, each POINTER, INTEGER or REAL."""

    source: str
    fields: Mapping[str, str]

    @lazy
    def form(self) -> struct.Struct:
        return struct.Struct("<" + "".join(map(_FORMATS.__getitem__, self.fields.values())))

    @lazy
    def pointers(self) -> tuple[int, ...]:
        return tuple(i for i, kind in enumerate(self.fields.values()) if kind == "POINTER")


def read_arguments(path: Path) -> dict[str, Kernel]:
    """Kernels by name from a file such as csrc/cuda/arguments.h: one declaration to a line."""
    kernels: dict[str, Kernel] = {}
    fields: dict[str, str] = {}
    for line in path.read_text(encoding="utf-8").splitlines():
        kind, _, rest = line.partition("(")
        name, *others = rest.partition(")")[0].split(", ")
        if kind == "ARGUMENTS":
            source, *names = others
            fields = {}
            kernels |= {kernel: Kernel(source, fields) for kernel in names}
        elif kind in _FORMATS:
            fields[name] = kind
    return kernels


@functools.cache
def kernels() -> dict[str, Kernel]:
    """Every kernel by its name."""
    return read_arguments(SOURCES / "cuda/arguments.h")


@functools.cache
def flags() -> tuple[str, ...]:
    """Of every compiler of these sources (csrc/cuda/flags.txt)."""
    lines = (SOURCES / "cuda/flags.txt").read_text(encoding="utf-8").splitlines()
    return tuple(line for line in lines if line.startswith("-"))


class Provider(Protocol):
    """Compiled kernels: the module bipace_kernels._cuda, or CuPy's."""

    built: str  # e.g. "sm_80 sm_90a compute_120"

    def launch(
        self, kernel: str, grid_x: int, grid_y: int, threads: int, shared: int, words: bytes, gpu: int, stream: int, /
    ) -> None:
        """Puts the kernel on a stream of a GPU, by its index.  RuntimeError names the kernel, shape and cause."""

    def shared_memory(self, gpu: int, /) -> int:
        """Bytes that a block may ask for."""


stand_in: Provider | None = None  # for the device, where there is none: tests run the kernels on the CPU


def provider() -> Provider:
    """The provider in use; RuntimeError where there is none."""
    return _of_this_installation() if stand_in is None else stand_in


@functools.cache
def _of_this_installation() -> Provider:
    module, why = cuda_loader.module()
    if module is not None:
        return module
    if cuda_loader.has_cupy():
        from ._cupy import CuPy

        return CuPy()
    raise RuntimeError(f"{why}, and there is no CuPy to compile them")


def shared_memory(device: torch.device) -> int:
    """Bytes that a block may ask for."""
    return provider().shared_memory(_index(device))


def _index(device: torch.device) -> int:
    """The GPU's; 0 for the CPU, where a stand-in runs the kernels."""
    if device.type != "cuda":
        return 0
    return torch.cuda.current_device() if device.index is None else device.index


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
    """Launches on the tensors' device and its current stream; an empty grid launches nothing.

    threads, shared  of a block: a multiple of 32, and bytes
    arguments        the fields of the kernel's struct.  TypeError where one is missing, unknown or of another kind.
    """
    x, y = grid if isinstance(grid, tuple) else (grid, 1)
    words = pack(kernel, kernels()[kernel], arguments)
    if not (x and y):
        return
    index = _index(device)
    stream = torch.cuda.current_stream(device).cuda_stream if device.type == "cuda" else 0
    # The build's module makes the GPU current to its own CUDA runtime; that torch's is as before, torch sees to.
    is_current = device.type != "cuda" or index == torch.cuda.current_device()
    with nullcontext() if is_current else torch.cuda.device(index):
        provider().launch(kernel, x, y, threads, shared, words, index, stream)


def pack(name: str, kernel: Kernel, arguments: Mapping[str, Word]) -> bytes:
    """The kernel's struct."""
    fields = kernel.fields
    if arguments.keys() != fields.keys():
        missing, unknown = sorted(fields.keys() - arguments.keys()), sorted(arguments.keys() - fields.keys())
        raise TypeError(f"CUDA kernel {name}: missing arguments {missing}, unknown ones {unknown}.")
    words: list[Any] = [arguments[field] for field in fields]
    try:
        for i in kernel.pointers:
            words[i] = 0 if words[i] is None else words[i].data_ptr()
        return kernel.form.pack(*words)
    except (AttributeError, struct.error) as error:
        raise TypeError(f"CUDA kernel {name}: {error}, in {dict(zip(fields.items(), words, strict=True))}.") from None
