"""The emulator itself: what the intrinsics give, and that faults are found which no kernel of the package has
(test_device_cuda_races.py leaves out their barriers and waits)."""

import os
import platform
import shutil
import subprocess

import pytest
import torch
from cuda_emulator import EMULATOR, Emulator, EmulatorError, build
from paths import python
from ragged import unaligned
from refusals import refused

from bipace_kernels.backends.cuda import _launch

N = 128

pytestmark = pytest.mark.skipif(platform.machine() != "x86_64", reason="the emulator is for x86-64 alone")
PLANTED = _launch.read_arguments(EMULATOR / "planted.h")


@pytest.fixture(scope="module")
def library(tmp_path_factory):
    return build([EMULATOR / "planted.cu"], tmp_path_factory.mktemp("emulator"))


@pytest.fixture(params=[1, 2])
def emulator(request, library):
    found = Emulator.load(library)
    found.seed = request.param
    return found


def run(emulator, kernel, threads, *, bytes_shared=0, grid=(1, 1), **arguments):
    words = _launch.pack(kernel, PLANTED[kernel], arguments)
    emulator.launch(kernel, *grid, threads, bytes_shared, words)


@pytest.mark.parametrize(("kernel", "said"), [("leave_early", "wait for ever"), ("part_ways", "others at")])
def test_threads_that_miss_each_other_are_an_error(emulator, kernel, said):
    if kernel == "leave_early":
        run(emulator, kernel, N, fault=False)
    refused(said, run, emulator, kernel, N, error=EmulatorError, fault=True)


def test_collectives(emulator):
    values = torch.randperm(32, generator=torch.Generator().manual_seed(0)).int() - 16
    out, least = torch.empty((8, 32), dtype=torch.int32), torch.tensor([-1])
    run(emulator, "collectives", 32, values=values, out=out, least=least)
    lane = torch.arange(32)
    assert torch.equal(out[0], values[(lane + 5) % 32]) and torch.equal(out[1], values[lane ^ 3])
    assert torch.equal(out[2], values[torch.where(lane < 2, lane, lane - 2)]) and (out[3] == values.max()).all()
    bits = sum(1 << i for i, v in enumerate(values.tolist()) if v > 0)
    assert (out[4] == torch.tensor(bits - (1 << 32) * (bits >> 31))).all()
    before = [[j for j in range(i) if values[j] > 0] for i in range(32)]
    assert out[5].tolist() == [len(js) for js in before]
    assert out[6].tolist() == [min(js, default=-1) for js in before]
    assert out[7].tolist() == [max(js, default=-1) for js in before]
    assert least.tolist() == [0]  # −1 is the greatest of unsigned numbers


def test_every_float16_and_launches_and_writes_that_cannot_be_are_errors(emulator):
    values, out = torch.arange(-(2**15), 2**15, dtype=torch.int16).view(torch.float16), torch.empty(2**16)
    run(emulator, "widen", 32, values=values, out=out, grid=(2**11, 1))
    torch.testing.assert_close(out, values.float(), rtol=0, atol=0, equal_nan=True)
    refused("no kernel nobody", emulator.launch, "nobody", 1, 1, 32, 0, b"", error=EmulatorError)
    refused("takes 1 arguments, got 2", emulator.launch, "leave_early", 1, 1, N, 0, bytes(16), error=EmulatorError)
    refused("blocks of 48 threads", run, emulator, "leave_early", 48, error=EmulatorError, fault=0)
    arguments = {"bytes_shared": 4 * N, "out": torch.empty(N, dtype=torch.int32), "shared": True}
    run(emulator, "write_beyond", N, **arguments, beyond=0)
    refused("beyond its shared memory", run, emulator, "write_beyond", N, error=EmulatorError, **arguments, beyond=1)


@pytest.mark.slow
@pytest.mark.parametrize("shared", [False, True])
def test_a_write_out_of_bounds_is_caught(tmp_path, shared):
    library = build([EMULATOR / "planted.cu"], tmp_path, sanitize=True)
    compiler = os.environ.get("CXX") or shutil.which("g++")
    find = [[compiler, f"-print-file-name={name}"] for name in ("libasan.so", "libstdc++.so.6")]
    preload = " ".join(subprocess.check_output(command, text=True).strip() for command in find)
    code = f"""
import ctypes, struct, sys
library = ctypes.CDLL({str(library)!r})
libc = ctypes.CDLL(None)
libc.malloc.restype = ctypes.c_void_p
at = libc.malloc(ctypes.c_size_t({4 * N}))
error = ctypes.create_string_buffer(200)
words = struct.pack("<qqq", at, {int(shared)}, int(sys.argv[1]))
launch = library.bipace_emulator_launch
long, text = ctypes.c_int64, ctypes.c_char_p
launch.argtypes = [text, long, long, ctypes.c_int, long, text, long, ctypes.c_uint64, text, long]
print(launch(b"write_beyond", 1, 1, {N}, {4 * N}, words, 3, 0, error, 200))
"""
    env = {"LD_PRELOAD": preload, "ASAN_OPTIONS": "detect_leaks=0"}
    assert python(code, "0", **env) == "0"
    refused("heap-buffer-overflow", python, code, "1", error=AssertionError, **env)


def multiplied_together(emulator, dtype, fault=0):
    generator = torch.Generator().manual_seed(2)
    x, y = (torch.randn(n, 64, generator=generator).to(dtype) for n in (64, 128))
    out, x = torch.zeros(64, 128), unaligned(x) if fault == 5 else x
    bf16 = dtype == torch.bfloat16
    run(emulator, "multiply_together", N, x=x, y=y, out=out, bf16=bf16, fault=fault, bytes_shared=192 * 128)
    return out, 2 * (x.double() @ y.double().T)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_products_of_a_group_of_warps(emulator, dtype):
    out, exact = multiplied_together(emulator, dtype)
    torch.testing.assert_close(out.double(), exact, rtol=1e-5, atol=1e-4)


def test_faults_around_products_are_caught(emulator):
    wrong = {1: "do not see what was", 3: "written to before it was done", 4: "have not begun", 5: "not aligned to 16"}
    for fault, said in wrong.items():
        refused(said, multiplied_together, emulator, torch.bfloat16, fault, error=EmulatorError)
    # Sums that are not waited for are nothing.
    out, _ = multiplied_together(emulator, torch.bfloat16, 2)
    assert out.isnan().all()
