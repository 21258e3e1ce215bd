"""GPU resources of the CUDA kernels as reported by nvcc (`python -m bench resources --cuda`); needs no GPU.

Each source of csrc/cuda/ is compiled for each architecture of a release, with the flags of the build, and `ptxas -v`
reports registers, stack, spills and static shared memory of each kernel.  Dynamic shared memory is set by the launch.
"""

import re
import shutil
import subprocess
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from bipace_kernels.backends.cuda._cupy import target
from bipace_kernels.backends.cuda._launch import SOURCES, flags

_ENTRY = re.compile(r"Compiling entry function '(\w+)' for 'sm_(\w+)'\n(.*?)Used (\d+) registers([^\n]*)", re.DOTALL)
# A message of ptxas, before the kernel, that it serializes the products of a group of warps.
_SERIALIZED = re.compile(r"wgmma\.mma_async instructions are serialized .* in the function '(\w+)'")
_STACK = re.compile(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads")


@dataclass(frozen=True)
class Kernel:
    """Resources of one kernel on one architecture, in bytes."""

    source: str
    kernel: str
    arch: str
    registers: int  # per thread
    stack: int  # per thread
    spill_stores: int  # per thread
    spill_loads: int
    shared: int  # per block, static
    serialized: bool = False  # whether products of groups of warps wait for one another

    @property
    def spills(self) -> bool:
        return self.spill_stores > 0 or self.spill_loads > 0

    @property
    def wrong(self) -> bool:
        return self.spills or self.serialized


def parse(source: str, said: str) -> list[Kernel]:
    """The kernels reported by `ptxas -v`.  ValueError if there are none, i.e. its output format has changed."""
    found, serialized = [], set(_SERIALIZED.findall(said))
    for name, arch, properties, registers, rest in _ENTRY.findall(said):
        sizes = _STACK.search(properties)
        if sizes is None:
            raise ValueError(f"ptxas reports no stack of {name} in {source}: {properties!r}")
        shared = re.search(r"(\d+) bytes smem", rest)
        stack, stores, loads = map(int, sizes.groups())
        static = int(shared[1]) if shared else 0
        found.append(Kernel(source, name, arch, int(registers), stack, stores, loads, static, name in serialized))
    if not found:
        raise ValueError(f"ptxas reports no kernel in {source}: {said[-500:]!r}")
    return found


def nvcc() -> str:
    """The compiler.  FileNotFoundError where there is none."""
    found = shutil.which("nvcc") or shutil.which("nvcc", path="/usr/local/cuda/bin")
    if found is None:
        raise FileNotFoundError("nvcc is neither on the PATH nor in /usr/local/cuda/bin; install the CUDA toolkit.")
    return found


def compile_source(source: Path, arch: int, more: Sequence[str] = ()) -> list[Kernel]:
    """Compiles a source for sm_<arch> and reads what its kernels need.  RuntimeError with the compiler's words."""
    said = to_cubin(source, divmod(arch, 10), Path("/dev/null"), ["-Xptxas", "-v", *more])
    return parse(source.name, said)


def to_cubin(source: Path, capability: tuple[int, int], out: Path, more: Sequence[str] = ()) -> str:
    """Compiles a source with the flags of the build; what nvcc says.  RuntimeError with its words where it fails."""
    options = [*flags(), *more, f"-I{SOURCES}", "--cubin", "-arch", target(capability), "-o", str(out)]
    command = [nvcc(), *options, str(source)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)}\n{done.stderr[-3000:]}")
    return done.stderr


def compile_all(archs: Iterable[int], jobs: int = 2) -> list[Kernel]:
    """Every source for every architecture."""
    targets = [(source, arch) for source in sorted((SOURCES / "cuda").glob("*.cu")) for arch in archs]
    with ThreadPoolExecutor(jobs) as pool:
        return [kernel for found in pool.map(lambda target: compile_source(*target), targets) for kernel in found]


def version() -> str:
    said = subprocess.run([nvcc(), "--version"], capture_output=True, text=True, check=True).stdout
    return "nvcc " + re.findall(r"release [\d.]+, V([\d.]+)", said)[0]
