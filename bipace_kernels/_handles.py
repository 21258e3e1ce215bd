"""Numbers for objects that torch ops cannot take: an op takes the number and finds the object."""

from __future__ import annotations

import itertools
import weakref
from typing import Any, ClassVar

_numbers = itertools.count(1)
_alive: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()


class Handled:
    """A frozen object with a number of its own, unique in the process and never used again.

    A compiled graph takes the number as an input, so a new object with other contents is no new compilation.
    """

    _handle: ClassVar[int] = 0  # until _register(): made while torch.compile traces, where nobody else sees it

    def _register(self) -> None:
        number = next(_numbers)
        object.__setattr__(self, "_handle", number)
        _alive[number] = self

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._register()


def handle_of(thing: Handled) -> int:
    return thing._handle


def find(handle: int) -> Any:
    """The object with a number."""
    found = _alive.get(handle)
    if found is None:
        raise RuntimeError(
            f"no object has the handle {handle} any more; keep the Layout and the Config while they are used."
        )
    return found
