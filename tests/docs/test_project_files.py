"""The map of the modules names each of them."""

import re

from paths import ROOT


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
