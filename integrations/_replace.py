"""Replaces functions of a trainer by ours, which receive the originals."""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Any

Function = Callable[..., Any]


def need(owner: Any, names: Iterable[str], cure: str = "") -> None:
    """Raises AttributeError for the attributes that the owner (a module, a class, an object) lacks."""
    missing = [name for name in names if not hasattr(owner, name)]
    if missing:
        who = getattr(owner, "__name__", type(owner).__name__)
        raise AttributeError(f"{who} has no {' and no '.join(missing)}{cure}")


def replace(owner: Any, *functions: Function) -> Callable[[], None]:
    """Replaces the owner's attributes by functions f(inner, ...) of their names; returns a function that undoes it.

    AttributeError as of need(); then nothing is replaced.
    """
    need(owner, [f.__name__ for f in functions])
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
