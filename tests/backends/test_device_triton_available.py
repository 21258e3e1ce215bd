"""The Triton backend is there, and says so."""

import bipace_kernels as bk


def test_triton_is_available(device):
    status = bk.backends()["triton"]
    assert status.available, status
