"""Rollouts of many episodes at once: a forward of the model per token that is written, and one per turn that is read.

A row is one episode: prompt, command, observation, command, ... as one sequence of tokens whose keys and values stay in
a cache, so no token is ever computed twice.  Rows write their commands token by token; one that has ended its command
waits until all have, then all read their observations in one forward.  What is read together stands right-aligned, and
padding is never looked at; rows that are done leave the cache.
"""

from __future__ import annotations

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
    drawn: int = 0  # random numbers used
    entropy: float = 0.0  # sum over its own tokens of the entropy of what they were drawn from, in nats

    def take(self, tokens: list[int], own: int, logprob: float) -> None:
        self.ids += tokens
        self.own += [own] * len(tokens)
        self.logprobs += [logprob] * len(tokens)

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
    layers = [_Columns() for _ in range(model.config.num_hidden_layers)]
    cache = Cache(layers=layers)

    # Prompts, each distinct one once.
    ids, new = _aligned(prompts, pad, device)
    nothing, before = new[:, :0], torch.full((len(prompts),), -1, device=device)
    logits, seen, position = _read(model, ids, new, nothing, before, cache)
    rows = torch.tensor(of_row, device=device)
    logits, seen, position = logits[rows], seen[rows], position[rows]
    for layer in layers:
        layer.choose(rows)
    slots: list[int | None] = list(range(len(episodes)))  # row of each slot, None where the episode is over
    unread: list[list[int]] = [[] for _ in slots]  # tokens of each slot that the model has not read

    while True:
        logp = tempered(logits.float(), temperature)
        wanted = [0.0 if row is None else luck[row][min(episodes[row].drawn, len(luck[row]) - 1)] for row in slots]
        drawn = torch.tensor(wanted, device=device)[:, None]  # far cheaper than multinomial()
        sampled = torch.searchsorted(logp.exp().cumsum(1), drawn).clamp(max=logp.shape[1] - 1)
        token, chance = sampled.squeeze(1).tolist(), logp.gather(1, sampled).squeeze(1).tolist()
        entropy = torch.special.entr(logp.exp()).sum(dim=1).tolist()
        for slot, row in enumerate(slots):
            if row is None or unread[slot]:
                continue
            episode = episodes[row]
            episode.take([token[slot]], 1, chance[slot])
            episode.entropy += entropy[slot]
            episode.written.append(token[slot])
            episode.drawn += 1
            unread[slot] = [token[slot]]
            full = len(episode.written) == command_tokens
            if full or (token[slot] in ends and _closed(tokenizer, episode.written)):
                answer = _act(episode, tokenizer)
                if episode.solved or len(episode.commands) == horizon:
                    slots[slot] = None
                else:
                    episode.take(answer, 0, 0.0)
                    unread[slot] += answer
        live = [slot for slot, row in enumerate(slots) if row is not None]
        if not live:
            break
        if len(live) <= len(slots) * (1 - SPARE):
            slots, unread = [slots[slot] for slot in live], [unread[slot] for slot in live]
            keep = torch.tensor(live, device=device)
            seen, position = seen[keep], position[keep]
            for layer in layers:
                layer.choose(keep)
        playing = [(slot, episodes[row]) for slot, row in enumerate(slots) if row is not None]
        due = {slot for slot, episode in playing if episode.written} or {slot for slot, _ in playing}
        ids, new = _aligned([tokens if slot in due else [] for slot, tokens in enumerate(unread)], pad, device)
        unread = [[] if slot in due else tokens for slot, tokens in enumerate(unread)]
        logits, seen, position = _read(model, ids, new, seen, position, cache)
    model.train(was_training)
    return episodes


def tempered(logits: torch.Tensor, temperature: float) -> torch.Tensor:
    """Log-probabilities; at temperature 0 the likeliest token has all."""
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


def _act(episode: Episode, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Ends the command; gives the tokens of the observation."""
    text = tokenizer.decode(episode.written, skip_special_tokens=True)
    command = text.partition(CLOSE)[0].rpartition(OPEN)[2].strip()
    observation, reward, _ = episode.env.step(command)
    episode.commands.append(command)
    episode.rewards.append(reward)
    episode.written.clear()
    episode.observations.append(observation)
    found: list[int] = tokenizer(answer_text(observation), add_special_tokens=False).input_ids
    return found


def _aligned(tokens: Sequence[list[int]], pad: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Each row's tokens at the right of the columns, and where they are."""
    width = max(map(len, tokens))
    ids = [[pad] * (width - len(row)) + row for row in tokens]
    new = [[False] * (width - len(row)) + [True] * len(row) for row in tokens]
    return torch.tensor(ids, device=device), torch.tensor(new, device=device)


def _read(
    model: PreTrainedModel, ids: torch.Tensor, new: torch.Tensor, seen: torch.Tensor, position: torch.Tensor,
    cache: Cache,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
    """[rows, vocabulary] logits after the ids that are new, columns of the cache that are tokens, each last one's
    position."""
    width = ids.shape[1]
    causal = torch.ones(width, width, dtype=torch.bool, device=ids.device).tril()
    itself = torch.eye(width, dtype=torch.bool, device=ids.device)  # so that padding looks at something
    look = torch.cat([seen[:, None].expand(-1, width, -1), causal & new[:, None] | itself], dim=2)
    places = (position[:, None] + new.cumsum(1)).clamp(min=0)
    logits: torch.Tensor = model(
        input_ids=ids,
        attention_mask=look[:, None],
        position_ids=places,
        past_key_values=cache,
        use_cache=True,
        logits_to_keep=1,
    ).logits
    return logits[:, -1], torch.cat([seen, new], dim=1), places[:, -1]
