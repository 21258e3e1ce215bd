"""The CUDA scan's approximate reciprocals and square roots: every decision against the rule in float64.

BIPACE_CERTIFICATE_RECORDS says over how many records; 12,800 take about half a minute in the emulator, whose
approximations have errors.
"""

import os

import numpy as np
import pytest
import torch
from certificate import BAND, replay
from clustering import device_sweep, mixture
from ragged import BACKEND

pytestmark = pytest.mark.skipif(BACKEND != "cuda", reason="the interpreter of Triton has no approximations")

RECORDS = int(os.environ.get("BIPACE_CERTIFICATE_RECORDS", "12800"))
SIZES = [400] * 8
# Clusters of the data, noise inside them, ε, which is near their width: many decisions are close.
KINDS = [(3, 0.35, 0.02), (12, 0.5, 0.03), (40, 0.7, 0.06), (120, 0.9, 0.1)]


@pytest.mark.slow
def test_every_decision_is_within_the_band(device):
    worst, done, joined = 0.0, 0, 0
    while done < RECORDS:
        seed = done // sum(SIZES)
        count, noise, epsilon = KINDS[seed % len(KINDS)]
        x = mixture(1000 + seed, sum(SIZES), 64, count, noise=noise).bfloat16()
        labels = device_sweep(device, x, SIZES, [epsilon])[0]
        for values, own in zip(x.to(torch.float64).split(SIZES), labels.split(SIZES), strict=True):
            own = (own - own.min()).numpy()
            worst = max(worst, replay(values.numpy(), own, epsilon).excess)
            joined += len(own) - len(np.unique(own))
        done += len(x)
    print(f"{done:,} decisions, {joined:,} of them joins; the worst is {worst:.2e} beyond the rule")
    assert joined > done // 3
    assert worst <= BAND
