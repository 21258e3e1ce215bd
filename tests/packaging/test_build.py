"""Building in a tree where something was built before, and where no compiler is."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
TOOLS = ("cmake", "ninja")


def build(folder: Path, path: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PATH": path, "BIPACE_BUILD_DIR": str(folder / "build"), "BIPACE_CUDA": "0"}
    command = [
        sys.executable,
        "setup.py",
        "-q",
        "build_ext",
        "--build-lib",
        str(folder / "lib"),
        "--build-temp",
        str(folder),
    ]
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)


@pytest.mark.slow
def test_an_earlier_builds_tools_may_be_gone(tmp_path):
    """Like pip: each build has cmake and ninja in its own environment, which is removed afterwards."""
    missing = [name for name in (*TOOLS, "c++") if shutil.which(name) is None]
    if missing:
        pytest.skip(f"needs {' and '.join(missing)} on the PATH (pip install cmake ninja)")
    for name in ("first", "second"):
        tools = tmp_path / name
        tools.mkdir()
        for tool in TOOLS:
            (tools / tool).symlink_to(Path(shutil.which(tool)).resolve())
        done = build(tmp_path, f"{tools}{os.pathsep}{os.environ['PATH']}")
        assert done.returncode == 0, done.stderr
        assert list((tmp_path / "lib/bipace_kernels").glob("_native*.so"))
        shutil.rmtree(tools)


def test_without_a_compiler_one_sentence_says_what_to_install(tmp_path):
    done = build(tmp_path, str(tmp_path))
    assert done.returncode != 0
    assert (
        done.stderr.strip()
        .splitlines()[-1]
        .startswith("bipace_kernels is built by a C++17 compiler, and none was found")
    )
    assert "Traceback" not in done.stderr
