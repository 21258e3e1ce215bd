"""GPU resources of the Triton kernels, from the compiled code; needs no GPU (`python -m bench resources`).

Every module of `bipace_kernels.backends.triton` with kernels has `main_path()`: (kernel, signature, constexprs, options)
of each configuration that a usual call launches, and the architectures where not all of them launch it. Each is compiled
ahead to machine code; registers, stack and local memory come from `cuobjdump -res-usage` (the toolkit's or Triton's own),
dynamic shared memory from Triton. A stack or local memory means that registers were spilled to device memory.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib
import pkgutil
import re
import shutil
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from . import report

# Shared memory that one program may ask for, in bytes (CUDA C++ Programming Guide, compute capabilities).
SHARED_LIMIT = {80: 163 << 10, 90: 227 << 10, 100: 227 << 10, 120: 99 << 10}
ARCHITECTURES = (80, 90, 100)
_SIZES = {"GLOBAL", "REG", "STACK", "SHARED", "LOCAL"}


@dataclass(frozen=True)
class Launch:
    """One configuration of one kernel, as it is launched."""

    module: str
    kernel: Any
    signature: Mapping[str, str]
    constexprs: Mapping[str, Any]
    options: Mapping[str, Any]
    archs: Sequence[int] = ARCHITECTURES  # where it is launched

    @property
    def name(self) -> str:
        return str(self.kernel.__name__)

    def runs_on(self, arch: int) -> bool:
        """Whether that architecture launches it; one that the tests do not compile for launches what all of them do."""
        return arch in self.archs or (arch not in ARCHITECTURES and len(self.archs) == len(ARCHITECTURES))

    @property
    def variant(self) -> str:
        """What distinguishes this configuration from the kernel's others."""
        names = [name for name in self.kernel.arg_names if name not in self.constexprs]
        pointers = sorted({kind for name in names if (kind := self.signature[name]).startswith("*")})
        return ", ".join([*(f"{k}={v}" for k, v in self.constexprs.items()), *pointers])


@dataclass(frozen=True)
class Usage:
    """Resources of one compiled configuration."""

    module: str
    kernel: str
    variant: str
    arch: int
    warps: int
    stages: int
    registers: int  # per thread
    stack: int  # bytes per thread; above 0 where registers are spilled
    local: int  # bytes per thread
    shared: int  # bytes per program, static and dynamic
    limit: int  # of shared memory on that architecture

    @property
    def spills(self) -> bool:
        return self.stack > 0 or self.local > 0


def launches() -> list[Launch]:
    """Every configuration that the modules of backends.triton name as their main path."""
    package = importlib.import_module("bipace_kernels.backends.triton")
    found = []
    for info in pkgutil.iter_modules(package.__path__):
        module = importlib.import_module(f"{package.__name__}.{info.name}")
        if hasattr(module, "main_path"):
            found += [Launch(info.name, *entry) for entry in module.main_path()]
    return found


def compile_ahead(launch: Launch, arch: int) -> Usage:
    """Compiles for sm_<arch> and reads the resources."""
    compiled = build(launch, arch)
    sizes, made = read(compiled.asm["cubin"]), compiled.metadata
    return Usage(
        launch.module, launch.name, launch.variant, arch, int(made.num_warps), int(made.num_stages),
        sizes["REG"], sizes["STACK"], sizes["LOCAL"], int(made.shared), SHARED_LIMIT[arch],
    )  # fmt: skip


def build(launch: Launch, arch: int) -> Any:
    """What Triton compiles for sm_<arch>; pointers are taken as 16-byte aligned, as torch allocates them."""
    compiler = importlib.import_module("triton.compiler")
    target = importlib.import_module("triton.backends.compiler").GPUTarget("cuda", arch, 32)
    names = list(launch.kernel.arg_names)
    signature = {n: "constexpr" if n in launch.constexprs else launch.signature[n] for n in names}
    aligned = {(i,): [["tt.divisibility", 16]] for i, n in enumerate(names) if signature[n].startswith("*")}
    source = compiler.ASTSource(launch.kernel, signature, dict(launch.constexprs), aligned)
    return compiler.compile(source, target=target, options=dict(launch.options))


def read(cubin: bytes) -> dict[str, int]:
    """Sizes of the one function in a cubin."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "kernel.cubin"
        path.write_bytes(cubin)
        done = subprocess.run([cuobjdump(), "-res-usage", str(path)], capture_output=True, text=True, check=True)
    (text,) = re.findall(r"^\s*Function \S+:\s*\n(.*)$", done.stdout, re.MULTILINE)
    sizes = {name: int(value) for name, value in re.findall(r"([A-Z]+):(\d+)", text)}
    return {name: value for name, value in sizes.items() if name in _SIZES}


@functools.cache
def cuobjdump() -> str:
    """The toolkit's cuobjdump, or the one that Triton carries."""
    found = shutil.which("cuobjdump")
    if found is not None:
        return found
    triton = importlib.import_module("triton")
    own = Path(str(triton.__file__)).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    if not own.exists():
        raise FileNotFoundError(f"cuobjdump is neither on the PATH nor at {own}; install the CUDA toolkit")
    return str(own)


_COLUMNS: report.Columns = {
    "module": "{module}", "kernel": "`{kernel}`", "sm": "{arch}", "warps": "{warps}", "stages": "{stages}",
    "registers": "{registers}", "stack": "{stack}", "local": "{local}", "shared": "{shared}", "of": "{limit}",
    "configuration": "{variant}",
}  # fmt: skip


def as_markdown(rows: Sequence[Usage], *, version: str) -> str:
    return report.page(
        "Resources of the Triton kernels",
        f"Written by `python -m bench resources`: Triton {version}, compiled ahead, no GPU took part. Registers, stack and "
        "local memory are per thread, shared memory per program, in bytes. A stack or local memory means spilled registers.",
        f"{len(rows)} compiled configurations, {sum(u.spills for u in rows)} with spills.",
        report.table(_COLUMNS, map(dataclasses.asdict, rows)),
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Compiles everything, prints the table, writes the files; exit status 1 where something spills."""
    parser = report.parser("resources", "Registers, spills and shared memory of every Triton kernel; needs no GPU.",
                           writes="resources.json and resources.md")  # fmt: skip
    parser.add_argument("--arch", type=int, nargs="+", choices=sorted(SHARED_LIMIT), default=list(ARCHITECTURES),
                        metavar="SM", help=f"of {', '.join(map(str, SHARED_LIMIT))} (default: 80 90 100)")  # fmt: skip
    arguments = parser.parse_args(argv)
    version = str(importlib.import_module("triton").__version__)
    rows = [compile_ahead(launch, arch) for launch in launches() for arch in arguments.arch if launch.runs_on(arch)]
    document = {"schema": 1, "triton": version, "rows": [dataclasses.asdict(u) for u in rows]}
    report.publish("resources", document, as_markdown(rows, version=version), arguments.out)
    return int(any(u.spills or u.shared > u.limit for u in rows))
