"""Steps: the tokens of turns, what each turn answers, what it did, and what a rollout tells of it."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from ..action_keys import action_keys
from ..hidden.layers import find_decoder, layer_of
from ..hidden.tap import Tap, tap
from ..token_bytes import TokenBytes, token_bytes
from ._states import States
from ._turns import Turns

Tensor = torch.Tensor


def turn_tokens(turns: Turns, ids: Tensor) -> tuple[Tensor, Tensor]:
    """Token ids [n, longest turn] of each turn out of ids [B, T], and a mask of those that there are."""
    length = (turns.stop - turns.start).to(ids.device)
    column = torch.arange(max(1, int(length.max())) if len(turns) else 1, device=ids.device)
    place = (turns.start.to(ids.device)[:, None] + column).clamp(max=max(0, turns.shape[1] - 1))
    return ids[turns.row.to(ids.device)[:, None], place], column < length[:, None]


def heard(turns: Turns, prompts: Sequence[Tensor], ids: Tensor, tokenizer: Any) -> list[str]:
    """[n] text of the tokens between the turn before and this one; of the first turn of a row its prompt.

    prompts  B rows of token ids, without padding;  ids  [B, T]
    """
    before = torch.cat([turns.stop.new_zeros(1), turns.stop[:-1]])
    spans = zip(*(x.tolist() for x in (turns.row, turns.step, before, turns.start)), strict=True)
    ids = ids.cpu()
    texts = [(prompts[row] if step == 0 else ids[row, begin:end]).tolist() for row, step, begin, end in spans]
    return list(tokenizer.batch_decode(texts, skip_special_tokens=True))


def keys_of(ids: Tensor, mask: Tensor, tokenizer: Any, mode: str, n: int) -> dict[str, Tensor]:
    """`action_key` and, where the mode parses anything, `action_parsed` of responses: ids and mask [n, T]; on their device.

    Made of the tokens' bytes.  Those of a tokenizer that has no table of bytes are made of its decoded text, with one warning:
    equal actions have equal keys either way.
    """
    table = None if mode == "first_n" else _table(tokenizer)
    if mode == "first_n" or table is not None:
        keys, parsed = action_keys(ids, mode=mode, n=n, mask=mask, token_bytes=table, check="now")
    else:
        rows = [row[kept != 0].tolist() for row, kept in zip(ids.cpu(), mask.cpu(), strict=True)]
        keys, parsed = action_keys(tokenizer.batch_decode(rows, skip_special_tokens=True), mode=mode, n=n)
    found = {"action_key": keys.to(ids.device), "action_parsed": parsed.to(ids.device)}
    return {"action_key": found["action_key"]} if mode == "first_n" else found


def per_turn(
    turns: Turns, rows: Sequence[Any], name: str, fill: Any, *, mask: str, spare: int = 0, valid: Any = None
) -> list[Any]:
    """[n] values out of B rows, each with a list of one entry per turn, or in a row of one turn the entry itself.

    fill    of padding, of a row without a turn whose list is empty, and of a last turn that has no entry
    mask    what the trainer calls the mask of the model's tokens
    spare   1: a list may have one entry more, which is left out; −1: one fewer
    valid   [B] bool   False: padding; None: there is none
    """
    found: list[Any] = []
    empty = set(turns.row[turns.stop == turns.start].tolist())
    for row, (value, n) in enumerate(zip(rows, turns.counts.tolist(), strict=True)):
        if valid is not None and not valid[row]:
            found += [fill] * n
            continue
        several = isinstance(value, (list, tuple, np.ndarray, Tensor)) and np.ndim(value) > 0
        values = [] if value is None else list(value) if several else [value]
        if row not in empty and len(values) not in (n, n + spare):
            raise ValueError(
                f"{name} must have one entry per turn of the model, but row {row} has {len(values)} for {n} turns; a turn is a "
                f"run of ones in {mask}, which must be 0 on what others wrote in between."
            )
        found += [*values[:n], fill][:n]
    return found


def marks(lists: Sequence[Any], shape: Sequence[int], name: str) -> Tensor:
    """[B, T] int64 of B lists of columns: 1 there, 0 elsewhere."""
    found = torch.zeros(tuple(shape), dtype=torch.int64)
    for row, columns in enumerate(lists):
        if not all(0 <= int(column) < shape[1] for column in columns):
            raise ValueError(f"{name} must be columns below {shape[1]}, got {list(columns)} in row {row}.")
        found[row, torch.as_tensor(columns, dtype=torch.int64)] = 1
    return found


def tap_of(model: Any, layer: int | str, key: str) -> Tap:
    """hidden.tap() of the layer that the trainer's configuration names under this key; errors name it."""
    try:
        return tap(model, layer)
    except (TypeError, ValueError) as error:
        raise type(error)(f"{key}={layer}: {error}") from error


def no_hidden_states(model: Any, states: States) -> str:
    """Why the model gives no hidden states; empty where it gives some.  An error where it lacks the layer asked for."""
    try:
        decoder = find_decoder(model)
    except (TypeError, ValueError) as error:
        return str(error)
    if decoder.compiled:
        return f"{decoder.compiled} is compiled as a whole and calls no hooks"
    try:
        layer_of(states.settings.layer, len(decoder.blocks))
    except (TypeError, ValueError) as error:
        raise type(error)(f"{states.where}{error}") from error
    return ""


@functools.lru_cache(maxsize=4)
def _table(tokenizer: Any) -> TokenBytes | None:
    """None, after a warning, for a tokenizer that can have no table."""
    try:
        return token_bytes(tokenizer)
    except (TypeError, ValueError) as error:
        warnings.warn(
            f"action keys are made from decoded text, for the tokenizer's tokens have no bytes of their own: {error}",
            RuntimeWarning,
            stacklevel=2,
        )
        return None
