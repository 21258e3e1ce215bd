"""What tests of several trainers start from."""

import os
import re

import pytest
from paths import ROOT


@pytest.fixture
def installed(tmp_path):
    """A folder that tells of this package's entry points, as an installation does."""
    declared = re.search(r'\[project\.entry-points\."verl\.plugins"\]\n(.*)\n', (ROOT / "pyproject.toml").read_text())
    info = tmp_path / "bipace_kernels-0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: bipace-kernels\nVersion: 0\n")
    (info / "entry_points.txt").write_text("[verl.plugins]\n" + declared[1].replace('"', "") + "\n")
    return {**os.environ, "PYTHONPATH": f"{tmp_path}{os.pathsep}{ROOT}", "OMP_NUM_THREADS": "1"}
