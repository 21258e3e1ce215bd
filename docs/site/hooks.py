"""MkDocs: the repository's pages at their own places, and public names by the name that users write."""

from __future__ import annotations

import importlib
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files
from mkdocs.utils import get_relative_url

ROOT = Path(__file__).resolve().parents[2]
SOURCES = (
    "*.md", "LICENSE", "CITATION.cff", "docs/**/*.md", "docs/images/*.png", "docs/site/*.css", "docs/site/*.js",
    "examples/**/*.md", "examples/**/*.png", "bench/*.md", "bench/truth/*.md", "bench/results/**/*.md",
    "bench/results/**/*.png",
    "integrations/*.md", "csrc/*.md",
)  # fmt: skip
PUBLIC = re.compile(r"^::: bk\.([\w.]+)$", re.MULTILINE)
PAGE = re.compile(r"\bdocs/\w+\.md\b")


def on_files(files: Files, config: Any) -> Files:
    """The repository's pages and their pictures, in place of what `docs_dir` holds."""
    for file in [file for file in files if file.src_dir == config.docs_dir]:
        files.remove(file)
    for path in sorted({path for form in SOURCES for path in ROOT.glob(form)}):
        files.append(File(str(path.relative_to(ROOT)), str(ROOT), config.site_dir, config.use_directory_urls))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """`::: bk.advantage` is the object of that name, wherever the package defines it.  Tables of results and the
    changelog are not searched: they would hide the pages that explain."""
    if page.file.src_uri.startswith("CHANGELOG") or "/results/" in page.file.src_uri:
        page.meta["search"] = {"exclude": True}
    elif page.file.src_uri in ("docs/estimator.md", "docs/leaderboard.md"):
        page.meta["search"] = {"boost": 2}

    def defined(match: re.Match[str]) -> str:
        name = match[1]
        thing: Any = importlib.import_module("bipace_kernels")
        for part in name.split("."):
            thing = getattr(thing, part)
        place = f"{thing.__module__}.{thing.__qualname__}"
        return f'::: {place}\n    options:\n      heading: "bk.{name}"\n      toc_label: "{name}"'

    return PUBLIC.sub(defined, markdown)


def on_page_content(html: str, page: Any, files: Files, **_: Any) -> str:
    """A page that prose names, as docstrings do ("docs/estimator.md, 3.2"), is a link to it."""

    def link(match: re.Match[str]) -> str:
        file = files.get_file_from_path(match[0])
        if file is None:
            raise ValueError(f"{page.file.src_uri} names {match[0]}, which is no page")
        return f'<a href="{get_relative_url(file.url, page.url)}">{match[0]}</a>'

    pieces = re.split(r"(<a\b.*?</a>|<pre\b.*?</pre>|<[^>]*>)", html, flags=re.DOTALL)
    return "".join(piece if piece.startswith("<") else PAGE.sub(link, piece) for piece in pieces)
