"""Warnings that a training run gets once, and not at every step."""

import warnings

_given: set[str] = set()


def warn_once(about: str, text: str, *, stacklevel: int = 2) -> None:
    """A RuntimeWarning, the first time that `about` is named in this process; `stacklevel` as of warnings.warn."""
    if about not in _given:
        _given.add(about)
        warnings.warn(text, RuntimeWarning, stacklevel=stacklevel + 1)


def warn_of_unparsed(rate: float, *, stacklevel: int) -> None:
    """Once where few responses hold a recognized action; rate: their share."""
    text = (
        f"{rate:.0%} of the responses hold an action that was recognized: the others are only equal if they begin with "
        "the same tokens, and without equal actions PACE is a mean over the cluster. gae leaves them out of its "
        "averages. Use another mode of action keys, or pass the actions themselves."
    )
    warn_once("unparsed actions", text, stacklevel=stacklevel + 1)
