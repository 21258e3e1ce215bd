"""bk.ngram_fingerprint: a row worked by hand, reference against cpu, every error."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, strategies as st
from lying import LyingText
from refusals import refused

import bipace_kernels as bk
from bipace_kernels.backends.cpu import ngrams as cpu

xxhash = pytest.importorskip("xxhash", reason="xxhash is not installed")
some_text = st.one_of(st.text(max_size=60), st.binary(max_size=60), st.sampled_from(["\ud800", "aaaa", ""]))


def test_abc_by_hand(backend):
    # 02 02 61 | 02 61 62 | 61 62 63 | 62 63 03 | 63 03 03, buckets and signs from the xxhash library.
    row = bk.ngram_fingerprint(["abc"], backend=backend)[0]
    want = torch.zeros(4096)
    entry = 1 / math.sqrt(5)
    want[3397], want[1350], want[1946], want[1490], want[1428] = -entry, -entry, entry, entry, entry
    assert torch.equal(row, want)


def test_cancelled_and_empty_rows(backend):
    # n = 1: no padding, so an empty text has no n-gram at all.
    assert bk.ngram_fingerprint([""], n=1, dim=3, backend=backend).tolist() == [[1.0, 0.0, 0.0]]
    # Two bytes of opposite sign in one bucket cancel.
    minus = next(b for b in range(256) if xxhash.xxh64_intdigest(bytes([b]), 5) % 2 == 1)
    plus = next(b for b in range(256) if xxhash.xxh64_intdigest(bytes([b]), 5) % 2 == 0)
    assert bk.ngram_fingerprint([bytes([minus, plus])], n=1, dim=1, backend=backend).tolist() == [[1.0]]
    assert bk.ngram_fingerprint([bytes([minus])], n=1, dim=1, backend=backend).tolist() == [[-1.0]]
    assert bk.ngram_fingerprint([], backend=backend).shape == (0, 4096)


@given(st.lists(some_text, max_size=5), st.integers(1, 40), st.sampled_from([1, 2, 3, 7, 64, 1000, 4096]))
def test_reference_equals_cpu_bit_for_bit(texts, n, dim):
    reference = bk.ngram_fingerprint(texts, n=n, dim=dim, backend="reference")
    ours = bk.ngram_fingerprint(texts, n=n, dim=dim, backend="cpu", num_threads=2)
    assert reference.dtype == ours.dtype == torch.float32
    assert torch.equal(reference.view(torch.int32), ours.view(torch.int32))
    norms = ours.double().norm(dim=1)
    assert bool(((norms - 1).abs() < 1e-6).all())


def test_every_kind_of_input_and_device_gives_the_same_rows():
    """Subclasses of str count as the text that they hold."""
    texts = ["You see a drawer.", "漢字 😀", ""]
    want = bk.ngram_fingerprint(texts)
    arrays = np.array(texts, object), np.array(texts)
    for kind in (tuple(texts), *arrays, [text.encode() for text in texts], list(map(LyingText, texts))):
        assert torch.equal(bk.ngram_fingerprint(kind), want)
    for device in ("cpu", torch.device("cpu")):
        assert torch.equal(bk.ngram_fingerprint(texts, device=device), want)


def test_same_bits_at_any_thread_count_and_in_any_batch():
    texts = [f"You are in room {i}. " * (i % 9 + 1) for i in range(60)]
    want = bk.ngram_fingerprint(texts, num_threads=1)
    for threads in range(2, 9):
        assert torch.equal(bk.ngram_fingerprint(texts, num_threads=threads), want)
    for i in (0, 17, 59):
        assert torch.equal(bk.ngram_fingerprint([texts[i]])[0], want[i])


def test_rows_are_written_and_nothing_beside_them(monkeypatch):
    storage = torch.full((5 * 64 + 32,), 77.0)
    monkeypatch.setattr(cpu.torch, "empty", lambda shape, dtype: storage[16:-16].view(shape))
    out = bk.ngram_fingerprint(["a", "b", "", "long text " * 50, "é"], dim=64, backend="cpu", num_threads=2)
    monkeypatch.undo()
    assert torch.equal(out, bk.ngram_fingerprint(["a", "b", "", "long text " * 50, "é"], dim=64, backend="reference"))
    assert bool((storage[:16] == 77).all()) and bool((storage[-16:] == 77).all())


def test_bad_arguments_are_named():
    for texts, options, error, message in (
        (["a"], {"n": 0}, ValueError, r"n must be an int in .*, got 0"),
        (["a"], {"dim": 0}, ValueError, r"dim must be an int in .*, got 0"),
        (["a"], {"dim": 4096.0}, ValueError, "dim must be an int"),
        (["a"], {"n": True}, ValueError, "n must be an int"),
        (["a"], {"backend": "cuda"}, bk.BackendError, "cuda"),
        (["a"], {"backend": "gpu"}, ValueError, "backend"),
        (["a"], {"device": "gpu"}, ValueError, "device must be None or a torch device such as 'cuda', got 'gpu'"),
        (["a"], {"device": 1.5}, ValueError, "device must be None or a torch device"),
        (["a"], {"device": "meta"}, bk.BackendError, "meta"),
        ("a", {}, TypeError, "texts must be a list of str or bytes, got str"),
        (None, {}, TypeError, "got NoneType"),
        (["a", 3], {}, TypeError, "got int at index 1"),
        (torch.zeros(2), {}, TypeError, "got Tensor"),
        (np.zeros(2), {}, TypeError, "got float at index 0"),
    ):
        refused(message, bk.ngram_fingerprint, texts, error=error, **options)
