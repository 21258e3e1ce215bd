"""nvcc, and NVRTC by its library itself: what CuPy compiles with at first use."""

import ctypes
import importlib.util
import shutil
from pathlib import Path

import pytest

NVCC = shutil.which("nvcc") or shutil.which("nvcc", path="/usr/local/cuda/bin")
NO_NVCC = "needs nvcc, which is neither on the PATH nor in /usr/local/cuda/bin"
needs_nvcc = pytest.mark.skipif(NVCC is None, reason=NO_NVCC)


def library() -> ctypes.CDLL | None:
    """NVRTC of the toolkit, or of a package nvidia-cuda-nvrtc, whose library does not find its other half alone."""
    names = ["libnvrtc.so", "libnvrtc.so.13", "libnvrtc.so.12"]
    spec = importlib.util.find_spec("nvidia")
    for folder in [] if spec is None else list(spec.submodule_search_locations or []):
        for path in sorted(Path(folder).glob("*/lib/libnvrtc.so.1?")):
            names += [str(other) for other in path.parent.glob("libnvrtc-builtins.so*")] + [str(path)]
    for name in names:
        try:
            found = ctypes.CDLL(name)
        except OSError:
            continue
        if hasattr(found, "nvrtcCreateProgram"):
            return found
    return None


class Nvrtc:
    """The calls of `cupy.cuda.nvrtc` that we use, over the library itself; without it the test is skipped."""

    def __init__(self) -> None:
        self.library = library()
        if self.library is None:
            pytest.skip("needs NVRTC, which is in no CUDA toolkit here nor installed (pip install nvidia-cuda-nvrtc)")

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
