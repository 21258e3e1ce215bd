"""Warnings that a training run gets once, and not at every step."""

from __future__ import annotations

import warnings

_given: set[str] = set()


def warn_once(about: str, text: str, *, stacklevel: int = 2) -> None:
    """A RuntimeWarning, the first time that `about` is named in this process; `stacklevel` as of warnings.warn."""
    if about not in _given:
        _given.add(about)
        warnings.warn(text, RuntimeWarning, stacklevel=stacklevel + 1)
