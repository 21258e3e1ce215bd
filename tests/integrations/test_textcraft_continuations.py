"""Continuations for the truth of a model's states: the fast way is the model's own forward, and plays as the example does."""

import random

import numpy as np
import pytest
import torch
from continuations import Rows, returns_from, states_of, true_advantages
from environment import TextCraft
from model import load
from rollout import play

from bench.make_truth.model import DIRECTIONS, SKETCH, _coordinates, _gradients, split
from bench.make_truth.textcraft import POLICY

GAMMA = 0.95


@pytest.fixture(scope="module")
def policy():
    return load(POLICY)


@pytest.fixture(scope="module")
def tasks(policy):
    return split(policy[1])[0][:10]


def test_logits_are_those_of_plain_forwards(policy):
    """Pasts of unequal lengths, one of whose rows end early, beyond one growth of the own keys; in float64 within 1e-9."""
    model, rng = policy[0].double(), random.Random(0)
    vocabulary = model.config.vocab_size
    pasts = [[rng.randrange(vocabulary) for _ in range(n)] for n in (7, 30, 19)]
    with torch.inference_mode():
        rows = Rows(model, pasts, 3)
        written = [list(pasts[number // 3]) for number in range(9)]
        for step in range(45):
            if step in (10, 20):  # first some rows of each past, then all of the second past
                kept = [0, 2, 4, 7, 8] if step == 10 else [0, 1, 3, 4]
                rows.keep(torch.tensor(kept))
                written = [written[i] for i in kept]
            token = [rng.randrange(vocabulary) for _ in written]
            for ids, new in zip(written, token, strict=True):
                ids.append(new)
            wanted = torch.tensor([0, len(written) - 1])
            logits = rows.feed(torch.tensor(token), wanted)
            if step in (0, 9, 10, 20, 31, 32, 44):
                for row, found in zip(wanted.tolist(), logits, strict=True):
                    plain = model(input_ids=torch.tensor([written[row]])).logits[0, -1]
                    assert (plain - found).abs().max() < 1e-9, (step, row)
    policy[0].float()


def test_a_policy_that_never_doubts_goes_on_as_its_episode_went_on(policy, tasks):
    """Logits a thousand times as large leave no choice: V(s_t) = γ^(n-1-t) where the example's rollout solves its task, else 0."""
    model, tokenizer = policy
    with torch.no_grad():
        model.model.norm.weight *= 1000
    try:
        episodes = play(model, tokenizer, [TextCraft(task) for task in tasks], horizon=12, seed=0)
        states = [state for episode in episodes for state in states_of(episode, 12)]
        places = [(e, t) for e in episodes for t in range(len(e.commands))]
        wanted = [e.solved * GAMMA ** (len(e.commands) - 1 - t) for e, t in places]
        assert [state.left for state in states] == [12 - t for _, t in places]
        generator = torch.Generator().manual_seed(0)
        found = returns_from(model, tokenizer, states, copies=2, gamma=GAMMA, generator=generator)
        surprises = true_advantages(model, tokenizer, episodes, horizon=12, copies=2, gamma=GAMMA, seed=0)
    finally:
        with torch.no_grad():
            model.model.norm.weight /= 1000
    assert 0 < sum(episode.solved for episode in episodes) < len(episodes)
    np.testing.assert_allclose(found, np.repeat(np.array(wanted)[:, None], 2, axis=1), rtol=1e-12)
    for episode, of_episode in zip(episodes, surprises, strict=True):  # A* = 0: every outcome was certain
        assert len(of_episode) == len(episode.commands)
        np.testing.assert_allclose(of_episode, 0.0, atol=1e-12)


def test_a_gradient_is_that_of_its_commands_tokens(policy, tasks):
    """Against a forward over the state's tokens and the command's, one command at a time."""
    model, tokenizer = policy
    (episode,) = play(model, tokenizer, [TextCraft(tasks[0])], horizon=12, seed=0)
    found = _gradients(model, episode)
    assert len(found) == len(episode.commands) > 1
    ids = [*episode.prompt_ids, *episode.ids]
    own = [0] * len(episode.prompt_ids) + episode.own
    for gradient, state in zip(found, states_of(episode, 12), strict=True):
        begin = len(state.ids)
        end = next((at for at in range(begin, len(ids)) if not own[at]), len(ids))
        logits = model(input_ids=torch.tensor([ids[:end]])).logits[0, begin - 1 : -1].log_softmax(-1)
        total = logits.gather(1, torch.tensor(ids[begin:end])[:, None]).sum()
        wanted = torch.cat([part.flatten() for part in torch.autograd.grad(total, list(model.parameters()))])
        assert float((gradient - wanted).norm() / wanted.norm()) < 1e-4


@pytest.mark.parametrize("n", [DIRECTIONS, DIRECTIONS + 100])
def test_coordinates_keep_the_inner_products_of_gradients(n):
    """Exactly, where there are no more gradients than directions; else the rest's as random projections do: within six
    standard errors of |x| |y| √(2 / SKETCH)."""
    gradients = torch.randn(n, 5000, generator=torch.Generator().manual_seed(1)) * torch.logspace(0, -2, 5000)
    found, share = _coordinates(gradients)
    products = (gradients.double() @ gradients.double().T).numpy()
    products /= np.diagonal(products).mean()
    leading, rest = found[:, :DIRECTIONS], found[:, DIRECTIONS:]
    # Lengths of what is not in the leading ones.
    length = np.sqrt(np.maximum(np.diagonal(products) - (leading**2).sum(axis=1), 0.0))
    assert rest.shape == (n, SKETCH) and share == pytest.approx(1 - (length**2).mean(), abs=1e-5)
    assert (share > 1 - 1e-9) == (n == DIRECTIONS)
    error = np.abs(leading @ leading.T + rest @ rest.T - products)
    assert (error <= 1e-5 + 6 * np.sqrt(2 / SKETCH) * np.outer(length, length)).all()
