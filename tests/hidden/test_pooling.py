"""Promises of pooling other than its numbers: memory, synchronization, gradients, models in float64."""

import pytest
import torch
from pooling_definition import Made
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode

from bipace_kernels.hidden._pool import CHUNK, POOLINGS, Scores, Spans, pool


def example(n, batches, tokens, width, **kind):
    hidden = torch.randn(batches, tokens, width, **kind)
    at = torch.zeros(n, dtype=torch.int64, device=hidden.device)
    scores = Scores(torch.randn(n, 4, 8, **kind), torch.randn(batches, tokens, 2, 8, **kind), 0.3, 0.0, 0)
    return hidden, Spans(at, at, at + tokens - 1), scores


@pytest.mark.parametrize("how", POOLINGS)
def test_no_value_is_read_on_the_host(how):
    """Fake tensors have shapes and no values: whatever would read one raises."""
    with FakeTensorMode():
        hidden, spans, scores = example(5, 3, 7, 16, dtype=torch.bfloat16)
        with pytest.raises(DataDependentOutputException):
            int(spans.last[0])
        rows = pool(hidden, spans, pooling=how, normalize=True, dtype=None, attention=scores)
    assert (rows.shape, rows.dtype) == ((5, 16), torch.bfloat16)


@pytest.mark.parametrize("strided", [False, True])
@pytest.mark.parametrize("how", POOLINGS)
def test_a_block_is_never_copied_whole(how, strided):
    hidden, spans, scores = example(3, 2, 2048, 2048, dtype=torch.bfloat16)
    hidden = hidden.transpose(1, 2) if strided else hidden
    assert 8 * hidden.numel() > 8 * CHUNK
    with Made() as made:
        pool(hidden, spans, pooling=how, normalize=True, dtype=None, attention=scores)
    assert max(made.bytes) <= 8 * CHUNK


@pytest.mark.parametrize("how", POOLINGS)
def test_no_graph_is_held(how):
    hidden, spans, scores = example(3, 2, 5, 6)
    with torch.no_grad():
        rows = pool(hidden.requires_grad_(), spans, pooling=how, normalize=True, dtype=None, attention=scores)
    assert not rows.requires_grad and rows.grad_fn is None
    assert rows.untyped_storage().data_ptr() != hidden.untyped_storage().data_ptr()


@pytest.mark.parametrize("how", POOLINGS)
def test_float64_models_are_served(how):
    hidden, spans, scores = example(3, 2, 5, 6, dtype=torch.float64)
    rows = pool(hidden, spans, pooling=how, normalize=False, dtype=None, attention=scores)
    assert rows.dtype == torch.float32
    if how != "attention":
        wanted = hidden[spans.batch, spans.last] if how == "last" else hidden[spans.batch].mean(1)
        assert torch.allclose(rows, wanted.float())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_rounding_to_half_types_is_torchs(dtype):
    values = torch.tensor([1 + 2**-9, 1 + 3 * 2**-9, 2**-25, -(2**-133), 65519.0, 65520.0, torch.inf, -torch.inf, -0.0])
    at = torch.zeros(1, dtype=torch.int64)
    rows = pool(values[None, None], Spans(at, at, at), pooling="last", normalize=False, dtype=dtype)
    assert torch.equal(rows[0].view(torch.int16), values.to(dtype).view(torch.int16))
