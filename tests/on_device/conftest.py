"""What runs where the tensors are: on a GPU (marked `gpu`), or on CPU tensors by a stand-in for one.

`TRITON_INTERPRET=1 pytest tests/on_device` runs the Triton kernels in Triton's interpreter; the variable has to stand in
the environment before Triton is imported, so that is a run of its own.  `BIPACE_TEST_BACKEND=cuda` tests the CUDA kernels
instead, and with BIPACE_TWIN=1 on the CPU: by their twin (tests/native/twin), under several orders of the threads each;
BIPACE_TWIN_SANITIZE=1 compiles it with AddressSanitizer and UndefinedBehaviorSanitizer (tests/native/sanitize.sh).
Without a stand-in these tests need a GPU and skip where there is none; BIPACE_REQUIRE=gpu makes the skip a failure.
"""

from __future__ import annotations

import os

import pytest
import torch
from ragged import BACKEND, ON_CPU

# Each backend has its own way with long groups, and tests of its own for it.  Stages that CUDA leaves to Triton are tested
# as Triton's.
collect_ignore = {
    "triton": ["test_cuda_clusters.py", "test_cuda_gram.py"],
    "cuda": [
        "test_available.py",
        "test_combine.py",
        "test_device_ngrams.py",
        "test_device_pooling.py",
        "test_episode.py",
        "test_long_groups.py",
        "test_numbering.py",
        "test_observations.py",
        "test_returns.py",
        "test_triton_xxh64.py",
    ],
}[BACKEND]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if not ON_CPU:
        for item in items:
            if "on_device" in item.path.parts:
                item.add_marker(pytest.mark.gpu)


@pytest.fixture(scope="session")
def device() -> torch.device:
    """Where the tensors of these tests live."""
    return torch.device("cpu" if ON_CPU else "cuda")


if BACKEND == "cuda" and ON_CPU:
    from cuda_twin import SCHEDULES, Twin, of_checkout, run_on_cpu

    @pytest.fixture(scope="session")
    def twin() -> Twin:
        return of_checkout(sanitize=os.environ.get("BIPACE_TWIN_SANITIZE") == "1")

    def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
        one = getattr(metafunc.module, "ONE_ORDER", False)
        metafunc.parametrize("schedule", ["random"] if one else sorted(SCHEDULES), indirect=True)

    @pytest.fixture(autouse=True)
    def schedule(request: pytest.FixtureRequest, twin: Twin, monkeypatch: pytest.MonkeyPatch) -> str:
        """The order of threads and blocks."""
        twin.schedule, twin.seed = request.param, 7
        run_on_cpu(twin, monkeypatch.setattr)
        return str(request.param)
