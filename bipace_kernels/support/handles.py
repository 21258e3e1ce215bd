"""Handles of objects that torch ops cannot take: an op takes the number and looks up the object."""

import itertools
import os
import weakref
from typing import Any, ClassVar

# A program of torch.export holds numbers: in another process they must be unknown, not those of other objects.
_numbers = itertools.count(1 + int.from_bytes(os.urandom(6), "big"))
_alive: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()


class Handled:
    """A frozen object with its own number, unknown to other processes and never reused.

    A compiled graph takes the number as an input, so a new object with other contents does not recompile it.
    """

    _handle: ClassVar[int] = 0  # until _register(): made while torch.compile traces, and only seen there

    def _register(self) -> None:
        number = next(_numbers)
        object.__setattr__(self, "_handle", number)
        _alive[number] = self

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._register()


def find(handle: int) -> Any:
    """The object with a number."""
    thing = _alive.get(handle)
    if thing is None:
        why = "keep Layout and Config while they are used, and make graphs in the process that runs them."
        raise RuntimeError(f"no object has the handle {handle} any more; {why}")
    return thing
