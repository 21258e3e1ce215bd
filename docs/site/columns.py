"""Griffe: the package's docstrings, plain text with aligned columns, as Markdown.

    fingerprint   [N, D] float32   any length
                  normalised here

becomes a row of a table; indented lines stay a block of code; everything else is prose.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from html import escape
from textwrap import dedent
from typing import Any

import griffe

# A short first column, two blanks, the rest.  Two blanks follow a full stop in prose too.
ROW = re.compile(r"^(?P<name>[^\s|](?:[^\S\n]?\S){0,30}?)(?P<gap>\s{2,})(?P<rest>\S.*)$")
CODE = re.compile(r"\bbk\.|^(from|import|with) ", re.MULTILINE)
BACKTICKS = re.compile(r"(`[^`]*`)")


class Columns(griffe.Extension):
    """Rewrites each docstring where it was found."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        if obj.docstring is not None:
            obj.docstring.value = as_markdown(obj.docstring.value)


def as_markdown(text: str) -> str:
    """The docstring in Markdown."""
    return "\n\n".join(_blocks(text.splitlines()))


def _blocks(lines: list[str]) -> Iterator[str]:
    while lines:
        if not lines[0].strip():
            lines = lines[1:]
            continue
        for take in (_table, _code, _prose):
            block, count = take(lines)
            if count:
                yield block
                lines = lines[count:]
                break


def _table(lines: list[str]) -> tuple[str, int]:
    rows: list[list[str]] = []
    column = count = 0
    for line in lines:
        row = ROW.match(line)
        if row and row["name"][-1] not in ".:;,?!" and (not rows or row.start("rest") == column):
            column = row.start("rest")
            rows.append([row["name"], row["rest"]])
        elif rows and line.strip() and len(line) - len(line.lstrip()) == column:
            rows[-1][1] += " " + line.strip()
        else:
            break
        count += 1
    cells = [f"<tr><td><code>{escape(name)}</code></td><td>{_cell(rest)}</td></tr>" for name, rest in rows]
    return '<table class="columns"><tbody>\n' + "\n".join(cells) + "\n</tbody></table>", count


def _cell(text: str) -> str:
    """A type, three blanks, the meaning; or only the meaning."""
    parts = [re.sub(r"`([^`]*)`", r"<code>\1</code>", escape(part, quote=False)) for part in re.split(r"\s{3,}", text)]
    kind = f"<code>{parts.pop(0)}</code> " if len(parts) > 1 and "<code>" not in parts[0] else ""
    return kind + " · ".join(parts)


def _code(lines: list[str]) -> tuple[str, int]:
    count = 0
    while count < len(lines) and (lines[count].startswith("    ") or not lines[count].strip()):
        count += 1
    block = dedent("\n".join(lines[:count])).strip("\n")
    return f"```{'python' if CODE.search(block) else 'text'}\n{block}\n```", count


def _prose(lines: list[str]) -> tuple[str, int]:
    """Up to a blank line, an indented one or a table; `<` is no tag."""
    count = 1
    while count < len(lines) and lines[count].strip() and not _table(lines[count:])[1]:
        count += 1
    if all(line.startswith("|") for line in lines[:count]):
        return "```text\n" + "\n".join(lines[:count]) + "\n```", count
    pieces = BACKTICKS.split("\n".join(lines[:count]))
    return "".join(piece if piece.startswith("`") else piece.replace("<", "&lt;") for piece in pieces), count
