"""Pooling of hidden states against the CPU and the reference: views, roundings, states that are not there."""

from __future__ import annotations

import math

import pytest
import torch
from marks import slow
from ragged import BACKEND, same_bits, sentinels, stage, unaligned

from bipace_kernels.cpu import pooling as cpu
from bipace_kernels.hidden._attention import Scores
from bipace_kernels.reference import pooling as reference

pooling = stage("pooling")
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning:triton.runtime.interpreter")

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
POOLINGS = ("last", "mean", "attention")


def spans(n, batches, tokens, seed=0):
    """batch, first and last; the first state has one token, the second all of them."""
    generator = torch.Generator().manual_seed(seed)
    batch = torch.randint(0, batches, (n,), generator=generator)
    ends = torch.randint(0, tokens, (n, 2), generator=generator).sort(1).values
    ends[0], ends[1] = torch.tensor([tokens - 1, tokens - 1]), torch.tensor([0, tokens - 1])
    return batch, ends[:, 0], ends[:, 1]


def scores_of(n, batches, tokens, dtype, *, softcap=0.0, width=20):
    generator = torch.Generator().manual_seed(5)
    query = 2 * torch.randn(n, 6, width, generator=generator)
    key = torch.randn(batches, tokens, 3, width, generator=generator)
    return Scores(query.to(dtype), key.to(dtype), 0.3, softcap, 0)


def pooled(device, hidden, where, scores=None, **more):
    scores = scores and Scores(
        unaligned(scores.query.to(device)), scores.key.to(device), scores.scale, scores.softcap, 0
    )
    with sentinels():
        return pooling.pool_rows(hidden.to(device), *(unaligned(x.to(device)) for x in where), attention=scores, **more)


def on_the_cpu(device, *given, dtype, **more):
    """By the CPU's kernel; Triton's interpreter cuts float32 to bfloat16 where a GPU rounds."""
    if dtype == torch.bfloat16 and device.type == "cpu":
        rows = cpu.pool_rows(*given, dtype=torch.float32, **more)
        return (rows.view(torch.int32) >> 16).to(torch.int16).view(torch.bfloat16)
    return cpu.pool_rows(*given, dtype=dtype, **more)


@pytest.mark.parametrize("unit", [False, True])
@pytest.mark.parametrize("dtype", [d if d == torch.bfloat16 else slow(d) for d in DTYPES])
@pytest.mark.parametrize("how", POOLINGS)
@pytest.mark.parametrize("whole", [False, True], ids=["any", "whole"])  # rows of whole, aligned pieces of 16 bytes
def test_against_the_cpu(device, how, dtype, unit, whole):
    hidden = torch.randn(3, 37, 64 if whole else 70, generator=torch.Generator().manual_seed(3)).to(dtype)
    where = spans(7, 3, 37)
    scores = scores_of(7, 3, 37, dtype, softcap=2.0, width=24 if whole else 20) if how == "attention" else None
    for out in {torch.float32, dtype}:
        got = pooled(device, hidden, where, scores, pooling=how, unit=unit, dtype=out)
        wanted = on_the_cpu(device, hidden, *where, pooling=how, unit=unit, dtype=out, attention=scores)
        assert got.dtype == out
        if how != "attention" and not unit:
            assert same_bits(got.float(), wanted.float())
        else:  # norms are summed in another order, weights are float32: the last bit of the dtype, or a bit more
            assert (got.cpu().double() - wanted.double()).abs().max() <= max(
                2e-6, torch.finfo(out).eps
            ) * wanted.abs().max()


@pytest.mark.parametrize("unit", [False, True])
@pytest.mark.parametrize("how", POOLINGS)
def test_rows_wider_than_a_program_holds_at_once(device, how, unit):
    hidden, where = torch.randn(1, 5, 8 * 1024 + 16, generator=torch.Generator().manual_seed(4)), spans(3, 1, 5)
    scores = scores_of(3, 1, 5, torch.float32) if how == "attention" else None
    given = {"pooling": how, "unit": unit, "dtype": torch.float32}
    got, wanted = (
        pooled(device, hidden, where, scores, **given),
        cpu.pool_rows(hidden, *where, attention=scores, **given),
    )
    assert (got.cpu().double() - wanted.double()).abs().max() <= 2e-6 * wanted.abs().max()


@pytest.mark.parametrize("softcap", [0.0, 3.0])
def test_attention_weights_are_as_good_as_float32(device, softcap):
    hidden, where = torch.randn(2, 70, 40), spans(6, 2, 70)
    scores = scores_of(6, 2, 70, torch.float32, softcap=softcap)
    wanted = reference.pool_rows(hidden, *where, pooling="attention", unit=True, dtype=torch.float32, attention=scores)
    got = pooled(device, hidden, where, scores, pooling="attention", unit=True, dtype=torch.float32)
    assert (got.cpu() - wanted).norm(dim=1).max() < 2e-6


@pytest.mark.parametrize("how", POOLINGS)
def test_views_are_read_where_they_are(device, how):
    base = torch.randn(5, 40, 9, 3)
    for x in (
        base[:, ::2, :, 1].transpose(1, 2),
        base[1:4, 7:31, :, 0].permute(2, 0, 1),
        base[:, :, 2:, 0].transpose(0, 1),
    ):
        where = spans(5, x.shape[0], x.shape[1])
        scores = scores_of(5, x.shape[0], 2 * x.shape[1], torch.float32)
        scores = Scores(scores.query, scores.key[:, ::2], scores.scale, 0.0, 0)
        given = {"pooling": how, "unit": True, "dtype": torch.float32}
        assert same_bits(
            pooled(device, x, where, scores, **given), pooled(device, x.contiguous(), where, scores, **given)
        )


@pytest.mark.parametrize("how", POOLINGS)
def test_bits_do_not_depend_on_company(device, how):
    hidden, where = torch.randn(3, 25, 33), spans(8, 3, 25)
    scores = scores_of(8, 3, 25, torch.float32)
    given = {"pooling": how, "unit": True, "dtype": torch.float32}
    together = pooled(device, hidden, where, scores, **given)
    one = Scores(scores.query[5:6], scores.key, scores.scale, 0.0, 0)
    assert same_bits(pooled(device, hidden, [x[5:6] for x in where], one, **given)[0], together[5])


@pytest.mark.parametrize("how", POOLINGS)
def test_states_without_a_token_are_zeros_and_read_nothing(device, how):
    hidden = torch.full((2, 4, 8), math.nan)
    hidden[0, 1] = 1.0
    where = (torch.tensor([0, 0, 2, -1, 0, 0]), torch.tensor([1, 0, 0, 0, 2, -1]), torch.tensor([1, -1, 1, 1, 4, 0]))
    if how == "last":  # where the prompt begins is of no account
        where[2][5] = -1
    got = pooled(device, hidden, where, scores_of(6, 2, 4, torch.float32), pooling=how, unit=True, dtype=torch.float32)
    assert torch.allclose(got[0].cpu(), torch.full((8,), 8**-0.5))
    assert torch.equal(got[1:].cpu(), torch.zeros(5, 8))


def test_a_zero_vector_stays_zero_and_bad_values_stay_visible(device):
    hidden = torch.zeros(3, 1, 5)
    hidden[1, 0, 2], hidden[2, 0, 2] = math.nan, math.inf
    none = torch.zeros(3, dtype=torch.int64)
    got = pooled(device, hidden, (torch.arange(3), none, none), pooling="last", unit=True, dtype=torch.float32).cpu()
    assert torch.equal(got[0], torch.zeros(5))
    assert not got[1].isfinite().all()
    assert not got[2].isfinite().all()


def test_nothing(device):
    none = torch.empty(0, dtype=torch.int64)
    got = pooled(device, torch.randn(2, 3, 4), (none, none, none), pooling="mean", unit=True, dtype=torch.float32)
    assert got.shape == (0, 4)


def test_the_tap_takes_it(device):
    """Through hidden._pool, as a tap on a model on this device comes to it."""
    from bipace_kernels.hidden._pool import Spans, pool

    hidden, where = torch.randn(2, 9, 16), spans(4, 2, 9)
    moved = Spans(*(x.to(device) for x in where))
    got = pool(hidden.to(device), moved, pooling="mean", normalize=False, dtype=None, backend=BACKEND)
    wanted = pool(hidden, Spans(*where), pooling="mean", normalize=False, dtype=None, backend="cpu")
    assert same_bits(got.float(), wanted.float())
