"""Rollouts of many episodes at once: one forward of the model per token, over all rows that still play.

A row is one episode: prompt, command, observation, command, ... as one sequence of tokens whose keys and values stay in
a cache, so no token is ever computed twice.  In each forward every row takes exactly one token: one that it samples,
while it writes a command, or the next one of the observation that it reads.  So rows never wait for each other's longer
commands. Prompts stand right-aligned, which gives all rows the same column; rows that are done leave the cache.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, Protocol

import torch
from transformers import Cache, PreTrainedModel, PreTrainedTokenizerBase
from transformers.cache_utils import DynamicLayer

OPEN, CLOSE = "<action>", "</action>"  # around each command of the model; CLOSE ends its turn
COMMAND_TOKENS = 16  # a longer command is cut there, and tried as it is
SPARE = 1 / 8  # share of rows that are over before the cache is copied without them


class Environment(Protocol):
    """One episode of a world of texts."""

    prompt: str  # what stands before the first command
    opening: str  # the first observation
    done: bool  # it is solved

    def step(self, command: str) -> tuple[str, float, bool]: ...


def answer_text(observation: str) -> str:
    """How an observation stands between two commands."""
    return "\n" + observation + "\n"


@dataclass
class Episode:
    """One episode as tokens (after the prompt) and as turns."""

    env: Environment
    prompt_ids: list[int]
    ids: list[int] = field(default_factory=list)  # commands and observations
    own: list[int] = field(default_factory=list)  # 1 on tokens that the model wrote
    logprobs: list[float] = field(default_factory=list)  # of its own tokens, 0 elsewhere
    observations: list[str] = field(default_factory=list)  # what each command answered to
    commands: list[str] = field(default_factory=list)
    rewards: list[float] = field(default_factory=list)  # of each command
    written: list[int] = field(default_factory=list)  # the command in the making
    reading: deque[int] = field(default_factory=deque)  # of the observation, what is to be taken still
    drawn: int = 0  # random numbers used
    entropy: float = 0.0  # sum over its own tokens of the entropy of what they were drawn from, in nats

    def take(self, token: int, own: int, logprob: float) -> None:
        self.ids.append(token)
        self.own.append(own)
        self.logprobs.append(logprob)

    @property
    def solved(self) -> bool:
        return self.env.done


class _Columns(DynamicLayer):
    """Keys and values with some room behind them, instead of tensors made anew for each token.

    Little room, for a row's keys should lie together: attention over them waits for memory.
    """

    ROOM = 64

    def __init__(self) -> None:
        super().__init__()
        self.taken = 0

    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        begin, self.taken = self.taken, self.taken + key_states.shape[2]
        if not self.is_initialized:
            self.keys, self.values = _roomy(key_states, self.ROOM), _roomy(value_states, self.ROOM)
            self.dtype, self.device, self.is_initialized = key_states.dtype, key_states.device, True
        elif self.taken > self.keys.shape[2]:
            self.keys, self.values = _roomy(self.keys, self.ROOM), _roomy(self.values, self.ROOM)
        self.keys[:, :, begin : self.taken] = key_states
        self.values[:, :, begin : self.taken] = value_states
        return self.keys[:, :, : self.taken], self.values[:, :, : self.taken]

    def get_seq_length(self) -> int:
        return self.taken

    def choose(self, rows: torch.Tensor) -> None:
        """Keeps these rows, in this order; a row may be named several times."""
        self.keys, self.values = self.keys[rows], self.values[rows]


def _roomy(x: torch.Tensor, room: int) -> torch.Tensor:
    b, h, n, d = x.shape
    out = x.new_empty(b, h, n + room, d)
    out[:, :, :n] = x
    return out


@torch.inference_mode()
def play(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, envs: Sequence[Environment], *, horizon: int, seed: int,
    temperature: float = 1.0, command_tokens: int = COMMAND_TOKENS,
) -> list[Episode]:  # fmt: skip
    """One episode of at most `horizon` commands in each environment; temperature 0 takes the likeliest token.

    Every row has random numbers of its own, one for each token it may write: whatever the other rows do, equal policies
    write equal episodes, and different policies are compared under the same luck.
    """
    if not envs:
        return []
    distinct = list(dict.fromkeys(env.prompt for env in envs))
    prompts = tokenizer(distinct).input_ids
    of_row = [distinct.index(env.prompt) for env in envs]
    episodes = [Episode(env, prompts[at], observations=[env.opening]) for env, at in zip(envs, of_row, strict=True)]
    was_training = model.training
    model.eval()
    device, pad, ends = model.device, tokenizer.pad_token_id, _ends(tokenizer)
    luck = torch.rand(len(envs), horizon * command_tokens, generator=torch.Generator().manual_seed(seed)).tolist()
    width = max(map(len, prompts))
    layers = [_Columns() for _ in range(model.config.num_hidden_layers)]
    cache = Cache(layers=layers)

    # Prompts, each distinct one once.
    ids = torch.tensor([[pad] * (width - len(p)) + p for p in prompts], device=device)
    seen = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in prompts], device=device).bool()
    causal = torch.ones(width, width, dtype=torch.bool, device=device).tril()
    itself = torch.eye(width, dtype=torch.bool, device=device)  # so that padding looks at something
    look = causal & seen[:, None, None, :] | itself
    position = (seen.cumsum(1) - 1).clamp(min=0)
    logits = _forward(model, ids, look, position, cache)
    rows = torch.tensor(of_row, device=device)
    logits, seen, position = logits[rows], seen[rows], position[rows, -1]
    for layer in layers:
        layer.choose(rows)
    slots: list[int | None] = list(range(len(episodes)))  # row of each slot, None where the episode is over

    while True:
        logp = _log_softmax(logits.float(), temperature)
        wanted = [0.0 if row is None else luck[row][min(episodes[row].drawn, len(luck[row]) - 1)] for row in slots]
        drawn = torch.tensor(wanted, device=device)[:, None]  # far cheaper than multinomial()
        sampled = torch.searchsorted(logp.exp().cumsum(1), drawn).clamp(max=logp.shape[1] - 1)
        token, chance = sampled.squeeze(1).tolist(), logp.gather(1, sampled).squeeze(1).tolist()
        entropy = torch.special.entr(logp.exp()).sum(dim=1).tolist()
        for slot, row in enumerate(slots):
            if row is None:
                continue
            episode = episodes[row]
            if episode.reading:
                token[slot] = episode.reading.popleft()
                episode.take(token[slot], 0, 0.0)
                continue
            episode.take(token[slot], 1, chance[slot])
            episode.entropy += entropy[slot]
            episode.written.append(token[slot])
            episode.drawn += 1
            full = len(episode.written) == command_tokens
            if full or (token[slot] in ends and _closed(tokenizer, episode.written)):
                _act(episode, tokenizer)
                if episode.solved or len(episode.commands) == horizon:
                    slots[slot] = None
        live = [slot for slot, row in enumerate(slots) if row is not None]
        if not live:
            break
        fed = torch.tensor(token, device=device)
        if len(live) <= len(slots) * (1 - SPARE):
            slots, keep = [slots[slot] for slot in live], torch.tensor(live, device=device)
            fed, seen, position = fed[keep], seen[keep], position[keep]
            for layer in layers:
                layer.choose(keep)
        position = position + 1
        seen = torch.nn.functional.pad(seen, (0, 1), value=True)
        logits = _forward(model, fed[:, None], seen[:, None, None], position[:, None], cache)
    model.train(was_training)
    return episodes


def _log_softmax(logits: torch.Tensor, temperature: float) -> torch.Tensor:
    if temperature > 0:
        return torch.log_softmax(logits / temperature, dim=-1)
    return torch.full_like(logits, -torch.inf).scatter_(-1, logits.argmax(dim=-1, keepdim=True), 0.0)


@lru_cache(maxsize=4)
def _ends(tokenizer: PreTrainedTokenizerBase) -> frozenset[int]:
    """Tokens that may end a command: the tokenizer's end, and those with the last character of CLOSE."""
    vocabulary = range(len(tokenizer))
    last = {i for i, text in enumerate(tokenizer.batch_decode([[i] for i in vocabulary])) if CLOSE[-1] in text}
    return frozenset(last | {tokenizer.eos_token_id})


def _closed(tokenizer: PreTrainedTokenizerBase, written: list[int]) -> bool:
    return written[-1] == tokenizer.eos_token_id or CLOSE in tokenizer.decode(written)


def _act(episode: Episode, tokenizer: PreTrainedTokenizerBase) -> None:
    """Ends the command, and lines up the observation for reading."""
    text = tokenizer.decode(episode.written, skip_special_tokens=True)
    command = text.partition(CLOSE)[0].rpartition(OPEN)[2].strip()
    observation, reward, _ = episode.env.step(command)
    episode.commands.append(command)
    episode.rewards.append(reward)
    episode.written.clear()
    episode.observations.append(observation)
    episode.reading.extend(tokenizer(answer_text(observation), add_special_tokens=False).input_ids)


def _forward(
    model: PreTrainedModel, ids: torch.Tensor, look: torch.Tensor, position: torch.Tensor, cache: Cache
) -> torch.Tensor:
    """[rows, vocabulary] logits after the last of the ids."""
    found: torch.Tensor = model(
        input_ids=ids,
        attention_mask=look,
        position_ids=position,
        past_key_values=cache,
        use_cache=True,
        logits_to_keep=1,
    ).logits
    return found[:, -1]
