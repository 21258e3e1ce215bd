"""XXH64 of many byte strings at once, as the Triton kernels hash them: of every length, through the smallest ring."""

from __future__ import annotations

import pytest
import torch
import triton
import triton.language as tl
from ragged import BACKEND

from bipace_kernels.backends.triton.action_keys import xxh_absorb, xxh_begin, xxh_finish

xxhash = pytest.importorskip("xxhash", reason="xxhash is not installed")
pytestmark = pytest.mark.skipif(BACKEND != "triton", reason="tests the Triton kernels")


@triton.jit
def hash_kernel(data, sizes, ring, out, longest, SEED: tl.constexpr, LANES: tl.constexpr, CAPACITY: tl.constexpr):
    lane = tl.arange(0, LANES)
    size = tl.load(sizes + lane)
    words = ring + lane * (CAPACITY // 8)
    a, b, c, d = xxh_begin(SEED, LANES)
    absorbed = tl.zeros_like(size)
    for start in range(0, longest, 16):
        k = start + tl.arange(0, 16)[None, :]
        byte = tl.load(data + lane[:, None] * longest + k)
        place = (words.to(tl.pointer_type(tl.uint8)))[:, None] + (k & (CAPACITY - 1))
        tl.store(place, byte, mask=k < size[:, None])
        tl.debug_barrier()
        written = tl.minimum(size, start + 16)
        a, b, c, d, absorbed = xxh_absorb(words, a, b, c, d, absorbed, written, CAPACITY)
        tl.debug_barrier()
    tl.store(out + lane, xxh_finish(words, a, b, c, d, absorbed, size, SEED, CAPACITY))


@pytest.mark.parametrize("seed", [1, 2, 3, 4, 5])
def test_xxh64_of_every_length(device, seed):
    data = torch.randint(0, 256, (512, 512), generator=torch.Generator().manual_seed(seed), dtype=torch.uint8)
    ring = torch.zeros(512 * 8, dtype=torch.uint64, device=device)
    out = torch.zeros(512, dtype=torch.uint64, device=device)
    sizes = torch.arange(512, device=device)
    hash_kernel[(1,)](data.to(device), sizes, ring, out, 512, SEED=seed, LANES=512, CAPACITY=64)
    want = [xxhash.xxh64_intdigest(bytes(data[i, :i].tolist()), seed) for i in range(512)]
    assert out.cpu().tolist() == want
