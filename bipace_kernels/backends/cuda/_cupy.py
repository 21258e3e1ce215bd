"""Kernels compiled by CuPy's NVRTC from the sources in the wheel, if the build has none; nvcc is not needed.

A source file is compiled when one of its kernels is first launched, for the GPU that runs it, by the flags of the
build.  The machine code is in CuPy's own cache ($CUPY_CACHE_DIR, else ~/.cupy/kernel_cache) under a hash of all its
inputs, and `cupy.RawModule` loads it from there.  RawModule's own compilation is not used: it flushes subnormal numbers
(-ftz=true, CuPy 14 cuda/compiler.py), which changes bits, and its cache ignores headers.
"""

import functools
import hashlib
import importlib
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ...support.files import atomic_file
from ._launch import SOURCES, flags, kernels

_SHARED_WITHOUT_ASKING = 48 * 1024


class CuPy:
    """Provider of _launch."""

    built = "sm_90a"  # on a GPU that has it: kernels are compiled for the one that runs them

    def __init__(self) -> None:
        self._cupy = importlib.import_module("cupy")
        self._functions: dict[tuple[str, int], Any] = {}  # by kernel and GPU
        self._shared: dict[tuple[str, int], int] = {}  # bytes allowed
        self._most_shared: dict[int, int] = {}  # bytes of a block, by GPU

    def launch(
        self, kernel: str, grid_x: int, grid_y: int, threads: int, shared: int, words: bytes, gpu: int, stream: int
    ) -> None:
        # NumPy's array of one element is what CuPy passes by value, whatever the size of the element.
        args = (np.frombuffer(words, dtype=np.dtype((np.void, len(words)))),)
        with self._cupy.cuda.Device(gpu), self._stream(stream, gpu):
            function = self._function(kernel, gpu)
            try:
                if shared > max(_SHARED_WITHOUT_ASKING, self._shared.get((kernel, gpu), 0)):
                    function.max_dynamic_shared_size_bytes = shared
                    self._shared[kernel, gpu] = shared
                function((grid_x, grid_y), (threads,), args, shared_mem=shared)
            except RuntimeError as error:  # of CuPy's driver
                raise RuntimeError(
                    f"CUDA kernel {kernel} of {grid_x} × {grid_y} blocks of {threads} threads, {shared} bytes of "
                    f"shared memory: {error}"
                ) from error

    def shared_memory(self, gpu: int) -> int:
        if gpu not in self._most_shared:  # CuPy asks for all attributes each time
            self._most_shared[gpu] = int(self._cupy.cuda.Device(gpu).attributes["MaxSharedMemoryPerBlockOptin"])
        return self._most_shared[gpu]

    def _stream(self, address: int, gpu: int) -> Any:
        """torch's stream as CuPy's."""
        stream = self._cupy.cuda.Stream
        if hasattr(stream, "from_external"):  # CuPy 14
            return stream.from_external(_Address(address))
        return self._cupy.cuda.ExternalStream(address, gpu)

    def _function(self, kernel: str, gpu: int) -> Any:
        function = self._functions.get((kernel, gpu))
        if function is None:
            source = SOURCES / f"cuda/{kernels()[kernel].source}.cu"
            path = self._compiled(source, target(torch.cuda.get_device_capability(gpu)))
            function = self._functions[kernel, gpu] = self._cupy.RawModule(path=str(path)).get_function(kernel)
        return function

    def _compiled(self, source: Path, arch: str) -> Path:
        """The machine code of a source file, compiled unless it is in the cache."""
        version = self._cupy.cuda.nvrtc.getVersion()
        key = hashlib.sha256(repr((version, arch, flags(), source.name, _texts())).encode()).hexdigest()
        folder = Path(os.environ.get("CUPY_CACHE_DIR") or Path.home() / ".cupy/kernel_cache")
        path = folder / f"bipace_{source.stem}_{key[:32]}.cubin"
        if not path.exists():
            with atomic_file(path) as temporary:  # other processes may compile it too
                temporary.write_bytes(compile_source(self._cupy.cuda.nvrtc, source, arch))
        return path


@dataclass(frozen=True)
class _Address:
    """A stream by the CUDA stream protocol, which torch's own streams do not support in every version."""

    address: int

    def __cuda_stream__(self) -> tuple[int, int]:
        return 0, self.address


def target(capability: tuple[int, int]) -> str:
    """The architecture to compile for: of 9.0 the one that has all its instructions, as in cmake/cuda.cmake."""
    major, minor = capability
    return f"sm_{major}{minor}" + ("a" if capability == (9, 0) else "")


def compile_source(nvrtc: Any, source: Path, arch: str) -> bytes:
    """Machine code (cubin) of a source file by CuPy's `cupy.cuda.nvrtc`.  RuntimeError with the compiler's words."""
    program = nvrtc.createProgram(source.read_text(encoding="utf-8"), source.name, (), ())
    try:
        try:
            nvrtc.compileProgram(program, (*flags(), f"-arch={arch}", f"-I{SOURCES}"))
        except RuntimeError as error:
            log = nvrtc.getProgramLog(program)
            raise RuntimeError(f"NVRTC does not compile {source.name} for {arch}: {error}\n{log}") from error
        return bytes(nvrtc.getCUBIN(program))
    finally:
        nvrtc.destroyProgram(program)


@functools.cache
def _texts() -> tuple[str, ...]:
    """Every source and header: a change of any recompiles all."""
    paths = sorted(path for path in SOURCES.glob("c*/*") if path.suffix in (".cu", ".h"))
    return tuple(path.read_text(encoding="utf-8") for path in paths)
