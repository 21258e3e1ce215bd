"""Positions of states: columns of the tensor that the model sees, one or several for each row of the batch."""

from __future__ import annotations

import numbers
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..backends import threads
from ..inputs import checks


@dataclass(frozen=True)
class Positions:
    """Any number of columns for each of R rows, row after row; made by the functions below or from lists.

    column   [n] int64   token index in its row: in the padded tensor, or inside the sequence where sequences are packed
    offsets  [R+1] int64 on the CPU: row r has column[offsets[r] : offsets[r + 1]]
    """

    column: Tensor
    offsets: Tensor

    @property
    def n_rows(self) -> int:
        return len(self.offsets) - 1

    def __len__(self) -> int:
        return int(self.column.shape[0])

    def rows(self, first: int, last: int) -> Positions:
        """Positions of rows [first, last)."""
        begin, end = int(self.offsets[first]), int(self.offsets[last])
        return Positions(self.column[begin:end], self.offsets[first : last + 1] - begin)

    def row(self) -> Tensor:
        """[n] int64 on the CPU: the row of each position."""
        return torch.repeat_interleave(torch.arange(self.n_rows), self.offsets.diff())


@threads.using()
def last_tokens(attention_mask: Any) -> Tensor:
    """[B] int64 column of the last attended token of each row, left- or right-padded; −1 where a row has none.

    attention_mask  [B, T] bool or integers, not 0 where there is a token

    On the mask's device, without synchronizing.  For prompts without responses this is the last prompt token; if the
    row also has a response, it is the response's last token, which is not a state: use turn_positions() there.
    """
    mask = mask_matrix(attention_mask, "attention_mask")
    column = torch.arange(1, mask.shape[1] + 1, device=mask.device)
    return (mask * column).amax(1) - 1 if mask.shape[1] else column.new_full((mask.shape[0],), -1)


@threads.using()
def turn_positions(mask: Any, prompt_length: Any = 0) -> Positions:
    """The token before each turn of the model: the state in which it responds.

        prompt_length + t − 1   for every t with mask[t] and not mask[t − 1]

    mask           [B, T] bool or 0 and 1, or B vectors of any lengths: 1 on tokens that the model generated, 0 on
                   prompts, tool results and padding (a response mask times an attention mask).  Over whole rows, or
                   only over responses
    prompt_length  where the mask covers only responses: columns before the response in the tensor that the model sees,
                   one int (left-padded prompts: their width) or one per row [B] (packed sequences)

    A row may have no turn.  ValueError if a turn has no token before it.  Synchronizes for a mask on a GPU, since the
    number of turns decides the shape of everything after it.
    """
    if isinstance(mask, (list, tuple)):
        rows = [mask_matrix(row, f"mask[{i}]", "[T]", 1) for i, row in enumerate(mask)]
        mask = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True) if rows else torch.zeros(0, 0, dtype=torch.bool)
    turns = mask_matrix(mask, "mask")
    before = torch.nn.functional.pad(turns, (1, 0))[:, :-1]
    row, column = torch.nonzero(turns & ~before, as_tuple=True)
    if not isinstance(prompt_length, bool) and isinstance(prompt_length, numbers.Integral):
        shift = torch.tensor(int(prompt_length), device=turns.device)
    else:
        lengths = checks.integer_vector(prompt_length, "prompt_length", turns.shape[0], "the rows of mask")
        shift = lengths.to(turns.device)
    if shift.numel() and int(shift.min()) < 0:
        raise ValueError(f"prompt_length must be at least 0, got {int(shift.min())}.")
    column = column + (shift if shift.ndim == 0 else shift[row]) - 1
    bad = column < 0
    if bool(bad.any()):
        raise ValueError(
            f"mask must have a token before each turn, but row {int(row[bad][0])} begins with one; give prompt_length."
        )
    counts = torch.bincount(row, minlength=turns.shape[0]).cpu()
    return Positions(column, torch.cat([counts.new_zeros(1), counts.cumsum(0)]))


def positions_of(value: Any) -> Positions | int | str:
    """A caller's positions: Positions, "last" or an int for all rows, one int per row, or a list of ints per row."""
    if isinstance(value, Positions) or (isinstance(value, str) and value == "last"):
        return value
    if not isinstance(value, bool) and isinstance(value, numbers.Integral):
        return int(value)
    wish = "'last', an int, one int per row, or a list of ints per row (see turn_positions)"
    if isinstance(value, (list, tuple)) and any(isinstance(v, (list, tuple)) for v in value):
        if not all(isinstance(v, (list, tuple)) for v in value):
            raise TypeError(f"positions must be {wish}, got a list that mixes ints and lists.")
        counts = torch.tensor([0, *(len(v) for v in value)], dtype=torch.int64)
        flat = [c for v in value for c in v]
        return Positions(checks.integer_vector(flat, "positions", len(flat)), counts.cumsum(0))
    if isinstance(value, (str, bool)) or not hasattr(value, "__len__"):
        raise TypeError(f"positions must be {wish}, got {value!r}.")
    column = checks.integer_vector(value, "positions", checks.length(value, "positions"))
    return Positions(column, torch.arange(len(column) + 1))


def mask_matrix(value: Any, name: str, shape: str = "[B, T]", ndim: int = 2) -> Tensor:
    """[B, T] bool of a mask of booleans or integers; of a single row [T] bool."""
    tensor = checks.to_tensor(value, name, f"a mask of shape {shape}")
    if tensor.ndim != ndim:
        raise ValueError(f"{name} must have shape {shape}, got {list(tensor.shape)}; one row per sequence.")
    if (tensor.is_floating_point() and tensor.numel()) or tensor.is_complex():  # [] is a tensor of floats
        raise TypeError(f"{name} must be bool or integers, got {tensor.dtype}; compare it, e.g. {name} > 0.")
    return tensor != 0
