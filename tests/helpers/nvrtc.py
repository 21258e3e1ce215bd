"""NVRTC, by its library itself: what CuPy compiles with at first use."""

from __future__ import annotations

import ctypes
import importlib.util
from pathlib import Path


def nvrtc() -> ctypes.CDLL | None:
    """NVRTC of the toolkit, or of a package nvidia-cuda-nvrtc, whose library does not find its other half alone."""
    names = ["libnvrtc.so", "libnvrtc.so.13", "libnvrtc.so.12"]
    spec = importlib.util.find_spec("nvidia")
    for folder in [] if spec is None else list(spec.submodule_search_locations or []):
        for path in sorted(Path(folder).glob("*/lib/libnvrtc.so.1?")):
            names += [str(other) for other in path.parent.glob("libnvrtc-builtins.so*")] + [str(path)]
    for name in names:
        try:
            library = ctypes.CDLL(name)
        except OSError:
            continue
        if hasattr(library, "nvrtcCreateProgram"):
            return library
    return None


class Nvrtc:
    """The calls of `cupy.cuda.nvrtc` that we use, over the library itself."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self.library = library

    def call(self, name, *args):
        status = getattr(self.library, name)(*args)
        if status:
            raise RuntimeError(f"{name}: status {status}")

    def createProgram(self, text, name, headers, names):
        program = ctypes.c_void_p()
        self.call("nvrtcCreateProgram", ctypes.byref(program), text.encode(), name.encode(), 0, None, None)
        return program

    def compileProgram(self, program, options):
        words = (ctypes.c_char_p * len(options))(*(option.encode() for option in options))
        self.call("nvrtcCompileProgram", program, len(options), words)

    def getCUBIN(self, program):
        return self._bytes("nvrtcGetCUBIN", program)

    def getProgramLog(self, program):
        return self._bytes("nvrtcGetProgramLog", program).decode()

    def destroyProgram(self, program):
        self.call("nvrtcDestroyProgram", ctypes.byref(program))

    def _bytes(self, name, program):
        size = ctypes.c_size_t()
        self.call(f"{name}Size", program, ctypes.byref(size))
        buffer = ctypes.create_string_buffer(size.value)
        self.call(name, program, buffer)
        return buffer.raw
