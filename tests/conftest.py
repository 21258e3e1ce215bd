"""Fixtures: every test of behaviour runs on each backend; skips print their reason."""

from __future__ import annotations

import os

import pytest
import torch
from hypothesis import HealthCheck, settings

import bipace_kernels as bk

settings.register_profile("default", max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("long", max_examples=600, deadline=None, suppress_health_check=list(HealthCheck))
settings.load_profile(os.environ.get("BIPACE_HYPOTHESIS", "default"))


@pytest.fixture(params=["reference", "cpu"])
def backend(request: pytest.FixtureRequest) -> str:
    status = bk.backends()[request.param]
    if not status.available:
        pytest.fail(f"backend {status}: the tests need it")
    return str(request.param)


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("gpu") is not None and not torch.cuda.is_available():
        why = "needs a GPU: torch sees none here"
        if os.environ.get("BIPACE_REQUIRE") == "gpu":
            pytest.fail(f"{why}, and BIPACE_REQUIRE=gpu asks for it")
        pytest.skip(why)
