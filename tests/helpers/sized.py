"""Stages by hand: a module whose functions fill in sizes and masks that a test leaves out."""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch

from bipace_kernels.ops.registry import STAGE_OPS, Op


class Sized:
    """The stage functions of a backend's module.  Masks left out are None, and sizes are read off the offsets given."""

    def __init__(self, module: ModuleType) -> None:
        self._module = module

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._module, name)
        return _filled(STAGE_OPS[name], found) if name in STAGE_OPS else found


def _filled(op: Op, function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def run(*args: Any, **kwargs: Any) -> Any:
        given = op.bind(args, kwargs)
        lengths: dict[str, int] = {}
        for a in op.arguments:
            value = given[a.name]
            if isinstance(value, torch.Tensor) and a.spec is not None:
                for letter, size in zip(a.spec.shape.split(), value.shape, strict=True):
                    lengths.setdefault(letter[0], size - 1 if letter.endswith("+1") else size)
        for a in op.arguments:
            if a.size is None or given[a.name] is not None:
                continue
            if a.name == "longest_group":
                given[a.name] = int(given["group_offsets"].diff().max()) if lengths["G"] else 0
            elif a.name == "n_records":
                given[a.name] = int(given["trajectory_offsets"][-1])
            else:
                given[a.name] = lengths[a.size.letter]
        positional = [given.pop(a.name) for a in op.arguments if not a.keyword]
        return function(*positional, **given)

    return run
