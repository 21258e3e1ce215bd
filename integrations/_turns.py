"""Turns: the model's tokens in each row of a batch, with each turn's observation, action and advantage."""

from __future__ import annotations

import contextlib
import functools
import json
import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..features.action_keys import action_keys
from ..features.token_bytes import TokenBytes, token_bytes
from ..hidden.positions import Positions, mask_matrix


@dataclass(frozen=True)
class Turns:
    """The n turns of B rows, row after row and in time order: one step record each.

    row, step     [n] int64   row of the batch, and number of the turn in it
    start, stop   [n] int64   columns [start, stop) of the turn's tokens in the mask
    shape         (B, T) of the mask

    A row without a turn (an empty or completely masked response) is still a rollout whose return counts in its group:
    it has one record with start = stop = 0, without tokens for its advantage.
    """

    row: Tensor
    step: Tensor
    start: Tensor
    stop: Tensor
    shape: tuple[int, int]

    @classmethod
    def of(cls, mask: Any, starts: Any = None) -> Turns:
        """From a mask over responses [B, T]: 1 on tokens that the model generated, 0 on tool results and padding.

        starts   [B, T]   non-zero where a turn begins without a rising edge of the mask, for adjacent turns
        """
        written = mask_matrix(mask, "mask").cpu()
        b, t = written.shape
        before = torch.nn.functional.pad(written, (1, 0))[:, :t]
        begins = written & ~before
        if starts is not None:
            begins |= written & mask_matrix(starts, "starts").cpu()
        ends = written & ~torch.nn.functional.pad(written & ~begins, (0, 1))[:, 1:]
        row, start = torch.nonzero(begins, as_tuple=True)
        stop = torch.nonzero(ends, as_tuple=True)[1] + 1
        empty = torch.nonzero(~written.any(1)).flatten()
        row, nothing = torch.cat([row, empty]), torch.zeros_like(empty)
        order = torch.argsort(row, stable=True)
        row, start, stop = row[order], torch.cat([start, nothing])[order], torch.cat([stop, nothing])[order]
        first = torch.searchsorted(row, torch.arange(b))
        return cls(row, torch.arange(len(row)) - first[row], start, stop, (b, t))

    def __len__(self) -> int:
        return len(self.row)

    def some(self, turns: Tensor | None) -> Turns:
        """Some turns [k], all those of their rows; None: every one."""
        if turns is None:
            return self
        row, step, start, stop = (x[turns] for x in (self.row, self.step, self.start, self.stop))
        return Turns(row, step, start, stop, self.shape)

    @property
    def last(self) -> Tensor:
        """[n] bool: the last turn of its row."""
        return torch.cat([self.row[1:] != self.row[:-1], torch.ones(min(1, len(self)), dtype=torch.bool)])

    @property
    def counts(self) -> Tensor:
        """[B] int64: turns of each row, 1 if a row has none."""
        return torch.bincount(self.row, minlength=self.shape[0])

    @property
    def empty(self) -> set[int]:
        """Rows without a token of the model."""
        return set(self.row[self.stop == self.start].tolist())

    def positions(self, prompt_length: int | Tensor) -> Positions:
        """The token before each turn, as columns of prompt and response together.

        prompt_length   columns before the response: one width for padded prompts, or [B] int64 for packed rows
        """
        before = prompt_length if isinstance(prompt_length, int) else prompt_length[self.row]
        return Positions(self.start + before - 1, torch.nn.functional.pad(self.counts.cumsum(0), (1, 0)))

    def positions_of(self, rows: Tensor, prompt_length: int) -> tuple[Tensor, Positions]:
        """The same for rows in another order [B]: the turns [n] in that order, and the token before each of them."""
        place = torch.empty(self.shape[0], dtype=torch.int64)
        place[rows.cpu()] = torch.arange(self.shape[0])
        order = torch.argsort(place[self.row], stable=True)
        offsets = torch.nn.functional.pad(self.counts[rows.cpu()].cumsum(0), (1, 0))
        return order, Positions(self.start[order] + prompt_length - 1, offsets)

    def spread(self, advantage: Tensor) -> Tensor:
        """[B, T] float32: each turn's advantage [n] on its tokens, 0 elsewhere; on the advantage's device."""
        length = (self.stop - self.start).to(advantage.device)
        row = torch.repeat_interleave(self.row.to(advantage.device), length)
        ahead = torch.repeat_interleave(self.start.to(advantage.device) - (length.cumsum(0) - length), length)
        out = torch.zeros(self.shape, dtype=torch.float32, device=advantage.device)
        out[row, torch.arange(len(row), device=advantage.device) + ahead] = torch.repeat_interleave(advantage, length)
        return out

    def on_last(self, reward: Tensor) -> Tensor:
        """[n] float64 rewards of the steps if each row has one reward [B], at its end."""
        return torch.where(self.last, reward.double().cpu()[self.row], 0.0)

    def tokens(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        """Token ids [n, longest turn] of each turn from ids [B, T], and their mask."""
        length = (self.stop - self.start).to(ids.device)
        column = torch.arange(max(1, int(length.max())) if len(self) else 1, device=ids.device)
        place = (self.start.to(ids.device)[:, None] + column).clamp(max=max(0, self.shape[1] - 1))
        return ids[self.row.to(ids.device)[:, None], place], column < length[:, None]

    def observation_texts(self, prompts: Sequence[Tensor], ids: Tensor, tokenizer: Any) -> list[str]:
        """[n] text of the tokens between the previous turn and this one; for the first turn of a row its prompt.

        prompts  B rows of token ids, without padding;  ids  [B, T]
        """
        before = torch.cat([self.stop.new_zeros(1), self.stop[:-1]])
        spans = zip(*(x.tolist() for x in (self.row, self.step, before, self.start)), strict=True)
        ids = ids.cpu()
        texts = [(prompts[row] if step == 0 else ids[row, begin:end]).tolist() for row, step, begin, end in spans]
        return list(tokenizer.batch_decode(texts, skip_special_tokens=True))

    def action_texts(self, ids: Tensor, tokenizer: Any) -> list[str]:
        """[n] text of each turn's tokens; ids [B, T]."""
        ids = ids.cpu()
        spans = zip(*(x.tolist() for x in (self.row, self.start, self.stop)), strict=True)
        return list(tokenizer.batch_decode([ids[row, a:b].tolist() for row, a, b in spans], skip_special_tokens=True))

    def entries(
        self, rows: Sequence[Any], name: str, mask: str, *, numbers: bool = False
    ) -> tuple[list[list[Any]], dict[int, str]]:
        """[B] lists of what each row says of its turns, and {row: why} of those that do not fit them.

        rows         [B], each with a list of one entry per turn, or in a row of one turn the entry itself
        name, mask   what the trainer calls the entries, and the mask of the model's tokens
        numbers      whether entries must be numbers

        A row without a token of the model may have any number of entries.
        """
        lists, misfits, empty = [], {}, self.empty
        for row, (value, n) in enumerate(zip(rows, self.counts.tolist(), strict=True)):
            several = isinstance(value, (list, tuple)) or getattr(value, "ndim", 0) > 0
            lists.append([] if value is None else list(value) if several else [value])
            if row not in empty and len(lists[row]) != n:
                misfits[row] = (
                    f"{name} must have one entry per turn of the model, but row {row} has {len(lists[row])} for {n} "
                    f"turns; a turn is a run of ones in {mask}, which must be 0 on the tokens in between"
                )
            elif numbers and not are_numbers(lists[row]):
                misfits[row] = f"{name} must be numbers, but row {row} has {value!r}"
        return lists, misfits


def cut_off(rows: Sequence[Any]) -> Tensor:
    """[B] bool from B values `truncated`: True if the rollout was cut off after the row; else False or None."""
    for row, value in enumerate(rows):
        if value is not None and not isinstance(value, (bool, np.bool_)):
            raise ValueError(f"truncated must be one bool per row, True if cut off, got {value!r} in row {row}.")
    return torch.tensor([bool(value) for value in rows])


def are_numbers(values: Iterable[Any]) -> bool:
    """Whether each is a number, also of NumPy and torch: NaN is one, a text and None are not."""
    for value in values:
        if isinstance(value, (str, bytes)):
            return False
        try:
            float(value)
        except (TypeError, ValueError, OverflowError):
            return False
    return True


def windows(
    records: Mapping[str, Tensor], observations: Sequence[Any], actions: Sequence[Any], turns: int
) -> list[str]:
    """[n] the last `turns` observations of each record and the actions between them, its own observation last.

    records   the columns group, trajectory and step [n], and valid where there is padding, which precedes nothing
    """
    ids = [records[name].tolist() for name in ("group", "trajectory", "step")]
    valid = records["valid"].tolist() if "valid" in records else [True] * len(observations)
    number = {key: i for i, key in enumerate(zip(*ids, strict=True)) if valid[i]}
    texts = []
    for group, trajectory, step, own in zip(*ids, observations, strict=True):
        before = [number.get((group, trajectory, t)) for t in range(step - turns + 1, step)]
        texts.append("".join(f"{observations[i]}\n> {actions[i]}\n" for i in before if i is not None) + str(own))
    return texts


KINDS = ("first_n", "action_tag", "tool_call", "text", "rollout")  # source of a key under mode "auto"
CALL, END_OF_CALL = "<tool_call>", "</tool_call>"


def keys_of(
    ids: Tensor, mask: Tensor, tokenizer: Any, mode: str, n: int, calls: list[str] | None = None, last: Any = None
) -> dict[str, Tensor]:
    """`action_key` of responses, ids and mask [n, T], on their device, and `action_parsed` if the mode parses anything.

    mode "auto", with `action_kind` int8, an index into KINDS, uses the first of these that a response has:
        its tool calls, each with name and arguments in canonical order, `calls` [n] as call_text() gives them;
        None: those between <tool_call> and </tool_call>
        <action>…</action>
        if there are tools (`calls` is given, or one response has a call), its whole text; else its first n tokens

    A whole text counts as recognized where it may be an answer: in a rollout's last turn (`last` [n] bool; None: any)
    that does not begin a tool call.

    Keys are made from the tokens' bytes, or for a tokenizer without a table of bytes from its decoded text, with one
    warning: equal actions have equal keys in both cases.
    """
    if mode != "auto":
        return _keys_of(ids, mask, tokenizer, mode, n)
    columns = _keys_of(ids, mask, tokenizer, "action_tag", n)
    kind = columns["action_parsed"].to(torch.int8)
    tools = calls is not None
    tag = tokenizer.convert_tokens_to_ids(CALL)
    tag = tag if tag is not None and tokenizer.convert_ids_to_tokens(tag) == CALL else None  # no token of its own
    begun = ((ids == tag) & (mask != 0)).any(1) if tag is not None else torch.zeros_like(columns["action_parsed"])
    # Decoding dominates the cost.  If the tag is one token (Qwen), only rows that have it are decoded; else those
    # without an action tag or a call that is given.
    unread = begun if tag is not None else ~columns["action_parsed"]
    some = [i for i in torch.nonzero(unread).flatten().tolist() if calls is None or not calls[i]]
    rows = [ids[i][mask[i] != 0].tolist() for i in some]
    decoded = tokenizer.batch_decode(rows, skip_special_tokens=False) if rows else []
    begun[some] = torch.tensor([CALL in text for text in decoded], dtype=torch.bool).to(ids.device)
    if calls is None:
        calls = [""] * len(ids)
        for i, text in zip(some, decoded, strict=True):
            calls[i] = _calls_in(text)
    called = torch.tensor([text != "" for text in calls], dtype=torch.bool).to(ids.device)
    if tools or bool(called.any()):
        texts = _keys_of(ids, mask, tokenizer, "text", n)
        rest = kind == KINDS.index("first_n")
        texts["action_parsed"] &= ~begun if last is None else ~begun & last.to(ids.device)
        columns = {name: texts[name].where(rest, column) for name, column in columns.items()}
        kind = kind.masked_fill(rest, KINDS.index("text"))
        columns["action_key"] = action_keys(calls, mode="text")[0].to(ids.device).where(called, columns["action_key"])
        columns["action_parsed"] |= called
        kind = kind.masked_fill(called, KINDS.index("tool_call"))
    return {**columns, "action_kind": kind}


def call_text(calls: Sequence[tuple[Any, Any]]) -> str:
    """One line for each (name, arguments): equal for equal calls, whatever the order of the arguments; "" for none, and
    where arguments are nested too deeply to be written."""
    lines = []
    for name, arguments in calls:
        if isinstance(arguments, str):
            with contextlib.suppress(ValueError, RecursionError):
                arguments = json.loads(arguments)
        try:
            line = json.dumps([name, arguments], sort_keys=True, ensure_ascii=False, separators=(",", ":"), default=str)
        except (RecursionError, ValueError, TypeError):  # also keys that cannot be sorted, and circular references
            return ""
        lines.append(line)
    return "\n".join(lines)


def _calls_in(text: str) -> str:
    """call_text() of the JSON calls in a response; anything else is not a call."""
    calls, begin = [], text.find(CALL)
    while begin >= 0 and (end := text.find(END_OF_CALL, begin)) >= 0:
        with contextlib.suppress(ValueError, RecursionError):  # the model may write anything, nested a thousand times
            call = json.loads(text[begin + len(CALL) : end])
            if isinstance(call, dict):
                calls.append((call.get("name"), call.get("arguments", call)))  # of another form: by all that it says
        begin = text.find(CALL, end)
    return call_text(calls)


def _keys_of(ids: Tensor, mask: Tensor, tokenizer: Any, mode: str, n: int) -> dict[str, Tensor]:
    size = len(tokenizer) if hasattr(tokenizer, "__len__") else 0
    table = None if mode == "first_n" else _byte_table(tokenizer, size)
    of_ids = mode if table is not None else "first_n"  # which needs no table
    keys, parsed = action_keys(ids, mode=of_ids, n=n, mask=mask, token_bytes=table, check="now")
    if mode == "first_n":
        return {"action_key": keys}
    if table is None:
        rows = [row[kept != 0].tolist() for row, kept in zip(ids.cpu(), mask.cpu(), strict=True)]
        own, parsed = action_keys(tokenizer.batch_decode(rows, skip_special_tokens=True), mode=mode)
        own, parsed = own.to(ids.device), parsed.to(ids.device)
        keys = own if mode == "text" else own.where(parsed, keys)
    return {"action_key": keys, "action_parsed": parsed}


def start_mask(lists: Sequence[Any], shape: Sequence[int], name: str) -> Tensor:
    """[B, T] int64 of B lists of columns, or None: 1 there, 0 elsewhere."""
    starts = torch.zeros(tuple(shape), dtype=torch.int64)
    for row, columns in enumerate([] if columns is None else columns for columns in lists):
        places = {int(column) for column in columns}
        if not all(0 <= place < shape[1] for place in places) or len(places) < len(columns):
            given = f"{list(columns)} in row {row}"
            raise ValueError(f"{name} must be columns below {shape[1]}, each once, got {given}; it is not a mask.")
        starts[row, torch.as_tensor(columns, dtype=torch.int64)] = 1
    return starts


@functools.lru_cache(maxsize=4)
def _byte_table(tokenizer: Any, size: int) -> TokenBytes | None:
    """None, after a warning, for a tokenizer without a table.  size: its length, which grows if tokens are added."""
    try:
        return token_bytes(tokenizer)
    except (TypeError, ValueError) as error:
        text = f"action keys are made from decoded text, since the tokenizer has no table of bytes: {error}"
        warnings.warn(text, RuntimeWarning, stacklevel=2)
        return None
