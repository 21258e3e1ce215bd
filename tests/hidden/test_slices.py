"""Ulysses: ranks that each see a slice of one packed row, and all of its states on every rank."""

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, strategies as st

from bipace_kernels.hidden.positions import Positions
from bipace_kernels.hidden.tap import expect

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
