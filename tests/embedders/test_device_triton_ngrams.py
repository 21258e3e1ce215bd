"""n-gram fingerprints on a device: bit for bit those of the cpu backend."""

from __future__ import annotations

import math
import random
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from marks import slow
from ragged import BACKEND, room, sentinels
from ragged import stage as stage_of

import bipace_kernels as bk
from bipace_kernels.backends import triton_loader

stage = stage_of("ngrams")


def ours(texts: Any, device: torch.device, **options: Any) -> torch.Tensor:
    out = bk.ngram_fingerprint(texts, device=device, backend=BACKEND, **options)
    assert out.dtype == torch.float32 and out.device.type == device.type
    return out.cpu()


def by_the_kernels(texts: list[bytes], device: torch.device, **options: Any) -> torch.Tensor:
    """The stage itself, which takes how its work is cut."""
    offsets = torch.tensor([0, *map(len, texts)]).cumsum(0)
    data = torch.tensor(list(b"".join(texts)), dtype=torch.uint8)
    with sentinels():
        return stage.ngram_fingerprints(data.to(device), offsets.to(device), **options).cpu()


def same_bits(got: torch.Tensor, want: torch.Tensor) -> bool:
    return got.shape == want.shape and torch.equal(got.view(torch.int32), want.view(torch.int32))


def random_texts(seed: int) -> list[str | bytes]:
    rng = random.Random(seed)
    texts: list[str | bytes] = ["", b"", "aaaa" * 100, "\ud800", "You see a drawer. 漢字 😀", b"\xff\x00\x02\x03"]
    texts += [rng.randbytes(rng.randrange(60)) for _ in range(6)]
    texts += ["You are in room 3. " * rng.randrange(1, 40) for _ in range(3)]
    return texts


def test_abc_by_hand(device):
    want = torch.zeros(4096)
    entry = 1 / math.sqrt(5)
    want[3397], want[1350], want[1946], want[1490], want[1428] = -entry, -entry, entry, entry, entry
    assert torch.equal(ours(["abc"], device)[0], want)


@pytest.mark.parametrize("n", [slow(1), slow(2), 3, slow(4), slow(5), slow(7), slow(8), slow(15)])
def test_equals_cpu_bit_for_bit(device, n):
    texts = random_texts(n)
    for dim in (1, 1000, 4096):
        want = bk.ngram_fingerprint(texts, n=n, dim=dim, backend="cpu")
        with sentinels():
            got = ours(texts, device, n=n, dim=dim)
        assert same_bits(got, want), dim


@pytest.mark.parametrize("n", [slow(31), 32, 33, slow(45), slow(64), 103, slow(300)])
def test_windows_of_whole_stripes_and_what_is_left_of_them(device, n):
    texts = [b"", b"short", b"xyz" * 50]
    # Few large steps: its time depends on the number of operations.
    windows = 1024 if triton_loader.interpreted() else stage.WINDOWS
    got = by_the_kernels(texts, device, n=n, dim=64, windows=windows)
    assert same_bits(got, bk.ngram_fingerprint(texts, n=n, dim=64, backend="cpu"))


TEXT = st.one_of(st.text(max_size=60), st.binary(max_size=60), st.sampled_from(["\ud800", "aaaa", ""]))


@settings(max_examples=settings.default.max_examples // 2)  # the interpreter takes its time
@given(
    texts=st.lists(TEXT, max_size=4), n=st.integers(1, 12), dim=st.sampled_from([1, 2, 3, 7, 64, 511, 512, 513, 4096])
)
def test_any_texts_equal_the_reference_bit_for_bit(device, texts, n, dim):
    want = bk.ngram_fingerprint(texts, n=n, dim=dim, backend="reference")
    assert same_bits(ours(texts, device, n=n, dim=dim), want)


def test_rows_that_cancel_and_nothing_at_all(device):
    assert ours([""], device, n=1, dim=3).tolist() == [[1.0, 0.0, 0.0]]
    plus, minus = (
        next(b for b in range(256) if ours([bytes([b])], device, n=1, dim=1).item() == sign) for sign in (1.0, -1.0)
    )
    assert ours([bytes([minus, plus])], device, n=1, dim=1).tolist() == [[1.0]]
    assert ours([], device).shape == (0, 4096)


@pytest.mark.parametrize("programs", [1, 30, 10**6])
def test_same_bits_however_many_programs_share_a_text(device, programs):
    texts = [b"You are in a kitchen. " * 100, b"", b"b", b"c" * 700]
    got = by_the_kernels(texts, device, n=3, dim=4096, enough_programs=programs)
    assert same_bits(got, bk.ngram_fingerprint(texts, backend="cpu"))


def test_same_bits_in_any_batch(device):
    texts = random_texts(1)
    whole = ours(texts, device)
    for i in (2, 7, 11):
        assert same_bits(ours([texts[i]], device)[0], whole[i])


def test_more_than_two_to_the_31_bytes_of_text(device):
    """Of the texts before the one looked at, only the addresses are there."""
    far, text = 2**31 + 7, b"You are in a kitchen."
    data = room(far + len(text), torch.uint8, device)
    data[far:] = torch.tensor(list(text), dtype=torch.uint8)
    offsets = torch.tensor([far, far + len(text)], device=device)
    got = stage.ngram_fingerprints(data, offsets, n=3, dim=4096, enough_programs=1)
    assert same_bits(got.cpu(), bk.ngram_fingerprint([text], backend="cpu"))


def test_nobody_waits_for_the_device(device):
    if device.type == "cuda":
        torch.cuda.set_sync_debug_mode("error")
    try:
        out = bk.ngram_fingerprint(["a", "b"], device=device, backend=BACKEND)
    finally:
        if device.type == "cuda":
            torch.cuda.set_sync_debug_mode("default")
    assert same_bits(out.cpu(), bk.ngram_fingerprint(["a", "b"], backend="cpu"))
