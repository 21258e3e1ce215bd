"""Embedders turn states into fingerprints: a row of EMBEDDERS for each; docs/embedders.md.

Your own embedder is a class with `name`, `epsilon` and `embed`; it needs no row.
"""

from __future__ import annotations

import contextlib
import hashlib
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import numpy as np
import torch
from torch import Tensor

from ..backends import threads
from ..inputs import checks
from ..inputs.ids import number_objects
from ..support import optional
from ..support.progress import progress_bar
from .ngrams import ngram_fingerprint

Progress = bool | Callable[[int], None]


@dataclass(frozen=True)
class EmbedderRow:
    """Description of an embedder for configurations, adapters, the command line and the documentation."""

    name: str  # in a configuration; "NAME:MODEL" where it takes a model
    label: str  # in tables and figures
    epsilon: float  # its default ε: each embedder has its own geometry
    make: Callable[[str], Embedder]  # from the MODEL of the configuration ("" where it takes none)
    takes_model: bool = False  # whether a configuration must name a model
    fixed: bool = False  # only equal states share a cluster, so no other ε is set or chosen

    @property
    def written(self) -> str:
        """The name in a configuration."""
        return f"{self.name}:MODEL" if self.takes_model else self.name


EMBEDDERS = {
    row.name: row
    for row in (
        EmbedderRow("actor_hidden", "hidden states", 0.10, lambda _: ActorHidden()),
        EmbedderRow("ngram", "n-grams", 0.25, lambda _: Ngram()),
        EmbedderRow("identity", "identity", 0.0, lambda _: Identity(), fixed=True),
        EmbedderRow("sentence", "sentence encoder", 0.20, lambda model: Sentence(model), takes_model=True),
    )
}


def find(text: Any) -> tuple[EmbedderRow, str]:
    """The row of a name in a configuration, such as "ngram" or "sentence:MODEL", and its model; else ValueError."""
    name, colon, model = text.partition(":") if isinstance(text, str) else ("", "", "")
    row = EMBEDDERS.get(name)
    if row is None or bool(colon) != row.takes_model or bool(model) != row.takes_model:
        names = [row.written for row in EMBEDDERS.values()]
        raise ValueError(f"an embedder must be one of {', '.join(names[:-1])} or {names[-1]}, got {text!r}.")
    return row, model


def named(text: str) -> Embedder:
    """The embedder of a name in a configuration: "actor_hidden", "ngram", "identity" or "sentence:MODEL"."""
    row, model = find(text)
    return row.make(model)


@runtime_checkable
class Embedder(Protocol):
    """Makes fingerprints of states.

    name      for tables and logs
    epsilon   starting value of ε; `choose_epsilon()` finds one for the data
    """

    @property
    def name(self) -> str: ...

    @property
    def epsilon(self) -> float: ...

    def embed(self, states: Any) -> Tensor:
        """[N, D] float32 | bfloat16 | float16 fingerprints of N states, for `advantage(fingerprint=...)`."""


@dataclass(frozen=True)
class ActorHidden:
    """Hidden states of the policy itself: the paper's state.

    model     a Hugging Face decoder, for prompts; None: only states
    options   arguments of `bk.hidden.extract()` by name, such as {"layer": -12, "token_budget": 8192}

    embed() takes [N, D] states (tensor or array), or an object whose rows() returns them, such as a tap of `bk.hidden`;
    they keep their device and dtype (float64 is rounded to float32).  With a model it also takes prompts, whose states
    `bk.hidden.extract()` computes: token ids [N, T] (integers, no padding), a list of N rows of them, or a tokenizer's
    output with "input_ids" and "attention_mask".
    """

    epsilon: float = EMBEDDERS["actor_hidden"].epsilon
    name: str = "actor_hidden"
    model: Any = field(default=None, repr=False, compare=False)
    options: Mapping[str, Any] | None = field(default=None, repr=False, compare=False)

    @threads.using()
    def embed(self, states: Any) -> Tensor:
        """[N, D] the states, checked for shape and dtype."""
        rows = states.rows() if hasattr(states, "rows") else states
        if self.model is not None and _are_prompts(rows):
            from ..hidden import extract

            prompts = (rows["input_ids"], rows.get("attention_mask")) if isinstance(rows, Mapping) else (rows,)
            rows = extract(self.model, *prompts, **(self.options or {}))
        if not isinstance(rows, (Tensor, np.ndarray)) or rows.ndim != 2:
            shape = list(rows.shape) if isinstance(rows, (Tensor, np.ndarray)) else type(rows).__name__
            also = "" if self.model is None else ", token ids of prompts"
            raise TypeError(
                f"states must be hidden states [N, D] or a tap{also}, got {shape}; texts are for the other embedders."
            )
        return checks.fingerprint_matrix(rows, rows.shape[0], "states")


@dataclass(frozen=True)
class Ngram:
    """Counts of hashed byte n-grams of str or bytes: `ngram_fingerprint()`, each distinct text counted once."""

    n: int = 3
    dim: int = 4096
    epsilon: float = EMBEDDERS["ngram"].epsilon
    backend: str = "auto"
    num_threads: int | None = None
    name: str = "ngram"

    @threads.using()
    def embed(self, states: Any) -> Tensor:
        """[N, dim] float32 unit vectors on the CPU."""
        distinct, number = _distinct(states, (str, bytes))
        rows = ngram_fingerprint(distinct, n=self.n, dim=self.dim, backend=self.backend, num_threads=self.num_threads)
        return rows[number]


@dataclass(frozen=True)
class Identity:
    """A code for each str or bytes: its cosine clusters are the exact partition (GiGPO's states).

        x_j = ±1/√128 by bit j of BLAKE2b(UTF-8 bytes, 128 bits)

    So at ε = 0 two states share a cluster where they are equal, on any machine and rank.  Codes of different texts are
    near right angles (the standard deviation of their cosine is 0.09), so a radius up to 0.25 changes nothing either.
    """

    epsilon: float = EMBEDDERS["identity"].epsilon
    name: str = "identity"

    @threads.using()
    def embed(self, states: Any) -> Tensor:
        """[N, 128] float32 unit vectors on the CPU."""
        distinct, number = _distinct(states, (str, bytes))
        codes = b"".join(hashlib.blake2b(_bytes(text), digest_size=16).digest() for text in distinct)
        bits = np.unpackbits(np.frombuffer(codes, np.uint8)).reshape(len(distinct), 128)
        return torch.from_numpy((2.0 * bits - 1.0) / math.sqrt(128)).float()[number]


class Sentence:
    """A frozen sentence encoder of sentence-transformers; the states are str.

    model        folder of an encoder, its name on the Hugging Face hub, or a SentenceTransformer
    batch_size   texts per forward
    device       of the encoder, and so of the fingerprints; None: that of the model given, else what
                 sentence-transformers chooses
    epsilon      0.20, a starting value: encoders differ
    progress     True: a bar on stderr; or a function that is called with the number of texts after each batch

    Distinct texts are encoded once, and scaled to unit length in float32.  Encoders keep the beginning of a long text.
    ImportError names the extra if sentence-transformers is not installed.
    """

    def __init__(
        self,
        model: Any,
        *,
        batch_size: int = 32,
        device: str | torch.device | None = None,
        epsilon: float = EMBEDDERS["sentence"].epsilon,
        progress: Progress = False,
    ) -> None:
        self.batch_size = checks.integer_at_least(batch_size, "batch_size", 1)
        self.epsilon = epsilon
        self.progress = progress
        self.name = "sentence"
        if isinstance(model, (str, Path)):
            self.name = f"sentence {'/'.join(Path(model).parts[-2:])}"
            model = _load(str(model), device)
        elif not callable(getattr(model, "encode", None)):
            raise TypeError(f"model must be a folder, a name or a SentenceTransformer, got {type(model).__name__}.")
        elif device is not None:
            model = model.to(device)
        self.encoder = model.eval()

    def __repr__(self) -> str:
        return f"Sentence({self.name!r}, batch_size={self.batch_size}, device={str(self.encoder.device)!r})"

    @threads.using()
    def embed(self, states: Any) -> Tensor:
        """[N, D] float32 unit vectors on the encoder's device."""
        distinct, number = _distinct(states, (str,))
        encode = partial(self.encoder.encode, convert_to_tensor=True, show_progress_bar=False)
        if not distinct:
            return torch.zeros_like(encode([""])[:0], dtype=torch.float32)
        by_length = sorted(range(len(distinct)), key=lambda i: (-len(distinct[i]), i))
        batches: list[Tensor] = []
        with torch.inference_mode(), _shown(self.progress, len(distinct)) as advance:
            for begin in range(0, len(by_length), self.batch_size):
                # Lone surrogates become "?": tokenizers take only valid Unicode.
                batch = [_bytes(distinct[i], "replace").decode() for i in by_length[begin : begin + self.batch_size]]
                rows = encode(batch, batch_size=self.batch_size)
                batches.append(torch.nn.functional.normalize(rows.float(), dim=1))
                advance(len(batch))
        place = torch.empty(len(distinct), dtype=torch.int64)
        place[torch.tensor(by_length)] = torch.arange(len(distinct))
        return torch.cat(batches)[place[number].to(batches[0].device)]


def _distinct(states: Any, kinds: tuple[type, ...]) -> tuple[list[Any], Tensor]:
    """The distinct texts by first appearance, and [N] int64 index of each state's text."""
    texts = checks.texts(states, "states", kinds)
    return list(dict.fromkeys(texts)), number_objects(texts, "states")


def _are_prompts(states: Any) -> bool:
    """Whether these are token ids: integers, rows of them, or a tokenizer's output."""
    if isinstance(states, Tensor):
        return not states.is_floating_point()
    if isinstance(states, np.ndarray):
        return bool(np.issubdtype(states.dtype, np.integer))
    if isinstance(states, Mapping):
        return "input_ids" in states
    return isinstance(states, list) and not any(isinstance(row, (str, bytes)) for row in states)


def _bytes(text: str | bytes, errors: str = "surrogatepass") -> bytes:
    return text.encode("utf-8", errors) if isinstance(text, str) else text


def _load(model: str, device: str | torch.device | None) -> Any:
    package: Any = optional.need("sentence_transformers", "the sentence embedder")
    try:
        return package.SentenceTransformer(model, device=None if device is None else str(device))
    except (OSError, ValueError) as error:
        reason = str(error).strip().split("\n")[0]
        raise ValueError(f"model must be one that sentence-transformers loads, got {model!r}: {reason}") from error


@contextlib.contextmanager
def _shown(progress: Progress, total: int) -> Iterator[Callable[[int], object]]:
    """A function to call with the number of texts done: the caller's, one that moves a bar, or one without effect."""
    if callable(progress):
        yield progress
    elif not progress:
        yield lambda done: None
    else:
        with progress_bar(True, "encoding", total) as bar:
            yield bar.update
