"""What runs where the tensors are: on a GPU (marked `gpu`), or on CPU tensors by Triton's interpreter.

`TRITON_INTERPRET=1 pytest tests/on_device` runs the kernels on the CPU; the variable has to stand in the environment
before Triton is imported, so that is a run of its own.  Without it these tests need a GPU and skip where there is none;
BIPACE_REQUIRE=gpu makes the skip a failure.
"""

from __future__ import annotations

import os

import pytest
import torch

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if not INTERPRETED:
        for item in items:
            if "on_device" in item.path.parts:
                item.add_marker(pytest.mark.gpu)


@pytest.fixture(scope="session")
def device() -> torch.device:
    """Where the tensors of these tests live."""
    return torch.device("cpu") if INTERPRETED else torch.device("cuda")
