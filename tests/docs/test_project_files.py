"""What the pages for developers name is there: paths, commands, stages, folders."""

import re

import pytest
from paths import ROOT


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


def test_every_module_and_folder_of_tests_is_on_the_map():
    """A module stands in the row of its room; those of a backend are named after their stages."""
    text = (ROOT / "docs/development.md").read_text()
    rooms = [ROOT / "bipace_kernels", ROOT / "integrations", *(ROOT / "bipace_kernels").glob("*/")]
    for room in rooms:
        modules = {path.stem.strip("_") for path in room.glob("*.py")} - {"init", "main", "version"}
        if modules:
            row = re.search(rf"^\| `{room.relative_to(ROOT)}/` \| (.*) \|$", text, re.MULTILINE)
            assert row, f"no row for {room.name}/"
            assert modules <= set(re.findall(r"\w+", row[1])), modules - set(re.findall(r"\w+", row[1]))
    for folder in (ROOT / "tests").iterdir():
        assert not any(folder.glob("*.py")) or f"`tests/{folder.name}/`" in text, f"no word on tests/{folder.name}/"
