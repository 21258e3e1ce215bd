"""A property computed once.  functools.cached_property has a lock until Python 3.12, which a fork may inherit held."""

from collections.abc import Callable
from typing import Any, Generic, TypeVar

T = TypeVar("T")


class lazy(Generic[T]):
    """Decorator of a method: its value is kept in the object."""

    def __init__(self, make: Callable[[Any], T]) -> None:
        self.make, self.__doc__ = make, make.__doc__

    def __get__(self, owner: Any, kind: Any = None) -> T:
        value = owner.__dict__[self.make.__name__] = self.make(owner)
        return value
