"""bk.token_bytes against the decode of tokenizers trained on the spot."""

import random
from types import SimpleNamespace

import pytest
import torch
import trained_tokenizers
from refusals import refused
from tokenizers import AddedToken, Tokenizer, decoders, models

import bipace_kernels as bk

TEXTS = [
    "<think>ok</think>\n<action>take the apple</action>",
    " two  spaces before, and after  ",
    "emoji 😀👩‍👩‍👧 and CJK 汉字かな in <action>search[汉字 😀]</action>",
    "tabs\tand\r\nnewlines\x00nul",
    "▁ is a character of its own",
    "",
]


def table_bytes(table, ids):
    flat, offsets = bytes(table.bytes.tolist()), table.offsets.tolist()
    return b"".join(flat[offsets[v] : offsets[v + 1]] for v in ids)


@pytest.fixture(params=["byte_level", "llama", "gemma"])
def tokenizer(request):
    return trained_tokenizers.all_tokenizers()[request.param]


def test_table_joins_to_what_decode_gives_and_holds_every_byte(tokenizer):
    table = bk.token_bytes(tokenizer)
    for text in TEXTS:
        ids = tokenizer.encode(text, add_special_tokens=False).ids
        got = table_bytes(table, ids).decode()
        want = tokenizer.decode(ids)
        assert got == want or got == " " + want, text
    table = bk.token_bytes(tokenizer)
    singles = {table_bytes(table, [v]) for v in range(table.vocabulary_size)}
    assert {bytes([b]) for b in range(256)} <= singles


def test_random_ids_join_to_what_decode_gives(tokenizer):
    table = bk.token_bytes(tokenizer)
    rng = random.Random(5)
    compared = 0
    for _ in range(400):
        ids = [rng.randrange(table.vocabulary_size) for _ in range(rng.randrange(1, 12))]
        try:
            got = table_bytes(table, ids).decode()
        except UnicodeDecodeError:
            continue
        compared += 1
        assert got.removeprefix(" ") == tokenizer.decode(ids).removeprefix(" "), ids
    assert compared > 20


def test_special_unused_and_added_tokens():
    tokenizer = trained_tokenizers.byte_level()
    table = bk.token_bytes(tokenizer)
    for special in trained_tokenizers.SPECIAL:
        assert table_bytes(table, [tokenizer.token_to_id(special)]) == b""
    for added in ("<｜tool｜>", "two words"):
        assert table_bytes(table, [tokenizer.token_to_id(added)]) == added.encode()
    tokenizer = Tokenizer(models.BPE(vocab={"a": 0, "b": 5}, merges=[]))
    tokenizer.decoder = decoders.ByteLevel()
    table = bk.token_bytes(tokenizer)
    assert table.vocabulary_size == 6 and table_bytes(table, [0, 1, 2, 3, 4, 5]) == b"ab"
    # "é" is the byte-level letter of byte 0xE9, and decode reads it so even in an added token: the table must agree.
    tokenizer = Tokenizer.from_str(trained_tokenizers.byte_level().to_str())
    tokenizer.add_tokens([AddedToken("é", normalized=False)])
    table = bk.token_bytes(tokenizer)
    assert table_bytes(table, [tokenizer.token_to_id("é")]) == b"\xe9"


def test_metaspace_decoder():
    vocabulary = [("<unk>", 0.0), ("▁take", -1.0), ("▁the", -1.1), ("s", -2.0), ("<0x41>", -3.0)]
    tokenizer = Tokenizer(models.Unigram(vocabulary, unk_id=0))
    tokenizer.decoder = decoders.Metaspace()
    table = bk.token_bytes(tokenizer)
    # Without ByteFallback in the decoder <0x41> is six characters of text.
    assert table_bytes(table, [1, 2, 3, 4]) == b" take thes<0x41>"


def test_transformers_wrapper_gives_the_same_table():
    transformers = pytest.importorskip("transformers")
    for backend in trained_tokenizers.all_tokenizers().values():
        wrapped = transformers.PreTrainedTokenizerFast(tokenizer_object=backend)
        table, want = bk.token_bytes(wrapped), bk.token_bytes(backend)
        assert torch.equal(table.offsets, want.offsets) and torch.equal(table.bytes, want.bytes)


BPE = models.BPE(vocab={"a": 0}, merges=[])
UNREAD = [
    (models.WordPiece(vocab={"[UNK]": 0, "a": 1}), decoders.WordPiece(), "model WordPiece"),
    (models.WordLevel(vocab={"[UNK]": 0}, unk_token="[UNK]"), None, "model WordLevel"),
    (BPE, None, "without a decoder"),
    (models.BPE(vocab={"a</w>": 0}, merges=[]), decoders.BPEDecoder(), "BPEDecoder"),
    (BPE, decoders.CTC(), "CTC"),
    (BPE, decoders.Sequence([decoders.ByteFallback(), decoders.Replace("▁", " "), decoders.Fuse()]), "Replace"),
]


@pytest.mark.parametrize(("model", "decoder", "why"), UNREAD)
def test_other_tokenizers_are_refused(model, decoder, why):
    tokenizer = Tokenizer(model)
    if decoder is not None:
        tokenizer.decoder = decoder
    refused(why, bk.token_bytes, tokenizer)


@pytest.mark.parametrize("other", [None, "gpt2", 3, {"a": 0}])
def test_other_objects_are_refused(other):
    refused("fast Hugging Face tokenizer", bk.token_bytes, other, error=TypeError)
    refused("use_fast=True", bk.token_bytes, SimpleNamespace(decode=lambda ids: ""), error=TypeError)


def test_tokenizer_whose_decode_disagrees_is_refused():
    backend = trained_tokenizers.byte_level()

    class Shouting:
        to_str, id_to_token = backend.to_str, backend.id_to_token

        def decode_batch(self, rows, skip_special_tokens):
            return [text.upper() for text in backend.decode_batch(rows, skip_special_tokens=skip_special_tokens)]

    refused("must decode to its bytes", bk.token_bytes, Shouting())


def test_added_tokens_of_a_large_vocabulary_are_all_checked():
    backend = Tokenizer(models.BPE(vocab={f"t{i}": i for i in range(40_000)}, merges=[]))
    backend.decoder = decoders.ByteLevel()
    backend.add_tokens(["<tool>", "<call>"])
    wanted = backend.token_to_id("<call>")
    assert bk.token_bytes(backend).vocabulary_size == 40_002
    checked = []

    class WrongOnce:
        to_str, id_to_token = backend.to_str, backend.id_to_token

        def decode_batch(self, rows, skip_special_tokens):
            checked.extend(row[1] for row in rows if len(row) == 2)
            texts = backend.decode_batch(rows, skip_special_tokens=skip_special_tokens)
            return [text + "!" if row[-1] == wanted else text for row, text in zip(rows, texts, strict=True)]

    refused("<call>!", bk.token_bytes, WrongOnce())
    assert 10_000 < len(checked) < 40_000  # a sample


def test_table_that_does_not_fit_together_is_refused():
    for offsets, data, error in (
        (torch.tensor([0, 2]), torch.zeros(1, dtype=torch.uint8), ValueError),
        (torch.tensor([0, 2, 1]), torch.zeros(1, dtype=torch.uint8), ValueError),
        (torch.tensor([1, 1]), torch.zeros(1, dtype=torch.uint8), ValueError),
        (torch.tensor([], dtype=torch.int64), torch.zeros(0, dtype=torch.uint8), ValueError),
        (torch.tensor([0, 4, 0, 4])[::2], torch.zeros(0, dtype=torch.uint8), ValueError),
        (torch.tensor([0, 1], dtype=torch.int32), torch.zeros(1, dtype=torch.uint8), TypeError),
        (torch.tensor([0, 1]), torch.zeros(1), TypeError),
        ([0, 1], torch.zeros(1, dtype=torch.uint8), TypeError),
    ):
        refused(r"offsets|bytes", bk.TokenBytes, offsets, data, error=error)
