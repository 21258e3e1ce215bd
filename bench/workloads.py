"""The timed data: shapes of published training runs, every value seeded, fresh strings on request.

Fingerprints imitate hidden states: one strong direction shared by all of them (cosine 0.70 between any two states), a
direction of its own for each state, and noise that keeps two visits of a state at cosine 0.96. So the partition at
ε = 0.10 is known: one cluster per planted state, far from the threshold, and every implementation must find it.
"""

import importlib
import math
import uuid
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

Ints = NDArray[np.int64]
Floats = NDArray[np.float32]
Objects = NDArray[Any]

EPSILON = 0.10
GAMMA = 0.95

_SHARED = 0.70  # squared length of the direction all states share; 1 − ε = 0.90 lies well above it,
_OWN = 0.26  # and well below _SHARED + _OWN = 0.96, the cosine of two visits of one state
_NOISE = 1.0 - _SHARED - _OWN
_CHUNK = 4096  # rows made at a time: the float32 noise of a chunk is the only memory besides the result


@dataclass(frozen=True)
class Shape:
    """Size of a batch and where it comes from."""

    name: str
    groups: int  # prompt groups, G
    rollouts: int  # trajectories of a group
    steps: int  # step records of a trajectory
    dim: int  # D, width of a fingerprint
    states: int  # planted states of a group: the number of clusters that must come out
    origin: str

    @property
    def per_group(self) -> int:
        return self.rollouts * self.steps

    @property
    def records(self) -> int:
        return self.groups * self.per_group

    def text(self) -> str:
        return f"{self.groups}×{self.rollouts}×{self.steps}×{self.dim}, {self.states} states/group"


# Groups × rollouts × horizon are the settings of the paper's training runs (16 prompts a step). States per group follow
# its reuse table: 400 records in clusters of 11.7 on the mean (ALFWorld), 840 in clusters of 21.6 (TextCraft).
TRAINING = (
    Shape("alfworld-7b", 16, 8, 50, 3584, 34, "ALFWorld, 8 rollouts of 50 steps, Qwen2.5-7B (width 3584)"),
    Shape("alfworld-1.5b", 16, 8, 50, 1536, 34, "ALFWorld, 8 rollouts of 50 steps, Qwen2.5-1.5B (width 1536)"),
    Shape("webshop-7b", 16, 12, 15, 3584, 16, "WebShop, 12 rollouts of 15 steps, Qwen2.5-7B"),
    Shape("textcraft-7b", 16, 12, 70, 3584, 39, "TextCraft, 12 rollouts of 70 steps, Qwen2.5-7B"),
)
LONG = Shape("large-batch", 64, 32, 64, 3584, 40, "64 groups of 2,048 records: a batch of a larger run, width 3584")
CLUSTERING = (
    Shape("16x130-k12", 16, 13, 10, 3584, 12, "short episodes: 130 records and 12 states per group"),
    Shape("16x400-k20", 16, 8, 50, 3584, 20, "ALFWorld's size, few states"),
    Shape("16x400-k70", 16, 8, 50, 3584, 70, "ALFWorld's size, many states"),
    Shape("2x4096-k200", 2, 64, 64, 3584, 200, "two very long groups, many states"),
)
# On a GPU: the sizes of the promises. One group of each batch is as long as it gets there.
ON_GPU = (
    Shape("16x400", 16, 8, 50, 3584, 20, "ALFWorld, 16 prompts of 8 rollouts of 50 steps, Qwen2.5-7B"),
    Shape("64x2048", 64, 32, 64, 3584, 64, "64 groups of 2,048 records: a batch of a larger run"),
    Shape("1x32768", 1, 512, 64, 3584, 512, "one group of 32,768 records"),
)
# What one decision costs: a group long enough that its beginning does not matter.  The number of states is set there.
ONE_GROUP = Shape("1x2048", 1, 32, 64, 3584, 2048, "one group of 2,048 records")
TINY = Shape("tiny", 3, 4, 6, 48, 5, "only to see that everything runs")


@dataclass(frozen=True)
class Steps:
    """A batch of N step records in processing order: by group, then trajectory, then step."""

    shape: Shape
    group: Ints  # [N]
    trajectory: Ints  # [N], unique in the batch
    step: Ints  # [N]
    rewards: Floats  # [N], 1 at the end of a successful episode
    action_key: Ints  # [N]
    state: Ints  # [N], the planted state, numbered inside the group

    @property
    def offsets(self) -> list[int]:
        """Where each group begins, and the end: [G + 1]."""
        return list(range(0, self.shape.records + 1, self.shape.per_group))


def steps(shape: Shape, *, seed: int = 0) -> Steps:
    """Ids, rewards, actions and states of a batch. State k is visited in proportion to 1/(k + 1); none is left out."""
    rng = np.random.default_rng([seed, shape.groups, shape.per_group, shape.states])
    if shape.states > shape.per_group:
        raise ValueError(f"states must be at most {shape.per_group}, the records of a group, got {shape.states}")
    weight = 1.0 / np.arange(1, shape.states + 1)
    state = np.empty((shape.groups, shape.per_group), np.int64)
    for row in state:
        drawn = rng.choice(shape.states, size=shape.per_group - shape.states, p=weight / weight.sum())
        row[:] = rng.permutation(np.concatenate([np.arange(shape.states), drawn]))
    trajectories = shape.groups * shape.rollouts
    rewards = np.zeros((trajectories, shape.steps), np.float32)
    rewards[:, -1] = rng.random(trajectories) < 0.6
    return Steps(
        shape,
        group=np.repeat(np.arange(shape.groups), shape.per_group),
        trajectory=np.repeat(np.arange(trajectories), shape.steps),
        step=np.tile(np.arange(shape.steps), trajectories),
        rewards=rewards.reshape(-1),
        action_key=rng.integers(0, 4, shape.records),
        state=state.reshape(-1),
    )


def fingerprints(
    batch: Steps, *, dtype: torch.dtype = torch.float32, device: torch.device | str = "cpu", seed: int = 0
) -> torch.Tensor:
    """[N, D] unit rows as described at the top of this file, made in chunks on `device`, whose generator is its own."""
    shape = batch.shape
    generator = torch.Generator(device).manual_seed(seed + 1)
    shared = _unit(torch.randn(1, shape.dim, generator=generator, device=device))
    states = _unit(torch.randn(shape.groups * shape.states, shape.dim, generator=generator, device=device))
    anchor = math.sqrt(_SHARED) * shared + math.sqrt(_OWN) * states
    which = torch.from_numpy(batch.group * shape.states + batch.state).to(device)
    out = torch.empty(shape.records, shape.dim, dtype=dtype, device=device)
    for start in range(0, shape.records, _CHUNK):
        chosen = which[start : start + _CHUNK]
        noise = torch.randn(len(chosen), shape.dim, generator=generator, device=device)
        out[start : start + _CHUNK] = _unit(noise).mul_(math.sqrt(_NOISE)).add_(anchor[chosen])
    return out


def _unit(rows: torch.Tensor) -> torch.Tensor:
    return rows.div_(rows.norm(dim=1, keepdim=True))


def fresh(texts: Sequence[str]) -> list[str]:
    """Equal strings that share no object and carry no cached hash, as after reading them from an environment."""
    return [text[:1] + text[1:] if len(text) > 1 else text for text in texts]


def uuids(ids: Ints, *, seed: int = 0) -> Objects:
    """Object array of uuid strings, one object per id, as trainers name groups and trajectories."""
    rng = np.random.default_rng([seed, 77])
    names = {i: str(uuid.UUID(bytes=rng.bytes(16), version=4)) for i in dict.fromkeys(ids.tolist())}
    out = np.empty(len(ids), object)
    out[:] = [names[i] for i in ids.tolist()]
    return out


def _words(text: str) -> tuple[str, ...]:
    return tuple(text.split())


_THINGS = _words(
    "apple bowl bread book butterknife candle cellphone cloth creditcard cup dishsponge egg fork glassbottle keychain "
    "kettle knife laptop lettuce mug newspaper pan pencil peppershaker pillow plate pot potato remotecontrol "
    "saltshaker soapbar soapbottle spatula spoon spraybottle statue tissuebox tomato toiletpaper towel vase watch "
    "winebottle"
)
_PLACES = _words(
    "armchair bathtubbasin bed cabinet cart coffeemachine coffeetable countertop desk diningtable drawer dresser "
    "fridge garbagecan handtowelholder microwave ottoman safe shelf sidetable sinkbasin sofa stoveburner toaster toilet"
)
_VERBS = _words("go take put open close heat cool clean examine use look inventory")


def _some(rng: np.random.Generator, words: Sequence[str]) -> str:
    return f"{words[int(rng.integers(len(words)))]} {int(rng.integers(1, 21))}"


def observations(batch: Steps, *, length: int = 240, seed: int = 0) -> list[str]:
    """[N] texts of about `length` characters: one text per planted state of a group, in ALFWorld's manner."""
    rng = np.random.default_rng([seed, 11])
    texts, names = {}, list(zip(batch.group.tolist(), batch.state.tolist(), strict=True))
    for name in dict.fromkeys(names):
        text = f"On the {_some(rng, _PLACES)}, you see"
        while len(text) < length:
            text += f" a {_some(rng, _THINGS)},"
        texts[name] = text[:length]
    return [texts[name] for name in names]


def similar_observations(batch: Steps, *, length: int = 400, edits: int = 1, seed: int = 0) -> list[str]:
    """[N] texts of `length` characters: the state's text with up to `edits` digits changed, as counters do.

    So most visits of a state differ and are still similar at 0.95, which is what verl-agent's similarity mode is for.
    """
    rng = np.random.default_rng([seed, 13])
    out = []
    for text in observations(batch, length=length, seed=seed):
        changed = list(text)
        digits = [i for i, c in enumerate(text) if c.isdigit()]
        for i in rng.choice(len(digits), size=min(int(rng.integers(0, edits + 1)), len(digits)), replace=False):
            changed[digits[i]] = str(int(rng.integers(0, 10)))
        out.append("".join(changed))
    return out


def response_texts(count: int, *, words: int, seed: int = 0) -> list[str]:
    """`count` model responses: <think> with about `words` words, then an <action>; one in twenty has no closed tag."""
    rng = np.random.default_rng([seed, 17])
    return [f"<think>\n{' '.join(_thoughts(rng, words))}\n</think>\n" + _action(rng) for _ in range(count)]


def _action(rng: np.random.Generator) -> str:
    action = f"{_VERBS[int(rng.integers(len(_VERBS)))]} {_some(rng, _THINGS)} to {_some(rng, _PLACES)}"
    if rng.random() < 0.3:  # models are not careful with case and blanks; keys must not depend on them
        action = f" {action.capitalize()}\n"
    return f"<action>{action}" + ("</action>" if rng.random() >= 0.05 else "")


_GLUE = _words(
    "I need to find the and then so because it is not here maybe check next first let me think about what we have seen "
    "already at which means that should be in one of these since previous step failed now try another place carefully"
)


def _thoughts(rng: np.random.Generator, words: int) -> Iterator[str]:
    for _ in range(words):
        kind = rng.random()
        if kind < 0.12:
            yield _some(rng, _THINGS)
        elif kind < 0.22:
            yield _some(rng, _PLACES) + "."
        else:
            yield _GLUE[int(rng.integers(len(_GLUE)))]


@dataclass(frozen=True)
class Responses:
    """Token ids of N responses, padded on the right, and the tokenizer that made them."""

    ids: torch.Tensor  # [N, T] int64
    mask: torch.Tensor  # [N, T] bool, True where a response token is valid
    tokenizer: Any

    @property
    def tokens(self) -> int:
        return int(self.mask.sum())


@lru_cache(maxsize=2)
def tokenizer(vocabulary: int = 8192) -> Any:
    """A byte-level BPE tokenizer of the GPT-2 family, trained here and now on responses of this file."""
    bpe = importlib.import_module("tokenizers")
    wrapper: Any = importlib.import_module("transformers").PreTrainedTokenizerFast
    model = bpe.Tokenizer(bpe.models.BPE())
    model.pre_tokenizer = bpe.pre_tokenizers.ByteLevel(add_prefix_space=False)
    model.decoder = bpe.decoders.ByteLevel()
    trainer = bpe.trainers.BpeTrainer(
        vocab_size=vocabulary,
        special_tokens=["<|endoftext|>", "<|im_end|>"],
        initial_alphabet=bpe.pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    model.train_from_iterator(response_texts(2000, words=120, seed=99), trainer)
    return wrapper(tokenizer_object=model, eos_token="<|im_end|>", pad_token="<|endoftext|>")


def responses(count: int, length: int, *, seed: int = 0) -> Responses:
    """`count` responses of 3/4 to all of `length` tokens; the thoughts are cut so that the action ends the row."""
    rng = np.random.default_rng([seed, 19])
    made = tokenizer()
    ids = np.full((count, length), made.pad_token_id, np.int64)
    mask = np.zeros((count, length), bool)
    thoughts = made([" ".join(_thoughts(rng, length)) for _ in range(64)], add_special_tokens=False)["input_ids"]
    opening = made("<think>\n", add_special_tokens=False)["input_ids"]
    actions = made(["\n</think>\n" + _action(rng) for _ in range(count)], add_special_tokens=False)["input_ids"]
    for row, action in enumerate(actions):
        end = [*action, made.eos_token_id]
        total = int(rng.integers(3 * length // 4, length + 1))
        body = max(total - len(opening) - len(end), 0)
        pool = thoughts[int(rng.integers(len(thoughts)))]
        start = int(rng.integers(max(len(pool) - body, 0) + 1))
        line = [*opening, *pool[start : start + body], *end][-length:]
        ids[row, : len(line)] = line
        mask[row, : len(line)] = True
    return Responses(torch.from_numpy(ids), torch.from_numpy(mask), made)
