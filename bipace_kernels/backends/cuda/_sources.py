"""Metadata of the kernels, from csrc/cuda/ in the wheel: source files, argument structs, and the compiler's flags."""

from __future__ import annotations

import functools
import re
import struct
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

SOURCES = Path(__file__).resolve().parents[2] / "csrc"
POINTER, INTEGER, REAL = "pointer", "int64_t", "double"  # kinds of a field

_KERNEL = re.compile(r"^BIPACE_KERNEL\((\w+), (\w+),", re.MULTILINE)
_STRUCT = re.compile(r"^struct (\w+) \{\n(.*?)^\};", re.MULTILINE | re.DOTALL)
_FIELD = re.compile(r"^ *(?:const )?(\w+)(\*?) ([\w, ]+);", re.MULTILINE)


@dataclass(frozen=True)
class Kernel:
    """A kernel's source file and the fields of its argument, in order, each with its kind."""

    source: Path
    fields: Mapping[str, str]

    @functools.cached_property
    def pointers(self) -> tuple[int, ...]:
        """Places of the pointers among the fields."""
        return tuple(i for i, kind in enumerate(self.fields.values()) if kind is POINTER)

    @functools.cached_property
    def form(self) -> struct.Struct:
        return struct.Struct("<" + "".join("d" if kind == REAL else "q" for kind in self.fields.values()))


@functools.cache
def kernels() -> dict[str, Kernel]:
    """Every kernel by its name."""
    return parse(sorted((SOURCES / "cuda").glob("*.cu")), (SOURCES / "cuda").glob("*.h"))


def parse(sources: Iterable[Path], headers: Iterable[Path] = ()) -> dict[str, Kernel]:
    """The kernels of some sources, whose structs may be in headers.  ValueError for a field of another kind."""
    texts = {path: path.read_text(encoding="utf-8") for path in (*headers, *sources)}
    bodies = {name: body for text in texts.values() for name, body in _STRUCT.findall(text)}
    return {
        name: Kernel(path, _fields(args, bodies))
        for path, text in texts.items()
        for name, args in _KERNEL.findall(text)
    }


def _fields(name: str, bodies: Mapping[str, str]) -> dict[str, str]:
    """Of a struct, those of a struct inside in its place; its methods come last."""
    found: dict[str, str] = {}
    body = re.sub("//.*", "", bodies[name]).partition("(")[0]
    fields = _FIELD.findall(body)
    if len(fields) != body.count(";"):
        raise ValueError(f"{name}: not every field is understood.")
    for kind, pointer, names in fields:
        for field in names.split(", "):
            inside = {field: POINTER if pointer else kind} if pointer or kind not in bodies else _fields(kind, bodies)
            if not {*inside.values()} <= {POINTER, INTEGER, REAL} or found.keys() & inside.keys():
                raise ValueError(f"{name}.{field}: a field is a pointer, int64_t or double under a name of its own.")
            found |= inside
    return found


@functools.cache
def flags() -> tuple[str, ...]:
    """Of every compiler of these sources (csrc/cuda/flags.txt)."""
    lines = (SOURCES / "cuda/flags.txt").read_text(encoding="utf-8").splitlines()
    return tuple(line for line in lines if line.startswith("-"))
