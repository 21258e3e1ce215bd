"""The bytes of every token id, so that text can be matched and hashed on the tokens' device."""

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from ..backends import threads
from ..inputs import transfer

ALL_CHECKED_UP_TO = 1 << 14  # larger tables are checked on every k-th id and on all added tokens
SEQUENCES, SEQUENCE_LENGTH = 64, 24  # checked in addition to single tokens
_BY_TEXT = "hash text instead: bk.action_keys(tokenizer.batch_decode(ids, skip_special_tokens=True))"


@dataclass(frozen=True, eq=False)
class TokenBytes:
    """Token id v has the bytes bytes[offsets[v] : offsets[v + 1]]; special tokens and unused ids have none.

    offsets  [V+1] int64, rising from 0 to len(bytes)
    bytes    [E] uint8
    Both on the CPU and contiguous; `on(device)` gives copies on a device.  Can be pickled, without the copies.
    ValueError or TypeError if the two do not match.
    """

    offsets: torch.Tensor
    bytes: torch.Tensor
    _kept: dict[torch.device, Any] = field(default_factory=dict, init=False, repr=False)  # results of on()

    def __post_init__(self) -> None:
        for name, value, dtype in (("offsets", self.offsets, torch.int64), ("bytes", self.bytes, torch.uint8)):
            if not isinstance(value, torch.Tensor) or value.dtype != dtype or value.ndim != 1:
                what = f"{value.dtype} {list(value.shape)}" if isinstance(value, torch.Tensor) else type(value).__name__
                raise TypeError(f"{name} must be a 1-D {dtype} tensor, got {what}; make the table by bk.token_bytes().")
            if value.device.type != "cpu" or not value.is_contiguous():
                raise ValueError(f"{name} must be contiguous on the CPU, got {value.device}; use .cpu().contiguous().")
        rising = self.offsets.numel() > 0 and bool((self.offsets.diff() >= 0).all())
        if not rising or int(self.offsets[0]) != 0 or int(self.offsets[-1]) != self.bytes.numel():
            raise ValueError(f"offsets must rise from 0 to len(bytes) = {self.bytes.numel()}; use bk.token_bytes().")
        for name in ("offsets", "bytes"):  # the caller may write to its own
            object.__setattr__(self, name, getattr(self, name).clone())

    @property
    def vocabulary_size(self) -> int:
        """V: the table has the ids 0 to V − 1."""
        return self.offsets.numel() - 1

    def on(self, device: torch.device | str) -> tuple[torch.Tensor, torch.Tensor]:
        """offsets and bytes on a device.  The first call copies them, without synchronizing; later calls copy nothing.

        `action_keys` does this itself; call it once before a CUDA graph is captured.
        """
        device = torch.device(device)
        if device.type == "cpu":
            return self.offsets, self.bytes
        device = torch.empty(0, device=device).device  # with its number
        if device not in self._kept:
            moved = transfer.to_device_together([self.offsets, self.bytes], device, "token_bytes")
            self._kept[device] = moved, transfer.Copied.to(device)
        (offsets, data), copied = self._kept[device]
        if copied is not None:
            copied.wait(offsets)
        return offsets, data

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_kept": {}}

    def __repr__(self) -> str:
        return f"TokenBytes({self.vocabulary_size} ids, {self.bytes.numel()} bytes)"


@threads.using()
def token_bytes(tokenizer: Any) -> TokenBytes:
    """The bytes that each token of a Hugging Face tokenizer adds to the text.

    tokenizer  a fast tokenizer of transformers, or a tokenizers.Tokenizer

    Supported: byte-level BPE, and SentencePiece-style vocabularies; special tokens get no bytes.  The table is compared
    with the tokenizer's own decode.  docs/action_keys.md lists decoders, and where text and ids may differ.

    TypeError for an object that is not a fast tokenizer; ValueError for one whose tokens are not bytes of the text
    (WordPiece, CTC, decoders with patterns) or whose decode disagrees with the table.
    """
    # By duck typing: this package imports neither library.
    backend = getattr(tokenizer, "backend_tokenizer", tokenizer)
    if not all(callable(getattr(backend, name, None)) for name in ("to_str", "decode_batch", "id_to_token")):
        raise TypeError(
            f"tokenizer must be a fast Hugging Face tokenizer or a tokenizers.Tokenizer, got {type(tokenizer).__name__}"
            f"; load it with AutoTokenizer.from_pretrained(..., use_fast=True), or {_BY_TEXT}."
        )
    spec = json.loads(backend.to_str())
    to_bytes = _decoder(spec)
    vocabulary = spec["model"]["vocab"]  # Unigram: a list of [token, score]; BPE: token -> id
    tokens: dict[int, str] = (
        {index: entry[0] for index, entry in enumerate(vocabulary)}
        if isinstance(vocabulary, list)
        else {index: token for token, index in vocabulary.items()}
    )
    added = {entry["id"]: entry for entry in spec["added_tokens"]}
    special_texts = {entry["content"] for entry in added.values() if entry["special"]}
    tokens.update({index: entry["content"] for index, entry in added.items()})

    size = max(tokens, default=-1) + 1
    parts = [b""] * size
    for index, token in tokens.items():
        if token not in special_texts:  # decode depends on the token's text, not on its id
            parts[index] = to_bytes(token)
    offsets = np.zeros(size + 1, np.int64)
    np.cumsum([len(part) for part in parts], out=offsets[1:])
    data = np.frombuffer(b"".join(parts), np.uint8).copy()
    table = TokenBytes(torch.from_numpy(offsets), torch.from_numpy(data))
    strips_space = any(step["type"] in ("Metaspace", "Strip") for step in _decoder_steps(spec))
    _verify(backend, parts, sorted(added), strips_space=strips_space)
    return table


def _decoder_steps(spec: dict[str, Any]) -> list[dict[str, Any]]:
    decoder = spec.get("decoder")
    if decoder is None:
        return []
    return list(decoder["decoders"]) if decoder["type"] == "Sequence" else [decoder]


def _refuse(spec: dict[str, Any], why: str) -> ValueError:
    steps = " + ".join(step["type"] for step in _decoder_steps(spec)) or "none"
    return ValueError(
        "tokenizer must be byte-level (decoder ByteLevel) or SentencePiece-style (decoder Metaspace, or Replace ▁ → "
        f"space with ByteFallback), got model {spec['model']['type']} with decoder {steps}: {why}; {_BY_TEXT}."
    )


def _decoder(spec: dict[str, Any]) -> Callable[[str], bytes]:
    """The function from a token to its bytes, derived from the tokenizer's decoder."""
    if spec["model"]["type"] not in ("BPE", "Unigram"):
        raise _refuse(spec, "its tokens are words or pieces without their spaces")
    steps = _decoder_steps(spec)
    if not steps:
        raise _refuse(spec, "without a decoder it joins tokens by spaces")
    if [step["type"] for step in steps] == ["ByteLevel"]:
        # Latin-1 characters without a byte map outside Latin-1, where encode() refuses them.
        to_latin_1 = {byte: 0x10000 + byte for byte in range(256)}
        # GPT-2's table: printable characters of Latin-1 represent themselves, those from U+0100 on the others.
        printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
        others = iter(range(0x100, 0x200))
        to_latin_1.update({byte if byte in printable else next(others): byte for byte in range(256)})

        def byte_level(token: str) -> bytes:
            try:
                return token.translate(to_latin_1).encode("latin-1")
            except UnicodeEncodeError:  # an added token such as "<｜user｜>" is literal text
                return _utf8(token)

        return byte_level

    replacements: list[tuple[str, str]] = []
    byte_fallback = fused = False
    for step in steps:
        kind = step["type"]
        if kind == "Metaspace" and not byte_fallback and not fused:
            replacements.append((step["replacement"], " "))
        elif kind == "Replace" and "String" in step["pattern"] and not byte_fallback and not fused:
            replacements.append((step["pattern"]["String"], step["content"]))
        elif kind == "ByteFallback" and not fused:
            byte_fallback = True
        elif kind == "Fuse":
            fused = True
        elif not (kind == "Strip" and fused and step["content"] == " " and step["start"] <= 1 and step["stop"] == 0):
            raise _refuse(spec, f"its decoder step {kind} changes text in a way that no table of tokens can follow")

    def pieces(token: str) -> bytes:
        for old, new in replacements:
            token = token.replace(old, new)
        if byte_fallback and len(token) == 6 and token.startswith("<0x") and token.endswith(">"):
            try:
                return bytes([int(token[3:5], 16)])
            except ValueError:
                pass  # <0xZZ> is text
        return _utf8(token)

    return pieces


def _utf8(text: str) -> bytes:
    return text.encode("utf-8", "surrogatepass")


def _verify(backend: Any, parts: list[bytes], added: list[int], *, strips_space: bool) -> None:
    """ValueError unless the tokenizer's decode gives the table's text, on a fixed choice of tokens and sequences."""
    size = len(parts)
    ids = range(size) if size <= ALL_CHECKED_UP_TO else sorted({*range(0, size, size // ALL_CHECKED_UP_TO), *added})
    # Each row begins with plain ASCII text, since SentencePiece decoders treat the first token differently.
    first = next(([v] for v in range(size) if parts[v].isascii() and parts[v].decode().isalnum()), [])
    rows = [[*first, v] for v in ids]
    # Sequences by a fixed multiplicative walk, so that tokens have neighbours from the whole vocabulary.
    for start in range(0, SEQUENCES * SEQUENCE_LENGTH if size else 0, SEQUENCE_LENGTH):
        rows.append([*first, *(i * 2654435761 % size for i in range(start, start + SEQUENCE_LENGTH))])
    for row, decoded in zip(rows, backend.decode_batch(rows, skip_special_tokens=True), strict=True):
        data = b"".join(parts[v] for v in row)
        try:
            text = data.decode()
        except UnicodeDecodeError:
            continue  # decoders differ in how they show broken UTF-8, and spec leaves such rows open
        if decoded == text or (strips_space and decoded.lstrip(" ") == text.lstrip(" ")):
            continue
        raise ValueError(f"tokenizer must decode to its bytes, but {row} gives {decoded!r}, not {text!r}; {_BY_TEXT}.")
