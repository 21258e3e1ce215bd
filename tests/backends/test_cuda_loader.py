"""Whether CUDA kernels run here: every reason is one sentence, and the kernels' architectures are compared."""

import sys
from types import SimpleNamespace

import pytest
import torch
from refusals import refused

import bipace_kernels as bk
from bipace_kernels.backends import cuda_loader, native_loader
from bipace_kernels.backends.cuda import _launch, gram

BUILT = "sm_80 sm_90 sm_120 compute_120"


def compiled(driver=13000, runtime=12090, built=BUILT):
    return SimpleNamespace(versions=lambda: (driver, runtime), built=built)


def a_torch(*capabilities, cuda="13.0"):
    """A torch with GPUs."""
    gpus = SimpleNamespace(
        is_available=lambda: bool(capabilities), device_count=lambda: len(capabilities),
        get_device_capability=lambda index: capabilities[index],
    )  # fmt: skip
    return SimpleNamespace(__version__="2.13.0+x", version=SimpleNamespace(cuda=cuda), cuda=gpus)


@pytest.mark.parametrize(
    ("capability", "runs"),
    [((8, 0), True), ((8, 6), True), ((9, 0), True), ((12, 0), True), ((12, 1), True), ((13, 0), True),
     ((7, 5), False), ((10, 0), False)],
)  # fmt: skip
def test_machine_code_runs_on_its_major_version_and_ptx_on_what_is_newer(capability, runs):
    assert cuda_loader.serves(BUILT, capability) == runs


def test_a_letter_binds_to_one_architecture():
    assert cuda_loader.serves("sm_90a", (9, 0)) and not cuda_loader.serves("sm_100a compute_100a", (10, 3))


@pytest.mark.parametrize(("module", "torch_", "said"), [
    (compiled(driver=0), a_torch((9, 0)), "no NVIDIA driver was found; the kernels need one for CUDA 12.0"),
    (compiled(driver=11080), a_torch((9, 0)), "too old: it must be for CUDA 12.0 or newer, found 11.8"),
    (compiled(), a_torch(cuda=None), "torch 2.13.0+x is a build without CUDA"),
    (compiled(), a_torch(), "torch sees no GPU"),
    (compiled(), a_torch((7, 5)), f"the GPUs here are sm_75, and this build has kernels for {BUILT}"),
    (compiled(driver=12000), a_torch((9, 0)), ""),  # older than the runtime, of its major version
    (compiled(), a_torch((7, 5), (9, 0)), ""),  # one of two GPUs is enough
    (None, a_torch((8, 6)), ""),  # CuPy compiles for what is there
    (None, a_torch((7, 5), (9, 0)), ""),
    (None, a_torch((7, 5)), "the GPUs here are sm_75, and the kernels need sm_80 or newer"),
    (None, a_torch(), "torch sees no GPU"),
])  # fmt: skip
def test_every_cause_is_told(module, torch_, said):
    why = cuda_loader._why_not(module, torch_)
    assert said in why and bool(said) == bool(why)


@pytest.fixture
def fresh():
    """Nothing of what was found before is kept."""
    caches = (cuda_loader.module, cuda_loader.reason, cuda_loader.detail, _launch._of_this_installation)
    for cached in caches:
        cached.cache_clear()
    yield
    for cached in caches:
        cached.cache_clear()


@pytest.mark.parametrize("decision", ["no CUDA kernels: nvcc was not found when this was built", ""])
def test_a_build_without_kernels_says_why_and_what_to_do(fresh, monkeypatch, decision):
    monkeypatch.setitem(sys.modules, "bipace_kernels._cuda", None)
    monkeypatch.setattr(cuda_loader, "has_cupy", lambda: False)
    monkeypatch.setattr(native_loader, "cuda_decision", lambda: decision)
    status = bk.backends()["cuda"]
    assert not status.available and (decision or "bipace_kernels._cuda does not load") in status.reason
    assert "pip install cupy" in status.reason and "BIPACE_CUDA=1" in status.reason
    assert (decision or "does not load") in status.detail
    refused("no CuPy", _launch.provider, error=RuntimeError)


def a_cupy(version="14.2.0", error=None):
    def get_version():
        if error is not None:
            raise error
        return 13, 0

    return SimpleNamespace(__version__=version, cuda=SimpleNamespace(nvrtc=SimpleNamespace(getVersion=get_version)))


@pytest.mark.parametrize(
    ("cupy", "said"),
    [
        (a_cupy(), "torch sees no GPU"),
        (a_cupy("12.3.0"), "CuPy 12.3.0, which compiles them otherwise, is older than 13"),
        (a_cupy(error=OSError("libnvrtc.so.13: no such file")), "does not work here: OSError: libnvrtc.so.13"),
        (None, "does not work here: ModuleNotFoundError"),
    ],
    ids=["works", "old", "without NVRTC", "broken"],
)
def test_a_cupy_that_cannot_compile_is_told_so_that_auto_takes_triton(fresh, monkeypatch, cupy, said):
    monkeypatch.setitem(sys.modules, "bipace_kernels._cuda", None)
    monkeypatch.setattr(cuda_loader, "has_cupy", lambda: True)
    monkeypatch.setattr(cuda_loader, "_why_not", lambda compiled, torch: "torch sees no GPU")
    monkeypatch.setitem(sys.modules, "cupy", cupy)
    assert said in cuda_loader.reason()


def test_the_detail_names_architectures_and_drivers(fresh, monkeypatch):
    monkeypatch.setitem(sys.modules, "bipace_kernels._cuda", compiled(driver=12040))
    assert bk.backends()["cuda"].detail == (f"built with CUDA 12.9 for {BUILT}; driver needed: CUDA 12.0, found: 12.4")


def test_groups_of_warps_are_for_code_that_has_them(monkeypatch):
    of_9, of_8 = ("sm_80 sm_90a", (9, 0), True), ("sm_80 sm_90a compute_120", (8, 0), False)
    for built, capability, has in (of_9, of_8, ("sm_90 compute_90", (9, 0), False)):
        gram._capability.cache_clear()
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device, of=capability: of)
        monkeypatch.setattr(_launch, "stand_in", SimpleNamespace(built=built))
        assert gram.warpgroups(torch.device("cuda", 0)) == has
    gram._capability.cache_clear()
