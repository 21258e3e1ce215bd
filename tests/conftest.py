"""Fixtures: every test of behaviour runs on each backend; skips print their reason."""

from __future__ import annotations

import importlib.util
import os

import pytest
import torch
from hypothesis import HealthCheck, settings

import bipace_kernels as bk

settings.register_profile("default", max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("long", max_examples=600, deadline=None, suppress_health_check=list(HealthCheck))
settings.load_profile(os.environ.get("BIPACE_HYPOTHESIS", "default"))

# Trainers live in an environment of their own (`make test-integrations`), for they pin what else may be installed.
_MISSING = [name for name in ("trl", "verl") if importlib.util.find_spec(name) is None]
collect_ignore = ["integrations"] if _MISSING else []


def pytest_report_header() -> list[str]:
    return [f"tests/integrations are left out: no {' and no '.join(_MISSING)} here"] if _MISSING else []


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
