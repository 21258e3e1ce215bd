"""Runs code after another package has imported one of its modules, without importing it earlier."""

import importlib.abc
import importlib.util
import sys
from collections.abc import Callable
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any


class _Finder(importlib.abc.MetaPathFinder):
    """Lets the other finders find a module, and runs the pending calls after the module's own code."""

    def __init__(self) -> None:
        self.waiting: dict[str, list[Callable[[], None]]] = {}

    def find_spec(self, fullname: str, path: Any = None, target: ModuleType | None = None) -> ModuleSpec | None:
        if fullname not in self.waiting:
            return None
        specs = (f.find_spec(fullname, path, target) for f in sys.meta_path if f is not self)
        spec = next((s for s in specs if s is not None), None)
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module

            def exec_module(module: ModuleType) -> None:
                execute(module)
                for call in self.waiting.pop(fullname, ()):
                    call()

            spec.loader.exec_module = exec_module  # type: ignore[method-assign]  # of this one loader
        return spec


_finder = _Finder()


def when_imported(module: str, call: Callable[[], None]) -> None:
    """Runs call() once, right after this module is first imported; immediately if it already is."""
    if module in sys.modules:
        call()
        return
    if _finder not in sys.meta_path:
        sys.meta_path.insert(0, _finder)
    _finder.waiting.setdefault(module, []).append(call)
