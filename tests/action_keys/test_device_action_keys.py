"""Action keys on a device: bit for bit those of the cpu backend, on every kind of ids and every corner of the text."""

import importlib
import itertools
import pickle
import random
import struct

import numpy as np
import pytest
import torch
from action_texts import MODES, TABLE, key, spelt, table_of
from hypothesis import given, settings, strategies as st
from marks import slow, slow_case_interpreted
from ragged import BACKEND, nothing_waits, room, sentinels, stage as stage_of

import bipace_kernels as bk
from bipace_kernels.backends.schema import Tokens

stage = stage_of("action_keys")
TILE, CAPACITY = 64, 2048  # tokens looked at together (CUDA: 32), bytes of text kept: what the kernels have
Keys = tuple[list[int], list[bool]]
PIECES = [
    *("<action>", "</action>", "</action>", "<action", "</actio", "<", "/", ">", "action>", "Go East", " ", "\n", "\t"),
    *("\x1c", "@[`{AZ", "é", "汉", "😀", "<think>", "x" * 40, "<<action>", "<action></action>", "</"),
]
MATRIX = torch.tensor([spelt(f"x<action>Go {i:02d} </action>") for i in range(20)])


def ours(responses, device, **options):
    keys, parsed = bk.action_keys(responses, backend=BACKEND, **options)
    assert keys.dtype == torch.int64 and parsed.dtype == torch.bool
    assert keys.device.type == parsed.device.type == device.type
    return keys.tolist(), parsed.tolist()


def by_the_kernels(ids, mask, table, device, mode, **how):
    """The stage itself, which takes how its work is cut; ids [N, T] and mask."""
    with sentinels():
        tokens = Tokens(ids.to(device), None, mask.to(device), *table.on(device), ids.shape[1])
        keys, parsed, outside = stage.hash_token_ids(tokens, mode, 8, **how)
    assert outside.item() == -1
    return keys.tolist(), parsed.tolist()


def wanted(responses, **options):
    keys, parsed = bk.action_keys(responses, backend="cpu", **options)
    return keys.tolist(), parsed.tolist()


def padded(rows):
    """Rows as a matrix, padded with −100 on the left and on the right by turns, and its mask."""
    width = max(map(len, rows), default=0)
    ids = torch.full((len(rows), width), -100)
    for i, row in enumerate(rows):
        ids[i, slice(0, len(row)) if i % 2 else slice(width - len(row), width)] = torch.tensor(row, dtype=torch.int64)
    return ids, ids != -100


def random_rows(count, pieces, seed):
    """Texts of a few pieces as byte tokens, with special tokens and long tokens strewn in."""
    rng = random.Random(seed)
    rows = []
    for _ in range(count):
        row = []
        for _ in range(rng.randrange(pieces)):
            row += rng.choice([spelt(rng.choice(PIECES)), [rng.randrange(256, 260)]])
        rows.append(row)
    return rows


def test_text_of_every_length(device):
    letters = bytes(97 + (7 * i) % 26 for i in range(300))
    rows = [letters[:n] for n in range(300)]
    ids, mask = padded([list(row) for row in rows])
    got = ours(ids.to(device), device, mask=mask.to(device), mode="text", token_bytes=TABLE)
    assert got == ([key(row, 4) for row in rows], [n > 0 for n in range(300)])


@pytest.mark.parametrize("mode", ["action_tag", slow("first_n"), slow("text")])
def test_thousands_of_adversarial_rows(device, mode):
    rows = random_rows(2000, 9, seed=11)
    ids, mask = padded(rows)
    options = {"mode": mode, "n": 5, "token_bytes": TABLE}
    want = wanted(ids, mask=mask, **options)
    if mode == "action_tag":
        assert 200 < sum(want[1]) < 1800
    with sentinels():
        got = ours(ids.to(device), device, mask=mask.to(device), **options)
    assert got == want
    flat = [torch.tensor(row, dtype=torch.int64, device=device) for row in rows[:300]]
    assert ours(flat, device, **options) == (want[0][:300], want[1][:300])


TOKEN = st.one_of(st.sampled_from([256, 257, 258, 259, 32, 65]), st.integers(0, 259))
ROW = st.lists(st.tuples(TOKEN, st.booleans()), max_size=2 * TILE + 9)


@settings(max_examples=settings.default.max_examples // 2)  # the interpreter takes its time
@given(rows=st.lists(ROW, max_size=6), mode=st.sampled_from(MODES), n=st.integers(1, 12), masked=st.booleans())
def test_any_rows_equal_the_reference_bit_for_bit(device, rows, mode, n, masked):
    ids = [torch.tensor([token for token, _ in row], dtype=torch.int64) for row in rows]
    mask = [torch.tensor([valid for _, valid in row], dtype=torch.bool) for row in rows]
    options = {"mode": mode, "n": n, "token_bytes": TABLE}
    keys, parsed = bk.action_keys(ids, mask=mask if masked else None, backend="reference", **options)
    there = ([row.to(device) for row in ids], [row.to(device) for row in mask] if masked else None)
    if ids:
        assert ours(there[0], device, mask=there[1], **options) == (keys.tolist(), parsed.tolist())
    matrix, real = padded([row.tolist() for row in ids])
    if masked:
        real[real.clone()] = torch.cat(mask) if mask else real[real]
    assert ours(matrix.to(device), device, mask=real.to(device), **options) == (keys.tolist(), parsed.tolist())


@pytest.mark.skipif(BACKEND != "triton", reason="every row has a warp of its own")
@pytest.mark.parametrize("mode", ["action_tag", "first_n", slow("text")])
def test_one_row_a_program_as_on_a_gpu_and_programs_with_many_rows(device, mode):
    rows = [*random_rows(9, 12, seed=3), spelt("z" * 90 + "<action> A </action>"), []]
    ids, mask = padded(rows)
    want = wanted(ids, mask=mask, mode=mode, token_bytes=TABLE)
    for cut in (stage.CUT, stage.Cut(rows=4, programs=2)):
        assert by_the_kernels(ids, mask, TABLE, device, mode, cut=cut) == want, cut


@pytest.mark.parametrize("of", ["tile", slow("round")])
def test_tags_across_every_seam(device, of):
    """Both tags at every place relative to the end of a tile of tokens, or to the end of a round of bytes."""
    how = {"cut": stage.Cut(rows=256, columns=64)} if BACKEND == "triton" else {}  # fewer steps for the interpreter
    tile = itertools.product(range(TILE - 20, TILE + 4), (0, 3, TILE, 2 * TILE - 9))
    tile = [spelt("." * before + "<action>" + "B" * body + "</action>tail") for before, body in tile]
    filler = [b"f" * (CAPACITY - 32 - length) for length in range(24)]
    table = table_of([*(bytes([b]) for b in range(256)), *filler])
    ends = itertools.product(range(24), (0, 1, 2))
    rounds = [[256 + i, *spelt("<action> "), *[257] * twice, *spelt("Z </action>.")] for i, twice in ends]
    ids, mask = padded({"tile": tile, "round": rounds}[of])
    want = wanted(ids, mask=mask, token_bytes=table)
    assert all(want[1]) and by_the_kernels(ids, mask, table, device, "action_tag", **how) == want


@pytest.mark.parametrize("mode", ["action_tag", slow_case_interpreted("text")])
def test_long_tokens_long_bodies_and_blank_stretches(device, mode):
    longer, how = 4, {}
    if BACKEND == "triton":  # so that the long is not too long for the interpreter
        longer, how = 1, {"cut": stage.Cut(rows=64, tile=16, columns=64, capacity=512)}
    parts = [b" " * 700 * longer, b"Long" * 400 * longer, b"<action>", b"</action>", b"a", b"\n", b""]
    rng = random.Random(8)
    rows = [[rng.randrange(7) for _ in range(rng.randrange(14))] for _ in range(12)]
    rows += [[2, 0, 4, 0, 3], [2, 0, 0, 3], [2, 1, 1, 3, 1], [0, 2, *[5] * 50, 4, *[5] * 50, 3], [0], [0, 4, 0], [6, 6]]
    ids, mask = padded(rows)
    table = table_of(parts)
    want = wanted(ids, mask=mask, mode=mode, token_bytes=table)
    assert by_the_kernels(ids, mask, table, device, mode, **how) == want


@pytest.mark.parametrize("n", [1, slow(3), slow(4), slow(100), slow(255), 256, 257, slow(1000), slow(2**62)])
def test_first_n_beyond_a_tile_and_beyond_the_ring(device, n):
    generator = torch.Generator().manual_seed(n % 97)
    ids = torch.randint(-(2**63), 2**63 - 1, (12, 400), generator=generator)
    mask = torch.rand(12, 400, generator=generator) < torch.linspace(0, 1, 12)[:, None]
    options = {"mode": "first_n", "n": n}
    assert ours(ids.to(device), device, mask=mask.to(device), **options) == wanted(ids, mask=mask, **options)
    assert ours(ids.to(device), device, **options) == wanted(ids, **options)


@pytest.mark.parametrize("mode", ["action_tag", "first_n", slow("text")])
def test_every_dtype_and_stride(device, mode):
    options = {"mode": mode, "token_bytes": TABLE}
    want = wanted(MATRIX, **options)
    wide = torch.full((40, 2 * MATRIX.shape[1] + 3), -5)
    wide[::2, 3::2] = MATRIX
    there = MATRIX.to(device)
    flat = torch.full((MATRIX.numel() + 3,), 300, device=device)
    for offset in range(3):
        view = flat[offset : offset + MATRIX.numel()].view(MATRIX.shape)
        view.copy_(there)
        assert ours(view, device, **options) == want
    kinds = [there.to(getattr(torch, name)) for name in ("uint8", "int8", "int16", "int32")]
    kinds += [MATRIX.to(getattr(torch, name)).to(device) for name in ("uint16", "uint32")]
    kinds += [MATRIX.to(torch.uint64).to(device)]
    kinds += [wide.to(device)[::2, 3::2], there.t().contiguous().t(), there.to(torch.int32).t().contiguous().t()]
    kinds += [list(there), [*there[:3], *MATRIX[3:9].tolist(), *there[9:].to(torch.int16)]]
    kinds += [[*there[:3], *MATRIX[3:9].numpy(), *there[9:]]]
    for kind in kinds:
        assert ours(kind, device, **options) == want
    for kind in kinds[:6]:  # on the CPU the public function converts them
        mask = torch.ones(kind.shape, dtype=torch.int16, device=device)
        tokens = Tokens(kind, None, mask, *TABLE.on(device), kind.shape[1])
        keys, parsed, _ = stage.hash_token_ids(tokens, mode, 8)
        assert (keys.tolist(), parsed.tolist()) == want


@pytest.mark.parametrize("name", ["bool", *map(slow, ("uint8", "int8", "int16", "int32", "uint16")), "int64"])
def test_mask_of_every_dtype_and_stride(device, name):
    dtype = getattr(torch, name)
    ids = MATRIX.clone()
    ids[:, 0], ids[:, 9] = -100, 10**12
    mask = ((ids >= 0) & (ids < 260)).to(dtype)
    want = wanted(ids, mask=mask, token_bytes=TABLE)
    assert all(want[1])
    there = mask.to(device)
    wide = torch.zeros(3 * mask.shape[1], 2 * mask.shape[0], dtype=dtype, device=device)
    wide[::3, ::2] = there.t()
    for kind in (there, wide[::3, ::2].t(), mask.tolist(), mask.numpy()):
        assert ours(ids.to(device), device, mask=kind, token_bytes=TABLE) == want
    rows = list(ids.to(device))
    for kind in (there, list(there), mask.tolist()):
        assert ours(rows, device, mask=kind, token_bytes=TABLE) == want


@pytest.mark.parametrize("mode", MODES)
def test_nothing_in_nothing_out_and_rows_without_tokens(device, mode):
    options = {"mode": mode, "token_bytes": TABLE}
    for shape in ((0, 5), (0, 0)):
        assert ours(torch.empty(shape, dtype=torch.int64, device=device), device, **options) == ([], [])
    want = key(b"", 4 if mode == "text" else 1)
    with sentinels():
        no_columns = ours(torch.empty(3, 0, dtype=torch.int32, device=device), device, **options)
        masked = torch.full((3, 70), -100, device=device)
        all_masked = ours(masked, device, mask=torch.zeros_like(masked), **options)
        empty_rows = ours([masked[0, :0]] * 3, device, **options)
    assert no_columns == all_masked == empty_rows == ([want] * 3, [False] * 3)


def test_empty_table(device):
    ids = torch.tensor([[3]], device=device)
    nothing = table_of([])
    assert ours(ids, device, mask=torch.zeros_like(ids), token_bytes=nothing) == ([key(b"", 1)], [False])
    assert ours(ids, device, token_bytes=nothing) == ([key(struct.pack("<q", 3), 1)], [False])
    assert ours(ids, device, token_bytes=table_of([b""] * 4)) == ([key(struct.pack("<q", 3), 1)], [False])


@pytest.mark.parametrize("mode", ["action_tag", slow("text")])
@pytest.mark.parametrize("bad", [slow(-1), 260, slow(2**62), -(2**63)])
def test_id_outside_the_table(device, mode, bad):
    ids = torch.full((300, 90), 65)
    ids[:, :2] = torch.tensor([257, 258])  # parsed at once: the rest of the row is checked all the same
    clean = ids.clone()
    for row, column in ((41, 77), (41, 80), (60, 2), (299, 0)):
        ids[row, column] = bad
    ids[3, 5] = ids[41, 9] = 10**6  # masked out: may hold anything
    mask = ids != 10**6
    options = {"mode": mode, "n": 4, "token_bytes": TABLE}
    keys, parsed = wanted(clean, mask=mask, **options)
    by_ids, _ = wanted(ids, mask=mask, mode="first_n", n=4)
    for row in (41, 60, 299):
        keys[row], parsed[row] = by_ids[row], False
    there, valid = ids.to(device), mask.to(device)
    assert ours(there, device, mask=valid, **options) == (keys, parsed)
    kinds = [(there, valid), (list(there), list(valid))]
    for responses, mask_of_kind in kinds:
        with pytest.raises(ValueError, match=rf"ids from 0 to 259, got {bad} in row 41, column 77"):
            bk.action_keys(responses, mask=mask_of_kind, backend=BACKEND, check="now", **options)
    masked = valid & (there >= 0) & (there < 260)
    bk.action_keys(there, mask=masked, backend=BACKEND, check="now", **options)
    assert bk.action_keys(there, mode="first_n", check="now", backend=BACKEND)[0].shape == (300,)


def test_outside_is_the_lowest_flat_position(device):
    table = TABLE.on(device)
    ids = torch.full((20, 300), 65, device=device)
    tokens = Tokens(ids, None, None, *table, 300)
    assert stage.hash_token_ids(tokens, "text", 8)[2].tolist() == [-1]
    ids[17, 0] = ids[9, 299] = ids[9, 130] = 999
    assert stage.hash_token_ids(tokens, "text", 8)[2].tolist() == [9 * 300 + 130]
    offsets = torch.tensor([0, 2000, 2000, 6000], device=device)
    flat = stage.hash_token_ids(Tokens(ids.flatten(), offsets, None, *table, 4000), "text", 8)
    assert flat[2].tolist() == [9 * 300 + 130] and flat[1].tolist() == [True, False, False]


def test_nobody_waits_for_the_device(device):
    there = MATRIX.to(device)
    mask = torch.ones_like(there)
    rows = list(there)
    with nothing_waits(device):
        for mode in MODES:
            for responses, valid in ((there, mask), (rows, list(mask)), (MATRIX.numpy(), mask)):
                options = {"mode": mode, "mask": valid, "token_bytes": TABLE}
                keys, _ = bk.action_keys(responses, backend=BACKEND, **options)
    assert keys.tolist() == wanted(MATRIX, mode=MODES[-1], token_bytes=TABLE)[0]


@pytest.mark.parametrize("mode", [MODES[0], *map(slow, MODES[1:])])
def test_more_than_two_to_the_31_ids(device, mode):
    """Rows, columns and flat positions far apart; the mask as well."""
    near = MATRIX[:3].to(device)
    rows, columns = near.shape
    keys, parsed = wanted(MATRIX[:3], mode=mode, token_bytes=TABLE)
    far, wide = 2**31 + 7, 2**31 // (columns - 1) + 1
    lent = room(2 * far + 3 * columns, torch.uint8, device)

    def run(ids, offsets=None, mask=None, table=TABLE):
        tokens = Tokens(ids, offsets, mask, *table.on(device), columns)
        return [out.tolist() for out in stage.hash_token_ids(tokens, mode, 8)]

    for ids in (lent.as_strided((rows, columns), (far, 1)), lent.as_strided((rows, columns), (1, wide))):
        ids.copy_(near)
        assert run(ids) == run(near, mask=ids) == [keys, parsed, [-1]]
        ids.zero_()
        assert run(near, mask=ids)[0] == [key(b"", 4 if mode == "text" else 1)] * rows
    lent[far : far + near.numel()] = near.flatten()
    offsets = far + columns * torch.arange(rows + 1, device=device)
    assert run(lent, offsets) == [keys, parsed, [-1]]
    if mode != "first_n":
        assert run(lent, offsets, table=table_of([b"a"] * 60))[2] == [far]  # each row has an id outside this table


@pytest.mark.gpu
@pytest.mark.parametrize("mode", MODES)
def test_never_waits_and_a_captured_graph_replays_on_other_ids(mode):
    ids, options = MATRIX.to("cuda"), {"mode": mode, "token_bytes": TABLE}
    mask = torch.ones_like(ids, dtype=torch.bool)

    def run():
        return bk.action_keys(ids, mask=mask, backend=BACKEND, **options)

    run()
    with nothing_waits(ids.device):
        run()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        keys, parsed = run()
    for other in (MATRIX, MATRIX.flip(0), MATRIX.flip(1)):
        ids.copy_(other)
        graph.replay()
        assert (keys.tolist(), parsed.tolist()) == wanted(other, **options)


def test_table_goes_to_a_device_once_pickles_without_its_copies_and_may_be_too_large(device):
    table = table_of([b"a", b"bc"])
    offsets, data = table.on(device)
    again = table.on(device)
    assert again[0] is offsets and again[1] is data
    assert offsets.device.type == device.type
    assert offsets.tolist() == [0, 1, 3] and bytes(data.tolist()) == b"abc"
    copy = pickle.loads(pickle.dumps(table))
    assert copy._kept == {} and copy.on(device)[0].tolist() == [0, 1, 3]
    assert torch.equal(copy.bytes, table.bytes) and repr(copy) == "TokenBytes(2 ids, 3 bytes)"
    most = stage.LARGEST_TABLE
    table = bk.TokenBytes(torch.tensor([0, most + 1]), torch.zeros(most + 1, dtype=torch.uint8))
    with pytest.raises(ValueError, match=f"token_bytes must hold {most} bytes at most, got {most + 1}"):
        bk.action_keys(MATRIX.to(device), token_bytes=table, backend=BACKEND)


def test_text_stays_on_the_host(device):
    texts = ["<action>Go</action>", "é", ""]
    for mode in MODES:
        keys, parsed = bk.action_keys(texts, mode=mode, backend=BACKEND)
        assert keys.device.type == parsed.device.type == "cpu"
        assert (keys.tolist(), parsed.tolist()) == wanted(texts, mode=mode)
    assert bk.action_keys(np.array(texts, object), backend=BACKEND)[0].tolist() == wanted(texts)[0]


def test_rows_of_device_and_host_are_joined_in_order(device, monkeypatch):
    """The way of rows on a GPU, with the CPU in its place."""
    public = importlib.import_module("bipace_kernels.features.action_keys")
    monkeypatch.setattr(public.transfer, "to_device", lambda tensor, *_: tensor)
    host = importlib.import_module("bipace_kernels.backends.cpu.action_keys")
    rows = [torch.tensor([1, 2]), [3], np.array([4, 5, 6], np.int16), torch.tensor([], dtype=torch.int64), (7,)]
    flat, offsets = public._flatten(rows, "responses", host, torch.device("cuda"), bools=False)
    assert flat.tolist() == [1, 2, 3, 4, 5, 6, 7] and offsets.tolist() == [0, 2, 3, 6, 6, 7]
    flat, _ = public._flatten([torch.tensor([8, 9])], "responses", host, torch.device("cuda"), bools=False)
    assert flat.tolist() == [8, 9]
    with pytest.raises(TypeError, match=r"responses\[2\] must hold integers, got float at position 1"):
        public._flatten([rows[0], [3], [4, 5.0]], "responses", host, torch.device("cuda"), bools=False)
