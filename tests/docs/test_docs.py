"""Documentation that cannot drift: every public name documented, defaults equal signatures, README's code runs."""

from __future__ import annotations

import dataclasses
import inspect
import re
from pathlib import Path

import pytest
import torch

import bipace_kernels as bk
from bipace_kernels import _ops

ROOT = Path(__file__).resolve().parents[2]
API = (ROOT / "docs/api.md").read_text()
README = (ROOT / "README.md").read_text()
GPU = (ROOT / "docs/gpu.md").read_text()
PAGES = sorted([ROOT / "README.md", *ROOT.glob("docs/*.md"), *ROOT.glob("examples/**/*.md"), ROOT / "bench/README.md"])
FUNCTIONS = [name for name in bk.__all__ if inspect.isfunction(getattr(bk, name))]


@pytest.mark.parametrize("name", bk.__all__)
def test_every_public_name_is_documented(name):
    assert re.search(rf"`?{re.escape(name)}\b", API), f"{name} is missing in docs/api.md"
    thing = getattr(bk, name)
    if inspect.isclass(thing) or inspect.isfunction(thing):
        assert inspect.getdoc(thing), f"{name} has no docstring"


@pytest.mark.parametrize("name", FUNCTIONS)
def test_documented_signatures_equal_the_code(name):
    """The call printed in docs/api.md, with its defaults, and every argument named in the docstring."""
    call = re.search(rf"```python\s+bk\.{name}\((.*?)\)\s+```", API, re.DOTALL)
    assert call, f"no signature of {name} in docs/api.md"
    parts, star = [], False
    for p in inspect.signature(getattr(bk, name)).parameters.values():
        if p.kind is p.KEYWORD_ONLY and not star:
            parts.append("*")
            star = True
        parts.append(p.name + ("" if p.default is p.empty else f"={p.default!r}"))
    assert re.sub(r"\s+", " ", call[1]) == ", ".join(parts)


def test_the_documented_controller_equals_the_code():
    documented = re.search(r"`EpsilonController\((.*?)\)`:", API, re.DOTALL)[1]
    parts = [f"{p.name}={p.default!r}" for p in inspect.signature(bk.EpsilonController).parameters.values()]
    assert documented == ", ".join([parts[0], "*", *parts[1:]])
    text = inspect.getdoc(bk.EpsilonController)
    for part in parts:
        assert re.search(rf"^{part.partition('=')[0]}\s{{2,}}", text, re.MULTILINE), part


@pytest.mark.parametrize("name", ["ActorHidden", "Ngram", "Identity", "Sentence", "named"])
def test_documented_embedders_equal_the_code(name):
    documented = re.search(rf"^\* `{name}\((.*?)\)`:", API, re.MULTILINE)[1]
    parts = inspect.signature(getattr(bk.embedders, name)).parameters.values()
    assert re.findall(r"(\w+)(?:=([^,)]+))?", documented) == [
        (p.name, "" if p.default is p.empty else repr(p.default)) for p in parts
    ]


def test_arguments_of_advantage_are_all_explained():
    text = inspect.getdoc(bk.advantage)
    for name in inspect.signature(bk.advantage).parameters:
        assert re.search(rf"^{name}\s{{2,}}", text, re.MULTILINE), name


def test_config_table_equals_the_dataclass():
    section = API.partition("\n## Config\n")[2].partition("\n## ")[0]
    table = dict(re.findall(r"^\| `(\w+)` \| `(.+?)` \|", section, re.MULTILINE))
    assert table == {f.name: repr(f.default) for f in dataclasses.fields(bk.Config)}
    text = inspect.getdoc(bk.Config)
    for f in dataclasses.fields(bk.Config):
        assert re.search(rf"^{f.name}\s{{2,}}", text, re.MULTILINE), f.name


def test_environment_variables_are_read_in_one_file_and_documented():
    used = set()
    for path in (ROOT / "bipace_kernels").rglob("*.py"):
        names = set(re.findall(r"environ.*?\"(BIPACE_\w+)\"", path.read_text()))
        assert not names or path.name == "_env.py", path
        used |= names
    assert used
    for name in used:
        assert name in API


def code_of(page: str) -> list[str]:
    """Python of a page; what needs a trainer is run by tests/integrations."""
    return [
        block
        for block in re.findall(r"```python\n(.*?)```", page, re.DOTALL)
        if "bipace_kernels.integrations" not in block
    ]


@pytest.mark.parametrize("block", range(len(code_of(README))))
def test_readmes_code_runs(block):
    exec(compile(code_of(README)[block], f"README.md, block {block}", "exec"), {"__name__": "readme"})


def test_readmes_lines_fit_a_page():
    """No line over 120 characters but in tables, pictures and the citation."""
    page = re.sub(r"```bibtex.*?```", "", README, flags=re.DOTALL)
    assert [line for line in page.splitlines() if len(line) > 120 and not line.startswith(("|", "!["))] == []


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_links_lead_somewhere(page):
    for target in re.findall(r"\]\((?!https?:)([^)#]+)", page.read_text()):
        assert (page.parent / target).exists(), f"{page.name} links to {target}"
    for target in re.findall(r"(?<![\w/])docs/\w+\.md", page.read_text()):
        assert (ROOT / target).exists(), f"{page.name} names {target}"


@pytest.mark.slow
def test_the_page_on_gpus_runs_anywhere():
    code = "\n".join(re.findall(r"```python\n(.*?)```", GPU, re.DOTALL))
    exec(compile(code, "docs/gpu.md", "exec"), {"__name__": "page"})


@pytest.mark.parametrize("page", ["docs/estimator.md", "docs/gae.md"])
def test_pages_that_need_nothing_else_run(page):
    code = "\n".join(re.findall(r"```python\n(.*?)```", (ROOT / page).read_text(), re.DOTALL))
    assert code
    exec(compile(code, page, "exec"), {"__name__": "page"})


def test_every_op_is_listed_with_its_arguments():
    listed = dict(re.findall(r"^\| `(\w+)\((.*?)\)` \|", GPU, re.MULTILINE))
    assert listed.pop("advantage") == "..."
    assert sorted(listed) == sorted(_ops.STAGE_OPS)
    for name, arguments in listed.items():
        schema = getattr(torch.ops.bipace, name).default._schema.arguments
        positional = [a.name for a in schema if not a.kwarg_only]
        keywords = [a.name for a in schema if a.kwarg_only]
        assert arguments == ", ".join(positional + (["*", *keywords] if keywords else [])), name
