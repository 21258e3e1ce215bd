"""Fixtures: every test of behaviour runs on each backend; skips print their reason."""

from __future__ import annotations

import importlib.util
import os
import sys
from types import ModuleType
from unittest.mock import MagicMock

import pytest
import torch

import bipace_kernels as bk

if importlib.util.find_spec("hypothesis") is None:
    # A machine with a GPU may have torch, pytest and little else.  What draws its data is skipped, the rest runs.
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

# Trainers live in an environment of their own (`make test-integrations`), for they pin what else may be installed.
_MISSING = [name for name in ("trl", "verl") if importlib.util.find_spec(name) is None]
_NO_PROGRAM = [name for name in ("typer", "rich", "pyarrow") if importlib.util.find_spec(name) is None]
collect_ignore_glob = ["integrations"] * bool(_MISSING) + ["test_cli_*.py", "test_epsilon.py"] * bool(_NO_PROGRAM)


def pytest_report_header() -> list[str]:
    left_out = (("tests/integrations", _MISSING), ("tests of the command line and of ε", _NO_PROGRAM))
    return [f"{what} are left out: no {' and no '.join(missing)} here" for what, missing in left_out if missing]


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
