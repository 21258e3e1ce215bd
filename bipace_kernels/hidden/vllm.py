"""Hidden states from vLLM while it generates: arguments of the engine, and a reader of the files it writes.

docs/hidden_states.md has an example.  vLLM is not imported: its files can be read in any process on their machine.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import math
import os
import re
import stat
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Any, NamedTuple

import torch
from torch import Tensor

from ..inputs import checks
from .layers import Layer, layers_of

DTYPES = {"BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32}  # safetensors' names
POLL_S = 0.01
LONGEST_HEADER = 1 << 20  # bytes: the connector writes two tensors


class Extraction:
    """Configuration of the states that the engine writes, and their reader.

    model      number of blocks of the model, or its local folder with config.json
    folder     where vLLM writes, a file per request; for speed in memory, such as in /dev/shm.  Created by vLLM
    layer      index into Hugging Face's hidden_states, or "block 16", as in tap(); not −1, since vLLM does not give the
               states after the final norm
    layers     several layers, for read_layers()
    keep       keep the files; False: files are removed after reading, and only files of `folder` are read
    timeout_s  how long to wait for a file that is missing or incomplete
    """

    def __init__(
        self,
        model: int | str | Path,
        folder: str | Path,
        layer: int | str = -8,
        *,
        layers: Sequence[int | str] | None = None,
        keep: bool = True,
        timeout_s: float = 60.0,
    ) -> None:
        n_blocks = _n_blocks(model)
        several = layers_of(layer, layers, n_blocks)
        if any(item.normed for item in several):
            raise ValueError(
                f"layer −1 is after the final norm, which vLLM does not write; take 'block {n_blocks - 1}' or earlier."
            )
        self.folder = checks.path(folder, "folder")
        self.layers = tuple(sorted(several, key=lambda item: item.block))  # vLLM's order, whatever the order given
        self.keep = keep
        if isinstance(timeout_s, bool) or not isinstance(timeout_s, (int, float)) or not timeout_s >= 0:
            raise ValueError(f"timeout_s must be a number of seconds of at least 0, got {timeout_s!r}.")
        self.timeout_s = float(timeout_s)

    def __repr__(self) -> str:
        return f"Extraction({str(self.folder)!r}, {', '.join(map(str, self.layers))})"

    def engine_arguments(self) -> dict[str, Any]:
        """Keyword arguments of `vllm.LLM` or of its engine arguments.

        They replace speculative decoding, and make room for the states in the KV cache.
        """
        ids = [item.block + 1 for item in self.layers]  # vLLM's layer k is what enters block k
        return {
            "speculative_config": {
                "method": "extract_hidden_states",
                "num_speculative_tokens": 1,
                "draft_model_config": {"hf_config": {"eagle_aux_hidden_state_layer_ids": ids}},
            },
            "kv_transfer_config": {
                "kv_connector": "ExampleHiddenStatesConnector",
                "kv_role": "kv_producer",
                "kv_connector_extra_config": {"shared_storage_path": str(self.folder)},
            },
        }

    def serve_arguments(self) -> list[str]:
        """The same for the command line of `vllm serve MODEL`."""
        options = self.engine_arguments().items()
        return [text for name, value in options for text in (f"--{name.replace('_', '-')}", json.dumps(value))]

    def read(self, outputs: Sequence[Any], prompt_lengths: Any = None) -> Tensor:
        """[B, D] states at the last prompt token of B finished requests, on the CPU, in the model's dtype.

        outputs         of LLM.generate(), responses of a server (objects or dicts with kv_transfer_params), or paths
        prompt_lengths  [B] tokens of each prompt; None: the length in the outputs, else all tokens of the file.  Needed
                        for paths and responses of requests with include_output_tokens

        Waits for files that are still being written.  With keep=False files are removed once all rows are read, so that
        a failed call can be repeated.  ValueError for a file of other tokens than the output's prompt_token_ids, and
        with keep=False for one that is not a regular file inside the folder.
        """
        if len(self.layers) > 1:
            raise ValueError(f"read() returns one layer, but there are {len(self.layers)}; use read_layers().")
        return self.read_layers(outputs, prompt_lengths)[self.layers[0]]

    def read_layers(self, outputs: Sequence[Any], prompt_lengths: Any = None) -> dict[Layer, Tensor]:
        """read() for all layers of the same files: {Layer: [B, D]}."""
        if isinstance(outputs, (str, bytes, Path, Mapping)) or not isinstance(outputs, Sequence) or not outputs:
            raise TypeError(f"outputs must be a list of finished requests or paths, got {type(outputs).__name__}.")
        lengths: list[Any] = [None] * len(outputs)
        if prompt_lengths is not None:
            lengths = checks.integer_vector(prompt_lengths, "prompt_lengths", len(outputs), "outputs").tolist()
        requests = [_request(outputs[i], i, length) for i, length in enumerate(lengths)]
        rows: dict[_Request, Tensor] = {}
        for request in dict.fromkeys(requests):
            self._check_inside(request.path)
            self._wait(request.path)
            rows[request] = self._row(request)
            width, first = rows[request].shape[1], rows[requests[0]].shape[1]
            if width != first:
                raise ValueError(
                    f"{request.path} has width {width}, {requests[0].path} {first}: use a folder for each model."
                )
        for path in [] if self.keep else [path for request in rows for path in _siblings(request)]:
            with contextlib.suppress(TimeoutError):  # a sample that was never written: there is nothing to remove
                self._wait(path)
                self._remove(path)
        return {layer: torch.stack([rows[request][i] for request in requests]) for i, layer in enumerate(self.layers)}

    def follow(self, count: int | None = None) -> Iterator[tuple[str, Tensor]]:
        """Request ids (file names) and their rows [layers, D], as the files of the folder become complete.

        count  how many to wait for; TimeoutError if none comes for timeout_s.  None: those that are complete now

        A file's last token is used: requests must not use include_output_tokens.  With keep=False each file is
        removed before its row is returned.
        """
        if count is not None:
            count = checks.integer_at_least(count, "count", 0)
        seen: set[Path] = set()
        last = time.monotonic()
        while count is None or len(seen) < count:
            for path in sorted(self.folder.glob("*.safetensors")):
                if path in seen or _unfinished(path) or (count is not None and len(seen) >= count):
                    continue
                self._check_inside(path)
                row = self._row(_Request(path, None, None, 1))
                seen.add(path)
                last = time.monotonic()
                self._remove(path)
                yield path.name.removesuffix(".safetensors"), row
            if count is None:
                return
            if len(seen) < count and time.monotonic() - last > self.timeout_s:
                raise TimeoutError(
                    f"{len(seen)} of {count} files came into {self.folder}, none for {self.timeout_s:g} s; see its log."
                )
            time.sleep(POLL_S)

    def _wait(self, path: Path) -> None:
        deadline = time.monotonic() + self.timeout_s
        while reason := _unfinished(path):
            if time.monotonic() >= deadline:
                raise TimeoutError(f"{path} was not complete after {self.timeout_s:g} s: {reason}")
            time.sleep(POLL_S)

    def _row(self, request: _Request) -> Tensor:  # [layers, D]
        """The row of one complete file; reads its header, the row, and if the prompt is known its ids."""
        path = request.path
        with _opened(path) as file:
            states, tokens = _header(file.fileno(), path)
            n_tokens, n_layers, width = states.shape
            if n_layers != len(self.layers):
                raise ValueError(
                    f"{path} holds {n_layers} layers, not {len(self.layers)}: start it with these engine_arguments()."
                )
            length = tokens.shape[0] if request.length is None else request.length
            if not 1 <= length <= min(n_tokens, tokens.shape[0]):
                raise ValueError(
                    f"{path} holds states of {n_tokens} tokens and {tokens.shape[0]} token ids for a prompt of {length}"
                    ": in older vLLM set enable_prefix_caching=False and enable_chunked_prefill=False."
                )
            if request.prompt is not None:
                ids = torch.frombuffer(bytearray(os.pread(file.fileno(), 8 * length, tokens.begin)), dtype=torch.int64)
                if ids.tolist() != list(request.prompt):
                    raise ValueError(f"{path} is of another request than this; start engines with an empty folder.")
            size = n_layers * width * states.dtype.itemsize
            # Read, not mapped: a row of a mapped file would keep the whole file in memory after its removal.
            data = os.pread(file.fileno(), size, states.begin + (length - 1) * size)
        if len(data) != size:
            raise ValueError(f"{path} became shorter while it was read; let only vLLM write into its folder.")
        return torch.frombuffer(bytearray(data), dtype=states.dtype).reshape(n_layers, width)

    def _check_inside(self, path: Path) -> None:
        """Raises ValueError for a file that must not be removed with keep=False: a server may name any file."""
        folder = self.folder.resolve()
        entry = path.parent.resolve() / path.name  # what unlink() removes: a link itself, not the file that it names
        if not self.keep and not (entry.is_relative_to(folder) and path.resolve().is_relative_to(folder)):
            raise ValueError(
                f"{path} must be in {self.folder} after resolving symbolic links: with keep=False files are "
                "removed after reading; start the engine with the engine_arguments() of this object, or use keep=True."
            )

    def _remove(self, path: Path) -> None:
        if not self.keep:
            self._check_inside(path)
            path.unlink(missing_ok=True)
            path.with_name(f"{path.name}.lock").unlink(missing_ok=True)


class _Request(NamedTuple):
    path: Path
    prompt: tuple[int, ...] | None  # its token ids
    length: int | None  # tokens of the prompt; None: all of the file
    n: int  # samples


class _Stored(NamedTuple):
    """A tensor in a safetensors file: begin is its first byte in the file."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    begin: int


def _request(output: Any, index: int, length: int | None) -> _Request:
    if isinstance(output, (str, Path)):
        return _Request(Path(output), None, length, 1)

    def field(name: str) -> Any:
        return output.get(name) if isinstance(output, Mapping) else getattr(output, name, None)

    params = field("kv_transfer_params")
    path = params.get("hidden_states_path") if isinstance(params, Mapping) else None
    if not path:
        raise ValueError(
            f"outputs[{index}] must have kv_transfer_params with a hidden_states_path, got {params!r} in "
            f"{type(output).__name__}; start the engine with engine_arguments(), and leave out aborted requests."
        )
    prompt = field("prompt_token_ids")
    prompt = None if prompt is None else tuple(prompt)
    if prompt is not None and length is not None and length != len(prompt):
        raise ValueError(f"prompt_lengths[{index}] is {length}, but the output has a prompt of {len(prompt)} tokens.")
    return _Request(Path(path), prompt, length if prompt is None else len(prompt), len(field("outputs") or [0]))


def _siblings(request: _Request) -> list[Path]:
    """The files of all samples of a request.  vLLM names them INDEX_ID, and names only one of them in its output."""
    match = re.fullmatch(r"\d+_(.*)", request.path.name)
    if request.n == 1 or match is None:
        return [request.path]
    return [request.path.with_name(f"{i}_{match[1]}") for i in range(request.n)]


def _unfinished(path: Path) -> str:
    """Why a file cannot be read yet; empty if it can.  vLLM holds a lock file next to it from the first step on."""
    locked = False  # with use_synchronization_lock=False there is none: only the size can be checked
    try:
        with contextlib.suppress(FileNotFoundError), _opened(path.with_name(f"{path.name}.lock")) as lock:
            locked = True
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return "vLLM still holds its lock; give a longer timeout_s."
    try:
        with _opened(path) as file:
            _header(file.fileno(), path)
    except FileNotFoundError:
        if not locked:
            return "there is no such file; read on vLLM's machine, with the folder at the same path."
        why = "the request was aborted, or vLLM's log has 'write failed'"
        return f"vLLM released its lock without writing the file: {why}."
    except _CutOff as error:
        return str(error)
    return ""


def _opened(path: Path) -> IO[bytes]:
    """Opens a regular file; ValueError for others, such as a pipe, which could block or never end."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    if stat.S_ISREG(os.fstat(descriptor).st_mode):
        return open(descriptor, "rb", buffering=0)
    os.close(descriptor)
    raise ValueError(f"{path} must be a regular file, as written by vLLM's connector; let only vLLM write there.")


class _CutOff(Exception):
    """A file that is shorter than its header says."""


def _header(fd: int, path: Path) -> tuple[_Stored, _Stored]:
    """hidden_states [tokens, layers, D] and token_ids [tokens] of a safetensors file as long as its header says."""
    size = os.fstat(fd).st_size
    length = int.from_bytes(os.pread(fd, 8, 0), "little")
    if size < 8 or size < 8 + length <= LONGEST_HEADER:
        raise _CutOff(f"it is cut off in its header, at {size} bytes; the disk may be full.")
    try:
        if length > LONGEST_HEADER:
            raise ValueError(f"a header of {length} bytes")
        entries = json.loads(os.pread(fd, length, 8))
        states, tokens = (_stored(entries[name], 8 + length) for name in ("hidden_states", "token_ids"))
        end = 8 + length + max(_offsets(entries[name])[1] for name in entries if name != "__metadata__")
        fits = len(states.shape) == 3 and states.dtype != torch.int64 and len(tokens.shape) == 1
        if not fits or tokens.dtype != torch.int64:
            raise ValueError(f"hidden_states {list(states.shape)}, token_ids {list(tokens.shape)}")
    except (ValueError, KeyError, TypeError, IndexError, AttributeError, RecursionError) as error:
        raise ValueError(
            f"{path} must be a safetensors file of vLLM's connector: hidden_states [tokens, layers, D] in bfloat16, "
            f"float16 or float32, token_ids [tokens] in int64, got {error!r}; let only vLLM write there."
        ) from error
    if size < end:
        raise _CutOff(f"it is cut off at {size} of {end} bytes; the disk may be full.")
    return states, tokens


def _stored(entry: Any, data: int) -> _Stored:
    dtype = {**DTYPES, "I64": torch.int64}[entry["dtype"]]
    begin, end = _offsets(entry)
    shape = tuple(entry["shape"])
    if len(shape) > 3 or not all(type(n) is int and n >= 0 for n in shape):
        raise ValueError(f"shape {str(list(shape))[:100]}")
    if end - begin != math.prod(shape) * dtype.itemsize:
        raise ValueError(f"{list(shape)} in {end - begin} bytes")
    return _Stored(dtype, shape, data + begin)


def _offsets(entry: Any) -> tuple[int, int]:
    """Where a tensor's bytes begin and end, after the header."""
    begin, end = entry["data_offsets"]
    if type(begin) is not int or type(end) is not int or not 0 <= begin <= end < 1 << 62:
        raise ValueError(f"data_offsets [{begin}, {end}]")
    return begin, end


def _n_blocks(model: Any) -> int:
    if isinstance(model, int):
        return checks.integer_at_least(model, "model", 1)
    path = checks.path(model, "model, unless it is a number of blocks,") / "config.json"
    if not path.is_file():
        raise ValueError(f"model must be the number of blocks or a folder with config.json, got {str(model)!r}.")
    config = json.loads(path.read_text())
    n_blocks = config.get("text_config", config).get("num_hidden_layers")
    if not isinstance(n_blocks, int):
        raise ValueError(f"{path} has no num_hidden_layers; pass the number of blocks as model.")
    return n_blocks
