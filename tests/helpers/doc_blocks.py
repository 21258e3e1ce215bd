"""Code blocks of the documentation.  `<!-- fragment -->` on the line before marks one that no test runs."""

import inspect
import re
from dataclasses import dataclass
from typing import Any

from paths import ROOT

FRAGMENT = "<!-- fragment -->"


@dataclass(frozen=True)
class Block:
    page: str
    line: int
    language: str
    code: str
    fragment: bool


def signature(function: Any) -> str:
    """Its arguments with their defaults, as a page writes a call."""
    parts, keywords = [], False
    for p in inspect.signature(function).parameters.values():
        if p.kind is p.KEYWORD_ONLY and not keywords:
            parts.append("*")
            keywords = True
        parts.append(p.name + ("" if p.default is p.empty else f"={p.default!r}"))
    return ", ".join(parts)


def blocks(page: str, *languages: str) -> list[Block]:
    """The blocks of a page in these languages, in order."""
    found, text = [], (ROOT / page).read_text(encoding="utf-8")
    for match in re.finditer(r"^( *)```(\w+)\n(.*?)^\1```$", text, re.DOTALL | re.MULTILINE):
        before = text[: match.start()].rstrip("\n").rpartition("\n")[2]
        if match[2] in languages:
            line = text.count("\n", 0, match.start()) + 1
            found.append(Block(page, line, match[2], match[3], before.strip() == FRAGMENT))
    return found


def run(page: str, names: dict[str, object], *, replacing: dict[str, str] | None = None) -> dict[str, object]:
    """Runs the Python of a page as pasted, block after block in one namespace, which begins with `names`.

    replacing   what a test cannot have, such as a large model, and what takes its place
    """
    for block in blocks(page, "python"):
        if not block.fragment:
            code = block.code
            for written, used in (replacing or {}).items():
                code = code.replace(written, used)
            exec(compile("\n" * block.line + code, page, "exec"), names)
    return names
