"""Marks that many tests share."""

from __future__ import annotations

import functools

import pytest

#: A case of parametrize() that `make check` runs and `make test` leaves out, where others have most of its power.
slow = functools.partial(pytest.param, marks=pytest.mark.slow)
