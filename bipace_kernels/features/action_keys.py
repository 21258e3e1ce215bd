"""Action keys: 64-bit hashes of an agent's action, from its response's text or token ids."""

from typing import Any

import numpy as np
import torch

from ..backends import dispatch, threads
from ..backends.contract import Texts
from ..backends.schema import Tokens
from ..inputs import checks, transfer
from .token_bytes import TokenBytes

MODES = ("action_tag", "first_n", "text")
KINDS = "a list of str, token ids [N, T] (tensor or array), or a list of rows of token ids"
_LARGEST_N = 1 << 40  # beyond any row; keeps 8·n inside int64


@threads.using()
def action_keys(
    responses: Any,
    *,
    mode: str = "action_tag",
    n: int = 8,
    mask: Any = None,
    token_bytes: TokenBytes | None = None,
    backend: str = "auto",
    check: str = "auto",
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
    token_bytes  bk.token_bytes(tokenizer); needed for ids in the modes "action_tag" and "text".  Its first use on a GPU
                 copies it there
    backend      for ids; text is on the host and stays there
    check        "auto" | "now"   when ids on a GPU are compared with the table.  "now": at the call, which
                 synchronizes.  "auto": no check, and a row with a bad id gets its first_n key, parsed False.  Ids on
                 the CPU are always checked at the call
    num_threads  threads of the cpu backend; None: torch.get_num_threads()

    Returns keys [N] int64 and parsed [N] bool where the ids are, on the CPU for text and lists.  Same input, same bits,
    on every backend and at any number of threads; text and ids give the same keys wherever a row parses and is valid
    UTF-8.  Formats: docs/action_keys.md.

    Ids on a GPU are never copied to the host; lists and arrays passed with tensors are copied to the tensors' device.
    TypeError and ValueError name the problem; for a token id outside the table also its row and column.
    """
    if mode not in MODES:
        raise ValueError(f"mode must be one of {', '.join(MODES)}, got {mode!r}.")
    checks.check_check(check)
    if isinstance(n, bool) or not isinstance(n, (int, np.integer)) or n < 1:
        raise ValueError(f"n must be an int of at least 1, got {n!r}.")
    if token_bytes is not None and not isinstance(token_bytes, TokenBytes):
        raise TypeError(f"token_bytes must be bk.token_bytes(tokenizer) or None, got {type(token_bytes).__name__}.")
    threads.checked(num_threads)
    if isinstance(responses, np.ndarray) and responses.dtype.kind in "OUST":
        responses = responses.tolist()
    if not isinstance(responses, (list, tuple, np.ndarray, torch.Tensor)):
        raise TypeError(f"responses must be {KINDS}, got {type(responses).__name__}; put a single one into a list.")

    if isinstance(responses, (list, tuple)):
        responses = tuple(responses)  # another thread may change a list between check and use
    if isinstance(responses, tuple) and (len(responses) == 0 or isinstance(responses[0], (str, bytes))):
        host = dispatch.texts(backend)
        checks.texts(responses, "responses", (str,), "give all rows as str or all as token ids")
        if mask is not None and len(responses):
            raise ValueError("mask must be None for text, which has no tokens to mask; cut the text instead.")
        with threads.using(num_threads):
            return host.hash_texts(responses, mode=mode)

    named = {f"responses[{i}]": row for i, row in enumerate(responses)} if isinstance(responses, tuple) else {}
    device = checks.one_device({**(named or {"responses": responses}), "mask": mask})
    chosen = dispatch.choose(backend, device)
    stage = chosen.action_keys
    offsets = row_offsets = valid = None
    if isinstance(responses, tuple):
        host = dispatch.texts(backend)
        ids, row_offsets = _flatten(responses, "responses", host, device, bools=False)
        if mask is not None:
            valid = _flat_mask(mask, row_offsets, host, device)
        longest = int(row_offsets.diff().max())
        offsets = transfer.to_device(row_offsets, device, "responses")
    else:
        if responses.ndim != 2:
            cure = "for one response pass responses[None]" if responses.ndim == 1 else "flatten to one row per response"
            raise ValueError(f"responses must have shape [N, T], got {list(responses.shape)}; {cure}.")
        ids = _integers(responses, "responses", "token ids of an integer dtype")
        ids = transfer.to_device(ids, device, "responses")
        if mask is not None:
            valid = _integers(mask, "mask", "bool or integers, non-zero where a token is valid", bools=True)
            if valid.shape != ids.shape:
                like = f"{list(ids.shape)} like responses"
                raise ValueError(f"mask must have shape [N, T] = {like}, got {list(valid.shape)}.")
            valid = transfer.to_device(valid, device, "mask")
        longest = ids.shape[1]
    if mode == "first_n":
        token_bytes = None
    elif token_bytes is None:
        raise ValueError(f'token_bytes is missing in mode "{mode}"; use bk.token_bytes(tokenizer), or "first_n".')
    table_offsets, table_bytes = (None, None) if token_bytes is None else token_bytes.on(device)
    if table_bytes is not None and table_bytes.numel() > stage.LARGEST_TABLE:
        raise ValueError(
            f"token_bytes must hold {stage.LARGEST_TABLE} bytes at most, got {table_bytes.numel()}; use ids.cpu()."
        )
    tokens = Tokens(ids, offsets, valid, table_offsets, table_bytes, longest)
    with threads.using(num_threads):
        keys, parsed, first_bad = stage.hash_token_ids(tokens, mode, min(int(n), _LARGEST_N))
    if token_bytes is not None and (check == "now" or not chosen.deferred) and (position := int(first_bad)) >= 0:
        if row_offsets is None:
            row, column = divmod(position, ids.shape[1])
        else:
            row = int(torch.searchsorted(row_offsets, position, right=True)) - 1
            column = position - int(row_offsets[row])
        token = int(ids[position] if ids.ndim == 1 else ids[row, column])
        raise ValueError(
            f"responses must hold token ids from 0 to {token_bytes.vocabulary_size - 1}, got {token} in row {row}, "
            f"column {column}; mask padding out, or make token_bytes from the tokenizer that made the ids."
        )
    return keys, parsed


def _integers(values: Any, name: str, wish: str = "", *, bools: bool = False) -> torch.Tensor:
    """Integers (or bools) with the caller's strides; on the CPU int32 or int64, a copy where the dtype is another."""
    wish = wish or ("bool or integers" if bools else "integers")
    if isinstance(values, torch.Tensor) and values.device.type != "cpu" and values.dtype == torch.uint64:
        values = values.view(torch.int64)  # values beyond int64 become negative; checking them would synchronize
    tensor = checks.to_tensor(values, name, wish)
    if tensor.dtype in (torch.int32, torch.int64) or (bools and tensor.dtype == torch.bool):
        return tensor
    if tensor.dtype == torch.bool or tensor.is_floating_point() or tensor.is_complex():
        raise TypeError(f"{name} must be {wish}, got {tensor.dtype}; convert it with .to(torch.int64).")
    return tensor.to(torch.int64) if tensor.device.type == "cpu" else tensor


def _flatten(
    rows: tuple[Any, ...], name: str, host: Texts, device: torch.device, *, bools: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows of integers (with bools=True also of bool) as flat values [E] int64 on a device, and offsets [N+1] int64.

    The offsets are on the CPU.
    """
    for i, row in enumerate(rows):
        if isinstance(row, (torch.Tensor, np.ndarray)):
            if row.ndim != 1:
                raise ValueError(f"{name}[{i}] must be one row of integers, got shape {list(row.shape)}; flatten it.")
        elif not isinstance(row, (list, tuple)):
            raise TypeError(f"{name}[{i}] must be a row of integers, got {type(row).__name__}; {name} must be {KINDS}.")
    lengths = [len(row) for row in rows]  # checked below: a list may change, and a __len__ may be wrong
    offsets = torch.tensor([0, *lengths]).cumsum(0)
    if device.type == "cpu":
        return _flatten_host(dict(enumerate(rows)), offsets, name, host, bools=bools), offsets
    others = {i: row for i, row in enumerate(rows) if not isinstance(row, torch.Tensor)}
    sizes = [lengths[i] for i in others]
    flat = _flatten_host(others, torch.tensor([0, *sizes]).cumsum(0), name, host, bools=bools)
    moved = iter(torch.split(transfer.to_device(flat, device, name), sizes))  # together, in one copy
    parts = [
        next(moved) if i in others else _integers(row, f"{name}[{i}]", bools=bools).to(torch.int64)
        for i, row in enumerate(rows)
    ]
    return torch.cat(parts), offsets


def _flatten_host(rows: dict[int, Any], offsets: torch.Tensor, name: str, host: Texts, *, bools: bool) -> torch.Tensor:
    """Rows of integers on the host, by number, as flat values [E] int64."""
    if rows and all(isinstance(row, (torch.Tensor, np.ndarray)) for row in rows.values()):
        flat = torch.cat([_integers(row, f"{name}[{i}]", bools=bools).to(torch.int64) for i, row in rows.items()])
        if flat.numel() != int(offsets[-1]):
            raise ValueError(f"{name} must hold {int(offsets[-1])} items, as its rows' len() says, got {flat.numel()}.")
        return flat
    lists = [row.tolist() if isinstance(row, (torch.Tensor, np.ndarray)) else row for row in rows.values()]
    flat, bad = host.flatten_rows(lists, offsets, bools=bools)
    if bad is not None:
        row, column = bad
        number = list(rows)[row]
        if column < 0:
            raise ValueError(
                f"{name}[{number}] must hold {int(offsets[row + 1] - offsets[row])} items like its len(); it changed."
            )
        item = lists[row][column]
        if isinstance(item, int) and not isinstance(item, bool):
            raise ValueError(f"{name}[{number}] must hold integers that fit int64, got {item} at position {column}.")
        got = type(item).__name__
        raise TypeError(f"{name}[{number}] must hold integers, got {got} at position {column}; {name} must be {KINDS}.")
    return torch.as_tensor(flat)


def _flat_mask(mask: Any, row_offsets: torch.Tensor, host: Texts, device: torch.device) -> torch.Tensor:
    """The mask of rows, flattened like them; each of its rows as long as theirs."""
    if not isinstance(mask, (list, tuple, np.ndarray, torch.Tensor)) or len(mask) != row_offsets.numel() - 1:
        got = f"{len(mask)} rows" if hasattr(mask, "__len__") else type(mask).__name__
        raise ValueError(f"mask must have one row per response, N = {row_offsets.numel() - 1}, got {got}.")
    flat, offsets = _flatten(tuple(mask), "mask", host, device, bools=True)
    if not torch.equal(offsets, row_offsets):
        row = int(torch.nonzero(offsets.diff() != row_offsets.diff())[0])
        wanted, length = (int(each.diff()[row]) for each in (row_offsets, offsets))
        raise ValueError(f"mask[{row}] must be as long as responses[{row}], {wanted}, got {length}.")
    return flat
