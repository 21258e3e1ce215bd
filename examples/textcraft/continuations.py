"""True values: many continuations of each of a few transcripts, by the model itself.

Copies of one transcript attend to the same keys, so these are kept once for each transcript instead of once for each
copy, and only what a copy wrote itself is its own.  That was three times as fast as rollout.play(), where every row
carries its prompt.
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
from rollout import CLOSE, COMMAND_TOKENS, OPEN, Episode, answer_text, tempered

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
    """A* = r + γ V(s′) − V(s) of each command of each episode, V by `copies` continuations, 0 after the last
    command."""
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
    """`copies` rows of each past, one token each at a time; the rows of one past stand together, in the order of the
    pasts."""

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
                f(normed).view(len(x), -1, attention.head_dim).transpose(0, 1)  # [heads, rows, D]
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
        """[heads, rows, D]: softmax over the keys of the row's past and its own ones; several heads may share keys."""
        heads, rows_all, width = q.shape
        q = q.view(len(keys), -1, rows_all, width).transpose(1, 2)  # [H, rows, heads with the same keys, D]
        counts = torch.bincount(self.of, minlength=len(past)).tolist()
        longest = max(k.shape[2] for (k, _), n in zip(past, counts, strict=True) if n)
        scores = q.new_full((*q.shape[:3], longest + self.taken), -torch.inf)
        scores[..., longest:] = (keys @ q.mT).mT
        parts, begin = [], 0
        for (k, v), n in zip(past, counts, strict=True):
            if n:
                rows = slice(begin, begin + n)
                scores[:, rows, :, : k.shape[2]] = (q[:, rows].flatten(1, 2) @ k).unflatten(1, (n, -1))
                parts.append((rows, v))
                begin += n
        chance = scores.softmax(-1)
        out = chance[..., longest:] @ values
        for rows, v in parts:
            out[:, rows] += (chance[:, rows, :, : v.shape[1]].flatten(1, 2) @ v).unflatten(1, out[:, rows].shape[1:3])
        return out.transpose(1, 2).reshape(heads, rows_all, width)


def _roomy(x: torch.Tensor) -> torch.Tensor:
    heads, rows, columns, width = x.shape
    out = x.new_empty(heads, rows, columns + ROOM, width)
    out[:, :, :columns] = x
    return out


class Markup:
    """Commands and observations as rollout.play() writes them."""

    def __init__(self, tokenizer: Any) -> None:
        self.end: int = tokenizer(CLOSE).input_ids[-1]
        self.read = cache(lambda observation: tokenizer(answer_text(observation)).input_ids)
        self.spell = cache(lambda ids: tokenizer.decode(list(ids)).removeprefix(OPEN).removesuffix(CLOSE).strip())


@dataclass
class Continuation:
    """One row: its environment, the commands that it has left, and what came after its past."""

    env: Any
    left: int
    ids: list[int] = field(default_factory=list)  # commands and observations
    spans: list[tuple[int, int]] = field(default_factory=list)  # of each command in `ids`
    commands: list[str] = field(default_factory=list)
    observations: list[str] = field(default_factory=list)  # after each command
    rewards: list[float] = field(default_factory=list)
    written: int = 0  # tokens of the command in the making
    reading: deque[int] = field(default_factory=deque)  # of the observation, what is to be taken still
    entropy: float = 0.0  # sum over the commands' tokens of the entropy of what they were drawn from, in nats

    def discounted(self, gamma: float) -> float:
        return sum(gamma**t * reward for t, reward in enumerate(self.rewards))


@torch.inference_mode()
def continue_from(
    model: Any, markup: Any, pasts: Sequence[Sequence[int]], played: Sequence[Continuation], *,
    generator: torch.Generator, command_tokens: int = COMMAND_TOKENS, temperature: float = 1.0,
) -> None:  # fmt: skip
    """Plays on: as many rows for each past, in the order of the pasts, each until it is over.

    `markup` says which token ends a command, how its tokens spell and which tokens an observation adds.
    """
    rows = Rows(model, pasts, len(played) // len(pasts))
    slots: list[Continuation | None] = list(played)
    logits, writing = rows.first, list(range(len(slots)))
    while True:
        chance = tempered(logits.float(), temperature).exp()
        cumulated, entropy = chance.cumsum(1), torch.special.entr(chance).sum(dim=1).tolist()
        drawn = torch.rand(len(writing), 1, generator=generator)
        sampled = torch.searchsorted(cumulated, drawn).clamp(max=logits.shape[1] - 1)
        chosen = dict(zip(writing, zip(sampled.squeeze(1).tolist(), entropy, strict=True), strict=True))
        token = [0] * len(slots)
        for slot, row in enumerate(slots):
            if row is None:
                continue
            if slot not in chosen:
                token[slot] = row.reading.popleft()
                row.ids.append(token[slot])
                continue
            token[slot], of_token = chosen[slot]
            row.ids.append(token[slot])
            row.entropy += of_token
            row.written += 1
            if token[slot] == markup.end or row.written == command_tokens:
                row.spans.append((len(row.ids) - row.written, len(row.ids)))
                row.commands.append(markup.spell(tuple(row.ids[-row.written :])))
                observation, reward, done = row.env.step(row.commands[-1])
                row.observations.append(observation)
                row.rewards.append(reward)
                row.written = 0
                if done or len(row.commands) == row.left:
                    slots[slot] = None
                else:
                    row.reading.extend(markup.read(observation))
        live = [slot for slot, row in enumerate(slots) if row is not None]
        if not live:
            return
        if len(live) <= len(slots) * (1 - SPARE):
            slots, token = [slots[slot] for slot in live], [token[slot] for slot in live]
            rows.keep(torch.tensor(live))
        writing = [slot for slot, row in enumerate(slots) if row is not None and not row.reading]
        logits = rows.feed(torch.tensor(token), torch.tensor(writing, dtype=torch.int64))


def returns_from(
    model: Any, tokenizer: Any, states: Sequence[State], *, copies: int, gamma: float, generator: torch.Generator
) -> NDArray[np.float64]:
    """[states, copies] discounted returns of independent continuations at temperature 1, γ^(n - 1) if command n solves.

    The rules are those of rollout.play(); the states stay as they are.
    """
    played = []
    for state in states:
        for _ in range(copies):
            env = type(state.env)(state.env.task, state.env.recipes)
            env.inventory = dict(state.env.inventory)
            played.append(Continuation(env, state.left))
    continue_from(model, Markup(tokenizer), [state.ids for state in states], played, generator=generator)
    return np.array([row.discounted(gamma) for row in played]).reshape(len(states), copies)
