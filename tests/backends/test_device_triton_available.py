"""The Triton backend is there, and says so."""

from __future__ import annotations

import bipace_kernels as bk


def test_triton_is_available(device):
    status = bk.backends()["triton"]
    assert status.available, status
