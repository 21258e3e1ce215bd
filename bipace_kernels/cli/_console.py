"""Terminal output of the commands: errors in one paragraph, progress on stderr, tables on stdout."""

import errno
import os
import signal
import warnings
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from types import FrameType

import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TaskID, TaskProgressColumn, TimeElapsedColumn
from rich.table import Table

from ..support.optional import MissingPackageError

BAD_INPUT = 2  # exit status of every error that the user can correct
INTERRUPTED = 130  # as shells report SIGINT


class CliError(Exception):
    """An error that the user can correct: shown as one paragraph, without a traceback, with exit status 2."""


class _Results(Console):
    def on_broken_pipe(self) -> None:
        raise BrokenPipeError(errno.EPIPE, os.strerror(errno.EPIPE))  # rich would exit silently


def stdout() -> Console:
    """Console of results, shown as they are; without a terminal it is wide enough for every table."""
    console = _Results(markup=False, emoji=False)
    return console if console.is_terminal else _Results(width=120, markup=False, emoji=False)


def stderr() -> Console:
    """Console of progress and errors."""
    return Console(stderr=True, emoji=False)


def plain(console: Console, text: str, heading: str = "") -> None:
    """Prints a text as it is, on one line unless it holds more, after a heading with markup."""
    console.print(heading, end="")
    console.print(text, markup=False, highlight=False, soft_wrap=True)


def number(value: float, form: str) -> str:
    """`value` in a format of str.format, as in a table: with a minus sign, and without negative zero."""
    text = format(value, form)
    if text.startswith("-") and not text.strip("-0.,%"):
        text = text[1:]
    return text.replace("-", "−")


def grid(headings: Sequence[str], rows: Iterable[Sequence[str]], title: str = "", *, numbers: bool = True) -> Table:
    """A table for the terminal.

    numbers   every column but the first holds numbers, and is aligned to the right
    """
    table = Table(title=title or None, title_justify="left", show_header=any(headings))
    for place, heading in enumerate(headings):
        table.add_column(heading, justify="right" if numbers and place else "left", overflow="fold")
    for row in rows:
        table.add_row(*row)
    return table


@contextmanager
def user_errors() -> Iterator[None]:
    """Turns CliError, a missing package, Ctrl-C and SIGTERM into exit statuses; everything inside has cleaned up."""

    def interrupt(signum: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    # A plain SIGTERM would end the process at once and leave temporary files behind.
    try:
        before = signal.signal(signal.SIGTERM, interrupt)
    except ValueError:  # not in the main thread: then the caller owns the signals
        before = None
    try:
        yield
    except (CliError, MissingPackageError) as error:
        plain(stderr(), str(error), "[bold red]error:[/] ")
        raise typer.Exit(BAD_INPUT) from None
    except BrokenPipeError as error:  # typer would exit silently
        raise OSError(errno.EIO, error.strerror) from None
    except KeyboardInterrupt:
        plain(stderr(), "stopped; nothing was written")
        raise typer.Exit(INTERRUPTED) from None
    finally:
        if before is not None:
            signal.signal(signal.SIGTERM, before)


@contextmanager
def notes() -> Iterator[None]:
    """Shows the package's warnings at the end, once each, as notes on stderr instead of Python's own format."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", RuntimeWarning)
        yield
    for text in dict.fromkeys(str(warning.message) for warning in caught if warning.category is RuntimeWarning):
        plain(stderr(), text, "[bold yellow]note:[/] ")


@contextmanager
def progress() -> Iterator[Progress]:
    """A transient progress display on stderr; silent where stderr is no terminal."""
    console = stderr()
    parts = (SpinnerColumn(), "{task.description}", BarColumn(bar_width=30), TaskProgressColumn(), TimeElapsedColumn())
    with Progress(*parts, console=console, transient=True, disable=not console.is_terminal) as bar:
        yield bar


def stage(bar: Progress, description: str, total: float | None = None) -> TaskID:
    """Replaces what the display shows; a stage without a total pulses."""
    for task in bar.task_ids:
        bar.remove_task(task)
    return bar.add_task(description, total=total)
