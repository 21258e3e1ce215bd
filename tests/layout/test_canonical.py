"""Values as text for other ranks: equal exactly where Python's equality, which numbers them, says so."""

import itertools
import uuid
from collections import namedtuple
from decimal import Decimal
from enum import Enum, IntEnum

import numpy as np
import pytest
import torch

from bipace_kernels.inputs.canonical import canonical
from bipace_kernels.inputs.ids import number_objects


class Colour(IntEnum):
    RED = 1


class Plain(Enum):
    RED = 1


Point = namedtuple("Point", "x y")
NAN = float("nan")
VALUES = [
    None, "", "a", np.str_("a"), b"a", np.bytes_(b"a"), "null", "[]", "snull", "1", '{"int": "0x1"}',
    "\ud800", "é", "e\u0301", 0, -0.0, False,
    1, 1.0, True, np.int8(1), Colour.RED, np.float32(0.5), 0.5, 0.1, np.float32(0.1), 2**64, float(2**64), 2**64 + 1,
    -(2**70),
    10**5000, float("inf"), -float("inf"), NAN, float("nan"), "nan", (), (1,), (1.0,), ((1,),), (1, "a"), ("1", "a"),
    Point(1, "a"), ("a",),
    ("a", "b"), ("ab",), ("a", ("b",)), (NAN,), frozenset(), frozenset({1, "a"}), frozenset({"a", True}),
    frozenset({("a", 1)}),
    uuid.UUID(int=7), uuid.UUID(int=8), uuid.UUID(int=7).hex, np.array([1, 2]), np.array([1, 2]),
    np.array([1, 2], np.int32),
    np.array([[1, 2]]), torch.tensor([1, 2]), torch.tensor([1.0, 2.0]), torch.tensor([1, 2]), np.array([NAN]),
    np.array([NAN]),
]  # fmt: skip


def test_texts_are_equal_exactly_where_the_values_are():
    texts, codes = [canonical(value, "observation") for value in VALUES], number_objects(VALUES).tolist()
    for (a, i, s), (b, j, t) in itertools.combinations(zip(VALUES, codes, texts, strict=True), 2):
        assert (i == j) == (s == t), (a, b)
    assert len(set(texts)) < len(VALUES) - 10


class Folded(str):
    def __eq__(self, other):
        return self.lower() == str(other).lower()

    def __hash__(self):
        return hash(self.lower())


@pytest.mark.parametrize(
    "value", [object(), Decimal(1), 1j, Plain.RED, Folded("A"), ("a", object()), np.datetime64(1, "s")]
)
def test_what_only_its_own_code_can_compare_is_refused(value):
    with pytest.raises(
        TypeError, match=r"trajectory must hold str, bytes, .*, got \w+; convert it to text or integers"
    ):
        canonical(value, "trajectory")
