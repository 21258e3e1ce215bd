"""True values: many continuations of each of a few transcripts, by the model itself.

Copies of one transcript attend to the same keys, so these are kept once for each transcript instead of once for each copy, and only
what a copy wrote itself is its own.  That is three times as fast as rollout.play(), where every row carries its prompt.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from rollout import CLOSE, COMMAND_TOKENS, OPEN, Episode, answer_text

ROOM = 32  # columns that the rows' own keys grow by
SPARE = 1 / 8  # share of rows that are over before the own keys are copied without them
AT_ONCE = 16  # states whose continuations run at the same time: times the copies, rows of the model's cache


@dataclass(frozen=True)
class State:
    """Where an episode stands before a command: its environment, all tokens so far, and the commands that are left."""

    env: Any
    ids: tuple[int, ...]
    left: int


def states_of(episode: Episode, horizon: int) -> list[State]:
    """The state before each command of an episode of TextCraft; its tokens begin with the prompt's."""
    found: list[State] = []
    env = type(episode.env)(episode.env.task, episode.env.recipes)  # type: ignore[attr-defined]
    for at, own in enumerate(episode.own):
        if not own or (at and episode.own[at - 1]):
            continue  # not the first token of a command
        here = type(env)(env.task, env.recipes)
        here.inventory = dict(env.inventory)
        found.append(State(here, (*episode.prompt_ids, *episode.ids[:at]), horizon - len(found)))
        env.step(episode.commands[len(found) - 1])
    if len(found) != len(episode.commands):
        raise RuntimeError(f"{len(found)} commands found in the tokens of an episode of {len(episode.commands)}.")
    return found


def values_of(
    model: Any, tokenizer: Any, states: Sequence[State], *, copies: int, gamma: float, seed: int
) -> NDArray[np.float64]:
    """[states] mean discounted return of `copies` continuations; equal transcripts share theirs."""
    distinct = {state.ids: state for state in states}
    waiting = sorted(distinct.values(), key=lambda state: (state.left, len(state.ids)))  # rows that end together
    generator, found = torch.Generator().manual_seed(seed), {}
    for begin in range(0, len(waiting), AT_ONCE):
        here = waiting[begin : begin + AT_ONCE]
        returns = returns_from(model, tokenizer, here, copies=copies, gamma=gamma, generator=generator)
        found |= dict(zip((state.ids for state in here), returns.mean(axis=1).tolist(), strict=True))
    return np.array([found[state.ids] for state in states])


def true_advantages(
    model: Any, tokenizer: Any, episodes: Sequence[Episode], *, horizon: int, copies: int, gamma: float, seed: int
) -> list[NDArray[np.float64]]:
    """A* = r + γ V(s′) − V(s) of each command of each episode, V by `copies` continuations, 0 after the last command."""
    states = [states_of(episode, horizon) for episode in episodes]
    flat = [state for of_episode in states for state in of_episode]
    values = values_of(model, tokenizer, flat, copies=copies, gamma=gamma, seed=seed)
    found, begin = [], 0
    for episode in episodes:
        v = values[begin : begin + len(episode.rewards)]
        begin += len(v)
        found.append(np.array(episode.rewards) + gamma * np.append(v[1:], 0.0) - v)
    return found


class Rows:
    """`copies` rows of each past, one token each at a time; the rows of one past stand together, in the order of the pasts."""

    def __init__(self, model: Any, pasts: Sequence[Sequence[int]], copies: int) -> None:
        self.model, self.copies = model, copies
        self.past: list[list[tuple[torch.Tensor, torch.Tensor]]] = []  # [layer][past]: keys [H, D, n], values [H, n, D]
        self.own: list[tuple[torch.Tensor, torch.Tensor]] = []  # [layer]: keys and values [H, rows, columns, D]
        self.taken = 0  # columns of `own` that are filled
        self.of = torch.arange(len(pasts)).repeat_interleave(copies)  # [rows] their past
        self.length = torch.tensor([len(past) for past in pasts])
        last, layers = [], []
        for past in pasts:
            out = model.model(input_ids=torch.tensor([list(past)]), use_cache=True)
            last.append(out.last_hidden_state[0, -1])
            layers.append([(x.keys[0].mT.contiguous(), x.values[0]) for x in out.past_key_values.layers])
        self.past = [list(of_layer) for of_layer in zip(*layers, strict=True)]
        heads, _, width = self.past[0][0][1].shape
        nothing = self.past[0][0][1].new_empty(heads, len(self.of), 0, width)
        self.own = [(nothing, nothing) for _ in self.past]
        self.first = model.lm_head(torch.stack(last))[self.of]  # [rows, vocabulary] logits of the first token

    def keep(self, rows: torch.Tensor) -> None:
        """Continues with only these rows, which must be in order."""
        self.of = self.of[rows]
        self.own = [(keys[:, rows], values[:, rows]) for keys, values in self.own]

    def feed(self, token: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
        """[wanted, vocabulary] logits after one more token in each row: token [rows], wanted indices of rows."""
        from transformers.models.qwen2.modeling_qwen2 import apply_rotary_pos_emb

        decoder = self.model.model
        x = decoder.embed_tokens(token)  # [rows, hidden]
        cos, sin = decoder.rotary_emb(x, (self.length[self.of] + self.taken)[None])  # [1, rows, D]
        if self.taken == self.own[0][0].shape[2]:
            self.own = [(_roomy(keys), _roomy(values)) for keys, values in self.own]
        self.taken += 1
        for number, layer in enumerate(decoder.layers):
            attention, normed = layer.self_attn, layer.input_layernorm(x)
            q, k, v = (
                f(normed).view(len(x), -1, attention.head_dim).transpose(0, 1)  # [H, rows, D]
                for f in (attention.q_proj, attention.k_proj, attention.v_proj)
            )
            q, k = (y[0] for y in apply_rotary_pos_emb(q[None], k[None], cos, sin))
            keys, values = (y[:, :, : self.taken] for y in self.own[number])
            keys[:, :, -1], values[:, :, -1] = k, v
            found = self._attend(q * attention.scaling, self.past[number], keys, values)
            x = x + attention.o_proj(found.transpose(0, 1).reshape(len(x), -1))
            x = x + layer.mlp(layer.post_attention_layernorm(x))
        out: torch.Tensor = self.model.lm_head(decoder.norm(x[wanted]))
        return out

    def _attend(self, q: torch.Tensor, past: list[Any], keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        """[H, rows, D]: softmax over the keys of the row's past and its own ones."""
        counts = torch.bincount(self.of, minlength=len(past)).tolist()
        longest = max(k.shape[2] for (k, _), n in zip(past, counts, strict=True) if n)
        scores = q.new_full((*q.shape[:2], longest + self.taken), -torch.inf)
        scores[:, :, longest:] = (keys @ q[..., None])[..., 0]
        parts, begin = [], 0
        for (k, v), n in zip(past, counts, strict=True):
            if n:
                rows = slice(begin, begin + n)
                torch.bmm(q[:, rows], k, out=scores[:, rows, : k.shape[2]])
                parts.append((rows, v))
                begin += n
        chance = scores.softmax(-1)
        out = (chance[:, :, None, longest:] @ values)[:, :, 0]
        for rows, v in parts:
            out[:, rows] += chance[:, rows, : v.shape[1]] @ v
        return out


def _roomy(x: torch.Tensor) -> torch.Tensor:
    heads, rows, columns, width = x.shape
    out = x.new_empty(heads, rows, columns + ROOM, width)
    out[:, :, :columns] = x
    return out


@dataclass
class _Playing:
    env: Any
    left: int
    at: tuple[int, int]  # of its return in the result
    steps: int = 0
    written: list[int] = field(default_factory=list)  # the command in the making
    reading: deque[int] = field(default_factory=deque)  # of the observation, what is to be taken still


@torch.inference_mode()
def returns_from(
    model: Any, tokenizer: Any, states: Sequence[State], *, copies: int, gamma: float, generator: torch.Generator
) -> NDArray[np.float64]:
    """[states, copies] discounted returns of independent continuations at temperature 1: γ^(n - 1) if command n solves the task.

    The rules are those of rollout.play(); the states stay as they are.
    """
    end = tokenizer(CLOSE).input_ids[-1]
    read = cache(lambda observation: tokenizer(answer_text(observation)).input_ids)
    spell = cache(lambda ids: tokenizer.decode(list(ids)).removeprefix(OPEN).removesuffix(CLOSE).strip())
    out = np.zeros((len(states), copies))
    slots: list[_Playing | None] = []
    for number, state in enumerate(states):
        for copy in range(copies):
            env = type(state.env)(state.env.task, state.env.recipes)
            env.inventory = dict(state.env.inventory)
            slots.append(_Playing(env, state.left, (number, copy)))
    rows = Rows(model, [state.ids for state in states], copies)
    logits, writing = rows.first, list(range(len(slots)))
    while True:
        cumulated = logits.softmax(-1).cumsum(1)
        drawn = torch.rand(len(writing), 1, generator=generator)
        sampled = torch.searchsorted(cumulated, drawn).clamp(max=logits.shape[1] - 1)
        chosen = dict(zip(writing, sampled.squeeze(1).tolist(), strict=True))
        token = [0] * len(slots)
        for slot, playing in enumerate(slots):
            if playing is None:
                continue
            if playing.reading:
                token[slot] = playing.reading.popleft()
                continue
            token[slot] = chosen[slot]
            playing.written.append(token[slot])
            if token[slot] == end or len(playing.written) == COMMAND_TOKENS:
                observation, _, done = playing.env.step(spell(tuple(playing.written)))
                playing.steps += 1
                if done:
                    out[playing.at] = gamma ** (playing.steps - 1)
                if done or playing.steps == playing.left:
                    slots[slot] = None
                else:
                    playing.written.clear()
                    playing.reading.extend(read(observation))
        live = [slot for slot, playing in enumerate(slots) if playing is not None]
        if not live:
            return out
        if len(live) <= len(slots) * (1 - SPARE):
            slots, token = [slots[slot] for slot in live], [token[slot] for slot in live]
            rows.keep(torch.tensor(live))
        writing = [slot for slot, playing in enumerate(slots) if playing is not None and not playing.reading]
        logits = rows.feed(torch.tensor(token), torch.tensor(writing, dtype=torch.int64))
