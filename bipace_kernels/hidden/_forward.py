"""Finds the chosen tokens of a tapped forward, for every layout of its input."""

from typing import Any

import torch
from torch import Tensor, nn

from ..inputs import checks
from ._pool import Spans
from .layers import arguments_of
from .positions import Positions, last_tokens, positions_of


class Consumer:
    """Assigns the given rows to the forwards in order, and records the row of each state."""

    def __init__(self, positions: Any, cu_seqlens: Any, *, one_token: bool) -> None:
        self._given, self._one_token = positions_of(positions), one_token
        self._cu_given = _cu_seqlens(cu_seqlens)
        self.restart()

    def restart(self) -> None:
        self._cursor = 0  # rows of the given positions that are assigned
        self._rows = 0  # rows of all forwards
        self.logits_to_keep = 0  # of the last forward, where it has more tokens
        self._cu = self._cu_given
        self._expected: tuple[Positions | int | str | None, Tensor | None] = (None, None)
        self._row_index: list[Tensor] = []
        self._outside: Tensor | None = None

    def expect(self, positions: Any, cu_seqlens: Any) -> None:
        self._expected = (None if positions is None else positions_of(positions), _cu_seqlens(cu_seqlens))

    def row_index(self) -> Tensor:
        return torch.cat(self._row_index) if self._row_index else torch.empty(0, dtype=torch.int64)

    def check_done(self) -> None:
        """Raises ValueError if forwards ran, but not for all rows of the positions."""
        if isinstance(self._given, Positions) and 0 < self._cursor < self._given.n_rows:
            raise ValueError(
                f"positions are for {self._given.n_rows} rows, the forwards had {self._cursor}; run all inside."
            )

    def check_outside(self) -> None:
        """Raises ValueError if a position on a device, which is not read during the forward, was not a token."""
        if self._outside is not None and bool(self._outside):
            raise ValueError(
                "positions must be tokens of their rows, and cu_seqlens the offsets of all sequences of a packed "
                "forward; some are outside the tensor, on padding or pooled over it, or sequences begin within a row."
            )

    def next(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Spans:
        """The spans of the forward that begins with these arguments."""
        arguments = arguments_of(module, args, kwargs)
        tokens = next((x for x in map(arguments.get, ("input_ids", "inputs_embeds")) if x is not None), None)
        if tokens is None:
            raise ValueError(f"model must be a decoder; {type(module).__name__} gets no input_ids or inputs_embeds.")
        n_batch, width = int(tokens.shape[0]), int(tokens.shape[1])
        (positions, cu), self._expected = self._expected, (None, None)
        keep = arguments.get("logits_to_keep")
        self.logits_to_keep = keep if isinstance(keep, int) and 0 < keep < width else 0
        cu = self._packed(arguments, n_batch) if cu is None else cu
        if cu is not None:
            if n_batch != 1:
                raise ValueError(f"cu_seqlens needs packed input [1, nnz], got {n_batch} rows; leave it out there.")
            if self._is_set((cu[0] != 0) | (cu[-1] > width) | (cu.diff() < 0).any()):
                raise ValueError(
                    f"cu_seqlens must begin with 0, never decrease and end within the forward's {width} tokens, got "
                    f"{cu.tolist()[:9]}; give the offsets of its sequences."
                )
        mask = arguments.get("attention_mask")
        cache: Any = arguments.get("past_key_values", arguments.get("cache"))  # its name from transformers 5.24 on
        before = cache.get_seq_length() if hasattr(cache, "get_seq_length") else 0
        longer = cu is None and isinstance(mask, Tensor) and mask.ndim == 2 and mask.shape[1] != width
        if longer or self._is_set(torch.as_tensor(before) > 0):
            raise ValueError(
                f"the forward has {width} tokens, but its attention_mask or its cache covers others before them: set "
                "`enabled` of the tap to False while tokens are generated, and run whole prompts without a cache."
            )
        n_rows = n_batch if cu is None else len(cu) - 1
        positions = self._take(n_rows) if positions is None else positions
        if cu is None and not (self._one_token and isinstance(positions, Positions)):
            self._check_whole(positions, mask, arguments.get("position_ids"))
        cu = None if cu is None else cu.to(tokens.device)
        spans, row, bad = _spans(positions, tokens, mask, cu, whole=not self._one_token)
        if self._is_set(bad.any()):
            raise ValueError(
                f"positions must be tokens of their rows, but one of row {self._rows + int(row[bad][0])} is outside "
                f"its {width} columns or on padding, or padding would be pooled; count columns with padding included."
            )
        self._row_index.append(row + self._rows)
        self._rows += n_rows
        return spans

    def _packed(self, arguments: dict[str, Any], n_batch: int) -> Tensor | None:
        """cu_seqlens from tap(), for its first forward, or from the forward's own arguments."""
        if self._cu is not None:
            cu, self._cu = self._cu, None
            return cu
        own = _cu_seqlens(arguments.get("cu_seq_lens_q")) if n_batch == 1 else None
        if own is None and self._cu_given is not None:
            raise ValueError("cu_seqlens was for one forward, but another ran; call expect(cu_seqlens=...) for each.")
        return own

    def _take(self, n_rows: int) -> Positions | int | str:
        if not isinstance(self._given, Positions):
            return self._given
        first, last = self._cursor, self._cursor + n_rows
        if last > self._given.n_rows:
            raise ValueError(
                f"positions are for {self._given.n_rows} rows, the forwards have {last} or more; give them all."
            )
        self._cursor = last
        return self._given.rows(first, last)

    def _check_whole(self, positions: Positions | int | str, mask: Any, ids: Any) -> None:
        """Raises ValueError if a row must be one sequence, but this cannot be checked."""
        if isinstance(positions, str) and mask is not None and not (isinstance(mask, Tensor) and mask.ndim == 2):
            raise ValueError("positions 'last' needs an attention_mask [B, T] in the forward; give the columns.")
        one_row = mask is None and isinstance(ids, Tensor) and ids.ndim == 2 and ids.shape[0] == 1
        if one_row and self._is_set((ids[0, 1:] <= ids[0, :-1]).any()):
            raise ValueError(
                f"{'positions' if self._one_token else 'pooling'} on packed input needs cu_seqlens: the forward's "
                "position_ids restart inside the row; give tap() or expect() the offsets of its sequences."
            )

    def _is_set(self, wrong: Tensor) -> bool:
        """The flag of an error, on the CPU; one on a device is kept for rows() to read."""
        if wrong.device.type == "cpu":
            return bool(wrong)
        self._outside = wrong if self._outside is None else self._outside | wrong
        return False


def hidden_of(output: Any) -> Tensor:
    """The hidden states in a block's output: a tensor in transformers 5, before that a tuple that begins with it."""
    hidden = output[0] if isinstance(output, (tuple, list)) else output
    if not isinstance(hidden, Tensor) or hidden.ndim != 3:
        raise TypeError(f"a block's output must be [B, T, D] or begin with it, got {type(hidden).__name__}.")
    return hidden


def _cu_seqlens(value: Any) -> Tensor | None:
    if value is None:
        return None
    cu = checks.integer_vector(value, "cu_seqlens", checks.length(value, "cu_seqlens"))
    if len(cu) < 2:
        raise ValueError(f"cu_seqlens must have shape [R+1] with R ≥ 1, got [{len(cu)}]; it begins with 0.")
    return cu


def _spans(
    positions: Positions | int | str, tokens: Tensor, mask: Any, cu: Tensor | None, *, whole: bool
) -> tuple[Spans, Tensor, Tensor]:
    """Spans, the row [n] of each on the CPU, and which positions [n] are not tokens of their rows."""
    device, (n_batch, width) = tokens.device, tokens.shape[:2]
    lengths = torch.full((n_batch,), width, device=device) if cu is None else cu.diff()
    alive = mask != 0 if cu is None and isinstance(mask, Tensor) and mask.ndim == 2 else None  # [R, T]; None: all
    start = torch.zeros_like(lengths) if alive is None or not width else alive.to(torch.int8).argmax(1)
    if isinstance(positions, Positions):
        own = positions.row()
        row, column = own.to(device), positions.column.to(device)
    else:
        own, row = torch.arange(len(lengths)), torch.arange(len(lengths), device=device)
        if isinstance(positions, int):
            column = lengths + positions if positions < 0 else torch.full_like(lengths, positions)
        else:  # "last"
            column = lengths - 1 if alive is None else last_tokens(alive)
    inside = (column >= 0) & (column < lengths[row])
    if alive is not None and alive.shape[1]:
        at = column.clamp(0, alive.shape[1] - 1)
        inside &= alive[row, at]
        if whole:  # no padding from the row's first token on
            inside &= alive.cumsum(1)[row, at] == at - start[row] + 1
        bad = ~inside & alive.any(1)[row]  # a row of only padding has no state, and gives zeros
    else:
        bad = ~inside & (lengths > 0)[row]
    last = torch.where(inside, column, -1)
    if cu is None:
        return Spans(row, start[row], last), own, bad
    return Spans(torch.zeros_like(row), cu[:-1][row], torch.where(inside, cu[:-1][row] + column, -1)), own, bad
