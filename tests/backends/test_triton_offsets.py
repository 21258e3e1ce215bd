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
# The axes of the grid on which groups (or blocks, or values of ε) are counted.
WITHIN_A_GROUP = {"_gram": "y", "_scan_groups": "xy", "_covariance": "z"}
TILE = 1024  # at most: the number of a tile times its side is the number of a record or of a column

PRODUCT = re.compile(r"= arith\.muli (%[^\s,]+), (%[^\s,]+)(?: overflow<[^>]*>)? : (?:tensor<[\dx]+xi32[^>]*>|i32)")


def narrow_products(ttir, axes="xyz"):
    """32-bit products of two variables, or of one and a constant beyond a tile's side.

    With fewer axes than three: those of a program's number on one of them.
    """
    narrow = set()  # 32-bit values that are computed from such a number
    for result, op in re.findall(r"^ *(%\w+) = (.* (?:tensor<[\dx]+xi32>|i32))(?: loc\(.*)?$", ttir, re.MULTILINE):
        if re.match(rf"tt\.get_program_id [{axes}]\b", op) or narrow & set(re.findall(r"%\w+", op)):
            narrow.add(result)
    constants = dict(re.findall(r"(%\S+) = arith\.constant (?:dense<)?(-?\d+)>? :", ttir))
    constants |= {copy: constants[x] for copy, x in re.findall(r"(%\S+) = tt\.splat (%\S+) :", ttir) if x in constants}
    found = []
    for line in ttir.splitlines():
        match = PRODUCT.search(line)
        if match is None or (axes != "xyz" and not narrow & set(match.groups())):
            continue
        known = [int(constants[x]) for x in match.groups() if x in constants]
        if not known or abs(known[0]) > TILE:
            found.append(line.strip())
    return found


@pytest.mark.parametrize("launch", [*FOR_SM_90, *map(slow, STRIDED)], ids=name_of)
def test_offsets_are_wide(launch):
    kernel = resources.build(launch, 90)
    found = narrow_products(kernel.asm["ttir"], WITHIN_A_GROUP.get(launch.name, "xyz"))
    assert not found, f"{launch.module}.{launch.name}: {found}"


def test_within_a_group_32_bits_are_enough():
    clusters = importlib.import_module("bipace_kernels.backends.triton.clusters")
    assert clusters.LONGEST % clusters.gram.UNIT == 0 and clusters.LONGEST**2 < 2**31
    assert {launch.name for launch in FOR_SM_90} >= WITHIN_A_GROUP.keys()


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
    ttir = resources.build(launch, 90).asm["ttir"]
    assert [len(narrow_products(ttir, axes)) for axes in ("xyz", "x", "y")] == [found, found, 0]
