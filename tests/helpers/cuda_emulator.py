"""The CPU emulator as a provider of kernels: csrc/cuda/*.cu compiled as C++, threads as fibres in a chosen order."""

from __future__ import annotations

import ctypes
import fcntl
import os
import shutil
import subprocess
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paths import ROOT
from stand_ins import Watched

from bipace_kernels.backends import dispatch
from bipace_kernels.backends.cuda import _launch
from bipace_kernels.backends.records import Records

EMULATOR = ROOT / "tests/native/emulator"
FLAGS = ["-std=c++17", "-g", "-fPIC", "-ffp-contract=off", "-fno-math-errno", "-Wno-unknown-pragmas"]


class EmulatorError(RuntimeError):
    """What the emulator found wrong with a kernel or its launch."""


def build(
    sources: Sequence[Path], out: Path, *, sanitize: bool = False, races: bool = False, includes: Path = ROOT / "csrc"
) -> Path:
    """A shared library of these kernels and the emulator's scheduler; objects newer than their sources are kept.

    sanitize   with AddressSanitizer and UndefinedBehaviorSanitizer
    races      every access to memory is looked at (emulator/races.h): slow
    """
    compiler = os.environ.get("CXX") or shutil.which("g++") or shutil.which("clang++")
    if compiler is None:
        raise EmulatorError("the emulator needs g++ or clang++, and there is neither")
    flags = [*FLAGS, "-DBIPACE_EMULATOR", "-O1" if sanitize or races else "-O2", f"-I{includes}", f"-I{EMULATOR}"]
    flags += ["-fsanitize=address,undefined", "-fno-sanitize-recover=undefined"] if sanitize else []
    # The scheduler itself is not looked at, and has the functions that the kernels then call.
    of_kernels, of_scheduler = ([], []) if not races else (["-fsanitize=thread"], ["-D__SANITIZE_THREAD__"])
    out.mkdir(parents=True, exist_ok=True)
    headers = [*includes.glob("common/*.h"), *includes.glob("cuda/*.h"), *EMULATOR.glob("*.h")]
    newest = max(path.stat().st_mtime for path in headers)
    objects = []
    for source in [EMULATOR / "emulator.cpp", *sources]:
        target = out / f"{source.stem}.o"
        if not target.exists() or target.stat().st_mtime < max(newest, source.stat().st_mtime):
            more = of_kernels if source.suffix == ".cu" else of_scheduler
            _run([compiler, *flags, *more, "-x", "c++", "-c", str(source), "-o", str(target)])
        objects.append(str(target))
    library = out / "libemulator.so"
    if not library.exists() or library.stat().st_mtime < max(os.path.getmtime(o) for o in objects):
        _run([compiler, *flags, "-shared", *objects, "-o", str(library)])
    return library


def of_checkout(*, sanitize: bool = False, races: bool = False) -> Emulator:
    """The emulator of this checkout's kernels; of several processes the first one builds it and the others wait."""
    folder = ROOT / "build" / ("emulator" + "-sanitize" * sanitize + "-races" * races)
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        library = build(sorted((ROOT / "csrc/cuda").glob("*.cu")), folder, sanitize=sanitize, races=races)
    return Emulator.load(library)


class Emulated(Watched):
    """Stages with CUDA kernels of their own, and those of the CPU in the place of Triton's."""

    def __init__(self) -> None:
        super().__init__()
        self.name = "cuda"
        del self.clusters, self.values

    def check(self, records: Records) -> None:
        """Those of an op hold what it reads."""


def run_on_cpu(emulator: Emulator, put: Callable[[Any, str, Any], None] = setattr) -> None:
    """From here on backend="cuda" runs, by the emulator and on CPU tensors."""
    put(_launch, "stand_in", emulator)
    real_backend, emulated = dispatch._backend, Emulated()
    put(dispatch, "_backend", lambda name: emulated if name == "cuda" else real_backend(name))
    for name in ("_why_not", "_why_not_on"):
        real = getattr(dispatch, name)
        put(dispatch, name, lambda backend, *of, real=real: "" if backend == "cuda" else real(backend, *of))


def _run(command: list[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise EmulatorError(f"{' '.join(command)}\n{done.stderr[-3000:]}")


@dataclass
class Emulator:
    """Provider of bipace_kernels.backends.cuda._launch; `seed` gives the order of the threads, and of the blocks."""

    library: ctypes.CDLL
    seed: int = 0
    shared: int = 227 << 10  # bytes that a block may have: those of compute capability 9.0
    groups: bool = True  # whether groups of four warps feed the tensor cores, as on compute capability 9.0

    @classmethod
    def load(cls, path: Path) -> Emulator:
        library = ctypes.CDLL(str(path))
        library.bipace_emulator_launch.argtypes = [
            ctypes.c_char_p, ctypes.c_int64, ctypes.c_int64, ctypes.c_int, ctypes.c_int64,
            ctypes.c_char_p, ctypes.c_int64, ctypes.c_uint64, ctypes.c_char_p, ctypes.c_int64,
        ]  # fmt: skip
        return cls(library)

    @contextmanager
    def without(self, file: str, line: int) -> Iterator[None]:
        """Kernels in which the barrier or wait that stands there is left out."""
        self.library.bipace_emulator_leave_out(file.encode(), line)
        try:
            yield
        finally:
            self.library.bipace_emulator_leave_out(b"", 0)

    @property
    def built(self) -> str:
        return "sm_90a" if self.groups else "sm_80"

    def launch(
        self, kernel: str, grid_x: int, grid_y: int, threads: int, shared: int, words: bytes, *_gpu: int
    ) -> None:
        error = ctypes.create_string_buffer(1000)
        if self.library.bipace_emulator_launch(
            kernel.encode(), grid_x, grid_y, threads, shared, words, len(words) // 8, self.seed, error, len(error)
        ):  # fmt: skip
            raise EmulatorError(error.value.decode())

    def shared_memory(self, gpu: int) -> int:
        return self.shared
