"""Fixtures: every test of behaviour runs on each backend; skips print their reason.

Files named test_device_*.py (of one backend: test_device_triton_*.py, test_device_cuda_*.py) need a GPU, or
TRITON_INTERPRET=1 for Triton's interpreter, or BIPACE_TEST_BACKEND=cuda BIPACE_EMULATOR=1 for the emulator of CUDA on
the CPU, threads in a random order (BIPACE_EMULATOR_SANITIZE=1: under sanitizers); docs/development.md says more.
Without any they are skipped; BIPACE_REQUIRE=gpu makes the skip a failure.
"""

import importlib.util
import os
import sys
from types import ModuleType
from unittest.mock import MagicMock

import pytest
import torch
from ragged import BACKEND, ON_CPU

import bipace_kernels as bk
from bipace_kernels.support import warnings

# Assertions in shared helpers are rewritten too, for full messages.
pytest.register_assert_rewrite("clustering", "cli_runs", "distributed_ranks")

if importlib.util.find_spec("hypothesis") is None:
    # A machine with a GPU may have torch, pytest and little else.  Tests that need hypothesis are skipped.
    settings = MagicMock(return_value=lambda test: test)
    HealthCheck = MagicMock()
    absent = ModuleType("hypothesis")
    absent.given = lambda *_, **__: pytest.mark.skip(reason="hypothesis is not installed")
    absent.settings, absent.HealthCheck, absent.strategies = settings, HealthCheck, MagicMock()
    sys.modules |= {"hypothesis": absent, "hypothesis.strategies": absent.strategies}
else:
    from hypothesis import HealthCheck, settings

settings.register_profile("default", max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("long", max_examples=600, deadline=None, suppress_health_check=list(HealthCheck))
settings.load_profile(os.environ.get("BIPACE_HYPOTHESIS", "default"))

# Trainers have a separate environment (`make test-integrations`), since they pin other packages.
_MISSING = [name for name in ("trl", "verl") if importlib.util.find_spec(name) is None]
_NO_PROGRAM = [name for name in ("typer", "rich", "pyarrow") if importlib.util.find_spec(name) is None]
collect_ignore_glob = ["integrations"] * bool(_MISSING)
collect_ignore_glob += ["cli", "packaging/test_optional_packages.py"] * bool(_NO_PROGRAM)


# Files of stages that CUDA leaves to Triton: its run tests them.
ONLY_TRITON = ("combine", "critic", "episode", "ngrams", "numbering", "observations", "returns")
OF_TRITON = [f"test_device_{name}.py" for name in ONLY_TRITON]


def pytest_report_header():
    left_out = (("tests/integrations", _MISSING), ("tests of the command line", _NO_PROGRAM))
    lines = [f"{what} are left out: no {' and no '.join(missing)} here" for what, missing in left_out if missing]
    return lines + [f"left out, as CUDA leaves these stages to Triton: {', '.join(OF_TRITON)}"] * (BACKEND == "cuda")


def pytest_ignore_collect(collection_path):
    name = collection_path.name
    other = {"triton": "cuda", "cuda": "triton"}[BACKEND]
    left_to_triton = BACKEND == "cuda" and name in OF_TRITON
    return True if left_to_triton or name.startswith(f"test_device_{other}_") else None


def pytest_collection_modifyitems(items):
    for item in items:
        if not ON_CPU and _on_device(item):
            item.add_marker(pytest.mark.gpu)


def _on_device(item):
    return item.path.name.startswith("test_device_")


def pytest_runtest_setup(item):
    if item.get_closest_marker("gpu") is not None and not torch.cuda.is_available():
        why = "needs a GPU: torch sees none here"
        if os.environ.get("BIPACE_REQUIRE") == "gpu":
            pytest.fail(f"{why}, and BIPACE_REQUIRE=gpu asks for it")
        pytest.skip(why)


@pytest.fixture(autouse=True)
def _warned_of_nothing(monkeypatch):
    """Each test gets the warnings that a process gets once."""
    monkeypatch.setattr(warnings, "_given", set())


@pytest.fixture(params=["reference", "cpu"])
def backend(request):
    status = bk.backends()[request.param]
    if not status.available:
        pytest.fail(f"backend {status}: the tests need it")
    return str(request.param)


@pytest.fixture(params=["baseline", "avx2", "avx512"])
def isa(request):
    """Each instruction set for which the clustering kernels are compiled and which the machine has."""
    from bipace_kernels.backends import native_loader

    native = native_loader.load()
    before = native.isa()
    native.set_isa(request.param)
    if native.isa() != request.param:
        native.set_isa(before)
        pytest.skip(f"this machine has no {request.param}")
    yield request.param
    native.set_isa("avx512")
    if before != "avx512":
        native.set_isa(before)


@pytest.fixture
def one_thread():
    """For tiny models: on a busy machine several threads are much slower than one."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def stand_ins(monkeypatch):
    """backend="triton" runs the masked stages of the CPU, which detect reads of tensors."""
    import stand_ins

    return stand_ins.install(monkeypatch)


@pytest.fixture(scope="session")
def device():
    """The device of the tensors of test_device_*.py."""
    return torch.device("cpu" if ON_CPU else "cuda")


if BACKEND == "triton" and ON_CPU:

    @pytest.fixture(autouse=True)
    def _fusion_is_stated(monkeypatch):
        """Each launch says enable_fp_fusion, whose default differs between versions of Triton."""
        from triton.runtime.interpreter import GridExecutor

        run = GridExecutor.__call__

        def launch(self, *args, **options):
            assert isinstance(options.get("enable_fp_fusion"), bool), f"{self.fn.__name__}: enable_fp_fusion is missing"
            run(self, *args, **options)

        monkeypatch.setattr(GridExecutor, "__call__", launch)


if BACKEND == "cuda" and ON_CPU:
    from cuda_emulator import of_checkout, run_on_cpu

    @pytest.fixture(scope="session")
    def emulator():
        return of_checkout(sanitize=os.environ.get("BIPACE_EMULATOR_SANITIZE") == "1")

    @pytest.fixture(autouse=True)
    def _by_the_emulator(request, monkeypatch):
        if _on_device(request.node):
            run_on_cpu(request.getfixturevalue("emulator"), monkeypatch.setattr)
