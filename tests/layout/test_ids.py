"""Numbering of ids and observations at the edge: Python's equality, arrays by their bytes, errors that name the row."""

import itertools
import sys
import uuid
from collections import namedtuple
from decimal import Decimal
from enum import Enum, IntEnum
from fractions import Fraction
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st
from lying import LyingList
from refusals import refused

import bipace_kernels as bk
from bipace_kernels.backends import native_loader
from bipace_kernels.inputs.canonical import canonical
from bipace_kernels.inputs.ids import ids_to_int, number_objects


class NotAvailable:
    """pandas' NA: comparing it gives itself, not a bool."""

    __hash__ = object.__hash__

    def __eq__(self, other):
        return self


NA = NotAvailable()


class Folded(str):
    def __eq__(self, other):
        return isinstance(other, str) and self.lower() == str(other).lower()

    def __hash__(self):
        return hash(self.lower())


def expected(values):
    seen = {}
    return [seen.setdefault(value, len(seen)) for value in values]


def codes(values):
    out = number_objects(values)
    assert out.dtype == torch.int64 and out.ndim == 1
    return out.tolist()


def test_first_appearance_and_python_s_equality():
    assert codes(["b", "a", "b", "c", "a"]) == [0, 1, 0, 2, 1]
    assert codes(("x", b"x", "x", b"x")) == [0, 1, 0, 1] and codes([]) == []
    assert codes([None, "", b"", None, ()]) == [0, 1, 2, 0, 3]
    assert codes(np.array([b"b", b"a", b"b"])) == codes(np.array(["b", "a", "b"])) == [0, 1, 0]
    assert codes(np.array(["b", None, 3, "b"], dtype=object)) == [0, 1, 2, 0]
    assert codes([1, 1.0, True, "1", Decimal(1), 2, np.int64(2), np.float32(2)]) == [0, 0, 0, 1, 0, 2, 2, 2]
    assert codes([2**70, 2.0**70, -(2**70)]) == [0, 0, 1]
    assert codes([("a", 1), ("a", 1.0), frozenset({1}), frozenset({True})]) == [0, 0, 1, 1]
    assert codes([np.nan, np.nan, float("nan")]) == [0, 0, 1]  # dict's rule: the same object, or equal
    assert codes([0.0, -0.0]) == [0, 0] and codes(["a", Folded("A"), "A"]) == [0, 0, 1]


def test_texts_of_every_width():
    # The bytes of "\x41\x01" and of "\u0141" are the same in CPython's storage.
    texts = ["A\x01", "\u0141", "A\x01\x00\x00", "\U00000141\u0100", "\U0001f600", "", "a", "é", "a\x00", "\ud800"]
    assert codes(texts * 2) == list(range(len(texts))) * 2
    assert codes([t.encode("utf-8", "surrogatepass") for t in texts] + texts) == list(range(2 * len(texts)))
    # Slices of a wider text are stored in their own width again.
    assert codes([("a\U0001f600")[:1], "a", ("a\u0141")[:1]]) == [0, 0, 0]


OBJECTS = st.text(max_size=3) | st.text(alphabet="ab\xe9\u0141\U0001f600", max_size=4) | st.binary(max_size=3)
OBJECTS |= st.integers(-3, 3) | st.booleans() | st.none()
OBJECTS |= st.floats(-2, 2, width=16) | st.tuples(st.integers(0, 1), st.text(max_size=1))


@settings(max_examples=200, deadline=None)
@given(st.lists(OBJECTS, max_size=40))
def test_equals_a_dict(values):
    assert number_objects(values).tolist() == expected(values)
    array = np.empty(len(values), dtype=object)
    array[:] = values
    assert number_objects(array).tolist() == expected(values)


def test_a_list_changed_by_hash_does_no_harm():
    values = []

    class Vandal:
        def __hash__(self):
            values.clear()
            return 1

    values += ["a", Vandal(), "b", "c"] * 100
    assert len(number_objects(values)) == 400


@pytest.mark.parametrize("length", [0, 2, 1000])
def test_codes_of_what_a_list_holds_whatever_its_len_says(length):
    assert codes(LyingList(["a", "b", "a", "c"], length)) == [0, 1, 0, 2]
    assert codes(LyingList(["a", 2, "a", 3], length)) == [0, 1, 0, 2]


def test_arrays_and_images_as_elements():
    image = np.arange(12, dtype=np.uint8).reshape(2, 2, 3)
    other = image.copy()
    other[1, 1, 2] += 1
    values = [image, other, image.copy(), image.astype(np.int16), image.reshape(4, 3), np.asfortranarray(image)]
    assert codes(values) == [0, 1, 0, 2, 3, 0]
    assert codes([np.float32(0.0) * np.ones(1, np.float32), -np.zeros(1, np.float32)]) == [0, 1]  # bytes
    assert codes([np.array(np.nan), np.array(np.nan)]) == [0, 0]
    tensor = torch.from_numpy(image)
    assert codes([tensor, tensor.clone(), tensor.permute(2, 0, 1), image, "x", torch.tensor(1)]) == [0, 0, 1, 2, 3, 4]
    assert codes([torch.ones(2, dtype=torch.bfloat16), torch.ones(2, dtype=torch.bfloat16)]) == [0, 0]


def test_integer_arrays_are_codes_already():
    for dtype in (np.int8, np.uint8, np.int32, np.uint32, np.int64, ">i4"):
        assert codes(np.array([7, 3, 7], dtype=dtype)) == [7, 3, 7]
    assert codes(np.array([True, False])) == [1, 0]
    big = np.array([2**64 - 1, 2**63, 2**64 - 1], dtype=np.uint64)
    out = codes(big)
    assert out[0] == out[2] != out[1] and codes(torch.tensor([5, -1, 5], dtype=torch.int32)) == [5, -1, 5]
    assert codes(torch.tensor([True, False])) == [1, 0]
    source = torch.tensor([1, 2])
    array = np.array([1, 2])
    number_objects(array)[0] = 9
    assert array[0] == 1
    assert number_objects(source).data_ptr() == source.data_ptr()  # nothing to convert: codes are never written


def test_rows_by_their_bytes():
    images = np.zeros((5, 4, 3, 2), dtype=np.uint8)
    images[1, 3, 2, 1] = 1
    images[4, 3, 2, 1] = 1
    assert codes(images) == [0, 1, 0, 0, 1] and codes(torch.from_numpy(images)) == [0, 1, 0, 0, 1]
    assert codes(torch.from_numpy(images).permute(0, 3, 1, 2)) == [0, 1, 0, 0, 1]
    assert codes(images[::2]) == [0, 0, 1]
    assert codes(np.array([[0.0], [-0.0], [np.nan], [np.nan], [0.0]])) == [0, 1, 2, 2, 0]
    assert codes(np.array([0.5, 0.25, 0.5])) == [0, 1, 0]
    assert codes(torch.tensor([0.5, 0.25, 0.5], dtype=torch.bfloat16, requires_grad=True)) == [0, 1, 0]
    assert codes(torch.tensor([[1 + 2j], [1 - 2j]]).conj()) == [0, 1]
    assert codes(torch.tensor([[1 + 2j], [1 - 2j]]).conj()[[0, 0]]) == [0, 0]
    assert codes(np.array([["a", "b"], ["a", "c"], ["a", "b"]])) == [0, 1, 0]
    assert codes(np.array([["a", 1], ["a", None], ["a", 1]], dtype=object)) == [0, 1, 0]
    assert codes(np.array(["2020-01-01", "2021-01-01", "2020-01-01"], dtype="M8[D]")) == [0, 1, 0]


@pytest.mark.parametrize("shape", [(0,), (0, 3), (3, 0), (0, 0), (4, 0, 2)])
def test_empty_rows_are_equal(shape):
    for values in (np.zeros(shape), torch.zeros(shape), torch.zeros(shape, dtype=torch.bfloat16)):
        assert codes(values) == [0] * shape[0]


def test_unhashable_is_named():
    for value in ([1], {"a": 1}, {1}, (1, [2]), bytearray(b"a")):
        words = rf"observation\[2\] must be hashable, got {type(value).__name__}; make it a tuple"
        refused(words, number_objects, ["a", "b", value, "c"], error=TypeError)


def test_errors_of_the_values_themselves_pass():
    class Broken:
        def __hash__(self):
            raise ZeroDivisionError("mine")

    refused("mine", number_objects, [Broken()], error=ZeroDivisionError)

    class Unequal:
        def __hash__(self):
            return 1

        def __eq__(self, other):
            raise TypeError("no comparison")

    refused("no comparison", number_objects, [Unequal(), Unequal()], error=TypeError)


M61 = 2**61 - 1  # hash(k) of an int is k modulo this
COLLIDING = {
    "ints": [k * M61 for k in range(-2000, 2000)],
    "large ints": [2**400 + k * M61 for k in range(4000)],
    "floats": [float(M61 + 1) * 2.0**k for k in range(-60, 900)] + [2.0 ** (61 * k) for k in range(1, 16)],
    "tuples": [("a", k * M61) for k in range(4000)],
    "nested": [(("a", k * M61), b"b", None, 0.5) for k in range(4000)],
    "sets": [frozenset({k * M61}) for k in range(4000)],
    "-1 and -2": list(itertools.product([-1, -2], repeat=12)),
    "mixed": [value for k in range(1, 2000) for value in (k * M61, str(k), 0.25 + k, (k * M61,), np.int64(k))],
}


@pytest.mark.parametrize("compiled", [True, False])
@pytest.mark.parametrize("name", COLLIDING)
def test_values_of_one_hash_are_numbered_as_by_a_dict(name, compiled, monkeypatch):
    if not compiled:
        monkeypatch.setattr(native_loader, "reason", lambda: "left out")
    values = COLLIDING[name]
    assert codes(values + values[::-1]) == expected(values + values[::-1])


class Counted(Fraction):
    """Counts how often one is compared with another."""

    compared = 0

    def __eq__(self, other):
        type(self).compared += 1
        return super().__eq__(other)

    __hash__ = Fraction.__hash__


def test_equal_hashes_never_take_quadratic_time():
    values = [Counted(k * M61) for k in range(30_000)]
    refused(r"observation must hold at most 64 different values of one hash.*Counted", number_objects, values)
    assert Counted.compared < 1024 * 1024  # those of the first part; 450 million in all


@pytest.mark.parametrize("kind", [Fraction, Decimal])
def test_fractions_and_decimals_of_few_equal_hashes_follow_python(kind):
    values = [kind(k * M61) for k in range(64)] + [kind(k) / 7 for k in range(5000)] + [M61, 1]
    assert codes(values * 2) == expected(values * 2)
    with pytest.raises(ValueError, match=f"group must hold at most 64 .* of type {kind.__name__}.*; convert"):
        ids_to_int([kind(k * M61) for k in range(65)], "group")


@pytest.mark.parametrize("values", ["abc", b"abc", {"a": 1}, {1, 2}, 5, None, iter([1])])
def test_not_a_sequence(values):
    for call in (lambda: number_objects(values), lambda: ids_to_int(values, "observation")):
        refused("observation must be a list or array with", call, error=TypeError)


def test_arrays_without_an_axis_or_meaningful_bytes_and_a_column_like_pandas():
    with pytest.raises(TypeError, match=r"observation\[1\] must hold numbers or text"):
        number_objects(["a", np.array(["a", None], dtype=object)])
    with pytest.raises(TypeError, match=r"observation must not be .*padding bytes are undefined"):
        number_objects(np.zeros((2, 2), dtype=np.longdouble))
    for values in (torch.eye(3).to_sparse(), torch._efficientzerotensor((3, 2)), torch.eye(3, device="meta")):
        refused("observation must be a dense tensor", number_objects, values, error=TypeError)
    for value in (np.array(3), torch.tensor(3), np.array("a")):
        refused("observation must have a first axis", number_objects, value)
    column = SimpleNamespace(type="int64", __array__=lambda dtype=None, copy=None: values)
    values = np.array([2.0, 1.0, 2.0])  # as of a table that has a column of the name "type"
    assert codes(column) == [0, 1, 0]
    values = np.array(["b", "a", "b"], dtype=object)
    assert codes(column) == [0, 1, 0] and ids_to_int(column, "group")[0].tolist() == [0, 1, 0]


def test_integers_beside_nulls_stay_integers():
    arrow = pytest.importorskip("pyarrow")
    column, category = arrow.array([2**53, 2**53 + 1, None, 2**53]), SimpleNamespace(categories=np.arange(3))
    as_floats, texts = column.to_numpy(zero_copy_only=False), arrow.array(["a", "b", None, "a"])
    for dtype, items in (("Int64", "to_list"), ("Int64", "tolist"), (category, "tolist")):  # of polars and pandas
        series = SimpleNamespace(dtype=dtype, __array__=lambda *a, **k: as_floats, **{items: column.to_pylist})
        assert codes(series) == codes(column) == [0, 1, 2, 0]
    assert ids_to_int(column.fill_null(-1), "group")[0].tolist() == [2**53, 2**53 + 1, -1, 2**53]
    for kind in (arrow.list_(arrow.int64(), 2), arrow.list_(arrow.int64())):
        pairs = arrow.chunked_array([[[2**53, 1], [2**53 + 1, 1], None, [2**53, None]], [[2**53, 1]]], kind)
        assert codes(pairs) == [0, 1, 2, 3, 0]
    for ids in (column, *(arrow.chunked_array([values.dictionary_encode()]) for values in (column, texts))):
        refused(r"group\[2\] must be an id, got None", bk.layout, ids, [0, 1, 2, 0])
        assert bk.layout(ids, [0, 1, 2, 0], valid=[True, True, False, True]).n_groups == 2


class Colour(IntEnum):
    RED = 1


def test_ids():
    for values, want, numeric in (
        ([5, -3, 5], [5, -3, 5], True),
        ((2**63 - 1, -(2**63)), [2**63 - 1, -(2**63)], True),
        ([Colour.RED, 2], [1, 2], True),
        (range(3), [0, 1, 2], True),
        (list(torch.tensor([4, 2])), [4, 2], True),
        (torch.tensor([4, 2], dtype=torch.uint8), [4, 2], True),
        (np.array([4, 2], dtype=np.uint64), [4, 2], True),
        (np.array([4, 2], dtype=object), [4, 2], True),
        ([], [], True),
        ([5, True, 5], [0, 1, 0], False),
        (np.array([True, False]), [0, 1], False),
        (["9", "5", "9"], [0, 1, 0], False),
        ([uuid.UUID(int=k) for k in (9, 3, 9, 1)], [0, 1, 0, 2], False),
        ([9, "9", 9], [0, 1, 0], False),
        ([("a", 1), ("b", 2), ("a", 1)], [0, 1, 0], False),
        (np.array(["b", "a", "b"]), [0, 1, 0], False),
        (np.array(["2021", "2020"], dtype="M8[Y]"), [0, 1], False),
        ([np.timedelta64(5, "h"), np.timedelta64(3, "h"), np.timedelta64(5, "h")], [0, 1, 0], False),
        ([("a", None), ("a", 1.0), ("a", None)], [0, 1, 0], False),
    ):
        ids, is_numeric = ids_to_int(values, "group")
        assert ids.dtype == torch.int64 and (ids.tolist(), is_numeric) == (want, numeric)


def test_bad_ids():
    for values, error, message in (
        (np.array([1.0]), TypeError, r"group must hold ids .* got dtype float64; make it int64"),
        (torch.tensor([1.0]), TypeError, r"group must hold ids .* got dtype torch.float32"),
        ([1, 2**63], ValueError, r"group\[1\] must fit into int64, got 9223372036854775808"),
        (np.array([1, 2**63], dtype=np.uint64), ValueError, r"group\[1\] must fit into int64"),
        (torch.tensor([2**63], dtype=torch.uint64), ValueError, r"group\[0\] must fit into int64"),
        (["a", None], ValueError, r"group\[1\] must be an id, got None"),
        (np.array([3, None], dtype=object), ValueError, r"group\[1\] must be an id, got None"),
        ([1.0, float("nan")], ValueError, r"group\[1\] must be an id, got nan"),
        (["a", Decimal("nan")], ValueError, r"group\[1\] must be an id, got NaN"),
        ([1j, complex(float("nan"), 0)], ValueError, r"group\[1\] must be an id, got \(nan"),
        ([("a", 1.0), ("a", (float("nan"),))], ValueError, r"group\[1\] must be an id, got \('a', \(nan"),
        ([np.timedelta64(1, "h"), np.timedelta64("NaT")], TypeError, "group must hold timedelta64 of one unit"),
        ([np.timedelta64(1, "h"), np.timedelta64("NaT", "h")], ValueError, r"group\[1\] must be an id, got NaT"),
        (["a", NA], ValueError, r"group\[1\] must be an id, got <"),
        (np.array(["a", ("a", NA)], dtype=object), ValueError, r"group\[1\] must be an id"),
        ([np.timedelta64(1, "h"), np.timedelta64(1, "m")], TypeError, r"of one unit, got timedelta64\[h\] .* convert"),
        (np.zeros((2, 1), np.int64), ValueError, r"group must have shape \[N\].* got \[2, 1\]; use group.reshape"),
        (torch.tensor(3), ValueError, r"group must have shape \[N\]"),
        ([[1], [2]], TypeError, r"group\[0\] must be hashable, got list"),
    ):
        refused(message, ids_to_int, values, "group", error=error)


def test_references_are_kept_and_released():
    values = [object() for _ in range(50)] + ["text" + str(k) for k in range(50)]
    texts = values[50:]
    before = [sys.getrefcount(v) for v in values]
    number_objects(values)
    number_objects(texts)
    with pytest.raises(TypeError):
        number_objects([*values, []])
    assert [sys.getrefcount(v) for v in values] == before


class Plain(Enum):
    RED = 1


Point = namedtuple("Point", "x y")
NAN = float("nan")
VALUES = [
    None, "", "a", np.str_("a"), b"a", np.bytes_(b"a"), "null", "[]", "snull", "1", '{"int": "0x1"}',
    "\ud800", "é", "e\u0301", 0, -0.0, False,
    1, 1.0, True, np.int8(1), Colour.RED, np.float32(0.5), 0.5, 0.1, np.float32(0.1), 2**64, float(2**64), 2**64 + 1,
    -(2**70), 10**5000, float("inf"), -float("inf"), NAN, float("nan"), "nan", (), (1,), (1.0,), ((1,),), (1, "a"),
    ("1", "a"), Point(1, "a"), ("a",), ("a", "b"), ("ab",), ("a", ("b",)), (NAN,), frozenset(), frozenset({1, "a"}),
    frozenset({"a", True}), frozenset({("a", 1)}), uuid.UUID(int=7), uuid.UUID(int=8), uuid.UUID(int=7).hex,
    np.array([1, 2]), np.array([1, 2]), np.array([1, 2], np.int32), np.array([[1, 2]]), torch.tensor([1, 2]),
    torch.tensor([1.0, 2.0]), torch.tensor([1, 2]), np.array([NAN]), np.array([NAN]),
]  # fmt: skip


def test_texts_for_other_ranks_are_equal_exactly_where_the_values_are():
    texts, codes = [canonical(value, "observation") for value in VALUES], number_objects(VALUES).tolist()
    for (a, i, s), (b, j, t) in itertools.combinations(zip(VALUES, codes, texts, strict=True), 2):
        assert (i == j) == (s == t), (a, b)
    assert len(set(texts)) < len(VALUES) - 10


@pytest.mark.parametrize("value", [object(), Decimal(1), 1j, Plain.RED, Folded("A"), ("a", 1j), np.datetime64(1, "s")])
def test_what_only_its_own_code_can_compare_is_refused(value):
    with pytest.raises(TypeError, match=r"trajectory must hold str, bytes, .*, got \w+; convert it to text or"):
        canonical(value, "trajectory")
