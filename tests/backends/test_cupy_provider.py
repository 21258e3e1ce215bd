"""Kernels compiled by CuPy: what CuPy and NVRTC are asked for, as a stand-in writes it down; on a GPU themselves."""

import struct
from contextlib import nullcontext
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from batches import CONFIGS, assert_same, make_batch

import bipace_kernels as bk
from bipace_kernels.backends.cuda import _cupy, _launch

STREAM = 0x5EED


class Function:
    """Stands in for cupy.RawKernel."""

    def __init__(self, cupy, path, name):
        self.cupy, self.path, self.name = cupy, path, name
        self.allowed = []

    def __setattr__(self, name, value):
        if name == "max_dynamic_shared_size_bytes":
            self.allowed.append(value)
        super().__setattr__(name, value)

    def __call__(self, grid, block, args, *, shared_mem):
        if self.cupy.fails:
            raise RuntimeError("CUDA_ERROR_ILLEGAL_ADDRESS: an illegal memory access was encountered")
        self.cupy.launched.append((self.name, grid, block, args, shared_mem, self.cupy.stream, self))


class Nvrtc:
    """Stands in for cupy.cuda.nvrtc."""

    def __init__(self):
        self.compiled = []

    getVersion = staticmethod(lambda: (13, 0))
    destroyProgram = staticmethod(lambda program: None)

    def createProgram(self, text, name, headers, names):
        return text, name

    def compileProgram(self, program, options):
        self.compiled.append((program[1], options))

    def getCUBIN(self, program):
        return b"machine code of " + program[1].encode()


class CuPy:
    """Stands in for the module cupy."""

    def __init__(self, newest):
        self.launched, self.fails, self.stream = [], False, None
        newer = {"from_external": lambda s: self.on(s.__cuda_stream__()[1])}
        streams = SimpleNamespace(**newer if newest else {})
        self.cuda = SimpleNamespace(nvrtc=Nvrtc(), Stream=streams, Device=nullcontext, ExternalStream=self.on)

    def on(self, address, index=None):
        self.stream = address
        return nullcontext()

    def RawModule(self, *, path):
        return SimpleNamespace(get_function=lambda name: Function(self, path, name))


@pytest.fixture(params=[True, False], ids=["cupy14", "cupy13"])
def cupy(request, monkeypatch, tmp_path):
    found = CuPy(request.param)
    monkeypatch.setenv("CUPY_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(_cupy.importlib, "import_module", lambda name: {"cupy": found}[name])
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index: (9, 0))
    return found


def launch(provider, shared=0):
    words = struct.pack("<qqqdq", 5, 0, 7, 0.5, 1)
    provider.launch("step_mean", 4, 2, 32, shared, words, 1, STREAM)
    return words


def test_a_launch_passes_the_struct_by_value_on_torchs_stream(cupy):
    words = launch(_cupy.CuPy())
    ((name, grid, block, args, shared, stream, function),) = cupy.launched
    assert (name, grid, block, shared, stream) == ("step_mean", (4, 2), (32,), 0, STREAM)
    (struct_,) = args
    # CuPy passes a NumPy array by value if it has one element, whatever that is (cupy/cuda/function.pyx, _pointer).
    assert isinstance(struct_, np.ndarray) and struct_.size == 1 and struct_.itemsize == len(words)
    assert struct_.tobytes() == words and function.allowed == []


def test_a_source_is_compiled_once_by_the_flags_of_the_build_and_kept(cupy, monkeypatch):
    launch(provider := _cupy.CuPy())
    launch(provider)
    launch(_cupy.CuPy())
    ((name, options),) = cupy.cuda.nvrtc.compiled
    assert name == "values.cu"
    # Without --fmad=false the compiler fuses, and bits differ from those of the emulator.
    assert _launch.flags() == ("-std=c++17", "-DNDEBUG", "--fmad=false")
    assert options == (*_launch.flags(), "-arch=sm_90a", f"-I{_launch.SOURCES}")
    function = cupy.launched[0][-1]
    with open(function.path, "rb") as file:
        assert file.read() == b"machine code of values.cu"
    assert cupy.launched[1][-1] is function
    launch(_cupy.CuPy())
    monkeypatch.setattr(_cupy, "_texts", lambda: ("another",))
    launch(_cupy.CuPy())
    assert len(cupy.cuda.nvrtc.compiled) == 2


def test_shared_memory_is_asked_for_once_up_to_what_the_gpu_says(cupy):
    provider = _cupy.CuPy()
    for shared in (49152, 60000, 50000, 60000, 70000):
        launch(provider, shared)
    assert cupy.launched[0][-1].allowed == [60000, 70000]
    gpu = {"MaxSharedMemoryPerBlock": 49152, "MaxSharedMemoryPerBlockOptin": 232448}
    cupy.cuda.Device = lambda index: SimpleNamespace(attributes={3: gpu}[index])
    assert _cupy.CuPy().shared_memory(3) == 232448


def test_errors_name_the_kernel_and_its_shape(cupy):
    provider = _cupy.CuPy()
    cupy.fails = True
    with pytest.raises(RuntimeError, match=r"step_mean of 4 × 2 blocks of 32 threads, 64 bytes.*ILLEGAL_ADDRESS"):
        launch(provider, 64)


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["bipace", "hgpo"])
def test_on_a_gpu(name, monkeypatch, tmp_path):
    """From the sources to the advantages, without nvcc; a second process would find the machine code in the cache."""
    pytest.importorskip("cupy", reason="needs CuPy")
    monkeypatch.setenv("CUPY_CACHE_DIR", str(tmp_path))
    given = {n: torch.as_tensor(value).cuda() if n in ("rewards", "fingerprint", "action_key") else value
             for n, value in make_batch(3).arguments().items()}  # fmt: skip
    monkeypatch.setattr(_launch, "stand_in", None)
    compiled = bk.advantage(config=CONFIGS[name], backend="cuda", **given)
    provider = _cupy.CuPy()
    monkeypatch.setattr(_launch, "stand_in", provider)
    for stream in (torch.cuda.current_stream(), torch.cuda.Stream()):
        torch.cuda.synchronize()
        with torch.cuda.stream(stream):
            got = bk.advantage(config=CONFIGS[name], backend="cuda", **given)
        torch.cuda.synchronize()
        assert_same(got, compiled)
    assert {path.suffix for path in tmp_path.iterdir()} == {".cubin"}
    with pytest.raises(RuntimeError, match="CUDA kernel step_mean of 1 × 1 blocks of 4096 threads"):
        provider.launch("step_mean", 1, 1, 4096, 0, bytes(104), 0, 0)
