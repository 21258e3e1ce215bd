"""Errors that name arguments and rows, so that the program can show them as options, files and lines."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Named:
    """An argument or a field of `Config` in a message: `name`, `name='value'`, or Config(name='value')."""

    name: str
    values: tuple[Any, ...] = ()  # one, or none
    in_config: bool = False

    def __str__(self) -> str:
        text = self.name + "".join(f"={value!r}" for value in self.values)
        return f"Config({text})" if self.in_config else text


@dataclass(frozen=True)
class Rows:
    """Rows of the caller's arrays in a message; the first of them are written out."""

    numbers: Sequence[int]

    @property
    def shown(self) -> Sequence[int]:
        """The rows that are written out."""
        return self.numbers[:5]

    def __str__(self) -> str:
        return f"row{'s' if len(self.numbers) > 1 else ''} {self.listed(self.shown)}"

    def listed(self, shown: Sequence[object]) -> str:
        """The rows, of which the first ones are written like this: "3, 17 and 4 more"."""
        texts = [*map(str, shown), *([f"{more} more"] if (more := len(self.numbers) - len(shown)) else [])]
        return " and ".join(filter(None, [", ".join(texts[:-1]), texts[-1]]))


class InputError(ValueError):
    """A ValueError whose message names arguments and rows.

    text       the message, with {} for each of the parts, as in str.format()
    parts      `Named`, `Rows`, and others, which are written out by str()
    argument   name of the first argument that it names, or ""
    rows       the rows that it names
    """

    def __init__(self, text: str, *parts: object) -> None:
        super().__init__(text, *parts)
        self.text, self.parts = text, parts

    def __str__(self) -> str:
        return self.written(str)

    @property
    def argument(self) -> str:
        return next((part.name for part in self.parts if isinstance(part, Named)), "")

    @property
    def rows(self) -> list[int]:
        return [row for part in self.parts if isinstance(part, Rows) for row in part.numbers]

    def written(self, form: Callable[[Any], str]) -> str:
        """The message with form(part) for each `Named` and `Rows`."""
        if not self.parts:
            return self.text  # also of another process, whose braces are its own
        return self.text.format(*(form(part) if isinstance(part, (Named, Rows)) else part for part in self.parts))

    def inside(self, where: str) -> InputError:
        """The same error with a prefix before the message, such as "algorithm.bipace."."""
        return type(self)("{}" + self.text, where, *self.parts)


class InputTypeError(InputError, TypeError):
    """The same as a TypeError."""


def near(word: object, known: Iterable[str]) -> str:
    """The end of a message about a name: the known one that is like it, if there is one."""
    close = difflib.get_close_matches(word, known, 1) if isinstance(word, str) else []
    return f"; did you mean {close[0]!r}?" if close else "."


def refuse_unknown(what: str, names: Iterable[str], known: Sequence[str], kind: str = "argument") -> None:
    """TypeError for the first name that is not known, with the nearest that is."""
    for name in names:
        if name not in known:
            meant = {"eps": "epsilon", "lam": "gae_lambda"}.get(name, name)
            raise TypeError(f"{what} has no {kind} {name!r}{near(meant, known)}")
