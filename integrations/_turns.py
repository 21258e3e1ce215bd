"""Turns: where the model speaks in each row of a batch, and a step's advantage back on its tokens."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from ..hidden.positions import Positions, mask_matrix

Tensor = torch.Tensor


@dataclass(frozen=True)
class Turns:
    """The n turns of B rows, row after row and in time order: one step record each.

    row, step     [n] int64   row of the batch, and number of the turn in it
    start, stop   [n] int64   columns [start, stop) of the mask that the turn's tokens take
    shape         (B, T) of the mask

    A row without a turn (an empty or wholly masked response) still is a rollout whose return counts among its group's: it
    has one record with start = stop = 0, which has no token to put an advantage on.
    """

    row: Tensor
    step: Tensor
    start: Tensor
    stop: Tensor
    shape: tuple[int, int]

    @classmethod
    def of(cls, mask: Any, starts: Any = None) -> Turns:
        """From a mask over responses [B, T]: 1 on tokens that the model wrote, 0 on tool results and padding.

        starts   [B, T]   not 0 where a turn begins besides the rising edges of the mask, for turns that stand back to back
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

    @property
    def last(self) -> Tensor:
        """[n] bool: the last turn of its row."""
        return torch.cat([self.row[1:] != self.row[:-1], torch.ones(min(1, len(self)), dtype=torch.bool)])

    @property
    def counts(self) -> Tensor:
        """[B] int64: turns of each row, 1 where a row has none."""
        return torch.bincount(self.row, minlength=self.shape[0])

    def positions(self, prompt_length: int | Tensor) -> Positions:
        """The token before each turn, as columns of prompt and response together.

        prompt_length   columns before the response: one width for padded prompts, or [B] int64 for packed rows
        """
        before = prompt_length if isinstance(prompt_length, int) else prompt_length[self.row]
        return Positions(self.start + before - 1, torch.nn.functional.pad(self.counts.cumsum(0), (1, 0)))

    def spread(self, advantage: Tensor) -> Tensor:
        """[B, T] float32: each turn's advantage [n] on its tokens, 0 elsewhere; on the advantage's device."""
        length = (self.stop - self.start).to(advantage.device)
        row = torch.repeat_interleave(self.row.to(advantage.device), length)
        ahead = torch.repeat_interleave(self.start.to(advantage.device) - (length.cumsum(0) - length), length)
        out = torch.zeros(self.shape, dtype=torch.float32, device=advantage.device)
        out[row, torch.arange(len(row), device=advantage.device) + ahead] = torch.repeat_interleave(advantage, length)
        return out

    def on_last(self, reward: Tensor) -> Tensor:
        """[n] float64 rewards of the steps where each row has one reward [B], given at its end."""
        return torch.where(self.last, reward.double().cpu()[self.row], 0.0)
