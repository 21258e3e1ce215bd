"""Building in a tree where something was built before, whole or in part, and where no compiler is.

Another torch changes nothing: the native code has no torch header.
"""

import os
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest
from paths import ROOT

TOOLS = ("cmake", "ninja")


def build(folder, path):
    environment = {**os.environ, "PATH": path, "BIPACE_BUILD_DIR": str(folder / "build"), "BIPACE_CUDA": "0"}
    folders = ["--build-lib", str(folder / "lib"), "--build-temp", str(folder)]
    command = [sys.executable, "setup.py", "-q", "build_ext", *folders]
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
    (*_, last) = done.stderr.strip().splitlines()
    assert last.startswith("bipace_kernels is built by a C++17 compiler, and none was found")
    assert "Traceback" not in done.stderr


CMAKE = """#!/bin/sh
# In place of cmake: configuring decides that there are no CUDA kernels, building links the module.
build=$(echo "$*" | sed 's/.*\\(-B\\|--build\\) \\([^ ]*\\).*/\\2/')
case "$*" in
  *--build*)
    case "$STOP" in kill) kill -9 $PPID; exit ;; error) exit 1 ;; esac
    ls -R "$build" > "$SEEN"; echo new > "$build/_native$SUFFIX" ;;
  *) touch "$build/CMakeCache.txt"; printf 'OFF\\nno CUDA kernels' > "$build/bipace_cuda.txt" ;;
esac
"""


@pytest.fixture
def stand_in(tmp_path, monkeypatch):
    """Builds in tmp_path/build by a stand-in of cmake; gives the status and what cmake saw there."""
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin/cmake").write_text(CMAKE)
    (tmp_path / "bin/cmake").chmod(0o755)
    monkeypatch.setenv("SUFFIX", sysconfig.get_config_var("EXT_SUFFIX"))
    monkeypatch.setenv("SEEN", str(tmp_path / "seen"))

    def run(stop=""):
        monkeypatch.setenv("STOP", stop)
        done = build(tmp_path, f"{tmp_path / 'bin'}{os.pathsep}{os.environ['PATH']}")
        return done.returncode, (tmp_path / "seen").read_text() if (tmp_path / "seen").exists() else ""

    return run


def test_modules_of_another_python_and_caches_of_another_environment_are_removed(stand_in, tmp_path):
    objects = tmp_path / "build/CMakeFiles/_native.dir"
    objects.mkdir(parents=True)
    (objects / "kept.o").touch()
    (tmp_path / "build/_native.cpython-39-x86_64-linux-gnu.so").write_text("another Python's")
    (tmp_path / "build/CMakeCache.txt").write_text("CMAKE_GENERATOR:INTERNAL=another")
    status, seen = stand_in()
    assert status == 0 and "cpython-39" not in seen and "kept.o" in seen
    assert (tmp_path / "build/CMakeCache.txt").read_text() == ""
    (made,) = (tmp_path / "lib/bipace_kernels").glob("_native*.so")
    assert made.read_text() == "new\n"


def test_a_build_that_was_interrupted_starts_over(stand_in, tmp_path):
    """make takes an object that was half written for a whole one.  Files that CMake did not make stay."""
    assert stand_in(stop="kill")[0] != 0
    objects = tmp_path / "build/CMakeFiles/_native.dir"
    objects.mkdir(parents=True, exist_ok=True)
    (objects / "half.o").write_text("half")
    (tmp_path / "build/yours.txt").touch()
    status, seen = stand_in()
    assert status == 0 and "half.o" not in seen and "yours.txt" in seen
    objects.mkdir(parents=True, exist_ok=True)
    (objects / "whole.o").touch()
    status, seen = stand_in()
    assert status == 0 and "whole.o" in seen, "after a build that ended, objects are kept"
    assert stand_in(stop="error")[0] != 0
    status, seen = stand_in()
    assert status == 0 and "whole.o" in seen, "after an error of the compiler too"


def test_a_wheel_has_no_modules_of_an_earlier_version(tmp_path):
    stale = tmp_path / "bipace_kernels/gone.py"
    stale.parent.mkdir()
    stale.touch()
    command = [sys.executable, "setup.py", "-q", "build_py", "--build-lib", str(tmp_path)]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True)
    assert not stale.exists() and (tmp_path / "bipace_kernels/pipeline.py").exists()
