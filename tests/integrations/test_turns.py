"""Turns: what a mask says, against a loop over its tokens."""

import torch
from bipace_kernels.integrations._turns import Turns
from hypothesis import given
from hypothesis import strategies as st

bit = st.integers(0, 1)
masks = st.integers(0, 9).flatmap(lambda t: st.lists(st.lists(bit, min_size=t, max_size=t), min_size=1, max_size=4))


def by_loop(mask, starts=None):
    turns = []
    for b, row in enumerate(mask):
        found, begin = [], None
        for t, written in enumerate([*row, 0]):
            edge = begin is not None and (not written or (starts is not None and starts[b][t]))
            if edge:
                found.append((begin, t))
                begin = None
            if written and begin is None:
                begin = t
        turns += [(b, i, *span) for i, span in enumerate(found or [(0, 0)])]
    return turns


@given(masks, st.randoms(use_true_random=False), st.booleans())
def test_turns_are_the_runs_of_the_mask_and_told_apart_where_starts_say_so(mask, random, told):
    starts = [[random.randint(0, 1) for _ in row] for row in mask] if told else None
    both = (rows and torch.tensor(rows, dtype=torch.int64).reshape(len(mask), -1) for rows in (mask, starts))
    turns = Turns.of(*both)
    columns = (turns.row, turns.step, turns.start, turns.stop)
    assert list(zip(*(column.tolist() for column in columns), strict=True)) == by_loop(mask, starts)
    assert turns.last.tolist() == [i + 1 == len(turns) or turns.row[i + 1] != turns.row[i] for i in range(len(turns))]


@given(masks)
def test_a_step_s_advantage_stands_on_its_tokens_alone(mask):
    mask = torch.tensor(mask, dtype=torch.int64).reshape(len(mask), -1)
    turns = Turns.of(mask)
    advantage = torch.arange(1.0, len(turns) + 1)
    wanted = torch.zeros(mask.shape)
    for value, b, start, stop in zip(advantage, turns.row, turns.start, turns.stop, strict=True):
        wanted[b, start:stop] = value
    assert torch.equal(turns.spread(advantage), wanted)
    assert torch.equal(turns.spread(advantage) != 0, mask != 0)


def test_rewards_at_the_end_and_positions():
    turns = Turns.of(torch.tensor([[1, 1, 0, 1], [0, 0, 0, 0], [1, 0, 0, 0]]))
    assert turns.on_last(torch.tensor([3.0, 5.0, 7.0])).tolist() == [0, 3, 5, 7]
    places = turns.positions(10)
    assert places.column.tolist() == [9, 12, 9, 9]
    assert places.offsets.tolist() == [0, 2, 3, 4]
    assert turns.positions(torch.tensor([2, 5, 7])).column.tolist() == [1, 4, 4, 6]
    assert turns.counts.tolist() == [2, 1, 1]
