"""Which tokens may begin a tag: found once for a table, anew for another, and nobody else needs to be spelt."""

import gc

import torch
from action_texts import table_of

from bipace_kernels.backends.cuda import action_keys


def table(*tokens):
    made = table_of(list(tokens))
    return made.offsets, made.bytes


def test_tokens_that_hold_the_byte():
    found = action_keys._tokens_with_a_tag(*table(b"so", b"", b"<", b"a<b", b">", b"<action>"))
    assert found.tolist() == [False, False, True, True, False, True]
    assert action_keys._tokens_with_a_tag(*table()).tolist() == []


def test_found_once_and_forgotten_with_the_table():
    offsets, data = table(b"<", b"so")
    found = action_keys._tokens_with_a_tag(offsets, data)
    assert action_keys._tokens_with_a_tag(offsets, data) is found
    data[1] = ord("<")  # another table in the same place
    assert action_keys._tokens_with_a_tag(offsets, data).tolist() == [True, True]
    assert action_keys._tokens_with_a_tag(torch.tensor([0, 2, 3]), data).tolist() == [True, False]
    before = len(action_keys._FOUND)
    del data
    gc.collect()
    assert len(action_keys._FOUND) == before - 1


def test_nothing_is_kept_of_inference_tensors():
    """They do not count what is written into them."""
    with torch.inference_mode():
        offsets, data = table(b"<", b"so")
        assert action_keys._tokens_with_a_tag(offsets, data).tolist() == [True, False]
        data[1] = ord("<")
        assert action_keys._tokens_with_a_tag(offsets, data).tolist() == [True, True]
