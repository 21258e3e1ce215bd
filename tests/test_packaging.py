"""The wheel: what is inside, what it needs, and that it works where neither a compiler nor the sources are."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> Path:
    """`pip wheel .` under build isolation, from a copy of what git tracks: the build sees neither torch nor this folder."""
    source = tmp_path_factory.mktemp("source")
    tracked = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, check=True).stdout.decode()
    for name in filter(None, tracked.split("\0")):
        if (ROOT / name).is_file():
            (source / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, source / name)
    out = tmp_path_factory.mktemp("wheel")
    done = subprocess.run(
        [sys.executable, "-m", "pip", "wheel", "--no-deps", "-q", "-w", str(out), str(source)],
        capture_output=True, text=True, check=False, env={**os.environ, "PYTHONNOUSERSITE": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    (path,) = out.glob("*.whl")
    return path


def test_wheel_holds_our_packages_and_nothing_else(wheel):
    names = zipfile.ZipFile(wheel).namelist()
    tops = {name.split("/")[0] for name in names}
    assert len(tops) == 2
    assert tops - {"bipace_kernels"} == {"-".join(wheel.name.split("-")[:2]) + ".dist-info"}
    assert "bipace_kernels/py.typed" in names
    assert "bipace_kernels/integrations/__init__.py" in names
    assert "bipace_kernels/bench/__main__.py" in names
    assert "bipace_kernels/bench/chain.cu" in names
    assert "bipace_kernels/triton_kernels/__init__.py" in names
    assert sum(name.endswith(".so") for name in names) == 1
    sources = {str(p.relative_to(ROOT)) for p in (ROOT / "bipace_kernels").rglob("*.py")}
    assert sources <= set(names)
    assert wheel.stat().st_size < 5e6


def test_wheel_metadata(wheel):
    archive = zipfile.ZipFile(wheel)
    metadata = archive.read(next(n for n in archive.namelist() if n.endswith("METADATA"))).decode()
    assert "Requires-Dist: torch>=2.6" in metadata
    assert "Requires-Python: >=3.10" in metadata
    triton = [line for line in metadata.splitlines() if line.startswith("Requires-Dist: triton")]
    assert triton and all("extra ==" in line for line in triton), "nobody on the CPU is made to install Triton"
    assert "License-Expression: Apache-2.0" in metadata
    entry_points = archive.read(next(n for n in archive.namelist() if n.endswith("entry_points.txt"))).decode()
    assert "bipace = bipace_kernels.cli:main" in entry_points


def test_compiled_module_needs_only_the_c_library(wheel, tmp_path):
    """No libtorch, libcudart, libgomp or libstdc++: nothing that another torch, CUDA or compiler could break."""
    archive = zipfile.ZipFile(wheel)
    name = next(n for n in archive.namelist() if n.endswith(".so"))
    archive.extract(name, tmp_path)
    dump = subprocess.run(["readelf", "-d", str(tmp_path / name)], capture_output=True, text=True, check=True).stdout
    needed = set(re.findall(r"NEEDED.*\[(.+?)\]", dump))
    assert needed <= {"libc.so.6", "libm.so.6", "libpthread.so.0", "libdl.so.2", "ld-linux-x86-64.so.2"}, needed
    assert "RPATH" not in dump
    assert "RUNPATH" not in dump


def test_wheel_works_without_compiler_or_sources(wheel, tmp_path):
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(tmp_path)
    code = """
import bipace_kernels as bk, bipace_kernels.integrations, bipace_kernels.bench
assert bk.backends()["cpu"].available, bk.backends()["cpu"]
r = bk.advantage([0] * 4, [0, 0, 1, 1], [0.0, 1.0, 0.0, 0.0], observation=list("abab"), config=bk.Config.gigpo(), backend="cpu")
assert r.cluster.tolist() == [0, 1, 0, 1]
print(bk.__file__)
"""
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=False,
        env={"PATH": "", "PYTHONPATH": str(tmp_path), "HOME": str(tmp_path)},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip().startswith(str(tmp_path))


def test_build_files_name_no_torch_and_no_network():
    setup = (ROOT / "setup.py").read_text()
    assert not re.search(r"import torch|urllib|requests|http", setup)
    requires = re.search(r"requires = \[(.*?)\]", (ROOT / "pyproject.toml").read_text())[1]
    assert "torch" not in requires
    for path in [*ROOT.glob("csrc/**/*.h"), *ROOT.glob("csrc/**/*.cpp"), ROOT / "CMakeLists.txt"]:
        text = path.read_text()
        assert not re.search(r"#include <(torch|ATen|c10)|march=native|fopenmp", text), path


def test_native_code_below_bindings_is_free_of_python():
    for folder in ("common", "cpu"):
        for path in (ROOT / "csrc" / folder).iterdir():
            assert not re.search(r"#include <(pybind11|Python)", path.read_text()), path
