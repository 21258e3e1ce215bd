"""n-gram fingerprints of device tensors: computed on the host, and where the caller wants them."""

import pytest
import torch
from ragged import BACKEND, nothing_waits

import bipace_kernels as bk

TEXTS = ["", "abc", "You see a drawer. 漢字 😀", "aaaa" * 100]


@pytest.mark.parametrize("texts", [TEXTS, []], ids=["some", "none"])
def test_the_rows_are_those_of_the_cpu_on_the_device(device, texts):
    with nothing_waits(device):
        rows = bk.ngram_fingerprint(texts, n=4, dim=100, device=device, backend=BACKEND)
    assert rows.device.type == device.type and rows.shape == (len(texts), 100)
    assert torch.equal(rows.cpu(), bk.ngram_fingerprint(texts, n=4, dim=100))
