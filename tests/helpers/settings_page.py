"""The tables of docs/settings.md, from the table of settings.  `python tests/helpers/settings_page.py` writes them."""

import re
from collections.abc import Iterable, Sequence
from typing import Any

from bipace_kernels.integrations._settings import OwnFields, Settings as OfTrainers
from bipace_kernels.integrations.verl_agent.settings import OF_GAE, Settings as OfVerlAgent
from paths import ROOT

import bipace_kernels as bk
from bipace_kernels.settings import Setting, settings_of

PAGE = ROOT / "docs/settings.md"


def table(head: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    lines = [list(head), ["---"] * len(list(head)), *map(list, rows)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def readers(row: Setting) -> str:
    """The configurations that read it."""

    def text(name: str, words: Sequence[str]) -> str:
        if "function" not in words:
            return f"{name} {' or '.join(words)}"
        others = [word for word in settings_of(bk.Config)[name].accepts if word not in words]
        return f"every {name} but {', '.join(others)}"

    return "; or ".join(", ".join(text(*item) for item in one.items()) for one in row.read_by)


def values(row: Setting) -> str:
    text = row.wanted.removeprefix("one of ").removeprefix("a number ")
    return f"{text}, or None" if row.off else text


def default(cls: Any, name: str) -> str:
    return f"`{getattr(cls, name)!r}`" if hasattr(cls, name) else ""


def tables() -> dict[str, str]:
    """The tables by name."""
    own, agents = settings_of(OwnFields), settings_of(OfVerlAgent)
    return {
        "config": table(
            ("setting", "`Config`", "trainers", "values", "what it is", "read by"),
            (
                (f"`{name}`", default(bk.Config, name), default(OfTrainers, name), values(row), row.help, readers(row))
                for name, row in settings_of(bk.Config).items()
            ),
        ),
        "trainers": table(
            ("setting", "default", "values", "what it is"),
            ((f"`{name}`", default(OfTrainers, name), values(row), row.help) for name, row in own.items()),
        ),
        "verl-agent": table(
            ("key", "default", "values", "what it is"),
            (
                *((f"`{name}`", default(OfVerlAgent, name), values(row), row.help) for name, row in agents.items()),
                *((f"`bipace_{name}`", "`None`", values(row), row.help) for name, row in OF_GAE.items()),
            ),
        ),
    }


def written(page: str) -> str:
    """The page with its tables anew."""
    made = tables()
    table_of_page = r"(?s)(<!-- table: (\S+) -->\n).*?(?=\n<!-- end -->)"
    return re.sub(table_of_page, lambda found: found[1] + made[found[2]], page)


if __name__ == "__main__":
    PAGE.write_text(written(PAGE.read_text()))
