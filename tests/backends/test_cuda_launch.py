"""Launches of the compiled CUDA kernels go to the GPU of the tensors, whichever torch or the runtime has current."""

import contextlib
import ctypes
import os
import re
import shutil
import struct
import subprocess
from types import SimpleNamespace

import pytest
import torch
from nvrtc import NO_NVCC, NVCC
from paths import ROOT, program
from refusals import refused

from bipace_kernels.backends.cuda import _launch


@pytest.fixture(scope="module")
def launch_one(tmp_path_factory):
    """csrc/cuda/launch.cpp on a runtime that writes down what it is asked (tests/native/cudart.cpp)."""
    if NVCC is None:
        pytest.skip(NO_NVCC)
    library = tmp_path_factory.mktemp("launch") / "launch.so"
    flags = ["-std=c++17", "-shared", "-cudart=none", "-Xcompiler=-fPIC,-Wall,-Wextra,-Werror", "-Icsrc"]
    sources = ["csrc/cuda/launch.cpp", "tests/native/cudart.cpp"]
    argv = [NVCC, *flags, '-DBIPACE_CUDA_BUILT="none"', *sources, "-o", str(library)]
    subprocess.run(argv, check=True, timeout=120, cwd=ROOT)
    function = ctypes.CDLL(str(library)).launch_one
    function.argtypes, function.restype = (ctypes.c_int, ctypes.c_longlong, ctypes.c_size_t), ctypes.c_char_p
    return lambda device, shared=0, stream=7: function(device, shared, stream).decode()


def test_the_runtime_is_set_to_the_gpu_and_shared_memory_allowed_on_each(launch_one):
    assert launch_one(0) == "launch on 0, stream 7; "
    assert launch_one(2, stream=9) == "set 2; launch on 2, stream 9; "
    assert launch_one(2) == "launch on 2, stream 7; " and launch_one(0) == "set 0; launch on 0, stream 7; "
    assert launch_one(0, 60000) == "allow 60000 on 0; launch on 0, stream 7; "
    assert launch_one(1, 60000) == "set 1; allow 60000 on 1; launch on 1, stream 7; "
    assert launch_one(0, 60000) == "set 0; launch on 0, stream 7; "
    assert launch_one(1, 50000) == "set 1; launch on 1, stream 7; "
    assert launch_one(0) == "set 0; launch on 0, stream 7; "
    report = launch_one(8)
    assert report.startswith("set 8; CUDA kernel one of 2 × 1 blocks of 32 threads, 0 bytes of shared memory")
    assert report.endswith("words (cudaErrorInvalidDevice)") and launch_one(0) == "launch on 0, stream 7; "


@pytest.mark.parametrize(
    ("device", "asked"),
    [("cuda:1", ["launch 1 77"]), ("cuda", ["launch 1 77"]), ("cuda:3", ["torch 3", "launch 3 77", "torch back"])],
)
def test_a_launch_names_the_gpu_and_tells_torch_of_another(device, asked, monkeypatch):
    """torch's current GPU is 1."""
    seen = []

    @contextlib.contextmanager
    def made_current(index):
        seen.append(f"torch {index}")
        yield
        seen.append("torch back")

    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: SimpleNamespace(cuda_stream=77))
    monkeypatch.setattr(torch.cuda, "device", made_current)

    def launch(name, grid_x, grid_y, threads, shared, words, index, stream):
        assert (name, grid_x, grid_y, threads, shared) == ("aggregate_depths", 4, 2, 32, 100)
        seen.append(f"launch {index} {stream}")

    monkeypatch.setattr(_launch, "stand_in", SimpleNamespace(launch=launch))
    _launch.launch("aggregate_depths", (4, 2), 32, device=torch.device(device), shared=100, **places())
    _launch.launch("aggregate_depths", (4, 0), 32, device=torch.device(device), shared=100, **places())
    assert seen == asked


def test_fields_are_those_of_the_structs(tmp_path):
    """Names, kinds and places as a compiler has them, no field beside; a kernel takes the struct it is listed under."""
    compiler = os.environ.get("CXX") or shutil.which("g++") or shutil.which("clang++")
    if compiler is None:
        pytest.skip("needs g++ or clang++, and there is neither")
    text = "\n".join(path.read_text() for path in sorted((ROOT / "csrc/cuda").glob("*.cu")))
    taken = dict(re.findall(r"^BIPACE_KERNEL\((\w+), (\w+),", text, re.MULTILINE))
    assert taken.keys() == _launch.kernels().keys()
    tests = {"POINTER": "is_pointer<{}>", "INTEGER": "is_same<{}, int64_t>", "REAL": "is_same<{}, double>"}
    lines = ['#include "cuda/arguments.h"', "#include <cstddef>", "#include <type_traits>"]
    for name, kernel in _launch.kernels().items():
        args = f"bipace::{taken[name]}"
        lines.append(f'static_assert(sizeof({args}) == {8 * len(kernel.fields)}, "{name}");')
        for place, (field, kind) in enumerate(kernel.fields.items()):
            lines.append(f"static_assert(offsetof({args}, {field}) == {8 * place});")
            lines.append(f"static_assert(std::{tests[kind].format(f'decltype({args}().{field})')}::value);")
    path = tmp_path / "fields.cpp"
    path.write_text("\n".join(lines))
    argv = [compiler, "-std=c++17", "-fsyntax-only", f"-I{ROOT / 'csrc'}", str(path)]
    program(*argv)


@pytest.fixture
def launched(monkeypatch):
    """What a stand-in for a provider is asked to launch."""
    found = []
    monkeypatch.setattr(_launch, "stand_in", SimpleNamespace(launch=lambda *args: found.append(args)))
    return found


def places(**changed):
    """Arguments of aggregate_depths, some of them changed; ...: left out."""
    given = dict.fromkeys(["company", "episode_advantage", "advantage", "deepest", "branch"])
    given |= {"term": torch.arange(3), "depth": 2, "m": 5, "delta": 0.5, "alpha": 1.0, **changed}
    return {name: value for name, value in given.items() if value is not ...}


def test_a_launch_packs_its_arguments_by_name(launched):
    given = places()
    for _ in range(2):
        _launch.launch("aggregate_depths", (3, 1), 256, device=torch.device("cpu"), shared=7, **given)
        given = dict(reversed(given.items()))  # their order is no matter
    assert launched[0] == launched[1]
    *shape, words, index, stream = launched[0]
    assert (*shape, index, stream) == ("aggregate_depths", 3, 1, 256, 7, 0, 0)
    assert struct.unpack("<8q2d", words) == (given["term"].data_ptr(), *[0] * 5, 2, 5, 0.5, 1.0)


def test_wrong_arguments_are_named_and_nothing_is_launched(launched):
    for changed, said in (
        ({"m": ...}, r"aggregate_depths: missing arguments \['m'\], unknown ones \[\]"),
        ({"m": ..., "longest": 5}, r"missing arguments \['m'\], unknown ones \['longest'\]"),
        ({"depth": 2.0}, r"aggregate_depths: .*\('depth', 'INTEGER'\): 2\.0"),
        ({"depth": None}, r"aggregate_depths: .*\('depth', 'INTEGER'\): None"),
        ({"branch": 0}, r"aggregate_depths: .*\('branch', 'POINTER'\): 0"),
    ):
        given = {"device": torch.device("cpu"), **places(**changed)}
        refused(said, _launch.launch, "aggregate_depths", 1, 256, error=TypeError, **given)
        assert launched == []
