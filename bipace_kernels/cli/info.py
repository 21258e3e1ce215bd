"""`bipace info`: versions, which backends run here, and why the others do not."""

import json
import os
import platform
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
import typer

import bipace_kernels as bk

from ..backends import dispatch, native_loader, threads
from ._console import grid, stdout
from .advantage import refused

PACKAGES = ("torch", "triton", "numpy", "pyarrow", "typer", "rich", "matplotlib", "scikit-learn")


def gather() -> dict[str, Any]:
    """Everything the command shows, JSON-able."""
    isa = "none: the compiled kernels do not load" if native_loader.reason() else str(native_loader.load().isa())
    return {
        "bipace_kernels": bk.__version__,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "packages": {name: _version(name) for name in PACKAGES},
        "cpu": {
            "model": _cpu_model(),
            "cores": os.cpu_count(),
            "usable_cores": len(os.sched_getaffinity(0)),
            "instruction_set": isa,
            "threads": threads.count(),
        },
        "cuda": {
            "built_for": torch.version.cuda,
            "devices": [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())],
        },
        "environment": {name: value for name, value in sorted(os.environ.items()) if name.startswith("BIPACE_")},
        "backends": {
            name: {"available": status.available, "reason": status.reason, "detail": status.detail}
            for name, status in bk.backends().items()
        },
        "auto": {
            kind: dict(zip(("backend", "reason"), dispatch.taken_for(kind), strict=True)) for kind in ("cpu", "cuda")
        },
    }


def run(values: Mapping[str, Any]) -> None:
    """The whole command, on its options by name."""
    with refused():
        facts = gather()
    if values["as_json"]:
        typer.echo(json.dumps(facts, indent=1))
        return
    cpu, cuda = facts["cpu"], facts["cuda"]
    place = {"cpu": "the CPU", "cuda": "a GPU"}
    rows = [
        ("Python", f"{facts['python']} on {facts['platform']}"),
        *((name, version or "not installed") for name, version in facts["packages"].items()),
        ("CPU", f"{cpu['model']}, {cpu['usable_cores']} of {cpu['cores']} cores usable"),
        ("instruction set in use", cpu["instruction_set"]),
        ("threads", str(cpu["threads"])),
        ("CUDA of torch", f"{cuda['built_for'] or 'none'}, {len(cuda['devices'])} devices"),
        *((f"cuda:{index}", device) for index, device in enumerate(cuda["devices"])),
        *(
            (f"tensors on {place[kind]} take", taken["backend"] or f"no backend ({taken['reason']})")
            for kind, taken in facts["auto"].items()
        ),
        *facts["environment"].items(),
    ]
    console = stdout()
    console.print(grid(("", ""), rows, f"bipace-kernels {facts['bipace_kernels']}", numbers=False))
    backends = [
        (name, "yes" if status["available"] else "no", status["reason"], status["detail"])
        for name, status in facts["backends"].items()
    ]
    headings = ("backend", "available", "why not", "versions and devices")
    console.print(grid(headings, backends, "Backends", numbers=False))


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _cpu_model() -> str:
    file = Path("/proc/cpuinfo")  # absent in some containers
    lines = file.read_text(encoding="utf-8", errors="replace").splitlines() if file.exists() else []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.machine())  # ARM's kernels name none
