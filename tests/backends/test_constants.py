"""Numbers that stand in Python and in C++ are the same."""

import re

import pytest
from paths import ROOT

from bipace_kernels.backends import schema
from bipace_kernels.backends.cuda import scan

CSRC = ROOT / "csrc"
CONSTANTS = [
    ("common/greedy.h", "kBand", schema.BAND),
    ("cpu/critic.h", "kCutBlock", schema.BLOCK),
    ("cpu/critic.h", "kLandmarks", schema.LANDMARKS),
    ("cpu/critic.cpp", "kFlat", schema.FLAT),
    ("cpu/critic.cpp", "kJitter", schema.JITTER),
    ("cpu/critic.cpp", "kSmallest", schema.SMALLEST),
    ("cpu/critic.cpp", "kTiny", schema.TINY),
]


@pytest.mark.parametrize(("file", "name", "value"), CONSTANTS)
def test_constants(file, name, value):
    (found,) = re.findall(rf"constexpr \w+ {name} = ([^;]+);", (CSRC / file).read_text())
    assert float(found) == value


def names_of(file, enum):
    """Names of a C++ enum, in snake case, in order."""
    (body,) = re.findall(rf"enum (?:class )?{enum}(?: : \w+)? \{{([^}}]*)\}}", (CSRC / file).read_text())
    words = [entry.split("=")[0].strip().removeprefix("k") for entry in body.split(",")]
    return [re.sub(r"(?<!^)(?=[A-Z])", "_", word).lower() for word in words]


def test_codes():
    assert names_of("cpu/stages.h", "Estimator") == list(schema.KERNELS)
    assert names_of("common/mean.h", "Branch") == [branch.name.lower() for branch in schema.Branch]


def test_shared_memory_of_the_scan():
    assert f"sizeof(Shared) == {scan._BEFORE}," in (CSRC / "cuda/clusters.cu").read_text()
