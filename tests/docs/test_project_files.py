"""Files for those who carry on: the citation, the map, the templates, the hooks at a commit."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import yaml

import bipace_kernels as bk

ROOT = Path(__file__).resolve().parents[2]


def test_the_citation():
    """Required by Citation File Format 1.2.0; version and licence are the project's."""
    found = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert found["cff-version"] == "1.2.0"
    assert found["version"] == bk.__version__
    assert f'license = "{found["license"]}"' in (ROOT / "pyproject.toml").read_text()
    assert found["title"].startswith("bipace-kernels") and found["message"] and found["type"] == "software"
    assert [author["name"] for author in found["authors"]] == ["The bipace-kernels developers"]
    paper = found["preferred-citation"]
    assert paper["title"].startswith("BiPACE: Bisimulation-Guided Policy Optimization")
    assert len(paper["authors"]) == 7
    assert all(author["family-names"] and author["given-names"] for author in paper["authors"])


@pytest.mark.parametrize("page", ["docs/development.md", "CONTRIBUTING.md", ".github/pull_request_template.md"])
def test_paths_and_commands_that_are_named_exist(page):
    text = (ROOT / page).read_text()
    paths = set(re.findall(r"`((?:bipace_kernels|csrc|tests|docs|bench|integrations|cmake|\.ci)/[\w./-]*)`", text))
    paths |= set(re.findall(r"`(\w[\w.]*\.(?:toml|yml|py|txt|md|cff))`", text)) - {
        "stages.py",
        "estimators.py",
        "partitions.py",
    }
    for path in paths:
        assert (ROOT / path).exists() or (ROOT / "bipace_kernels" / path).exists(), f"{page} names {path}"
    targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    for words in re.findall(r"`make ([\w -]+)`", text):
        assert set(words.split()) <= targets, f"{page} names make {words}"


def test_every_stage_and_backend_is_on_the_map():
    from bipace_kernels.backends.dispatch import STAGES

    text = (ROOT / "docs/development.md").read_text()
    for name in (
        "pipeline.py",
        "backends/contract.py",
        "estimators/table.py",
        "estimators/partitions.py",
        "backends/dispatch.py",
    ):
        assert f"bipace_kernels/{name}`" in text
    for backend in ("reference", "cpu", "triton", "cuda"):
        assert f"{backend}/" in text
    folders = {path.name for path in (ROOT / "tests").iterdir() if path.is_dir() and any(path.glob("*.py"))}
    for folder in folders:
        assert f"`tests/{folder}/`" in text, f"no word on tests/{folder}/"
    assert len(STAGES) >= 9
    for stage in STAGES:
        assert (ROOT / f"bipace_kernels/backends/reference/{stage}.py").is_file(), stage


def test_the_hooks_at_a_commit_are_those_of_make_lint():
    (repo,) = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())["repos"]
    assert repo["repo"] == "local"
    lint = re.search(r"^lint:.*\n((?:\t.*\n)+)", (ROOT / "Makefile").read_text(), re.MULTILINE)[1]
    used = {re.match(r"\.venv/bin/([\w-]+)", hook["entry"])[1] for hook in repo["hooks"]}
    assert used == set(re.findall(r"\$\(VENV\)/bin/([\w-]+)", lint))


@pytest.mark.parametrize("name", ["bug", "feature"])
def test_the_forms_for_issues(name):
    """What GitHub asks of a form: a name, a description, fields with labels and distinct ids."""
    form = yaml.safe_load((ROOT / f".github/ISSUE_TEMPLATE/{name}.yml").read_text())
    assert form["name"] and form["description"]
    ids = [field["id"] for field in form["body"]]
    assert len(ids) == len(set(ids)) >= 4
    for field in form["body"]:
        assert field["type"] in ("markdown", "textarea", "input", "dropdown", "checkboxes")
        assert field["attributes"]["label"]
