"""Triton where it compiles, and what the benchmarks know of its kernels; else tests that import this are skipped."""

import benchmarks
import pytest

triton = pytest.importorskip("triton")
tl = triton.language
if triton.knobs.runtime.interpret:
    pytest.skip("TRITON_INTERPRET=1: kernels are interpreted, not compiled", allow_module_level=True)
resources = benchmarks.module("resources")
LAUNCHES = resources.launches()
FOR_SM_90 = [launch for launch in LAUNCHES if launch.runs_on(90)]


def name_of(value):
    """A configuration or an architecture in the ids of tests."""
    if isinstance(value, int):
        return f"sm_{value}"
    return f"{value.module}.{value.name}-{LAUNCHES.index(value) if value in LAUNCHES else 'strided'}"
