"""Pooling where the states are, against its definition in float64: dtypes, chunks, views, states that are not there."""

import math

import pooling_definition
import pytest
import torch
from ragged import nothing_waits, unaligned

from bipace_kernels.hidden import _pool
from bipace_kernels.hidden._pool import POOLINGS, Scores, Spans, pool

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
ROUNDING = {torch.float32: 2**-24, torch.bfloat16: 2**-8, torch.float16: 2**-11}  # half a unit in the last place


def spans_of(n, batches, tokens):
    """The first state has one token, the second all of them."""
    generator = torch.Generator().manual_seed(0)
    batch = torch.randint(0, batches, (n,), generator=generator)
    ends = torch.randint(0, tokens, (n, 2), generator=generator).sort(1).values
    ends[0], ends[1] = torch.tensor([tokens - 1, tokens - 1]), torch.tensor([0, tokens - 1])
    return Spans(batch, ends[:, 0], ends[:, 1])


def scores_of(n, batches, tokens, dtype=torch.float32, softcap=0.0):
    generator = torch.Generator().manual_seed(1)
    query = 2 * torch.randn(n, 6, 20, generator=generator)
    key = torch.randn(batches, tokens, 3, 20, generator=generator)
    return Scores(query.to(dtype), key.to(dtype), 0.3, softcap, 0)


def pooled(device, hidden, spans, scores=None, *, dtype=None, normalize=False, **more):
    """By torch on the device, which nothing waits for."""
    if scores is not None:
        query = unaligned(scores.query.to(device))
        scores = Scores(query, scores.key.to(device), scores.scale, scores.softcap, scores.window)
    hidden = hidden.to(device)
    spans = Spans(*(unaligned(x.to(device)) for x in (spans.batch, spans.first, spans.last)))
    with nothing_waits(device):
        rows = pool(hidden, spans, normalize=normalize, dtype=dtype, attention=scores, **more)
    return rows.cpu()


def defined(hidden, spans, scores=None, *, normalize=False, pooling):
    given = {"pooling": pooling, "unit": normalize, "attention": scores}
    return pooling_definition.pool_rows(hidden, spans.batch, spans.first, spans.last, **given)


@pytest.mark.parametrize("normalize", [False, True])
@pytest.mark.parametrize("how", POOLINGS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_against_the_definition(device, dtype, how, normalize):
    hidden = torch.randn(4, 23, 1100, generator=torch.Generator().manual_seed(3)).to(dtype)
    spans, scores = spans_of(9, 4, 23), scores_of(9, 4, 23, dtype, softcap=2.0)
    want = defined(hidden, spans, scores, pooling=how, normalize=normalize)
    for out in {torch.float32, dtype}:
        given = {"pooling": how, "normalize": normalize, "dtype": out}
        rows = pooled(device, hidden, spans, scores, **given)
        assert rows.dtype == out and torch.equal(rows, pooled(device, hidden, spans, scores, **given))
        # One rounding to the wanted dtype and nothing else; below 2^-14 float16 rounds to multiples of 2^-24.
        least = 2**-25 if out == torch.float16 else 1e-12
        assert ((rows.double() - want).abs() <= 1.01 * ROUNDING[out] * want.abs() + least).all()


@pytest.mark.parametrize("dtype", DTYPES)
def test_last_without_norm_gives_the_very_token(device, dtype):
    hidden, spans = torch.randn(3, 5, 40).to(dtype), spans_of(7, 3, 5)
    hidden[0, 0, :3] = torch.tensor([-0.0, math.inf, 1e-40])
    rows = pooled(device, hidden, spans, pooling="last")
    want = hidden[spans.batch, spans.last]
    assert rows.dtype == dtype and torch.equal(rows.view(torch.uint8), want.view(torch.uint8))


@pytest.mark.parametrize("numbers", [1, 24, 300, 10_000])
@pytest.mark.parametrize("how", ["mean", "attention"])
def test_chunks_of_any_size_hold_the_same_states(device, how, numbers, monkeypatch):
    monkeypatch.setattr(_pool, "CHUNK", numbers)
    hidden, spans, scores = torch.randn(5, 13, 12), spans_of(9, 5, 13), scores_of(9, 5, 13)
    rows = pooled(device, hidden, spans, scores, pooling=how)
    assert torch.allclose(rows.double(), defined(hidden, spans, scores, pooling=how), rtol=1.01 * 2**-24, atol=1e-12)


@pytest.mark.parametrize("how", POOLINGS)
def test_views_of_every_kind(device, how):
    base = torch.randn(5, 60, 9, 3)
    views = [
        base[:, ::2, :, 1].transpose(1, 2),
        base[1:4, 7:41, :, 0].permute(2, 0, 1),
        base[:, :, 2:, 0].transpose(0, 1),
        base[:1, :, :, 0].expand(4, -1, -1),
    ]
    for x in views:
        spans, scores = spans_of(6, x.shape[0], x.shape[1]), scores_of(6, x.shape[0], 2 * x.shape[1])
        scores = Scores(scores.query, scores.key[:, ::2], scores.scale, 0.0, 0)
        given = {"pooling": how, "normalize": True}
        before = x.clone()
        rows = pooled(device, x, spans, scores, **given)
        assert torch.equal(x, before)
        assert torch.allclose(rows.double(), defined(x, spans, scores, **given), rtol=1.01 * 2**-24, atol=1e-12)


@pytest.mark.parametrize("how", ["mean", "attention"])
def test_a_window_ends_the_prompt_early(device, how):
    hidden, spans, scores = torch.randn(2, 20, 8), spans_of(7, 2, 20), scores_of(7, 2, 20)
    near = Spans(spans.batch, torch.maximum(spans.first, spans.last - 4), spans.last)
    want = pooled(device, hidden, near, scores, pooling=how)
    assert torch.equal(pooled(device, hidden, spans, Scores(scores.query, scores.key, 0.3, 0.0, 5), pooling=how), want)


@pytest.mark.parametrize("how", POOLINGS)
def test_states_without_a_token_are_zeros(device, how):
    """And values elsewhere in the block, and keys there, reach no state."""
    hidden = torch.full((2, 4, 8), math.nan)
    hidden[0, 1], hidden[1] = 1.0, math.inf
    batch, first = torch.tensor([0, 0, 2, -1, 0, 0]), torch.tensor([1, 0, 0, 0, 2, -1])
    last = torch.tensor([1, -1, 1, 1, 4, 0])
    if how == "last":  # where the prompt begins is of no account
        last[5] = -1
    scores = scores_of(6, 2, 4)
    scores.key[:, 2:] = math.nan
    rows = pooled(device, hidden, Spans(batch, first, last), scores, pooling=how, normalize=True)
    assert torch.allclose(rows[0], torch.full((8,), 8**-0.5)) and torch.equal(rows[1:], torch.zeros(5, 8))


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("how", POOLINGS)
def test_bad_values_reach_the_states_that_hold_them_and_no_other(device, how, bad):
    hidden, spans, scores = torch.randn(3, 9, 16), spans_of(12, 3, 9), scores_of(12, 3, 9)
    clean = pooled(device, hidden, spans, scores, pooling=how)
    hidden[int(spans.batch[1]), 4, 7] = bad
    rows = pooled(device, hidden, spans, scores, pooling=how)
    first = spans.last if how == "last" else spans.first
    holds = (spans.batch == spans.batch[1]) & (first <= 4) & (spans.last >= 4)
    assert how == "last" or holds.any()
    assert torch.equal(rows.isfinite().all(1), ~holds) and torch.equal(rows[~holds], clean[~holds])


def test_a_zero_vector_stays_zero_and_huge_values_neither_overflow_nor_vanish(device):
    hidden = torch.zeros(3, 1, 5)
    hidden[1, 0, 2], hidden[2, 0, 2] = math.nan, math.inf
    none = torch.zeros(3, dtype=torch.int64)
    for how in ("last", "mean"):
        rows = pooled(device, hidden, Spans(torch.arange(3), none, none), pooling=how, normalize=True)
        assert torch.equal(rows[0], torch.zeros(5)) and not rows[1:].isfinite().all(1).any()
    for scale in (1e38, 1e-38):
        hidden = torch.full((1, 3, 4), scale)
        spans = Spans(torch.zeros(1, dtype=torch.int64), torch.zeros(1, dtype=torch.int64), torch.full((1,), 2))
        for how in ("last", "mean"):
            rows = pooled(device, hidden, spans, pooling=how, normalize=True)
            assert torch.allclose(rows, torch.full((1, 4), 0.5))


@pytest.mark.parametrize("shape", [(2, 3, 4), (0, 3, 4), (2, 0, 4)])
@pytest.mark.parametrize("how", POOLINGS)
def test_nothing(device, how, shape):
    batches, tokens, width = shape
    for n in (0, 2):
        spans = Spans(*(torch.full((n,), x) for x in (0, 0, -1)))
        rows = pooled(device, torch.randn(shape), spans, scores_of(n, batches, tokens), pooling=how)
        assert torch.equal(rows, torch.zeros(n, width))
