"""The stage `pooling` alone: both CPU backends against float64, bits, views, and rows that are not there."""

from __future__ import annotations

import pytest
import torch

from bipace_kernels import _dispatch
from bipace_kernels.hidden._attention import Scores
from bipace_kernels.hidden._pool import Spans, pool

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
ROUNDING = {torch.float32: 2**-24, torch.bfloat16: 2**-8, torch.float16: 2**-11}  # half a unit in the last place
POOLINGS = ("last", "mean", "attention")


def spans_of(n: int, batches: int, tokens: int, seed: int = 0) -> Spans:
    generator = torch.Generator().manual_seed(seed)
    batch = torch.randint(0, batches, (n,), generator=generator)
    ends = torch.randint(0, tokens, (n, 2), generator=generator).sort(1).values
    return Spans(batch, ends[:, 0], ends[:, 1])


def scores_of(n: int, batches: int, tokens: int, dtype: torch.dtype, *, softcap: float = 0.0, seed: int = 1) -> Scores:
    generator = torch.Generator().manual_seed(seed)
    query = 2 * torch.randn(n, 6, 20, generator=generator)
    key = torch.randn(batches, tokens, 3, 20, generator=generator)
    return Scores(query.to(dtype), key.to(dtype), 0.3, softcap, 0)


def truth(hidden, spans, pooling, scores, normalize):
    """float64, with torch's own operations in another order than the reference's."""
    rows = []
    for i, (b, first, last) in enumerate(
        zip(spans.batch.tolist(), spans.first.tolist(), spans.last.tolist(), strict=True)
    ):
        tokens = hidden[b, first : last + 1].double()
        weight = torch.zeros(len(tokens), dtype=torch.float64)
        if pooling == "last":
            weight[-1] = 1
        elif pooling == "mean":
            weight[:] = 1 / len(tokens)
        else:
            key = scores.key[b, first : last + 1].double()
            for h in range(6):
                logit = key[:, h // 2] @ scores.query[i, h].double() * scores.scale
                logit = scores.softcap * (logit / scores.softcap).tanh() if scores.softcap else logit
                weight += logit.softmax(0) / 6
        vector = (weight[:, None] * tokens).sum(0)
        rows.append(vector / vector.norm() if normalize else vector)
    return torch.stack(rows)


@pytest.mark.parametrize("normalize", [False, True])
@pytest.mark.parametrize("pooling", POOLINGS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_against_float64(backend, dtype, pooling, normalize):
    hidden = torch.randn(4, 23, 1100, generator=torch.Generator().manual_seed(3)).to(dtype)
    spans, scores = spans_of(9, 4, 23), scores_of(9, 4, 23, dtype, softcap=2.0)
    want = truth(hidden, spans, pooling, scores, normalize)
    for out in {torch.float32, dtype}:
        rows = pool(hidden, spans, pooling=pooling, normalize=normalize, dtype=out, attention=scores, backend=backend)
        assert rows.dtype == out
        # One rounding to the wanted dtype and nothing else; below 2^-14 float16 rounds to multiples of 2^-24.
        least = 2**-25 if out == torch.float16 else 1e-12
        assert ((rows.double() - want).abs() <= 1.01 * ROUNDING[out] * want.abs() + least).all()


def test_last_without_norm_gives_the_very_token(backend):
    for dtype in DTYPES:
        hidden = torch.randn(3, 5, 40).to(dtype)
        spans = spans_of(7, 3, 5)
        rows = pool(hidden, spans, pooling="last", normalize=False, dtype=None, backend=backend)
        assert torch.equal(rows, hidden[spans.batch, spans.last])


@pytest.mark.parametrize("pooling", POOLINGS)
def test_views_of_every_kind_are_read_where_they_are(backend, pooling):
    base = torch.randn(5, 60, 9, 3)
    views = [
        base[:, ::2, :, 1].transpose(1, 2),
        base[1:4, 7:41, :, 0].permute(2, 0, 1),
        base[:, :, 2:, 0].transpose(0, 1),
    ]
    for x in views:
        spans = spans_of(6, x.shape[0], x.shape[1])
        scores = scores_of(6, x.shape[0], 2 * x.shape[1], torch.float32)
        scores = Scores(scores.query, scores.key[:, ::2], scores.scale, 0.0, 0)
        given = {"pooling": pooling, "normalize": True, "dtype": None, "backend": backend, "attention": scores}
        assert torch.equal(pool(x, spans, **given), pool(x.contiguous(), spans, **given))


@pytest.mark.parametrize("pooling", POOLINGS)
def test_bits_do_not_depend_on_threads_or_company(pooling, monkeypatch):
    hidden, spans = torch.randn(4, 37, 700), spans_of(12, 4, 37)
    scores = scores_of(12, 4, 37, torch.float32)
    found = []
    for threads in (1, 2, 5):
        monkeypatch.setattr(_dispatch, "threads", lambda _, n=threads: n)
        found.append(pool(hidden, spans, pooling=pooling, normalize=True, dtype=None, attention=scores, backend="cpu"))
    assert torch.equal(found[0], found[1])
    assert torch.equal(found[0], found[2])
    alone = Spans(spans.batch[5:6], spans.first[5:6], spans.last[5:6])
    one = Scores(scores.query[5:6], scores.key, scores.scale, 0.0, 0)
    row = pool(hidden, alone, pooling=pooling, normalize=True, dtype=None, attention=one, backend="cpu")
    assert torch.equal(row[0], found[0][5])


@pytest.mark.parametrize("pooling", POOLINGS)
def test_states_without_a_token_are_zeros(backend, pooling):
    hidden = torch.full((2, 4, 8), float("nan"))
    hidden[0, 1] = 1.0
    batch, first, last = (
        torch.tensor([0, 0, 2, -1, 0, 0]),
        torch.tensor([1, 0, 0, 0, 2, -1]),
        torch.tensor([1, -1, 1, 1, 4, 0]),
    )
    if pooling == "last":  # where the prompt begins is of no account
        last[5] = -1
    scores = scores_of(6, 2, 4, torch.float32)
    rows = pool(
        hidden,
        Spans(batch, first, last),
        pooling=pooling,
        normalize=True,
        dtype=None,
        attention=scores,
        backend=backend,
    )
    assert torch.allclose(rows[0], torch.full((8,), 8**-0.5))
    assert torch.equal(rows[1:], torch.zeros(5, 8))


def test_a_zero_vector_stays_zero_and_bad_values_stay_visible(backend):
    hidden = torch.zeros(3, 1, 5)
    hidden[1, 0, 2], hidden[2, 0, 2] = float("nan"), float("inf")
    spans = Spans(torch.arange(3), torch.zeros(3, dtype=torch.int64), torch.zeros(3, dtype=torch.int64))
    rows = pool(hidden, spans, pooling="last", normalize=True, dtype=None, backend=backend)
    assert torch.equal(rows[0], torch.zeros(5))
    assert not rows[1].isfinite().all()
    assert not rows[2].isfinite().all()


def test_huge_values_neither_overflow_nor_vanish(backend):
    for scale in (1e38, 1e-38):
        hidden = torch.full((1, 3, 4), scale)
        spans = Spans(torch.zeros(1, dtype=torch.int64), torch.zeros(1, dtype=torch.int64), torch.full((1,), 2))
        for pooling in ("last", "mean"):
            rows = pool(hidden, spans, pooling=pooling, normalize=True, dtype=None, backend=backend)
            assert torch.allclose(rows, torch.full((1, 4), 0.5))


def test_rounding_to_half_types_is_torchs():
    """Every float32 exponent, ties, denormals, overflow, infinities and NaN through csrc/common/half.h."""
    bits = torch.arange(0, 2**32, 65_521, dtype=torch.int64)
    ties = (torch.arange(0, 2**16, dtype=torch.int64) << 16) | 0x8000
    halves = torch.cat([(torch.arange(0, 2**19) << 13) | 0x1000, bits, ties, ties + 1, ties - 1]) % 2**32
    values = torch.where(halves >= 2**31, halves - 2**32, halves).to(torch.int32).view(torch.float32)
    values = values[: len(values) // 64 * 64].view(1, -1, 64)
    n = values.shape[1]
    spans = Spans(torch.zeros(n, dtype=torch.int64), torch.arange(n), torch.arange(n))
    for dtype in (torch.bfloat16, torch.float16):
        rows = pool(values, spans, pooling="last", normalize=False, dtype=dtype, backend="cpu")
        want = values[0].to(dtype)
        same = (rows == want) | (rows.isnan() & want.isnan())
        # A weight of 1 in float64 brings nothing but rounding, except that NaN and infinity make their whole row so.
        assert same.all()


def test_empty_inputs(backend):
    none = torch.empty(0, dtype=torch.int64)
    rows = pool(
        torch.randn(2, 3, 4), Spans(none, none, none), pooling="mean", normalize=True, dtype=None, backend=backend
    )
    assert rows.shape == (0, 4)


def test_float64_models_are_served():
    hidden, spans = torch.randn(2, 5, 6, dtype=torch.float64), spans_of(3, 2, 5)
    rows = pool(hidden, spans, pooling="last", normalize=False, dtype=None)
    assert rows.dtype == torch.float32
    assert torch.equal(rows, hidden[spans.batch, spans.last].float())
