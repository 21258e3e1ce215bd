"""Triton where it compiles, and what the benchmarks know of its kernels; else tests that import this are skipped."""

import benchmarks
import pytest

triton = pytest.importorskip("triton")
tl = triton.language
if triton.knobs.runtime.interpret:
    pytest.skip("TRITON_INTERPRET=1: kernels are interpreted, not compiled", allow_module_level=True)
resources = benchmarks.module("resources")
