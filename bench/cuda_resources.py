"""GPU resources of the CUDA kernels as reported by nvcc (`python -m bench cuda_resources`); needs no GPU.

Each source of csrc/cuda/ is compiled for each architecture of a release, with the flags of the build, and `ptxas -v`
reports registers, stack, spills and static shared memory of each kernel.  Dynamic shared memory is set by the launch.
"""

import dataclasses
import re
import shutil
import subprocess
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from bipace_kernels.backends.cuda._cupy import target
from bipace_kernels.backends.cuda._launch import SOURCES, flags

from . import report
from .resources import SHARED_LIMIT

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


def compile_all(archs: Iterable[int], jobs: int) -> list[Kernel]:
    """Every source for every architecture."""
    targets = [(source, arch) for source in sorted((SOURCES / "cuda").glob("*.cu")) for arch in archs]
    with ThreadPoolExecutor(jobs) as pool:
        return [kernel for found in pool.map(lambda target: compile_source(*target), targets) for kernel in found]


_COLUMNS: report.Columns = {
    "source": "{source}", "kernel": "`{kernel}`", "sm": "{arch}", "registers": "{registers}", "stack": "{stack}",
    "spill stores": "{spill_stores}", "spill loads": "{spill_loads}", "static shared": "{shared}",
    "serialized": lambda row: "yes" if row["serialized"] else "no",
}  # fmt: skip


def as_markdown(rows: Sequence[Kernel], version: str) -> str:
    return report.page(
        "Resources of the CUDA kernels",
        f"Written by `python -m bench cuda_resources`: {version}, no GPU took part. Registers, stack and spills are "
        "per thread, static shared memory per block, in bytes.",
        f"{len(rows)} compiled kernels, {sum(kernel.spills for kernel in rows)} with spills.",
        report.table(_COLUMNS, map(dataclasses.asdict, rows)),
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Compiles everything, prints the table, writes the files; exit status 1 where something spills or serializes."""
    parser = report.parser("cuda_resources",
                           "Registers, spills and shared memory of every CUDA kernel; needs nvcc, no GPU.",
                           writes="cuda_resources.json and cuda_resources.md")  # fmt: skip
    parser.add_argument("--arch", type=int, nargs="+", choices=sorted(SHARED_LIMIT), default=sorted(SHARED_LIMIT),
                        metavar="SM", help="default: those of a release")  # fmt: skip
    parser.add_argument("--jobs", type=int, default=2, metavar="N", help="parallel compilers (default 2)")
    arguments = parser.parse_args(argv)
    said = subprocess.run([nvcc(), "--version"], capture_output=True, text=True, check=True).stdout
    version = "nvcc " + re.findall(r"release [\d.]+, V([\d.]+)", said)[0]
    rows = compile_all(arguments.arch, arguments.jobs)
    document = {"schema": 1, "compiler": version, "rows": [dataclasses.asdict(kernel) for kernel in rows]}
    report.publish("cuda_resources", document, as_markdown(rows, version), arguments.out)
    return int(any(kernel.spills or kernel.serialized for kernel in rows))
