"""The Gram matrix of the CUDA kernels, by warps and by groups of four: within rounding of the exact one."""

import numpy as np
import pytest
import torch
from ragged import room, sentinels, stage

gram = stage("gram")

# Records of the groups: less than a warp's share, a tile and its neighbours, some beyond two.
SIZES = [5, 64, 128, 129, 1, 300]
# Elements: one, less than a vector of 16 bytes, some of a stage, whole stages and sums, more than shared memory holds.
DIMS = [1, 8, 72, 128, 200, 456]


@pytest.fixture(params=["groups", "warps"])
def way(request, device, monkeypatch):
    """Who feeds the tensor cores."""
    monkeypatch.setattr(gram, "WARPGROUPS", request.param == "groups")
    if request.param == "groups" and not gram.warpgroups(device):
        pytest.skip("this GPU's tensor cores are not fed by groups of warps: it is not of compute capability 9.0")
    return request.param


def multiply(device, x, sizes, *, scale=None, order=None):
    """[groups, side, side] float32 and 1 / ‖x‖ [M]."""
    n = sum(sizes)
    offsets = torch.tensor([0, *np.cumsum(sizes)], device=device)
    side = -(-max(sizes) // gram.UNIT) * gram.UNIT
    order = torch.arange(n, device=device) if order is None else order.to(device)
    scale = torch.ones(n, device=device) if scale is None else scale.to(device)
    with sentinels():
        out = torch.empty((len(sizes), side, side), device=device)
        reciprocal = torch.empty(n, device=device)
        gram.multiply(x, order, gram.Groups(offsets[:-1], offsets[1:], side + 1), scale, out, reciprocal)
    return out.cpu(), reciprocal.cpu()


def check(found, reciprocal, x, sizes):
    """Every product of the triangle, and the norms, within what float32 sums may lose."""
    begin, values = 0, x.cpu().double()
    for group, n in zip(found.double(), sizes, strict=True):
        own = values[begin : begin + n]
        exact, most = own @ own.T, own.abs() @ own.abs().T
        off = (group[:n, :n] - exact).abs() / most.clamp_min(1e-300)
        assert off.triu().max() <= 1e-5
        reciprocals = reciprocal[begin : begin + n].double() * own.norm(dim=1)
        torch.testing.assert_close(reciprocals, torch.ones_like(reciprocals), rtol=0, atol=1e-5)
        begin += n


def rows(n, dim, dtype, seed=0):
    """Each with its own direction plus a common one, and its own length."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(n, dim, generator=generator) + 1.5 * torch.randn(1, dim, generator=generator)
    return (x * torch.exp(torch.randn(n, 1, generator=generator))).to(dtype)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("dim", DIMS)
def test_every_product_of_the_triangle(dim, dtype, way, device):
    x = rows(sum(SIZES), dim, dtype)
    found, reciprocal = multiply(device, x.to(device), SIZES)
    check(found, reciprocal, x, SIZES)


def test_rows_of_any_order_and_stride(way, device):
    sizes, dim = [130, 20], 72
    n = sum(sizes)
    x = rows(n, dim, torch.bfloat16).to(device)
    plain, lengths = multiply(device, x, sizes)
    order = torch.randperm(n, generator=torch.Generator().manual_seed(1))
    gathered = torch.empty_like(x)
    gathered[order.to(device)] = x
    wide = torch.zeros(n, dim + 8, dtype=x.dtype, device=device)  # each row begins 2 bytes after a multiple of 16
    wide[:, 1:-7] = x
    sparse = torch.zeros(n, dim, 2, dtype=x.dtype, device=device)
    sparse[:, :, 1] = x
    far = room(n << 24, x.dtype, device).as_strided((n, dim), (1 << 24, 1)).copy_(x)  # beyond 2^31 elements
    for other, how in ((gathered, order), (wide[:, 1:-7], None), (sparse[:, :, 1], None), (far, None)):
        found, reciprocals = multiply(device, other, sizes, order=how)
        for g, size in enumerate(sizes):
            upper = torch.ones(size, size, dtype=torch.bool).triu()
            assert torch.equal(found[g, :size, :size][upper], plain[g, :size, :size][upper])
        assert torch.equal(reciprocals, lengths)


@pytest.mark.parametrize(("dim", "pitch"), [(100, 136), (1, 8), (71, 72), (193, 200)])
def test_rows_that_end_within_sixteen_bytes(dim, pitch, way, device):
    """Aligned rows whose D is no multiple of 8: what stands beyond D in memory is no part of any product."""
    sizes = [130, 20]
    x = rows(sum(sizes), pitch, torch.bfloat16).to(device)[:, :dim]
    found, reciprocal = multiply(device, x, sizes)
    check(found, reciprocal, x, sizes)


def test_a_group_alone_has_its_bits_in_any_batch(way, device):
    x = rows(sum(SIZES), 200, torch.bfloat16).to(device)
    together, lengths = multiply(device, x, SIZES)
    begin = sum(SIZES[:3])
    alone, reciprocals = multiply(device, x[begin : begin + 129].contiguous(), [129])
    upper = torch.ones(129, 129, dtype=torch.bool).triu()
    assert torch.equal(together[3, :129, :129][upper], alone[0, :129, :129][upper])
    assert torch.equal(lengths[begin : begin + 129], reciprocals)


def test_rows_of_extreme_length(way, device):
    """What over- or underflows comes by scaled rows."""
    sizes = [140]
    x = rows(140, 72, torch.bfloat16).float()
    scale = torch.ones(140)
    x[3] *= 2.0**80
    x[130] *= 2.0**-90
    scale[3], scale[130] = 2.0**-80, 2.0**90
    found, reciprocal = multiply(device, x.bfloat16().to(device), sizes, scale=scale)
    check(found, reciprocal, x.bfloat16().double() * scale.double()[:, None], sizes)
