"""Small tokenizers trained on the spot: a byte-level BPE and SentencePiece-style ones with byte fallback."""

import functools
import json
import random
from typing import Any

import pytest

pytest.importorskip("tokenizers", reason="tokenizers is not installed")

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

VERBS = ["go to", "take", "put", "open", "close", "examine", "heat", "cool", "clean", "use", "click", "search", "think"]
NOUNS = ["the apple", "drawer 2", "fridge 1", "a red mug", "the desk lamp", "countertop 3", "B09QKP7XQL", "Buy Now"]
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]


@functools.cache
def corpus() -> list[str]:
    rng = random.Random(7)
    lines = []
    for _ in range(1500):
        verb, noun = rng.choice(VERBS), rng.choice(NOUNS)
        thought = f"I should {verb} {noun}, since the task says so."
        lines.append(f"<think>\n{thought}\n</think>\n<action>{verb} {noun}</action>")
    return lines


def learnt(texts: list[str], special: list[str], **sizes: int) -> Tokenizer:
    """A byte-level BPE, as Qwen's and Llama 3's: every string of bytes has tokens."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    how = {"initial_alphabet": pre_tokenizers.ByteLevel.alphabet(), "show_progress": False, **sizes}
    tokenizer.train_from_iterator(texts, trainers.BpeTrainer(special_tokens=special, **how))
    return tokenizer


@functools.cache
def byte_level() -> Tokenizer:
    tokenizer = learnt(corpus(), SPECIAL, vocab_size=600)
    # An added token that is not special is text; the full-width bars lie outside the byte alphabet.
    tokenizer.add_tokens([AddedToken("<｜tool｜>", normalized=False), AddedToken("two words", normalized=False)])
    return tokenizer


@functools.cache
def sentencepiece_style(kind: str = "llama") -> Tokenizer:
    """As Llama 2 and Mistral ("llama": a space goes before the text and is dropped on decoding) or Gemma ("gemma")."""
    trained = Tokenizer(models.BPE())
    trained.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always" if kind == "llama" else "never")
    trained.train_from_iterator(corpus(), trainers.BpeTrainer(vocab_size=400, show_progress=False))
    spec = json.loads(trained.to_str())
    bytes_before = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    pieces = bytes_before + sorted(spec["model"]["vocab"], key=spec["model"]["vocab"].get)
    vocabulary = {piece: index for index, piece in enumerate(pieces)}
    merges = [tuple(merge) if isinstance(merge, list) else tuple(merge.split(" ")) for merge in spec["model"]["merges"]]
    unknown = {"unk_token": "<unk>", "byte_fallback": True, "fuse_unk": True}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=merges, **unknown))
    steps: list[Any] = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    replace = normalizers.Replace(" ", "▁")
    if kind == "llama":
        tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), replace])
        steps.append(decoders.Strip(" ", 1, 0))
    else:
        tokenizer.normalizer = replace
    tokenizer.decoder = decoders.Sequence(steps)
    tokenizer.add_special_tokens(["<unk>", "<s>", "</s>"])
    return tokenizer


def all_tokenizers() -> dict[str, Tokenizer]:
    return {"byte_level": byte_level(), "llama": sentencepiece_style("llama"), "gemma": sentencepiece_style("gemma")}
