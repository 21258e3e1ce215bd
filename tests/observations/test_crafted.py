"""Values that someone chose so that they fall into one slot of a hash table, which then takes quadratic time.

The native functions return how many slots they looked at.  Each set here costs thousands a value, about 30,000 with all in
one slot, where the hash has no random key; a hash with one costs about 1.5.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from bipace_kernels import _native
from bipace_kernels.inputs import ids

N, MOST = 60_000, 2.5  # values; slots looked at for each
NUMBERS = np.arange(N, dtype=np.uint64)


def inverse(odd: int) -> int:
    return pow(odd, -1, 2**64)


def times(values: np.ndarray, odd: int) -> np.ndarray:
    return values * np.uint64(odd)


def mixed(values: np.ndarray, bits: int) -> np.ndarray:
    """Its own inverse from 32 bits on."""
    return values ^ (values >> np.uint64(bits))


def before_the_mixer(values: np.ndarray) -> np.ndarray:
    """Integers that PairNumbers' hash (csrc/cpu/observations.cpp) turns into `values` where its key is zero."""
    hashed = mixed(times(mixed(values, 32), inverse(0xD6E8FEB86659FD93)), 32)
    return times(hashed ^ np.uint64(0x632BE59BD9B4E019), inverse(0x9E3779B97F4A7C15))


def before_murmur(values: np.ndarray) -> np.ndarray:
    """Words of 8 bytes that std::hash of libstdc++ (MurmurHash64A with a fixed seed) turns into `values`."""
    odd = 0xC6A4A7935BD1E995
    hashed = mixed(times(mixed(values, 47), inverse(odd)), 47)
    hashed = times(hashed, inverse(odd)) ^ np.uint64(0xC70F6907 ^ (8 * odd) % 2**64)
    return times(mixed(times(hashed, inverse(odd)), 47), inverse(odd))


SETS = {
    **{f"multiples of 2^{k}": NUMBERS << np.uint64(k) for k in (0, 16, 17, 24, 32, 40, 48)},
    **{f"low {k} bits 0 after the mixer": before_the_mixer(NUMBERS << np.uint64(k)) for k in (17, 32, 47)},
    "high bits 0 after the mixer": before_the_mixer(NUMBERS),
    **{f"low {k} bits 0 after std::hash": before_murmur(NUMBERS << np.uint64(k)) for k in (17, 32, 47)},
}
OFFSETS = torch.tensor([0, N])


def exact(words: np.ndarray) -> tuple[int, torch.Tensor]:
    codes, labels = torch.from_numpy(words.view(np.int64)), torch.empty(N, dtype=torch.int64)
    return _native.cluster_exact(codes.data_ptr(), OFFSETS.data_ptr(), 1, labels.data_ptr()), labels


def history(words: np.ndarray) -> tuple[int, torch.Tensor]:
    """Each value follows the same first one, so the second half of the work has pairs of one prefix."""
    codes = torch.from_numpy(np.stack([np.full_like(words, words[0]), words], axis=1).view(np.int64))
    offsets, ends = torch.arange(0, 2 * N + 1, 2), torch.tensor([0, 2 * N])
    labels = torch.empty((2, 2 * N), dtype=torch.int64)
    looked = _native.cluster_history(
        codes.data_ptr(), 0, offsets.data_ptr(), N, ends.data_ptr(), 1, 2, labels.data_ptr()
    )
    return looked // 3, labels[1, 1::2]  # 2 N records by one code, N by two


def rows(words: np.ndarray) -> tuple[int, torch.Tensor]:
    codes = torch.empty(N, dtype=torch.int64)
    return _native.number_rows(np.ascontiguousarray(words).ctypes.data, N, 8, codes.data_ptr()), codes


def objects(values: list[Any]) -> tuple[int, torch.Tensor]:
    codes = torch.empty(N, dtype=torch.int64)
    return _native.number_objects(
        tuple(values), N, codes.data_ptr(), (np.ndarray,), ids.array_key, "observation"
    ), codes


WAYS: dict[str, Callable[[np.ndarray], tuple[int, torch.Tensor]]] = {
    "cluster_exact": exact,
    "cluster_history": history,
    "rows of an array": rows,
    "texts": lambda words: objects([word.tobytes().decode("latin-1") for word in words]),
    "bytes": lambda words: objects([word.tobytes() for word in words]),
    "ints": lambda words: objects(words.view(np.int64).tolist()),
}


@pytest.mark.parametrize("name", SETS)
@pytest.mark.parametrize("way", WAYS)
def test_no_set_is_quadratic(way: str, name: str) -> None:
    looked, labels = WAYS[way](SETS[name])
    assert N <= looked < MOST * N
    assert torch.equal(labels, torch.arange(N))


@pytest.mark.parametrize("first", [0, -(2**70), 2**400])
def test_ints_of_one_hash_in_python(first: int) -> None:
    """hash(k) is k modulo 2^61 - 1: a dict would compare each with all before it."""
    values = [first + k * (2**61 - 1) for k in range(N)]
    assert len({hash(value) for value in values}) <= 2  # of both signs
    looked, codes = objects(values)
    assert N <= looked < MOST * N
    assert torch.equal(codes, torch.arange(N))


def test_ints_of_any_size_are_python_s() -> None:
    for values in (
        [5, -3, 2**63 - 1, -(2**63), 5],
        [2**63, -(2**63), 2**63, 2**64, 0, -(2**64)],
        [2**5000, 0, 2**5000],
    ):
        for more in ([], [True], [1.0], ["5"], [(5,)]):
            seen: dict[Any, int] = {}
            want = [seen.setdefault(value, len(seen)) for value in values + more]
            assert ids.number_objects(values + more).tolist() == want


def test_the_key_is_drawn_anew_and_labels_do_not_depend_on_it() -> None:
    code = """
import hashlib, sys
from test_crafted import SETS, WAYS
looked, labels = zip(*(way(SETS["multiples of 2^24"]) for way in WAYS.values()))
print(looked, hashlib.sha256(b"".join(found.numpy().tobytes() for found in labels)).hexdigest(), sep="|")
"""
    path = os.pathsep.join([os.path.dirname(__file__), os.environ.get("PYTHONPATH", "")])
    runs = [
        subprocess.run(
            [sys.executable, "-c", code],
            env={**os.environ, "PYTHONPATH": path},
            capture_output=True,
            text=True,
            check=True,
        )
        for _ in range(2)
    ]
    (looked, labels), (looked_again, labels_again) = (run.stdout.split("|") for run in runs)
    assert looked != looked_again
    assert labels == labels_again


@pytest.mark.skipif(sys.hash_info.algorithm != "siphash13", reason="Python before 3.11 has SipHash-2-4")
def test_siphash_is_python_s() -> None:
    """With PYTHONHASHSEED=0 Python's key is zero."""
    code = "print(*(hash(bytes(range(1, n + 1))) for n in range(1, 200)))"
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONHASHSEED": "0"},
        capture_output=True,
        text=True,
        check=True,
    )
    want = [int(word) % 2**64 for word in done.stdout.split()]
    assert [_native.siphash(bytes(range(1, n + 1)), 0, 0) for n in range(1, 200)] == want
    assert len({_native.siphash(b"text", *key) for key in ((0, 0), (1, 0), (0, 1), (2**64 - 1, 0))}) == 4
