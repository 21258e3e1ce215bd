"""The wheel: what is inside, what it needs, and that it works where neither a compiler nor the sources are."""

import re
import shutil
import sys
import zipfile

import benchmarks
import pytest
from paths import ROOT, copy_tracked, program

resources = benchmarks.module("resources")
CUDA_CMAKE = ROOT / "cmake/cuda.cmake"
C_LIBRARY = {"libc.so.6", "libm.so.6", "libpthread.so.0", "libdl.so.2", "librt.so.1", "ld-linux-x86-64.so.2"}


def build_wheel(folder, **environment):
    """`pip wheel .` from a copy of what git tracks, in isolation: the build sees neither torch nor this folder."""
    source, out = folder / "source", folder / "wheel"
    copy_tracked(source)
    command = [sys.executable, "-m", "pip", "wheel", "--no-deps", "-q", "-w", out, source]
    program(*command, env={"PYTHONNOUSERSITE": "1", **environment})
    (path,) = out.glob("*.whl")
    return path


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    """Without CUDA kernels, whatever this machine has."""
    return build_wheel(tmp_path_factory.mktemp("plain"), BIPACE_CUDA="0")


@pytest.fixture(scope="module")
def cuda_wheel(tmp_path_factory):
    """With CUDA kernels of a release."""
    if shutil.which("nvcc") is None:
        pytest.skip("needs nvcc, which is not on the PATH here")
    return build_wheel(tmp_path_factory.mktemp("cuda"), BIPACE_CUDA="1")


@pytest.mark.slow
def test_wheel_holds_our_packages_and_nothing_else(wheel):
    names = zipfile.ZipFile(wheel).namelist()
    tops = {name.split("/")[0] for name in names}
    assert len(tops) == 3
    assert tops - {"bipace_kernels", "bipace_cli"} == {"-".join(wheel.name.split("-")[:2]) + ".dist-info"}
    assert "bipace_kernels/py.typed" in names and "bipace_kernels/integrations/__init__.py" in names
    bench = {name.removeprefix("bipace_kernels/bench/") for name in names if name.startswith("bipace_kernels/bench/")}
    forms = ("gpu*.py", "truth*.py", "readme_chart.py")
    of_checkouts = {path.name for form in forms for path in ROOT.glob(f"bench/{form}")}
    assert "gpu.py" in of_checkouts
    assert bench == {path.name for path in ROOT.glob("bench/*.py")} - of_checkouts, "no results, data or GPU scripts"
    assert "bipace_kernels/backends/triton/__init__.py" in names
    assert sum(name.endswith(".so") for name in names) == 1
    kernels = {f"bipace_kernels/{p.relative_to(ROOT)}" for p in ROOT.glob("csrc/c*/*") if p.suffix in (".cu", ".txt")}
    assert kernels | {"bipace_kernels/csrc/common/hd.h", "bipace_kernels/csrc/cuda/intrinsics.h"} <= set(names)
    # bipace_kernels/cli/program installs as bipace_cli, and only so.
    sources = {str(p.relative_to(ROOT)) for p in (ROOT / "bipace_kernels").rglob("*.py")}
    program = {source for source in sources if source.startswith("bipace_kernels/cli/program/")}
    assert {source.replace("bipace_kernels/cli/program", "bipace_cli") for source in program} <= set(names)
    assert not program & set(names)
    sources -= program
    adapters = [*ROOT.glob("integrations/**/*.py"), *ROOT.glob("integrations/**/*.yaml")]
    sources |= {f"bipace_kernels/{p.relative_to(ROOT)}" for p in adapters}
    sources |= {str(p.relative_to(ROOT)) for p in (ROOT / "bipace_kernels/cli/templates").iterdir()}
    assert sources <= set(names) and wheel.stat().st_size < 5e6


@pytest.mark.slow
def test_wheel_metadata(wheel):
    archive = zipfile.ZipFile(wheel)
    metadata = archive.read(next(n for n in archive.namelist() if n.endswith("METADATA"))).decode()
    requires = re.findall(r"^Requires-Dist: (.*)$", metadata, re.MULTILINE)
    assert {line for line in requires if "extra ==" not in line} == {"torch>=2.6", "numpy>=1.26"}
    assert "Requires-Python: >=3.10" in metadata
    triton = [line for line in metadata.splitlines() if line.startswith("Requires-Dist: triton")]
    assert triton and all("extra ==" in line for line in triton), "nobody on the CPU is made to install Triton"
    assert "License-Expression: Apache-2.0" in metadata
    entry_points = archive.read(next(n for n in archive.namelist() if n.endswith("entry_points.txt"))).decode()
    assert "bipace = bipace_cli:main" in entry_points


def unpack(wheel, folder):
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(folder)


def needed(wheel, folder):
    """Shared libraries that each compiled module of a wheel asks for, which is unpacked into the folder."""
    unpack(wheel, folder)
    found = {}
    for path in sorted(folder.glob("bipace_kernels/*.so")):
        dump = program("readelf", "-d", path).stdout
        assert "RPATH" not in dump and "RUNPATH" not in dump
        found[path.name.partition(".")[0]] = set(re.findall(r"NEEDED.*\[(.+?)\]", dump))
    return found


@pytest.mark.slow
def test_compiled_module_needs_only_the_c_library(wheel, tmp_path):
    """No libtorch, libcudart, libgomp or libstdc++: nothing that another torch, CUDA or compiler could break."""
    modules = needed(wheel, tmp_path)
    assert list(modules) == ["_native"]
    assert modules["_native"] <= C_LIBRARY, modules


@pytest.mark.slow
def test_a_wheel_with_cuda_kernels(cuda_wheel, tmp_path):
    """Small, no libcudart and no driver in what it needs, machine code for every GPU of a release."""
    assert cuda_wheel.stat().st_size < 25e6
    modules = needed(cuda_wheel, tmp_path)
    assert list(modules) == ["_cuda", "_native"]
    for name, libraries in modules.items():
        assert libraries <= C_LIBRARY, (name, libraries)
    (path,) = tmp_path.glob("bipace_kernels/_cuda*.so")
    command = [resources.cuobjdump(), "--list-elf", "--list-ptx", str(path)]
    archs = program(*command)
    assert set(re.findall(r"\.sm_(\d+\w?)\.cubin", archs.stdout)) == {"80", "90a", "100", "120"}
    assert set(re.findall(r"\.(?:sm|compute)_(\d+\w?)\.ptx", archs.stdout)) == {"120"}


def from_wheel(wheel, folder, code):
    """What Python code prints that sees the wheel's files alone, and no other program."""
    unpack(wheel, folder)
    env = {"PATH": "", "PYTHONPATH": str(folder), "HOME": str(folder)}
    return program(sys.executable, "-c", code, cwd=folder, env=env).stdout


@pytest.mark.slow
def test_a_wheel_with_cuda_kernels_serves_where_no_driver_is(cuda_wheel, tmp_path):
    code = """
import sys, bipace_kernels as bk
assert "bipace_kernels._cuda" not in sys.modules
rewards, gigpo = [0.0, 1.0, 0.0, 0.0], bk.Config.gigpo()
r = bk.advantage([0] * 4, [0, 0, 1, 1], rewards, observation=list("abab"), config=gigpo, backend="cpu")
assert r.cluster.tolist() == [0, 1, 0, 1]
status = bk.backends()["cuda"]
assert "sm_80 sm_90a sm_100 sm_120 compute_120" in status.detail and "driver needed: CUDA 1" in status.detail, status
from bipace_kernels import _cuda
if _cuda.versions()[0] == 0:
    assert status.reason.startswith("no NVIDIA driver was found"), status
    try:
        bk.advantage([0] * 2, [0, 1], [0.0, 1.0], observation=list("aa"), config=bk.Config.gigpo(), backend="cuda")
    except bk.BackendError as error:
        assert "backend='cuda' cannot run here: no NVIDIA driver was found" in str(error)
    else:
        raise AssertionError("it ran")
"""
    from_wheel(cuda_wheel, tmp_path, code)


def cuda_cmake(folder, before, *options):
    """cmake/cuda.cmake by itself, with no language, behind some lines."""
    if shutil.which("cmake") is None:
        pytest.skip("needs cmake, which is not on the PATH here")
    lines = ("cmake_minimum_required(VERSION 3.22)", "project(p LANGUAGES NONE)", before, f"include({CUDA_CMAKE})", "")
    (folder / "CMakeLists.txt").write_text("\n".join(lines))
    build = folder / f"build{len(list(folder.iterdir()))}"
    command = ["cmake", "-S", str(folder), "-B", str(build), "-G", "Unix Makefiles", "-DCMAKE_MAKE_PROGRAM=true"]
    return program(*command, *options, status=None)


def test_cuda_that_is_asked_for_and_missing_fails_the_build(tmp_path):
    """Only the decision: no language, nothing is compiled, and programs are searched where there are none."""

    def configure(wish):
        nowhere = [f"-DCMAKE_FIND_ROOT_PATH={tmp_path}", "-DCMAKE_FIND_ROOT_PATH_MODE_PROGRAM=ONLY"]
        return cuda_cmake(tmp_path, "", f"-DBIPACE_CUDA={wish}", *nowhere)

    done = configure("1")
    assert done.returncode != 0 and "BIPACE_CUDA=1 needs nvcc" in " ".join(done.stderr.split())
    done = configure("auto")
    assert done.returncode == 0, done.stderr
    assert "no CUDA kernels: nvcc was not found when this was built (BIPACE_CUDA=auto)" in done.stdout
    assert configure("0").returncode == 0
    assert "BIPACE_CUDA must be auto, 0 or 1, got 'yes'" in configure("yes").stderr


def test_architectures_with_a_letter_are_options_of_nvcc(tmp_path):
    """Every CMake since 3.22 takes such a list; 3.24 refuses one with a letter.  CUDA itself is not looked for."""
    said = 'message(FATAL_ERROR "<${CMAKE_CUDA_ARCHITECTURES}> <${bipace_cuda_lettered}>")'
    macro = f"macro(enable_language language)\n{said}\nendmacro()"
    lettered = "--generate-code=arch=compute_90a,code=sm_90a"
    for wish, architectures, options in (
        ("90", "90-virtual", lettered),
        ("90a;120;80", "80-real;120-real;120-virtual", lettered),
        ("80", "80-real;80-virtual", ""),
    ):
        done = cuda_cmake(tmp_path, macro, "-DBIPACE_CUDA=1", f"-DBIPACE_CUDA_ARCHS={wish}", "-DBIPACE_NVCC=nvcc")
        found = re.search(r"<(.*?)>\s+<(.*?)>", done.stderr)
        assert found and found.groups() == (architectures, options), (wish, done.stderr)


@pytest.mark.slow
def test_wheel_works_without_compiler_or_sources(wheel, tmp_path):
    code = """
import bipace_kernels as bk, bipace_kernels.integrations, bipace_kernels.bench
assert bk.backends()["cpu"].available, bk.backends()["cpu"]
rewards, gigpo = [0.0, 1.0, 0.0, 0.0], bk.Config.gigpo()
r = bk.advantage([0] * 4, [0, 0, 1, 1], rewards, observation=list("abab"), config=gigpo, backend="cpu")
assert r.cluster.tolist() == [0, 1, 0, 1]
print(bk.__file__)
"""
    assert from_wheel(wheel, tmp_path, code).strip().startswith(str(tmp_path))


@pytest.mark.slow
def test_the_program_of_the_wheel(wheel, tmp_path):
    unpack(wheel, tmp_path)

    def bipace(*words):
        code = """
import sys
sys.meta_path[:] = [f for f in sys.meta_path if not getattr(f, "__module__", "").startswith("__editable__")]
from bipace_cli import main
main(sys.argv[1:])
"""  # no editable checkout may replace what the wheel lacks
        env = {"PYTHONPATH": str(tmp_path), "HOME": str(tmp_path)}
        return program(sys.executable, "-c", code, *words, cwd=tmp_path, status=None, env=env)

    done = bipace("bench", "ngrams", "--quick", "--out", str(tmp_path / "out"))
    assert done.returncode == 0, done.stderr
    assert {path.name for path in (tmp_path / "out").iterdir()} == {"bench.json", "bench.md", "texts.png"}
    assert "bipace_kernels" in bipace("info", "--json").stdout
    for words in (("bench", "gpu"), ("truth", "--estimator", "mine.py:KNN")):
        assert (done := bipace(*words)).returncode == 2 and 'pip install -e ".[cli]"' in done.stderr, done.stderr
    assert "there is no" in bipace("bench", "hidden").stderr, "its sample of rollouts stays in the repository"
