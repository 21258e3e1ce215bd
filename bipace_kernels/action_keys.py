"""Action keys: 64-bit names of what an agent did, from its response's text or token ids."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from . import _checks, _dispatch
from .token_bytes import TokenBytes

MODES = ("action_tag", "first_n", "text")
KINDS = "a list of str, token ids [N, T] (tensor or array), or a list of rows of token ids"
_LARGEST_N = 1 << 40  # beyond any row; keeps 8·n inside int64


def action_keys(
    responses: Any,
    *,
    mode: str = "action_tag",
    n: int = 8,
    mask: Any = None,
    token_bytes: TokenBytes | None = None,
    backend: str = "auto",
    num_threads: int | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Key of each response's action, and whether the response parsed.

        key = XXH64(bytes, seed) read as int64

    mode "action_tag"  bytes = body of the first <action>…</action>, stripped, A–Z lowered; seed 2; parsed True.
                       No match: the key of "first_n", parsed False.
    mode "first_n"     bytes = the first n valid token ids as little-endian int64, seed 1; of text, its first 64 bytes,
                       seed 3.  parsed False.
    mode "text"        bytes = the whole text, stripped, A–Z lowered; seed 4; parsed where not empty.

    responses    list, tuple or object array of N str; or token ids [N, T] of any integer dtype and strides; or N rows
                 of token ids (lists, tuples, 1-D arrays or tensors)
    mask         [N, T] bool or integers like the ids, non-zero = valid response token (rows likewise for rows); None:
                 all.  Ids where it is zero may hold anything
    token_bytes  bk.token_bytes(tokenizer); needed for ids in the modes "action_tag" and "text"
    num_threads  threads of the cpu backend; None: torch.get_num_threads()

    Returns keys [N] int64 and parsed [N] bool, on the CPU.  Matching, stripping and lowering work on UTF-8 bytes: white
    space and letters of ASCII only.  Lone surrogates in text are encoded as by Python's "surrogatepass".  Text and ids
    give the same keys wherever a row parses and is valid UTF-8.  Same input, same bits, on every backend and at any
    number of threads.  Formats, with values to test against: docs/action_keys.md.

    TypeError and ValueError name what is wrong, for a token id outside the table with its row and column.
    """
    if mode not in MODES:
        raise ValueError(f"mode must be one of {', '.join(MODES)}, got {mode!r}.")
    if isinstance(n, bool) or not isinstance(n, (int, np.integer)) or n < 1:
        raise ValueError(f"n must be an int of at least 1, got {n!r}.")
    if token_bytes is not None and not isinstance(token_bytes, TokenBytes):
        raise TypeError(
            f"token_bytes must be a TokenBytes or None, got {type(token_bytes).__name__}; make it by "
            "bk.token_bytes(tokenizer)."
        )
    threads = _dispatch.threads(num_threads)
    if isinstance(responses, np.ndarray) and responses.dtype.kind in "OUS":
        responses = responses.tolist()
    if not isinstance(responses, (list, tuple, np.ndarray, torch.Tensor)):
        raise TypeError(
            f"responses must be {KINDS}, got {type(responses).__name__}; put a single response into a list."
        )

    if isinstance(responses, (list, tuple)) and (len(responses) == 0 or isinstance(responses[0], (str, bytes))):
        stage = _stage(backend, None)
        _check_texts(responses)
        if mask is not None and len(responses):
            raise ValueError("mask must be None for text, which has no tokens to mask; cut the text instead.")
        keys, parsed = stage.hash_texts(tuple(responses), mode=mode, num_threads=threads)
        return keys, parsed

    if isinstance(responses, (list, tuple)):
        rows = list(responses)
        device = _checks.one_device(
            {f"responses[{i}]": row for i, row in enumerate(rows) if isinstance(row, torch.Tensor)} | {"mask": mask}
        )
        stage = _stage(backend, device)
        ids, row_offsets = _flatten(rows, "responses", stage, bools=False)
        valid = None if mask is None else _flat_mask(mask, row_offsets, stage)
    else:
        stage = _stage(backend, _checks.one_device({"responses": responses, "mask": mask}))
        ids, row_offsets = _matrix(responses), None
        valid = None if mask is None else _matrix_mask(mask, ids)
    if mode == "first_n":
        table = None
    elif token_bytes is None:
        raise ValueError(
            f'token_bytes must be given for token ids in mode "{mode}", got None; make it once by '
            'bk.token_bytes(tokenizer), or use mode "first_n".'
        )
    else:
        table = (token_bytes.offsets, token_bytes.bytes)
    keys, parsed, outside = stage.hash_token_ids(
        ids, row_offsets, valid, table, mode=mode, n=min(int(n), _LARGEST_N), num_threads=threads
    )
    if outside is not None and token_bytes is not None:
        row, column, token = outside
        raise ValueError(
            f"responses must hold token ids from 0 to {token_bytes.vocabulary_size - 1} (vocabulary size "
            f"{token_bytes.vocabulary_size}), got {token} in row {row}, column {column}; mask padding out, or make "
            "token_bytes from the tokenizer that made the ids."
        )
    return keys, parsed


def _stage(backend: str, device: torch.device | None) -> Any:
    return _dispatch.choose(backend, device).action_keys


def _check_texts(texts: list[Any] | tuple[Any, ...]) -> None:
    if set(map(type, texts)) <= {str}:
        return
    for i, text in enumerate(texts):
        if not isinstance(text, str):
            cure = "decode it first" if isinstance(text, bytes) else "give all rows as str or all as token ids"
            raise TypeError(f"responses must all be str, got {type(text).__name__} at index {i}; {cure}.")


def _integers(values: Any, name: str, wish: str, *, bools: bool = False) -> torch.Tensor:
    """A CPU tensor of int32 or int64 (or bool) with the caller's strides; a copy where the dtype is another."""
    tensor = _checks.to_tensor(values, name, wish)
    if tensor.dtype in (torch.int32, torch.int64) or (bools and tensor.dtype == torch.bool):
        return tensor
    if tensor.dtype == torch.bool or tensor.is_floating_point() or tensor.is_complex():
        raise TypeError(f"{name} must be {wish}, got {tensor.dtype}; convert it with .to(torch.int64).")
    return tensor.to(torch.int64)


def _matrix(responses: Any) -> torch.Tensor:
    if responses.ndim != 2:
        cure = "; for one response pass responses[None]" if responses.ndim == 1 else "; flatten to one row a response"
        raise ValueError(f"responses must have shape [N, T], got {list(responses.shape)}{cure}.")
    return _integers(responses, "responses", "token ids of an integer dtype")


def _matrix_mask(mask: Any, ids: torch.Tensor) -> torch.Tensor:
    tensor = _integers(mask, "mask", "bool or integers, non-zero where a token is valid", bools=True)
    if tensor.shape != ids.shape:
        raise ValueError(
            f"mask must have shape [N, T] = {list(ids.shape)} like responses, got {list(tensor.shape)}; give it one "
            "entry per token id."
        )
    return tensor


def _flatten(rows: list[Any], name: str, stage: Any, *, bools: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows of integers (with bools=True also of bool) as flat values [E] and offsets [N+1] int64."""
    for i, row in enumerate(rows):
        if isinstance(row, (torch.Tensor, np.ndarray)):
            if row.ndim != 1:
                raise ValueError(f"{name}[{i}] must be one row of integers, got shape {list(row.shape)}; flatten it.")
        elif not isinstance(row, (list, tuple)):
            raise TypeError(f"{name}[{i}] must be a row of integers, got {type(row).__name__}; {name} must be {KINDS}.")
    offsets = torch.zeros(len(rows) + 1, dtype=torch.int64)
    offsets[1:] = torch.tensor([len(row) for row in rows], dtype=torch.int64).cumsum(0)
    if rows and all(isinstance(row, (torch.Tensor, np.ndarray)) for row in rows):
        wish = "bool or integers" if bools else "integers"
        tensors = [_integers(row, f"{name}[{i}]", wish, bools=bools) for i, row in enumerate(rows)]
        return torch.cat([tensor.to(torch.int64) for tensor in tensors]), offsets
    lists = [row.tolist() if isinstance(row, (torch.Tensor, np.ndarray)) else row for row in rows]
    flat, bad = stage.flatten_rows(lists, offsets, bools=bools)
    if bad is not None:
        row, column = bad
        item = lists[row][column]
        if isinstance(item, int) and not isinstance(item, bool):
            raise ValueError(f"{name}[{row}] must hold integers inside int64, got {item} at position {column}.")
        raise TypeError(
            f"{name}[{row}] must hold integers, got {type(item).__name__} at position {column}; {name} must be {KINDS}."
        )
    return flat, offsets


def _flat_mask(mask: Any, row_offsets: torch.Tensor, stage: Any) -> torch.Tensor:
    """The mask of rows, flattened like them; each of its rows as long as theirs."""
    if not isinstance(mask, (list, tuple, np.ndarray, torch.Tensor)) or len(mask) != row_offsets.numel() - 1:
        got = f"{len(mask)} rows" if hasattr(mask, "__len__") else type(mask).__name__
        raise ValueError(f"mask must have one row per response, N = {row_offsets.numel() - 1}, got {got}.")
    flat, offsets = _flatten(list(mask), "mask", stage, bools=True)
    if not torch.equal(offsets, row_offsets):
        row = int(torch.nonzero(offsets.diff() != row_offsets.diff())[0])
        raise ValueError(
            f"mask[{row}] must be as long as responses[{row}], {int(row_offsets.diff()[row])}, got "
            f"{int(offsets.diff()[row])}."
        )
    return flat
