"""Launches of the compiled CUDA kernels go to the GPU of the tensors, whichever one torch or the runtime inside has current."""

from __future__ import annotations

import contextlib
import ctypes
import shutil
import subprocess
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from bipace_kernels.cuda import _provider

ROOT = Path(__file__).resolve().parents[2]
NVCC = shutil.which("nvcc") or shutil.which("nvcc", path="/usr/local/cuda/bin")


@pytest.fixture(scope="module")
def launch_one(tmp_path_factory):
    """csrc/cuda/launch.cpp on a runtime that writes down what it is asked (tests/native/cudart.cpp)."""
    if NVCC is None:
        pytest.skip("needs nvcc, which is neither on the PATH nor in /usr/local/cuda/bin")
    library = tmp_path_factory.mktemp("launch") / "launch.so"
    argv = [NVCC, "-std=c++17", "-shared", "-cudart=none", "-Xcompiler=-fPIC,-Wall,-Wextra,-Werror", f"-I{ROOT / 'csrc'}",
            '-DBIPACE_CUDA_BUILT="none"', str(ROOT / "csrc/cuda/launch.cpp"), str(ROOT / "tests/native/cudart.cpp"),
            "-o", str(library)]  # fmt: skip
    subprocess.run(argv, check=True, timeout=120)
    function = ctypes.CDLL(str(library)).launch_one
    function.argtypes, function.restype = (ctypes.c_int, ctypes.c_longlong, ctypes.c_size_t), ctypes.c_char_p
    return lambda device, shared=0, stream=7: function(device, shared, stream).decode()


def test_the_runtime_is_set_to_the_gpu_that_was_asked_for(launch_one):
    assert launch_one(0) == "launch on 0, stream 7; "
    assert launch_one(2, stream=9) == "set 2; launch on 2, stream 9; "
    assert launch_one(2) == "launch on 2, stream 7; "
    assert launch_one(0) == "set 0; launch on 0, stream 7; "


def test_shared_memory_is_allowed_on_each_gpu(launch_one):
    assert launch_one(0, 60000) == "allow 60000 on 0; launch on 0, stream 7; "
    assert launch_one(1, 60000) == "set 1; allow 60000 on 1; launch on 1, stream 7; "
    assert launch_one(0, 60000) == "set 0; launch on 0, stream 7; "
    assert launch_one(1, 50000) == "set 1; launch on 1, stream 7; "
    assert launch_one(0) == "set 0; launch on 0, stream 7; "


def test_a_gpu_that_is_not_there_is_an_error_of_the_launch(launch_one):
    told = launch_one(8)
    assert told.startswith("set 8; CUDA kernel one of 2 × 1 blocks of 32 threads, 0 bytes of shared memory")
    assert told.endswith("words (cudaErrorInvalidDevice)")
    assert launch_one(0) == "launch on 0, stream 7; "


@pytest.mark.parametrize(
    ("device", "said"),
    [("cuda:1", ["launch 1 77"]), ("cuda", ["launch 1 77"]), ("cuda:3", ["torch 3", "launch 3 77", "torch back"])],
)
def test_the_wheel_names_the_gpu_and_tells_torch_of_another(device, said, monkeypatch):
    """torch's current GPU is 1."""
    told = []

    @contextlib.contextmanager
    def made_current(index):
        told.append(f"torch {index}")
        yield
        told.append("torch back")

    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: SimpleNamespace(cuda_stream=77))
    monkeypatch.setattr(torch.cuda, "device", made_current)

    def launch(name, grid_x, grid_y, threads, shared, words, index, stream):
        assert (name, grid_x, grid_y, threads, shared, words) == ("one", 4, 2, 32, 100, b"words")
        told.append(f"launch {index} {stream}")

    wheel = _provider.Wheel(SimpleNamespace(launch=launch))
    wheel.launch("one", (4, 2), 32, 100, b"words", torch.device(device))
    assert told == said
