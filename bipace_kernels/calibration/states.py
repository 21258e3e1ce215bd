"""States of a calibration: computed once, kept in a folder, and resumed after an interruption."""

import contextlib
import hashlib
import itertools
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..hidden._prompts import Prompts, prompts_of
from ..hidden.extract import extract_layers
from ..hidden.layers import Decoder, Layer, find_decoder
from ..inputs import checks
from ..support.files import atomic_file, locked
from ..support.progress import progress_bar

Pair = tuple[Layer, str]  # a layer and a pooling
FORMAT = 2
_INTEGER_OF_SIZE = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def token_ids(prompts: Any, tokenizer: Any) -> list[list[int]]:
    """Token ids of each prompt: a text, chat messages, or token ids."""
    if isinstance(prompts, (str, bytes, Mapping, Tensor)) or not isinstance(prompts, Sequence):
        raise TypeError(
            f"prompts must be a list of texts, chats or token ids, got {type(prompts).__name__}; no padded tensor."
        )
    if not prompts:
        raise ValueError("prompts must hold at least one prompt, got none.")
    if tokenizer is not None and not callable(tokenizer):
        raise TypeError(
            f"tokenizer must be a transformers tokenizer, got {type(tokenizer).__name__}; load one by AutoTokenizer."
        )
    rows = [_row(prompt, i, tokenizer) for i, prompt in enumerate(prompts)]
    for i, row in enumerate(rows):
        if not row:
            raise ValueError(f"prompts[{i}] must have at least one token, got none; leave it out, with its label.")
    return rows


def _row(prompt: Any, i: int, tokenizer: Any) -> list[int]:
    chat = isinstance(prompt, (list, tuple)) and bool(prompt) and all(isinstance(m, Mapping) for m in prompt)
    if not chat and not isinstance(prompt, str):
        ids: list[int] = checks.integer_vector(prompt, f"prompts[{i}]", checks.length(prompt, f"prompts[{i}]")).tolist()
        return ids
    if tokenizer is None:
        raise ValueError(
            f"tokenizer is missing, but prompts[{i}] is {'chat messages' if chat else 'a text'}; or pass token ids."
        )
    text = prompt
    if chat:  # as text first: whether the template returns ids or a dict depends on the version of transformers
        if getattr(tokenizer, "chat_template", None) is None:
            raise ValueError(
                f"prompts[{i}] is chat messages, but the tokenizer has no chat_template; set it, or use texts."
            )
        text = tokenizer.apply_chat_template(list(prompt), tokenize=False, add_generation_prompt=True)
    tokens: list[int] = tokenizer(text, add_special_tokens=not chat)["input_ids"]
    return tokens


def stem_of(layer: Layer, pooling: str) -> str:
    """Start of the names of a pair's files."""
    return f"block_{layer.block}{'_normed' if layer.normed else ''}.{pooling}"


@contextlib.contextmanager
def in_use(folder: Path | None) -> Iterator[None]:
    """Holds the folder of the states; ValueError where another calibration holds it."""
    with contextlib.ExitStack() as stack:
        if folder is not None:
            folder.mkdir(parents=True, exist_ok=True)
            try:
                stack.enter_context(locked(folder))
            except BlockingIOError:
                raise ValueError(
                    f"out must be used by one calibration at a time, but another one is writing {folder}; wait until "
                    "it has ended, or take another folder."
                ) from None
            except OSError:  # a file system without locks
                pass
        yield


class States:
    """States [N, D] of each pair of layer and pooling, in memory or in a folder.

    reused   prompts whose states were found in the folder, the fewest over the pairs
    """

    def __init__(self, model: Any, rows: list[list[int]], folder: Path | None, restart: bool) -> None:
        self.model, self.folder = model, folder
        self.prompts: Prompts = prompts_of(rows, None, n_ids=find_decoder(model).n_ids, name="prompts")
        self.n_rows, self.n_distinct = len(rows), len(self.prompts.tokens)
        self.reused = 0
        self._done: dict[str, int] = {}  # stem -> number of distinct prompts with rows, the longest first
        self._kept: dict[str, Any] = {}  # stem -> [N, D] float32
        if folder is not None:
            ids = hashlib.sha256(json.dumps(rows).encode()).hexdigest()
            self._identity = {"format": FORMAT, "model": _model_hash(find_decoder(model)), "prompts": ids}
            self._open(folder, restart)

    def load(self, pair: Pair) -> Tensor:
        """[N, D] float32 states of one pair, a row per prompt."""
        stem = stem_of(*pair)
        if self.folder is not None:
            return torch.from_numpy(np.load(self.folder / f"{stem}.npy"))
        return torch.from_numpy(self._kept[stem])

    def compute(self, pairs: Sequence[Pair], budget: int, progress: bool | None) -> None:
        """Computes the missing states with shared forwards; saves after each forward."""
        done = min(self._done.get(stem_of(*pair), 0) for pair in pairs)
        self.reused = int((self.prompts.of_state < done).sum())
        with progress_bar(progress, "hidden states", self.n_distinct, done) as bar:
            while done < self.n_distinct:
                longest = len(self.prompts.tokens[done])  # of the rest, so that a batch is one forward
                batch = range(done, min(self.n_distinct, done + max(1, budget // longest)))
                missing = [pair for pair in pairs if self._done.get(stem_of(*pair), 0) < batch.stop]
                layers: list[Any] = list(dict.fromkeys(layer for layer, _ in missing))
                poolings = list(dict.fromkeys(how for _, how in missing))
                prompts = self.prompts.tokens[batch.start : batch.stop]
                states = extract_layers(
                    self.model, prompts, None, layers, pooling=poolings, token_budget=budget, progress=False
                )
                self._keep(batch, {pair: states[pair] for pair in missing})
                bar.update(len(batch))
                done = batch.stop

    def remembered(self, pair: Pair, settings: Mapping[str, Any]) -> dict[str, Any] | None:
        """Measurements on this pair's states under the same settings."""
        saved = {} if self.folder is None else _read_json(self.folder / f"{stem_of(*pair)}.json")
        measured: dict[str, Any] | None = saved["measured"] if saved.get("settings") == settings else None
        return measured

    def remember(self, pair: Pair, settings: Mapping[str, Any], measured: Mapping[str, Any]) -> None:
        if self.folder is not None:
            _write_json(self.folder / f"{stem_of(*pair)}.json", {"settings": settings, "measured": measured})

    def _open(self, folder: Path, restart: bool) -> None:
        manifest = folder / "manifest.json"
        if restart:
            for file in [manifest, *folder.glob("block_*.npy"), *folder.glob("block_*.json")]:
                file.unlink(missing_ok=True)
        saved = _read_json(manifest)
        for name in self._identity if saved else ():
            if saved.get(name) != self._identity[name]:
                what = {"format": "in another format", "model": "of another model"}.get(name, "of other prompts")
                raise ValueError(
                    f"out must be of this model and these prompts, but {folder} holds states {what}; take another "
                    "folder, or restart=True (--restart) to compute them again."
                )
        done = saved.get("done", {}).items()
        self._done = {stem: int(n) for stem, n in done if _is_whole(folder / f"{stem}.npy", self.n_rows)}
        _write_json(manifest, {**self._identity, "done": self._done})

    def _keep(self, batch: range, by_pair: Mapping[Pair, Tensor]) -> None:
        number = self.prompts.of_state.numpy()
        rows = np.flatnonzero((number >= batch.start) & (number < batch.stop))
        for (layer, pooling), states in by_pair.items():
            stem = stem_of(layer, pooling)
            values = states.float().cpu().numpy()[number[rows] - batch.start]
            if not np.isfinite(values).all():
                bad = int(rows[~np.isfinite(values).all(axis=1)][0])
                raise ValueError(
                    f"model must give finite states, but those of {layer} ({pooling}) are not for prompts[{bad}]; load "
                    "it in bfloat16 or float32, or leave the layer out."
                )
            out = self._array(stem, values.shape[1])
            out[rows] = values
            if isinstance(out, np.memmap):
                out.flush()  # before the manifest lists it
            self._done[stem] = batch.stop
        if self.folder is not None:
            _write_json(self.folder / "manifest.json", {**self._identity, "done": self._done})

    def _array(self, stem: str, width: int) -> Any:
        shape = (self.n_rows, width)
        if self.folder is None:
            return self._kept.setdefault(stem, np.zeros(shape, np.float32))
        path = self.folder / f"{stem}.npy"
        if self._done.get(stem):
            return np.load(path, mmap_mode="r+")
        out = np.lib.format.open_memmap(path, mode="w+", dtype=np.float32, shape=shape)
        try:
            _allocate(path)
        except OSError as error:
            path.unlink()
            raise OSError(
                error.errno,
                f"{os.strerror(error.errno or 0)}: {path.name} needs {out.nbytes / 2**20:,.1f} MiB for states",
            ) from error
        return out


def _is_whole(path: Path, n_rows: int) -> bool:
    """Whether the file holds states of all rows; one that was cut off or replaced is computed again."""
    try:
        shape = np.load(path, mmap_mode="r").shape
    except (OSError, ValueError, EOFError):  # NumPy's three errors for a file that is missing, cut off or no array
        return False
    return len(shape) == 2 and shape[0] == n_rows


def _allocate(path: Path) -> None:
    """Reserves disk space for the file: a write to a mapped file without space would kill the process (SIGBUS)."""
    with path.open("r+b") as file:
        os.posix_fallocate(file.fileno(), 0, os.fstat(file.fileno()).st_size)


def _model_hash(decoder: Decoder) -> str:
    """Hash of the configuration and of each weight's name, shape, dtype and exact sums of its bits as integers."""
    config = decoder.causal.config.to_dict()  # type: ignore[operator, union-attr]
    config = {name: x for name, x in config.items() if name not in ("_name_or_path", "transformers_version")}
    digest = hashlib.sha256(json.dumps(config, sort_keys=True, default=str).encode())
    saved = decoder.causal.state_dict()  # without buffers that a forward may change, such as those of RoPE
    buffers = ((name, buffer) for name, buffer in decoder.causal.named_buffers() if name in saved)
    for name, weight in itertools.chain(decoder.causal.named_parameters(), buffers):
        bits = weight.detach().contiguous().view(_INTEGER_OF_SIZE[weight.element_size()])
        bits = bits.reshape(*weight.shape[:1], weight.shape[1:].numel())
        sums = [bits.sum(axis, dtype=torch.int64).cpu().numpy().tobytes() for axis in (0, -1)]  # their order counts
        digest.update(b" ".join([f"{name} {list(weight.shape)} {weight.dtype}".encode(), *sums]))
    for module in decoder.causal.modules():
        if hasattr(module, "_active_adapter"):  # of PEFT: which adapters run, and how strong they are
            used = [getattr(module, name, None) for name in ("_active_adapter", "_disable_adapters", "scaling")]
            digest.update(repr(used).encode())
    return digest.hexdigest()


def _read_json(path: Path) -> dict[str, Any]:
    """{} if the file is missing or incomplete."""
    with contextlib.suppress(FileNotFoundError, ValueError):
        content: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        return content
    return {}


def _write_json(path: Path, content: Mapping[str, Any]) -> None:
    with atomic_file(path) as temporary:
        temporary.write_text(json.dumps(content, indent=1, sort_keys=True) + "\n", encoding="utf-8")
