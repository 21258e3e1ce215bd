"""Action keys from vectors on a device: the keys that the reference has, without waiting, and advantages by them."""

import numpy as np
import pytest
import torch
from ragged import BACKEND, nothing_waits, states

import bipace_kernels as bk


@pytest.mark.parametrize("epsilon", [0.0, 0.35])
def test_keys_are_those_of_the_reference(device, epsilon):
    """A zero row is an ordinary action at ε = 0, and gets its own key above; a row that is not finite does at any ε."""
    x, group = states()
    x[[3, 9]] = 0
    x[7] = np.nan
    lay = bk.layout(group, group, valid=np.arange(24) != 4)
    want = bk.action_clusters(x, epsilon=epsilon, layout=lay, on_invalid="singleton", backend="reference")
    rows = torch.from_numpy(x).to(device)
    lay.on(rows.device)
    with nothing_waits(device):
        found = bk.action_clusters(rows, epsilon=epsilon, layout=lay, backend=BACKEND)
    assert found.device.type == device.type
    assert torch.equal(found.cpu(), want)
    assert want[4] == -1
    with pytest.raises(ValueError, match=r"action_fingerprint must have finite, non-zero rows, got .* at row 7;"):
        bk.action_clusters(rows, epsilon=epsilon, layout=lay, backend=BACKEND, check="now")
