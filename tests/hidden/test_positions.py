"""Columns of states: last tokens, the token before each turn, what callers may give instead, and Ulysses' slices."""

import itertools

import numpy as np
import pytest
import torch
import torch.distributed as dist
from hypothesis import given, strategies as st
from refusals import refused

from bipace_kernels.hidden import last_tokens, turn_positions
from bipace_kernels.hidden.positions import Positions, positions_of
from bipace_kernels.hidden.tap import expect


def lists(positions):
    offsets = positions.offsets.tolist()
    return [positions.column[a:b].tolist() for a, b in itertools.pairwise(offsets)]


def test_last_tokens_and_turn_positions_of_whole_rows_and_of_responses_alone():
    mask = [[0, 0, 1, 1], [1, 1, 1, 0], [0, 0, 0, 0], [1, 1, 1, 1], [0, 1, 1, 0]]
    for given_mask in (mask, np.array(mask), torch.tensor(mask), torch.tensor(mask, dtype=torch.bool)):
        assert last_tokens(given_mask).tolist() == [3, 2, -1, 3, 2]
    mask = [[0, 0, 0, 1, 1, 0, 0, 1, 0, 0],
            [0, 1, 0, 1, 0, 1, 0, 0, 0, 1],
            [0, 0, 0, 0, 0, 0, 0, 0, 0, 0]]  # fmt: skip
    assert lists(turn_positions(mask)) == [[2, 6], [0, 2, 4, 8], []]
    mask = torch.tensor([[1, 1, 0, 1], [1, 0, 0, 0]])
    assert lists(turn_positions(mask, [3, 7])) == [[2, 5], [6]]
    assert lists(turn_positions(mask, torch.tensor([3, 7]))) == [[2, 5], [6]]


def test_turn_positions_of_ragged_masks_and_a_turn_without_a_token_before_it():
    masks = [torch.tensor([0, 1, 1]), torch.tensor([0, 0, 1, 0, 1]), torch.tensor([])]
    found = turn_positions(masks)
    assert lists(found) == [[0], [1, 3], []] and found.row().tolist() == [0, 1, 1]
    assert (found.n_rows, len(found)) == (3, 3) and lists(found.rows(1, 3)) == [[1, 3], []]
    assert turn_positions([]).n_rows == 0
    refused("row 1 begins with one; give prompt_length", turn_positions, [[0, 1], [1, 1]])
    refused("prompt_length must be at least 0, got -2", turn_positions, [[0, 1]], -2)


@given(st.lists(st.lists(st.booleans(), min_size=1, max_size=12), min_size=1, max_size=5), st.integers(1, 4))
def test_turn_positions_against_a_loop(masks, prompt):
    wanted = [[prompt + t - 1 for t in range(len(m)) if m[t] and (t == 0 or not m[t - 1])] for m in masks]
    assert lists(turn_positions(masks, prompt)) == wanted


def test_what_positions_may_be():
    assert positions_of(-1) == -1 and lists(positions_of([4, 2])) == [[4], [2]]
    assert lists(positions_of(torch.tensor([4, 2], dtype=torch.int32))) == [[4], [2]]
    assert lists(positions_of(np.array([4, 2]))) == [[4], [2]]
    assert lists(positions_of([[4, 2], [], [7]])) == [[4, 2], [], [7]] and positions_of([]).n_rows == 0


@pytest.mark.parametrize("value", ["first", True, 2.5, [1.5], [[1], 2], None, [True, False], torch.zeros(2, 2).long()])
def test_what_positions_may_not_be(value):
    refused("positions", positions_of, value, error=ValueError if isinstance(value, torch.Tensor) else TypeError)


def test_masks_of_the_wrong_kind():
    for mask, error, text in (
        (torch.zeros(3), ValueError, r"mask must have shape \[B, T\], got \[3\]"),
        (torch.zeros(3, 2), TypeError, "mask must be bool or integers, got torch.float32"),
        ([torch.zeros(2, 2)], ValueError, r"mask\[0\] must have shape \[T\]"),
        ([torch.zeros(2)], TypeError, r"mask\[0\] must be bool or integers"),
    ):
        refused(text, turn_positions, mask, error=error)


rows = st.lists(st.lists(st.booleans(), min_size=1, max_size=6), min_size=1, max_size=5)


class Watching:
    """A tap on the identity: of a forward on tokens it keeps the wanted ones."""

    def clear(self):
        self.kept = None

    def expect(self, positions):
        self.positions = positions

    def forward(self, tokens):
        assert self.positions.n_rows == 1
        self.kept = tokens[self.positions.column]

    def rows(self):
        return self.kept


@given(rows, st.integers(1, 4), st.integers(0, 3))
def test_the_ranks_states_add_up_to_those_of_the_whole_row(sequences, ranks, padding):
    """Whatever the cuts: every wanted token is in one slice."""
    tokens = torch.randn(sum(map(len, sequences)), 3)
    wanted = tokens[torch.tensor([on for row in sequences for on in row])]
    column = torch.tensor([t for row in sequences for t, on in enumerate(row) if on], dtype=torch.int64)
    counts = torch.tensor([0, *(sum(row) for row in sequences)])
    begin = torch.tensor([0, *map(len, sequences)]).cumsum(0)[:-1]
    total = len(tokens) + padding
    width = -(-total // ranks)
    padded = torch.cat([tokens, torch.full((ranks * width - len(tokens), 3), torch.nan)])
    found = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dist, "get_world_size", lambda group: ranks)
        patch.setattr(dist, "all_reduce", lambda rows, group: found.append(rows))
        for rank in range(ranks):
            patch.setattr(dist, "get_rank", lambda group, rank=rank: rank)
            tapped = Watching()
            states = expect(tapped, Positions(column, counts.cumsum(0)), begin, total, "a group")
            tapped.forward(padded[rank * width : (rank + 1) * width])
            states()
    assert torch.equal(sum(found), wanted)


def test_a_row_that_nobody_cuts_and_padded_rows():
    tokens, tapped = torch.randn(7, 2), Watching()
    positions = Positions(torch.tensor([0, 2, 1]), torch.tensor([0, 2, 3]))
    states = expect(tapped, positions, torch.tensor([0, 4]), 7)
    tapped.forward(tokens)
    assert torch.equal(states(), tokens[[0, 2, 5]])
    tokens, tapped = torch.randn(2, 4, 3), Watching()
    states = expect(tapped, Positions(torch.tensor([0, 2, 1]), torch.tensor([0, 2, 3])))
    tapped.kept = tokens[tapped.positions.row(), tapped.positions.column]
    assert torch.equal(states(), tokens[[0, 0, 1], [0, 2, 1]])
