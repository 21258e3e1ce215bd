"""Replaces functions of a trainer by ours, which receive the originals."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Any

Function = Callable[..., Any]


def replace(owner: Any, *functions: Function) -> Callable[[], None]:
    """Replaces the owner's attributes by functions f(inner, ...) of their names; returns a function that undoes it.

    AttributeError names the attributes that the owner (a module, a class, an object) lacks; then nothing is replaced.
    """
    missing = [f.__name__ for f in functions if not hasattr(owner, f.__name__)]
    if missing:
        raise AttributeError(f"{getattr(owner, '__name__', type(owner).__name__)} has no {' and no '.join(missing)}")
    own = {f.__name__: vars(owner)[f.__name__] for f in functions if f.__name__ in vars(owner)}
    for f in functions:
        setattr(owner, f.__name__, _after(getattr(owner, f.__name__), f))

    def undo() -> None:
        for f in functions:
            if f.__name__ in own:
                setattr(owner, f.__name__, own[f.__name__])
            else:
                delattr(owner, f.__name__)

    return undo


@contextmanager
def replaced(owner: Any, *functions: Function) -> Iterator[None]:
    """replace() for the duration of a with block."""
    undo = replace(owner, *functions)
    try:
        yield
    finally:
        undo()


def _after(inner: Function, f: Function) -> Function:
    @wraps(inner)
    def call(*args: Any, **kwargs: Any) -> Any:
        return f(inner, *args, **kwargs)

    return call
