"""GPU resources of the Triton kernels, from the compiled code; needs no GPU (`python -m bench resources`).

Every module of `bipace_kernels.backends.triton` with kernels has `main_path()`: (kernel, signature, constexprs, options)
of each configuration that a usual call launches, and the architectures where not all of them launch it. Each is compiled
ahead to machine code; registers, stack and local memory come from `cuobjdump -res-usage` (the toolkit's or Triton's own),
dynamic shared memory from Triton. A stack or local memory means that registers were spilled to device memory.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import importlib
import json
import pkgutil
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

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
    sizes = read(compiled.asm["cubin"])
    return Usage(
        module=launch.module,
        kernel=launch.name,
        variant=launch.variant,
        arch=arch,
        warps=int(compiled.metadata.num_warps),
        stages=int(compiled.metadata.num_stages),
        registers=sizes["REG"],
        stack=sizes["STACK"],
        local=sizes["LOCAL"],
        shared=int(compiled.metadata.shared),
        limit=SHARED_LIMIT[arch],
    )


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


# ------------------------------------------------------------------------------------------------------------- report

_HEADER = ("module", "kernel", "sm", "warps", "stages", "registers", "stack", "local", "shared", "of", "configuration")


def write(folder: Path, usages: Iterable[Usage], *, version: str) -> list[Path]:
    """resources.json and resources.md, both naming the Triton that compiled."""
    folder.mkdir(parents=True, exist_ok=True)
    rows = list(usages)
    document, page = folder / "resources.json", folder / "resources.md"
    found = {"schema": 1, "triton": version, "rows": [dataclasses.asdict(u) for u in rows]}
    document.write_text(json.dumps(found, indent=1, ensure_ascii=False) + "\n")
    page.write_text(as_markdown(rows, version=version))
    return [document, page]


def as_markdown(rows: Sequence[Usage], *, version: str) -> str:
    spilled = sum(u.spills for u in rows)
    lines = [
        "# Resources of the Triton kernels",
        "",
        f"Written by `python -m bench resources`: Triton {version}, compiled ahead, no GPU took part. Registers, stack and",
        "local memory are per thread, shared memory per program, in bytes. A stack or local memory means spilled registers.",
        "",
        f"{len(rows)} compiled configurations, {spilled} with spills.",
        "",
        "| " + " | ".join(_HEADER) + " |",
        "|" + " --- |" * len(_HEADER),
    ]
    for u in rows:
        cells = (u.module, f"`{u.kernel}`", u.arch, u.warps, u.stages, u.registers, u.stack, u.local, u.shared, u.limit,
                 u.variant.replace("|", "\\|"))  # fmt: skip
        lines.append("| " + " | ".join(str(c) for c in cells) + " |")
    return "\n".join([*lines, ""])


def main(argv: Sequence[str] | None = None) -> int:
    """Compiles everything, prints the table, writes the files; exit status 1 where something spills."""
    parser = argparse.ArgumentParser(
        prog="bench resources", description="Registers, spills and shared memory of every Triton kernel; needs no GPU."
    )
    parser.add_argument("--arch", type=int, nargs="+", choices=sorted(SHARED_LIMIT), default=list(ARCHITECTURES),
                        metavar="SM", help=f"of {', '.join(map(str, SHARED_LIMIT))} (default: 80 90 100)")  # fmt: skip
    parser.add_argument("--out", type=Path, metavar="DIR", help="write resources.json and resources.md there")
    arguments = parser.parse_args(argv)
    version = str(importlib.import_module("triton").__version__)
    rows = [compile_ahead(launch, arch) for launch in launches() for arch in arguments.arch if launch.runs_on(arch)]
    sys.stdout.write(as_markdown(rows, version=version))
    if arguments.out is not None:
        for path in write(arguments.out, rows, version=version):
            sys.stdout.write(f"wrote {path}\n")
    return int(any(u.spills or u.shared > u.limit for u in rows))
