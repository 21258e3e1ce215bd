"""bk.action_keys: golden values, reference against cpu, text against ids, every kind of input, errors; tags in CUDA."""

import gc
import random
import re
import struct

import numpy as np
import pytest
import torch
import trained_tokenizers
from action_texts import GOLDEN_IDS, GOLDEN_TEXT, MODES, TABLE, byte_table, key, spelt, table_of, xxhash
from hypothesis import given, settings, strategies as st
from lying import LyingList
from refusals import refused

import bipace_kernels as bk
from bipace_kernels.backends.cpu import action_keys as cpu
from bipace_kernels.backends.cuda import action_keys as on_cuda
from bipace_kernels.backends.reference.xxh64 import signed, xxh64

MATRIX = torch.tensor([spelt(f"<action>Go {i:02d}</action>") for i in range(37)])
TOKEN = st.sampled_from([256, 257, 258, 259, 32, 65]) | st.integers(0, 259)
TABLES = {}
IDS = torch.zeros(2, 3, dtype=torch.int64)
SEEDS = [0, 1, 2, 3, 4, 5, 0x9E3779B185EBCA87, 2**64 - 1]


def keys_of(responses, **options):
    keys, parsed = bk.action_keys(responses, **options)
    assert keys.dtype == torch.int64 and parsed.dtype == torch.bool
    assert keys.shape == parsed.shape == (len(responses),)
    return keys.tolist(), parsed.tolist()


@pytest.mark.parametrize(("mode", "text", "want", "parsed"), GOLDEN_TEXT)
def test_golden_text(backend, mode, text, want, parsed):
    assert keys_of([text], mode=mode, backend=backend) == ([want], [parsed])


@pytest.mark.parametrize(("ids", "want"), GOLDEN_IDS)
def test_golden_ids(backend, ids, want):
    assert keys_of([ids], mode="first_n", backend=backend) == ([want], [False])
    assert keys_of(torch.tensor([ids], dtype=torch.int64), mode="first_n", backend=backend) == ([want], [False])


@pytest.mark.parametrize("n", [3, 4, 2**62, 2**64, np.int32(3)])
def test_n_beyond_the_row_hashes_what_there_is(backend, n):
    assert keys_of([[5, -7, 1 << 40]], mode="first_n", n=n, backend=backend) == ([-6511843743981271603], [False])


def test_tags_and_lone_surrogates(backend):
    cases = {
        "<action>a</action><action>b</action>": b"a",
        "<action><action>a</action></action>": b"<action>a",
        "</action><action>a</action>": b"a",
        "<action>a</actio</action>": b"a</actio",
        "<<action>a<</action>": b"a<",
        "<action>a\n\nb</action>": b"a\n\nb",
        "<action>É Ā\u00a0</action>": "É Ā\u00a0".encode(),  # only A to Z are lowered, only ASCII white space stripped
        "<action>\x00A\x00</action>": b"\x00a\x00",
        "<action>\x1ca\x1f</action>": b"\x1ca\x1f",  # white space for str.strip(), not for bytes.strip()
        "<action>@[`{AZ</action>": b"@[`{az",
        "x" * 500 + "<action>far</action>" + "y" * 500: b"far",
    }
    want = [key(body, 2) for body in cases.values()]
    assert keys_of(list(cases), backend=backend) == (want, [True] * len(cases))
    rows = [spelt(text) for text in cases]
    assert keys_of(rows, token_bytes=TABLE, backend=backend) == (want, [True] * len(cases))
    text = "<action>\ud83d Go</action>"
    assert keys_of([text], backend=backend) == ([key(b"\xed\xa0\xbd go", 2)], [True])


def test_no_match_falls_back_to_the_first_n_key(backend):
    texts = ["<action>unclosed", "<Action>a</Action>", "</action>a<action>", "<action >a</action>", "<action>a</action"]
    want = [key(text.encode()[:64], 3) for text in texts]
    assert keys_of(texts, backend=backend) == (want, [False] * len(texts))
    rows = [spelt(text) for text in texts]
    want = [key(struct.pack("<3q", *row[:3]), 1) for row in rows]
    assert keys_of(rows, token_bytes=TABLE, n=3, backend=backend) == (want, [False] * len(texts))


def test_tag_may_straddle_tokens_and_the_joins_inside_the_search(backend):
    # Byte tokens put the two tags across every boundary at which the search pauses for more tokens.
    lengths = [(before, body) for before in range(50, 70) for body in (0, 5, 60)]
    rows = [spelt("." * before + "<action>" + "b" * body + "</action>tail") for before, body in lengths]
    want = [key(b"b" * body, 2) for _, body in lengths]
    assert keys_of(rows, token_bytes=TABLE, backend=backend) == (want, [True] * len(rows))


def test_tokens_of_any_length(backend):
    rows = [[259, 257, 256, 259, 65, 258, 259], [257, 258], [259] * 300 + [257, 66, 258], [256, 256]]
    long = b"a token longer than sixteen bytes"
    assert keys_of(rows, token_bytes=TABLE, backend=backend) == (
        [key(long + b"a", 2), key(b"", 2), key(b"b", 2), key(struct.pack("<2q", 256, 256), 1)],
        [True, True, True, False],
    )
    parts = [bytes(range(0x61, 0x61 + length)) for length in range(20)]
    table = table_of(parts)
    rows = [[v, v, w] for v in range(20) for w in range(20)]
    want = [key(parts[v] * 2 + parts[w], 4) for v, _, w in rows]
    assert keys_of(rows, mode="text", token_bytes=table, backend=backend)[0] == want


@pytest.mark.parametrize("longest", [1000, 1024, 1025, 200_000])
def test_tokens_that_are_very_long(backend, longest):
    table = table_of([b"z", b"z" * longest])
    rows = [[0, 1, 0], [1] * 5, [0] * 70, [1] + [0] * 64 + [1]]
    want = [key(b"z" * sum((1, longest)[v] for v in row), 4) for row in rows]
    assert keys_of(rows, mode="text", token_bytes=table, backend=backend)[0] == want


@pytest.mark.parametrize("dtype", [torch.bool, torch.int64, torch.int32, torch.uint8, torch.int16])
def test_mask_with_holes(backend, dtype):
    row = [257, 0, 65, -100, 66, 10**12, 258, -1]
    mask = torch.tensor([[1, 0, 1, 0, 1, 0, 1, 0]]).to(dtype)
    ids = torch.tensor([row])
    assert keys_of(ids, mask=mask, token_bytes=TABLE, backend=backend) == ([key(b"ab", 2)], [True])
    want = key(struct.pack("<3q", 257, 65, 66), 1)
    assert keys_of(ids, mask=mask, mode="first_n", n=3, backend=backend) == ([want], [False])
    want = key(struct.pack("<4q", 257, 65, 66, 258), 1)
    assert keys_of(ids, mask=mask, mode="first_n", n=100, backend=backend) == ([want], [False])
    assert keys_of([row], mask=mask.tolist(), token_bytes=TABLE, backend=backend) == ([key(b"ab", 2)], [True])
    assert keys_of([row], mask=mask, token_bytes=TABLE, backend=backend) == ([key(b"ab", 2)], [True])
    unequal = [torch.tensor(row), torch.tensor([257, 258])]
    rows_of_mask = [mask[0], torch.tensor([1, 1]).to(dtype)]
    want_two = ([key(b"ab", 2), key(b"", 2)], [True, True])
    assert keys_of(unequal, mask=rows_of_mask, token_bytes=TABLE, backend=backend) == want_two
    if dtype != torch.uint8:  # any integer but zero is a valid token
        assert keys_of(ids, mask=mask.to(torch.int64) * -256, token_bytes=TABLE, backend=backend)[1] == [True]


@pytest.mark.parametrize("mode", MODES)
def test_every_kind_of_ids_gives_the_same_keys(backend, mode):
    options = {"mode": mode, "token_bytes": TABLE, "backend": backend}
    want = keys_of(MATRIX, **options)
    wide = torch.full((74, 2 * MATRIX.shape[1] + 3), -5)
    wide[::2, 3::2] = MATRIX
    array = MATRIX.numpy()
    read_only = array.copy()
    read_only.flags.writeable = False
    kinds = [
        *(MATRIX.to(dtype) for dtype in (torch.int32, torch.int16, torch.uint8, torch.int64)),
        wide[::2, 3::2],
        MATRIX.t().contiguous().t(),
        array,
        read_only,
        array[::-1, ::-1].copy()[::-1, ::-1],
        np.asfortranarray(array),
        *(array.astype(dtype) for dtype in (np.uint16, np.uint32, np.uint64, np.int8, ">i4", ">i8")),
        array.astype(object),
        MATRIX.tolist(),
        tuple(map(tuple, MATRIX.tolist())),
        list(MATRIX),
        list(array),
        [row.astype(np.uint16) for row in array],
        list(wide[::2, 3::2]),
    ]
    for kind in kinds:
        before = kind.clone() if isinstance(kind, torch.Tensor) else None
        assert keys_of(kind, **options) == want
        assert before is None or torch.equal(before, kind)


@pytest.mark.parametrize("offset", range(8))
def test_every_storage_offset(offset):
    def moved(x, beside):
        storage = torch.full((x.numel() + 8,), beside, dtype=x.dtype)
        return storage[offset : offset + x.numel()].view(x.shape).copy_(x)

    want = keys_of(MATRIX, token_bytes=TABLE)
    for ids in (MATRIX.int(), MATRIX):
        assert keys_of(moved(ids, 300), token_bytes=TABLE) == want
    assert keys_of(MATRIX, mask=moved(MATRIX > 0, False), token_bytes=TABLE) == want


def test_arrays_of_text():
    texts = ["<action>a</action>", "b", "漢"]
    kinds = [None, object, *([np.dtypes.StringDType()] if hasattr(np.dtypes, "StringDType") else [])]  # since NumPy 2
    for same in (tuple(texts), *(np.array(texts, dtype=kind) for kind in kinds)):
        assert keys_of(same) == keys_of(texts)


def test_strided_mask(backend):
    ids = MATRIX.clone()
    ids[:, 8] = -100
    mask = torch.zeros(ids.shape[1] * 2, ids.shape[0] * 3, dtype=torch.int64)
    mask[::2, ::3] = 1
    view = mask[::2, ::3].t()
    view[:, 8] = 0
    want = [key(f"o {i:02d}".encode(), 2) for i in range(37)]
    for rows, mask in ((ids, view), (ids.to(torch.int32), view.to(torch.int32)), (ids, view != 0)):
        assert keys_of(rows, mask=mask, token_bytes=TABLE, backend=backend)[0] == want


def test_outputs_are_written_and_nothing_beside_them(monkeypatch):
    guards = []

    def guarded(size, dtype):
        storage = torch.full((size + 16,), 77, dtype=torch.uint8 if dtype == torch.bool else dtype)
        guards.append((storage, size))
        inner = storage[8 : 8 + size]
        return inner.view(torch.bool) if dtype == torch.bool else inner

    monkeypatch.setattr(cpu.torch, "empty", guarded)
    keys, parsed = bk.action_keys(MATRIX, token_bytes=TABLE, backend="cpu", num_threads=3)
    text_keys, text_parsed = bk.action_keys([f"<action>Go {i:02d}</action>" for i in range(37)], backend="cpu")
    monkeypatch.undo()
    assert torch.equal(keys, text_keys) and torch.equal(parsed, text_parsed) and bool(parsed.all())
    assert len(guards) == 4
    for storage, size in guards:
        assert bool((storage[:8] == 77).all()) and bool((storage[8 + size :] == 77).all())


def test_same_bits_at_any_thread_count():
    ids = torch.randint(0, 260, (203, 90), generator=torch.Generator().manual_seed(3))
    texts = [f"<action>Go {i}</action>" for i in range(203)]
    for mode in MODES:
        options = {"mode": mode, "backend": "cpu"}
        want, want_text = keys_of(ids, token_bytes=TABLE, **options), keys_of(texts, **options)
        for threads in range(1, 9):
            assert keys_of(ids, token_bytes=TABLE, num_threads=threads, **options) == want
            assert keys_of(texts, num_threads=threads, **options) == want_text


PIECES = ["<action>", "</action>", "<", ">", "action", "/", " ", "\n", "A", "é", "汉", "😀", "\ud800", "x" * 40]
TEXT = st.text(max_size=80) | st.lists(st.sampled_from(PIECES), max_size=14).map("".join)


@settings(max_examples=300, deadline=None)
@given(st.lists(TEXT, max_size=6), st.sampled_from(MODES))
def test_reference_equals_cpu_on_text(texts, mode):
    assert keys_of(texts, mode=mode, backend="reference") == keys_of(texts, mode=mode, backend="cpu")


@settings(max_examples=300, deadline=None)
@given(st.lists(st.lists(TOKEN, max_size=150), max_size=6), st.sampled_from(MODES), st.integers(1, 12), st.data())
def test_reference_equals_cpu_on_ids(rows, mode, n, data):
    mask = None
    if rows and data.draw(st.booleans()):
        mask = [data.draw(st.lists(st.booleans(), min_size=len(row), max_size=len(row))) for row in rows]
    options = {"mode": mode, "n": n, "mask": mask, "token_bytes": TABLE}
    assert keys_of(rows, backend="reference", **options) == keys_of(rows, backend="cpu", **options)


@settings(max_examples=300, deadline=None)
@given(texts=st.lists(TEXT, min_size=1, max_size=4), mode=st.sampled_from(MODES), seed=st.integers(0, 2**32 - 1))
def test_text_in_tokens_of_any_length_equals_the_reference(texts, mode, seed):
    rng, parts, rows = random.Random(seed), [b"<action>", b"</action>", b""], []
    longest, order = rng.randint(1, 12), rng.choice("CF")
    ids_of, mask_of = rng.choice([np.int32, np.int64]), rng.choice([np.uint8, np.int32, np.int64])
    for text in (text.encode("utf-8", "surrogatepass") for text in texts):
        row, at = [], 0
        while at < len(text):
            row += [(rng.randrange(2), 0)] * (rng.random() < 0.1) + [(2, 1)] * (rng.random() < 0.1)
            row.append((len(parts), 1))
            parts.append(text[at : at + rng.randint(1, longest)])
            at += len(parts[-1])
        rows.append(row)
    ids, mask = np.zeros((2, len(rows), max(map(len, rows))), np.int64)
    for i, row in enumerate(rows):
        for k, token in enumerate(row):
            ids[i, k], mask[i, k] = token
    options = {"mode": mode, "n": rng.randint(1, 11), "token_bytes": table_of(parts)}
    matrix, masks = ids.astype(ids_of, order=order), mask.astype(mask_of, order=order)
    want = keys_of(matrix, mask=masks, backend="reference", **options)
    assert keys_of(matrix, mask=masks, backend="cpu", **options) == want
    ragged = [ids[i, : len(row)] for i, row in enumerate(rows)]
    assert keys_of(ragged, mask=[mask[i, : len(row)] for i, row in enumerate(rows)], backend="cpu", **options) == want


@settings(max_examples=300, deadline=None)
@given(TEXT.filter(lambda text: "\ud800" not in text), st.sampled_from(["byte_level", "llama", "gemma"]))
def test_text_ids_and_a_regular_expression_agree_wherever_a_row_parses(text, name):
    tokenizer = trained_tokenizers.all_tokenizers()[name]
    table = TABLES.setdefault(name, bk.token_bytes(tokenizer))
    ids = tokenizer.encode(text, add_special_tokens=False).ids
    decoded = tokenizer.decode(ids)
    for mode in ("action_tag", "text"):
        keys, parsed = keys_of([decoded], mode=mode)
        id_keys, id_parsed = keys_of([ids], mode=mode, token_bytes=table)
        assert parsed == id_parsed
        assert keys == id_keys or not parsed[0]
    action = re.search(r"<action>(.*?)</action>", decoded, re.DOTALL)
    keys, parsed = keys_of([ids], token_bytes=table)
    assert parsed == [action is not None]
    assert action is None or keys == [key(action[1].encode().strip().lower(), 2)]


def test_strings_keep_no_utf8_copy():
    text = "汉" * 1000 + "".join(chr(0x4E00 + i) for i in range(100))
    before = text.__sizeof__()
    bk.action_keys([text])
    assert text.__sizeof__() == before


@pytest.mark.parametrize("mode", MODES)
def test_nothing_in_nothing_out(backend, mode):
    empty = [[], (), np.empty(0, object), torch.empty(0, 5, dtype=torch.int64), np.empty((0, 0), np.int32)]
    for responses in empty:
        assert keys_of(responses, mode=mode, token_bytes=TABLE, backend=backend) == ([], [])
    no_columns = torch.empty(3, 0, dtype=torch.int32)
    want = key(b"", 4 if mode == "text" else 1)
    assert keys_of(no_columns, mode=mode, token_bytes=TABLE, backend=backend) == ([want] * 3, [False] * 3)
    assert keys_of([[], [], []], mode=mode, token_bytes=TABLE, backend=backend) == ([want] * 3, [False] * 3)


def test_empty_table():
    ids, mask = torch.tensor([[3]]), torch.tensor([[False]])
    assert keys_of(ids, mask=mask, token_bytes=table_of([])) == ([key(b"", 1)], [False])
    assert keys_of(ids, token_bytes=table_of([b""] * 4)) == ([key(struct.pack("<q", 3), 1)], [False])


@pytest.mark.parametrize("mode", ["action_tag", "text"])
@pytest.mark.parametrize("bad", [-1, 260, 2**62, -(2**63)])
def test_token_id_outside_the_table_is_named(backend, mode, bad):
    ids = torch.full((70, 200), 65)
    ids[:, :2] = torch.tensor([257, 258])  # parsed at once: the rest of the row is checked all the same
    ids[41, 177], ids[41, 180], ids[60, 2], ids[61, 2] = bad, bad, -9, 10**6
    message = re.escape(f"responses must hold token ids from 0 to 259, got {bad} in row 41, column 177")
    for kind in (ids, ids.tolist()):
        for threads, check in ((1, "auto"), (4, "now")):
            with pytest.raises(ValueError, match=message):
                bk.action_keys(kind, mode=mode, token_bytes=TABLE, backend=backend, num_threads=threads, check=check)
    ids[3, 5] = ids[41, 9] = 10**6  # masked out: may hold anything
    mask = ids != 10**6
    refused(message, bk.action_keys, ids, mask=mask, mode=mode, token_bytes=TABLE, backend=backend)
    assert keys_of(ids, mode="first_n", token_bytes=TABLE, backend=backend)[1] == [False] * 70


@pytest.mark.parametrize(("responses", "options", "error", "message"), [
    (["a"], {"mode": "tag"}, ValueError, "mode must be one of action_tag, first_n, text, got 'tag'"),
    (["a"], {"n": 0}, ValueError, "n must be an int of at least 1, got 0"),
    (["a"], {"backend": "gpu"}, ValueError, "backend"),
    (["a"], {"backend": "cuda"}, bk.BackendError, "cuda"),
    (["a"], {"num_threads": 0}, ValueError, "num_threads"),
    (["a"], {"check": "later"}, ValueError, "check must be 'auto' or 'now', got 'later'"),
    (["a"], {"token_bytes": "table"}, TypeError, r"must be bk\.token_bytes\(tokenizer\) or None, got str"),
    (["a"], {"mask": [[1]]}, ValueError, "mask must be None for text"),
    ("one response", {}, TypeError, "got str; put a single one into a list"),
    (None, {}, TypeError, "got NoneType"),
    (["a", "b", 3], {}, TypeError, "got int at index 2"),
    (["a", [1, 2]], {}, TypeError, "got list at index 1; give all rows as str or all as token ids"),
    ([b"a", "b"], {}, TypeError, "got bytes at index 0; decode it first"),
    ([1, 2, 3], {"mode": "first_n"}, TypeError, r"responses\[0\] must be a row of integers, got int"),
    ([[1, 2], "a"], {"mode": "first_n"}, TypeError, r"responses\[1\] must be a row of integers, got str"),
    ([[1, 2.0]], {"mode": "first_n"}, TypeError, r"responses\[0\] must hold integers, got float at position 1"),
    ([[1], [2, 2**63]], {"mode": "first_n"}, ValueError, r"responses\[1\] .*9223372036854775808 at pos.* 1"),
    ([[1], (2, True)], {"mode": "first_n"}, TypeError, r"responses\[1\] must .* got bool at position 1"),
    ([[1], [[2]]], {"mode": "first_n"}, TypeError, r"responses\[1\] must hold integers, got list at position 0"),
    ([IDS], {"mode": "first_n"}, ValueError, r"responses\[0\] must be one row of integers, got shape \[2, 3\]"),
    (IDS[0], {"mode": "first_n"}, ValueError, r"responses must have shape \[N, T\], got \[3\].*responses\[None\]"),
    (IDS.float(), {"mode": "first_n"}, TypeError, "responses must be token ids.*got torch.float32"),
    (np.full((1, 1), 2**63, np.uint64), {"mode": "first_n"}, ValueError, "int64"),
    (np.zeros((2, 2), "datetime64[s]"), {"mode": "first_n"}, TypeError, "responses"),
    (IDS, {}, ValueError, "token_bytes is missing in mode \"action_tag\""),
    (IDS, {"mask": IDS[:1].bool()}, ValueError, r"mask must have shape .N, T. = .2, 3. like .*\[1, 3\]"),
    (IDS, {"mask": IDS.float()}, TypeError, "mask must be bool or integers.*torch.float32"),
    (IDS, {"mask": [[1, 1, 1], [1, 1]]}, (TypeError, ValueError), "mask"),
    ([[1], [2, 3]], {"mask": [[1]]}, ValueError, "mask must have one row per response, N = 2, got 1 rows"),
    ([[1], [2, 3]], {"mask": [[1], [1]]}, ValueError, r"mask\[1\] must be as long as responses\[1\], 2, got 1"),
    ([[1]], {"mask": [[0.5]]}, TypeError, r"mask\[0\] must hold integers"),
    (torch.empty(2, 3, dtype=torch.int64, device="meta"), {"mode": "first_n"}, Exception, "meta"),
    (IDS, {"mask": torch.empty(2, 3, device="meta")}, ValueError, "device"),
])  # fmt: skip
def test_bad_arguments_are_named(responses, options, error, message):
    for backend in [options["backend"]] if "backend" in options else ["reference", "cpu"]:
        refused(message, bk.action_keys, responses, error=error, **{**options, "backend": backend})


def test_rows_of_any_mixture_of_integers(backend):
    want = keys_of([[3, 4, 5]] * 5, mode="first_n", backend=backend)
    rows = [[3, np.int16(4), 5], (3, 4, 5), torch.tensor([3, 4, 5]), np.uint64([3, 4, 5]), [np.int64(3), 4, 5]]
    assert keys_of(rows, mode="first_n", backend=backend) == want
    assert keys_of(rows[2:4] * 2 + rows[2:3], mode="first_n", backend=backend) == want
    extremes = [[-(2**63), 2**63 - 1]]
    assert keys_of(extremes, mode="first_n", backend=backend)[0] == [key(struct.pack("<2q", *extremes[0]), 1)]


def test_row_that_shrinks_while_it_is_read_is_an_error():
    class Shrinking:
        def __index__(self):
            row.clear()
            return 1

    row = [Shrinking(), 2, 3]
    with pytest.raises(ValueError, match=r"responses\[0\] must hold 3 items like its len\(\); it changed"):
        bk.action_keys([row], mode="first_n", backend="cpu")


@pytest.mark.parametrize("lengths", [(3, 200_000, 3), (2,), (4,)])
def test_rows_that_lie_about_their_length_are_an_error(backend, lengths):
    """Their len() is their place among the flat ids: keys of a row that is shorter would be read beyond the end."""
    with pytest.raises(ValueError, match=rf"responses\[1\] must hold {max(lengths[:2])} items"):
        bk.action_keys([[1], LyingList([3, 4, 5], *lengths)], mode="first_n", backend=backend)


@pytest.mark.parametrize("where", [0, 5, 260])
def test_table_changed_after_it_was_made_is_an_error(where):
    table = byte_table()
    table.offsets[where] = 10**15 if where == 5 else 1
    refused("its tensors were changed", bk.action_keys, IDS, token_bytes=table, backend="cpu")


@pytest.mark.parametrize("seed", SEEDS)
def test_xxh64_of_every_length_to_300(seed):
    data = random.Random(300).randbytes(301)
    for length in range(301):
        assert xxh64(data[:length], seed) == xxhash.xxh64_intdigest(data[:length], seed), length
    assert [signed(v) for v in (0, 2**63 - 1, 2**63, 2**64 - 1)] == [0, 2**63 - 1, -(2**63), -1]


def test_texts_of_every_length_to_300(backend):
    texts = ["".join(random.Random(300).choices("abcxyz0189", k=300))[:length] for length in range(1, 301)]
    assert keys_of(texts, mode="text", backend=backend)[0] == [key(text.encode(), 4) for text in texts]


def columns_of(*tokens):
    made = table_of(list(tokens))
    return made.offsets, made.bytes


def test_tokens_that_hold_the_byte_are_found_once_and_forgotten_with_the_table():
    found = on_cuda._tokens_with_a_tag(*columns_of(b"so", b"", b"<", b"a<b", b">", b"<action>"))
    assert found.tolist() == [False, False, True, True, False, True]
    assert on_cuda._tokens_with_a_tag(*columns_of()).tolist() == []
    offsets, data = columns_of(b"<", b"so")
    found = on_cuda._tokens_with_a_tag(offsets, data)
    assert on_cuda._tokens_with_a_tag(offsets, data) is found
    data[1] = ord("<")  # another table in the same place
    assert on_cuda._tokens_with_a_tag(offsets, data).tolist() == [True, True]
    assert on_cuda._tokens_with_a_tag(torch.tensor([0, 2, 3]), data).tolist() == [True, False]
    before = len(on_cuda._FOUND)
    del data
    gc.collect()
    assert len(on_cuda._FOUND) == before - 1


def test_nothing_is_kept_of_inference_tensors():
    """They do not count what is written into them."""
    with torch.inference_mode():
        offsets, data = columns_of(b"<", b"so")
        assert on_cuda._tokens_with_a_tag(offsets, data).tolist() == [True, False]
        data[1] = ord("<")
        assert on_cuda._tokens_with_a_tag(offsets, data).tolist() == [True, True]
