"""Marks that many tests share."""

import functools
from collections.abc import Callable

import pytest
from ragged import BACKEND, ON_CPU

#: A case of parametrize() that `make check` runs and `make test` leaves out, where others have most of its power.
slow = functools.partial(pytest.param, marks=pytest.mark.slow)

_INTERPRETED = BACKEND == "triton" and ON_CPU
#: Such a case of parametrize().
slow_case_interpreted = slow if _INTERPRETED else pytest.param


def slow_interpreted(test: Callable[..., None]) -> Callable[..., None]:
    """A test that takes long in Triton's interpreter: there `make check` runs it; elsewhere `make test` does."""
    return pytest.mark.slow(test) if _INTERPRETED else test
