"""Inputs may hold more than 2^31 elements: no kernel multiplies a row number by a stride in 32 bits.

Read off Triton's own intermediate code, of every configuration that is launched, with any distance between columns too.
"""

import dataclasses
import importlib
import re

import pytest
from compiled_triton import FOR_SM_90, name_of, resources, tl, triton
from marks import slow

STRIDED = [
    dataclasses.replace(
        launch,
        signature={**launch.signature, **{name: "i32" for name in launch.constexprs if name.endswith("column_stride")}},
        constexprs={name: value for name, value in launch.constexprs.items() if not name.endswith("column_stride")},
    )
    for launch in FOR_SM_90
    if any(name.endswith("column_stride") for name in launch.constexprs)
]
# Products inside one group's matrices, whose side is at most LONGEST; where such a matrix begins is 64-bit.
WITHIN_A_GROUP = {"_gram", "_scan_groups", "_covariance"}
TILE = 1024  # at most: the number of a tile times its side is the number of a record or of a column

PRODUCT = re.compile(r"= arith\.muli (%[^\s,]+), (%[^\s,]+)(?: overflow<[^>]*>)? : (?:tensor<[\dx]+xi32[^>]*>|i32)")


def narrow_products(ttir):
    """32-bit products of two variables, or of one and a constant beyond a tile's side."""
    constants = dict(re.findall(r"(%\S+) = arith\.constant (?:dense<)?(-?\d+)>? :", ttir))
    constants |= {copy: constants[x] for copy, x in re.findall(r"(%\S+) = tt\.splat (%\S+) :", ttir) if x in constants}
    found = []
    for line in ttir.splitlines():
        match = PRODUCT.search(line)
        if match is None:
            continue
        known = [int(constants[x]) for x in match.groups() if x in constants]
        if not known or abs(known[0]) > TILE:
            found.append(line.strip())
    return found


@pytest.mark.parametrize("launch", [*FOR_SM_90, *map(slow, STRIDED)], ids=name_of)
def test_offsets_are_wide(launch):
    kernel = resources.build(launch, 90)
    found = narrow_products(kernel.asm["ttir"])
    assert launch.name in WITHIN_A_GROUP or not found, f"{launch.module}.{launch.name}: {found}"


def test_within_a_group_32_bits_are_enough():
    clusters = importlib.import_module("bipace_kernels.backends.triton.clusters")
    assert clusters.LONGEST % clusters.gram.UNIT == 0 and clusters.LONGEST**2 < 2**31
    assert {launch.name for launch in FOR_SM_90} >= WITHIN_A_GROUP


@triton.jit
def _rows(x, n, stride, WIDE, DIM):
    i = tl.program_id(0) * 64 + tl.arange(0, 64)
    if WIDE:
        i = i.to(tl.int64)
    at = i * stride if DIM == 0 else i * DIM
    tl.store(x + at, 0.0, mask=i < n)


@pytest.mark.parametrize(("wide", "dim", "found"), [(False, 0, 1), (False, 4096, 1), (True, 0, 0), (True, 4096, 0)])
def test_narrow_products_are_seen(wide, dim, found):
    signature = {"x": "*fp32", "n": "i32", "stride": "i32"}
    launch = resources.Launch("own", _rows, signature, {"WIDE": wide, "DIM": dim}, {"enable_fp_fusion": False})
    assert len(narrow_products(resources.build(launch, 90).asm["ttir"])) == found
