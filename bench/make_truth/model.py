"""TextCraft with the example's model as policy: at the warm start, half-way and at the end of a training run.

`train` runs the example's own training once, in the trainers' environment (`make test-integrations` makes it), and
keeps weights of some updates; `make` needs torch and transformers only.  `along` does both for a committed run of the
example.
"""

import argparse
import json
import random
import sys
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from tqdm import tqdm

from ..truth_sets import write
from . import EXAMPLES, example
from .textcraft import GAMMA, HORIZON, LAYERS, MOST_COMMANDS, POLICY, PROMPT_TOKENS, ROLES

NAME, UPDATES = "textcraft_model", (30, 60, 0)  # in the order of making
ALONG = (10, 20, 40)  # of a run of the example
EARLIER = 2  # updates before, whose batches may serve as memory
METHOD, SEED, BATCH = "bipace", 0, 64
PROMPTS, ROLLOUTS = 18, 8
DIRECTIONS, SKETCH = 192, 128  # numbers that a set keeps of each gradient: exact ones, and random sums of the rest


def split(tokenizer: Any) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
    """Published tasks of depth 2 and 3 that fit, by a fixed shuffle: those that the policy was trained on, and 25
    others."""
    from environment import published
    from model import commands_needed, prompt_text

    fitting = [
        task for task in published()
        if task.depth in (2, 3) and commands_needed(task) <= MOST_COMMANDS
        and len(tokenizer(prompt_text(task)).input_ids) <= PROMPT_TOKENS
    ]  # fmt: skip
    random.Random(0).shuffle(fitting)
    return tuple(fitting[:-25]), tuple(fitting[-25:])


@dataclass(frozen=True)
class Played:
    """One batch of a set: its number, the file of the policy's weights (None: the start's), what is played, and the
    seed."""

    number: int
    weights: Path | None
    tasks: Sequence[Any]
    seed: int


def train(out: Path) -> None:
    """Weights after the updates that `make` needs, as out/update<k>.pt, by the trainer of examples/textcraft."""
    example("textcraft")
    import trainer
    from environment import TextCraft
    from model import load
    from settings import Settings

    wanted = {update - back for update in UPDATES for back in range(EARLIER + 1)}
    settings = Settings().changed(updates=max(UPDATES), batch=BATCH, learning_rate=5e-4, check_every=0)
    world = trainer.World(*split(load(POLICY)[1]), TextCraft)
    found = trainer.train(METHOD, SEED, settings, world, POLICY, out / "work", after_update=keeper(out, wanted))
    (out / "run.json").write_text(json.dumps(found), encoding="utf-8")


def keeper(out: Path, wanted: Collection[int]) -> Callable[[int, Any], None]:
    """For trainer.train(after_update=...): writes the weights after these updates to out/update<k>.pt, in bfloat16."""
    import torch

    out.mkdir(parents=True, exist_ok=True)

    def keep(update: int, model: Any) -> None:
        if update in wanted:
            state = {name: x.to(torch.bfloat16) for name, x in model.state_dict().items()}
            torch.save(state, out / f"update{update}.pt")

    return keep


def make(path: Path, update: int, role: str, arguments: argparse.Namespace) -> None:
    """One of the committed sets."""
    continuations, out = arguments.continuations, arguments.out
    example("textcraft")
    from model import load

    trained, _ = split(load(POLICY)[1])
    seed = 10_000 * ROLES[role] + update
    shuffled = list(trained)
    random.Random("truth").shuffle(shuffled)
    first = PROMPTS * list(ROLES).index(role)
    tasks = shuffled[first : first + PROMPTS]
    batches = [Played(0, out / f"update{update}.pt" if update else None, tasks, seed)]
    for back in range(1, EARLIER + 1 if update else 1):
        drawn = random.Random(f"{seed} {back}").sample(list(trained), BATCH // ROLLOUTS)
        batches.append(Played(-back, out / f"update{update - back}.pt", drawn, seed + 100 * back))
    meta = {
        "name": path.stem, "environment": "TextCraft, published tasks that the model was trained on", "role": role,
        "policy": f"the example's model, temperature 1, after {update} updates of {METHOD}, seed {SEED}",
        "made_by": f"python -m bench.make_truth model --continuations {continuations}",
    }  # fmt: skip
    _make(path, POLICY, batches, continuations, out / f"{path.stem}-{continuations}.jsonl", meta)


def along(run: Path, continuations: int, out: Path) -> None:
    """Sets of the policies after ALONG updates of a finished run of the example, into `out`; the training is repeated
    first."""
    example("textcraft")
    import trainer
    from environment import TextCraft
    from model import load_split
    from settings import Settings

    before = json.loads(run.read_text(encoding="utf-8"))
    method, seed, start = before["method"], before["seed"], EXAMPLES / "textcraft/warm_start"
    tasks = load_split(start / "tasks.json.gz")
    weights = out / f"{run.stem}-weights"
    if not (weights / f"update{max(ALONG)}.pt").exists():
        settings = Settings(**before["settings"]).changed(updates=max(ALONG), check_every=0)
        world = trainer.World(tasks.train, tasks.test, TextCraft)
        found = trainer.train(
            method, seed, settings, world, start, weights / "work", after_update=keeper(weights, ALONG)
        )
        differ = [row for row, old in zip(found["updates"], before["updates"], strict=True) if row != old]
        if differ:
            print(f"{run} is not repeated from update {differ[0]['update']} on", file=sys.stderr)
    for update in ALONG:
        path = out / f"textcraft_model_{run.stem}_update{update}_hold.npz"
        if path.exists():
            continue
        drawn = random.Random(f"truth {update}").sample(tasks.train, PROMPTS)
        meta = {
            "name": path.stem, "environment": "TextCraft, generated tasks", "role": "hold",
            "policy": f"the example's model, temperature 1, after {update} updates of {method}, seed {seed}",
            "made_by": f"python -m bench.make_truth along {run.name} --continuations {continuations}",
        }  # fmt: skip
        batch = Played(0, weights / f"update{update}.pt", drawn, 1000 + update)
        _make(path, start, [batch], continuations, out / f"{path.stem}-{continuations}.jsonl", meta)


def _make(
    path: Path, start: Path, batches: Sequence[Played], continuations: int, log: Path, meta: dict[str, Any]
) -> None:
    """Plays the batches, measures the states of those with a number from 0 on, and writes the set."""
    import torch
    from continuations import AT_ONCE, State, returns_from, states_of
    from environment import TextCraft
    from model import load
    from rollout import play

    torch.set_num_threads(1)
    model, tokenizer = load(start)
    rows: list[list[Any]] = []
    states: dict[int, list[Any]] = {layer: [] for layer in LAYERS}
    unknown: dict[tuple[int, ...], tuple[State, list[int]]] = {}  # distinct pasts, and the rows that have them
    gradients: list[Any] = []

    def add(batch: Played) -> None:
        if batch.weights is not None:
            model.load_state_dict(torch.load(batch.weights, weights_only=True))
        envs = [TextCraft(task) for task in batch.tasks for _ in range(ROLLOUTS)]
        episodes: Any = play(model, tokenizer, envs, horizon=HORIZON, seed=batch.seed)
        begin, trajectory = (rows[-1][1] + 1, rows[-1][2] + 1) if rows else (0, 0)
        for number, episode in enumerate(episodes):
            found = states_of(episode, HORIZON)
            for t, state in enumerate(found):
                if batch.number >= 0:
                    unknown.setdefault(state.ids, (state, []))[1].append(len(rows))
                ids_of_row = batch.number, begin + number // ROLLOUTS, trajectory + number, t
                rows.append([*ids_of_row, episode.rewards[t], 0.0, 0.0, episode.observations[t], episode.commands[t]])
            if batch.number >= 0:  # only the first one
                gradients.append(_gradients(model, episode))
            with torch.inference_mode():
                ids = torch.tensor([[*episode.prompt_ids, *episode.ids]])
                hidden = model.model(input_ids=ids, output_hidden_states=True).hidden_states
            for layer in LAYERS:
                states[layer].append(hidden[layer][0, [len(state.ids) - 1 for state in found]].numpy())

    add(batches[0])
    coordinates, share = _coordinates(torch.cat(gradients))
    gradients.clear()  # gigabytes, which the continuations do not need
    # Transcripts with as many commands left stand together: their rows end at about the same time.
    pasts = sorted(unknown.values(), key=lambda past: (past[0].left, len(past[0].ids)))
    known = [json.loads(line) for line in log.read_text().splitlines()] if log.exists() else []  # measured already
    half, seed = continuations // 2, batches[0].seed
    with open(log, "a", encoding="utf-8") as file:
        for chunk in tqdm(range(0, len(pasts), AT_ONCE), desc=path.stem):
            if chunk < len(known):
                continue
            generator = torch.Generator().manual_seed(1_000_003 * seed + chunk)
            here = [state for state, _ in pasts[chunk : chunk + AT_ONCE]]
            found = returns_from(model, tokenizer, here, copies=continuations, gamma=GAMMA, generator=generator)
            values = np.stack([found[:, :half].mean(axis=1), found[:, half:].mean(axis=1)], axis=1).tolist()
            known += values
            file.write("".join(json.dumps(value) + "\n" for value in values))
            file.flush()
    for (_, rows_of), values in zip(pasts, known, strict=True):
        for row in rows_of:
            rows[row][5:7] = values
    for batch in batches[1:]:
        add(batch)
    gradient = np.zeros((len(rows), DIRECTIONS + SKETCH))
    gradient[: len(coordinates), : coordinates.shape[1]] = coordinates
    meta |= {
        "gamma": GAMMA, "horizon": HORIZON, "continuations": continuations, "rollouts": ROLLOUTS, "seed": seed,
        "hidden": "the policy's own", "gradient_share": round(share, 4),
        "tasks": [task.task_id for task in batches[0].tasks],
    }  # fmt: skip
    write(path, meta, rows, {layer: np.concatenate(found) for layer, found in states.items()}, gradient)


def _gradients(model: Any, episode: Any) -> Any:
    """[commands, weights] float32 gradients of the log-probability of each command of an episode."""
    import torch

    weights = [weight for weight in model.parameters() if weight.requires_grad]
    ids, own = torch.tensor([[*episode.prompt_ids, *episode.ids]]), torch.tensor(episode.own, dtype=torch.bool)
    command = torch.cumsum(torch.diff(own.int(), prepend=torch.zeros(1, dtype=torch.int32)) > 0, 0) - 1  # of each token
    logits = model(input_ids=ids).logits[0, len(episode.prompt_ids) - 1 : -1].log_softmax(-1)
    chosen = logits.gather(1, ids[0, len(episode.prompt_ids) :, None])[:, 0]
    found = []
    for number in range(len(episode.commands)):
        total = chosen[own & (command == number)].sum()
        parts = torch.autograd.grad(total, weights, retain_graph=number + 1 < len(episode.commands))
        found.append(torch.cat([part.flatten() for part in parts]))
    return torch.stack(found)


def _coordinates(gradients: Any) -> tuple[Any, float]:
    """[N, DIRECTIONS + SKETCH] numbers whose inner products are those of gradients [N, weights], in units of their mean
    square length, and the share of the squared lengths in the leading directions.

    Exact in the DIRECTIONS leading ones; the rest is projected on SKETCH random directions, which keeps its inner
    products without bias.
    """
    import torch

    product = (gradients @ gradients.T).double()
    product /= product.diagonal().mean()
    size, direction = torch.linalg.eigh(product)  # ascending
    size, direction = size.flip(0).clamp(min=0), direction.flip(1)
    found, rest = (direction * size.sqrt()).split([min(DIRECTIONS, len(size)), max(len(size) - DIRECTIONS, 0)], dim=1)
    random = torch.randn(rest.shape[1], SKETCH, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    share = float(size[:DIRECTIONS].sum() / size.sum())
    return torch.cat([found, rest @ random / SKETCH**0.5], dim=1).numpy(), share
