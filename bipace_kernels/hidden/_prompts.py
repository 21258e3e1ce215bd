"""Prompts for an early exit: distinct, without padding, cut into micro-batches."""

import itertools
import numbers
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..inputs import checks
from .positions import Positions, mask_matrix, positions_of

# Default number of tokens of one forward, which determines the memory.  Matrix products of a CPU are at full speed from
# a few hundred on (two cores, width 768: 512 at a time take 2 % more than 1,800, 256 18 %); a GPU's need thousands.
CPU_BUDGET, GPU_BUDGET = 512, 16_384
# Fixed cost of a forward, in tokens, so that saving one is worth some padding.  An H100 reads the weights of a 7B model
# in bfloat16 in about the time of 200 of its tokens, and launches wait for the host; the CPU above in that of 20 to 60.
CPU_FORWARD, GPU_FORWARD = 32, 256


def budget_of(token_budget: Any, device: torch.device) -> int:
    """The caller's value, or the device's default."""
    if token_budget is None:
        return CPU_BUDGET if device.type == "cpu" else GPU_BUDGET
    return checks.integer_at_least(token_budget, "token_budget", 1)


Batch = tuple[list[Tensor], Positions]  # prompts of one forward, and the chosen tokens of each


@dataclass(frozen=True)
class Prompts:
    """Distinct prompts, the longest first, each up to its last chosen token, and the caller's states among theirs."""

    tokens: list[Tensor]  # of [length] int64, on the CPU
    wanted: Positions  # the chosen tokens, rising, prompt after prompt: S states
    of_state: Tensor  # [n] int64: which of the S each state of the caller is; −1: its row has no token

    def batches(self, token_budget: int, device: torch.device, *, packed: bool) -> list[Batch]:
        """Batches of prompts of similar length, as many as the budget allows, including padding; at least one."""
        lengths = [len(prompt) for prompt in self.tokens]
        each = CPU_FORWARD if device.type == "cpu" else GPU_FORWARD
        cuts = filled(lengths, token_budget) if packed else cheapest(lengths, token_budget, each)
        return [(self.tokens[a:b], self.wanted.rows(a, b)) for a, b in itertools.pairwise(cuts)]


def filled(lengths: list[int], token_budget: int) -> list[int]:
    """Bounds [0, ..., U] of micro-batches without padding."""
    cuts, used = [0], 0
    for i, length in enumerate(lengths):
        if i > cuts[-1] and used + length > token_budget:
            cuts.append(i)
            used = 0
        used += length
    return [*cuts, len(lengths)] if lengths else cuts


def cheapest(lengths: list[int], token_budget: int, each_forward: int) -> list[int]:
    """Bounds [0, ..., U] of padded micro-batches, lengths falling: the cheapest cuts within the budget.

    cost of a micro-batch of n prompts = n · (the length of its first, the longest) + each_forward
    """
    n = len(lengths)
    cost, taken = np.zeros(n + 1, np.int64), np.ones(n, np.int64)
    for i in range(n - 1, -1, -1):  # cost[i]: of prompt i and all after it
        most = min(n - i, max(1, token_budget // lengths[i]))
        each = lengths[i] * np.arange(1, most + 1) + each_forward + cost[i + 1 : i + most + 1]
        taken[i] = most - int(np.argmin(each[::-1]))  # of equal costs the longest run
        cost[i] = each[taken[i] - 1]
    cuts = [0]
    while cuts[-1] < n:
        cuts.append(cuts[-1] + int(taken[cuts[-1]]))
    return cuts


def prompts_of(
    input_ids: Any, attention_mask: Any, positions: Any = "last", *, n_ids: int | None = None, name: str = "input_ids"
) -> Prompts:
    """Prompts from [B, T] ids and their mask, padded on either side, or from B vectors of any lengths.

    n_ids   size of the model's embedding.  Ids are already on the CPU, where equal prompts are found, so checking them
            does not synchronize; on a GPU an id that is too high would kill the process
    """
    if isinstance(input_ids, (list, tuple)) and not any(isinstance(row, numbers.Number) for row in input_ids):
        if attention_mask is not None:
            raise ValueError("attention_mask is for input_ids of shape [B, T]; leave it out with a list of rows.")
        named = [(row, f"input_ids[{i}]") for i, row in enumerate(input_ids)]
        rows = [checks.integer_vector(row, name, checks.length(row, name)).cpu().long() for row, name in named]
        first, widths = [0] * len(rows), [len(row) for row in rows]
    else:
        rows, first, width = _padded(input_ids, attention_mask)
        widths = [width] * len(rows)
    of_tokens: dict[bytes, int] = {}
    distinct: list[Tensor] = []
    wanted: list[set[int]] = []
    of_state: list[tuple[int, int]] = []
    for i, (row, columns) in enumerate(zip(rows, _columns(positions, rows, first, widths), strict=True)):
        if not len(row) or not columns:
            of_state += [(-1, 0)] * len(columns)
            continue
        row = row[: max(columns) + 1]
        prompt = of_tokens.setdefault(row.numpy().tobytes(), len(distinct))
        if prompt == len(distinct):
            if n_ids is not None and len(outside := row[(row < 0) | (row >= n_ids)]):
                wish = f"token ids from 0 to {n_ids - 1}"
                raise ValueError(f"{name}[{i}] must hold {wish}, got {int(outside[0])}; mask padding out.")
            distinct.append(row)
            wanted.append(set())
        wanted[prompt].update(columns)
        of_state += [(prompt, column) for column in columns]
    order = sorted(range(len(distinct)), key=lambda i: -len(distinct[i]))
    states = [(i, column) for i in order for column in sorted(wanted[i])]
    place = {state: k for k, state in enumerate(states)}
    column = torch.tensor([column for _, column in states], dtype=torch.int64)
    offsets = torch.tensor([0, *itertools.accumulate(len(wanted[i]) for i in order)])
    number = torch.tensor([place.get(state, -1) for state in of_state], dtype=torch.int64)
    return Prompts([distinct[i] for i in order], Positions(column, offsets), number)


def _columns(positions: Any, rows: list[Tensor], first: list[int], widths: list[int]) -> list[list[int]]:
    """The chosen tokens of each row, counted from its first token; positions are columns of the caller's input."""
    wanted = positions_of(positions)
    if isinstance(wanted, str):
        return [[max(0, len(row) - 1)] for row in rows]
    if isinstance(wanted, int):
        columns = [[wanted if wanted >= 0 else width + wanted] for width in widths]
    elif wanted.n_rows != len(rows):
        raise ValueError(f"positions are for {wanted.n_rows} rows, but input_ids has {len(rows)}; give some for each.")
    else:
        flat, offsets = wanted.column.tolist(), wanted.offsets.tolist()
        columns = [flat[begin:end] for begin, end in itertools.pairwise(offsets)]
    for b, row in enumerate(rows):
        if len(row) and not all(0 <= column - first[b] < len(row) for column in columns[b]):
            raise ValueError(
                f"positions must be tokens of their rows, but one of row {b} is outside its {widths[b]} columns or on "
                "padding; count columns of input_ids, padding included."
            )
    return [[column - begin for column in some] for some, begin in zip(columns, first, strict=True)]


def padded_batch(prompts: Sequence[Tensor], *, masked: bool) -> tuple[dict[str, Tensor], None]:
    """Arguments of a forward on [R, T].

    Padding is on the right, where causal attention never looks, so there is no mask: attention is faster without
    one and does not expand it to [T, T].  Positions count from 0 by default.
    """
    ids = torch.nn.utils.rnn.pad_sequence(list(prompts), batch_first=True)
    if not masked:
        return {"input_ids": ids}, None
    lengths = torch.tensor([len(p) for p in prompts])
    return {"input_ids": ids, "attention_mask": (torch.arange(ids.shape[1]) < lengths[:, None]).long()}, None


def packed_batch(prompts: Sequence[Tensor]) -> tuple[dict[str, Tensor], Tensor]:
    """Arguments of a forward on [1, nnz], where position ids restart at each prompt; cu_seqlens."""
    position = torch.cat([torch.arange(len(p)) for p in prompts])
    cu_seqlens = torch.tensor([0, *itertools.accumulate(len(p) for p in prompts)])
    return {"input_ids": torch.cat(list(prompts))[None], "position_ids": position[None]}, cu_seqlens


def _padded(input_ids: Any, attention_mask: Any) -> tuple[list[Tensor], list[int], int]:
    """The tokens of each row, the column of its first, and the number of columns."""
    if isinstance(input_ids, Mapping):
        raise TypeError(f"input_ids must be token ids, got {type(input_ids).__name__}; give its items by **.")
    ids = checks.to_tensor(input_ids, "input_ids", "token ids of shape [B, T], or a list of token ids per row")
    if ids.ndim != 2:
        raise ValueError(f"input_ids must have shape [B, T], got {list(ids.shape)}; a single prompt is [ids].")
    if ids.is_floating_point() or ids.is_complex() or ids.dtype == torch.bool:
        raise TypeError(f"input_ids must be integers, got {ids.dtype}.")
    ids = ids.cpu().long()
    if attention_mask is None:
        return list(ids), [0] * len(ids), ids.shape[1]
    mask = mask_matrix(attention_mask, "attention_mask").cpu()
    if mask.shape != ids.shape:
        raise ValueError(f"attention_mask must have the shape of input_ids, {list(ids.shape)}, got {list(mask.shape)}.")
    holes = (mask.int().diff(dim=1) != 0).sum(1) > 1 + (~mask[:, :1] & ~mask[:, -1:]).any(1).int()
    if bool(holes.any()):
        raise ValueError(
            f"attention_mask must be one run of tokens in each row, but row {int(holes.nonzero()[0])} has padding "
            "between its tokens, where models disagree about positions; close the gaps."
        )
    first = mask.int().argmax(1).tolist() if mask.shape[1] else [0] * len(ids)
    return [row[kept] for row, kept in zip(ids, mask, strict=True)], first, ids.shape[1]
