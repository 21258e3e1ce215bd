"""The progress bar for models.  tqdm is a dependency of transformers and of sentence-transformers, which load them."""

from typing import Any


def progress_bar(progress: bool | None, description: str, total: int, done: int = 0) -> Any:
    """A tqdm bar on stderr, a context manager with update(n).

    progress   True, False, or None: where stderr is a terminal
    """
    from tqdm import tqdm  # type: ignore[import-untyped]  # not where no model is loaded

    hidden = None if progress is None else not progress
    return tqdm(total=total, initial=done, desc=description, disable=hidden)
