"""The policy: a small decoder of the Qwen2 architecture and its tokenizer, both made here from nothing but the tasks'
texts."""

from __future__ import annotations

import copy
import gzip
import json
import random
import shutil
from collections.abc import Callable, Sequence
from dataclasses import astuple, dataclass, fields
from functools import partial
from pathlib import Path

import torch
from environment import Recipes, Task, TextCraft, all_recipes, published
from generate import generate, split_goals
from planner import plan, stray
from rollout import CLOSE, OPEN, answer_text
from settings import Settings
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen2ForCausalLM,
)  # fmt: skip

FACTS = "warm_start.json"  # in the folder of a warm start
PAD, END = "<pad>", "<end>"  # END is never used: trainers require a tokenizer to have one

# Counts are joined with the words around them and item names are separate, so a command is few tokens: "<action>get 2
# ", "quartz", "</action>".  BPE then decides what becomes one token inside these pieces.
PIECES = Regex(
    r"</action>|<action>get \d+ |(?:<action>|\n)?craft \d+ | using \d+ |, \d+ |_|\n\nGoal: craft |\nGot \d+ "
    r"|\nCrafted \d+ minecraft:|\nCould not find (?:enough items to craft minecraft:|a valid recipe for "
    r"minecraft:)?|\.?\n"
)


def prompt_text(task: Task) -> str:
    return task.text + "\n"


def make_tokenizer(vocabulary: int) -> PreTrainedTokenizerFast:
    """Trained on the tasks, on commands, and on what the environment answers."""
    texts = [prompt_text(task) for task in published()]
    for item in sorted(all_recipes().gettable | all_recipes().printed.keys()):
        name = item.replace(" ", "_")
        texts += [f"{OPEN}get {n} {item}{CLOSE}\nGot {n} {item}\n" for n in range(1, 10)]
        texts += [f"{OPEN}craft {n} {item}{CLOSE}\nCrafted {n} minecraft:{name}\n" for n in range(1, 10)]
        texts += [
            answer_text(f"Could not find {item}"),
            answer_text(f"Could not find enough items to craft minecraft:{name}"),
        ]
    return train_tokenizer(texts, PIECES, vocabulary)


def train_tokenizer(texts: Sequence[str], pieces: Regex, vocabulary: int) -> PreTrainedTokenizerFast:
    """Byte-level BPE inside the pieces that the pattern isolates."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(pieces, "isolated"), pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary, special_tokens=[PAD, END], show_progress=False,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )  # fmt: skip
    tokenizer.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token=PAD, eos_token=END, clean_up_tokenization_spaces=False
    )


def make_model(
    tokenizer: PreTrainedTokenizerFast, *, width: int, blocks: int, heads: int, seed: int
) -> Qwen2ForCausalLM:
    """Random weights; `heads` query heads and as many of keys, an MLP three times as wide as the model."""
    torch.manual_seed(seed)
    config = Qwen2Config(
        vocab_size=len(tokenizer), hidden_size=width, intermediate_size=3 * width, num_hidden_layers=blocks,
        num_attention_heads=heads, num_key_value_heads=heads, max_position_embeddings=2048, tie_word_embeddings=True,
        pad_token_id=tokenizer.pad_token_id, eos_token_id=tokenizer.eos_token_id, bos_token_id=None,
        initializer_range=0.04,
    )  # fmt: skip
    return Qwen2ForCausalLM(config)


@dataclass(frozen=True)
class Split:
    """Tasks to train on and tasks to measure on, all different.

    test       drawn like `train`, from the same goals
    new_goals  of goals that nothing else has: neither reinforcement learning nor the planner's lessons
    """

    train: tuple[Task, ...]
    test: tuple[Task, ...]
    new_goals: tuple[Task, ...]


def make_split(
    tokenizer: PreTrainedTokenizerBase, *, train: int, test: int, new_goals: int, most_commands: int, prompt_tokens: int
) -> Split:
    """`train` and `test` tasks of the same goals, and `test` tasks of `new_goals` others; equal arguments, equal
    tasks."""

    def fits(task: Task) -> bool:
        return len(tokenizer(prompt_text(task)).input_ids) <= prompt_tokens

    goals, others = split_goals(new_goals, seed=0)
    seen = generate(train + test, seed=1, goals=goals, most_commands=most_commands, fits=fits)
    unseen = generate(test, seed=2, goals=others, most_commands=most_commands, fits=fits)
    drawn = random.Random(3).sample(seen, len(seen))  # they come goal by goal
    return Split(tuple(drawn[test:]), tuple(drawn[:test]), unseen)


def save_split(path: Path, split: Split) -> None:
    """Gzipped JSON; making the tasks takes ten seconds."""
    found = {part.name: [astuple(task) for task in getattr(split, part.name)] for part in fields(split)}
    path.write_bytes(gzip.compress(json.dumps(found).encode(), mtime=0))


def load_split(path: Path) -> Split:
    found = json.loads(gzip.decompress(path.read_bytes()))
    return Split(**{part: tuple(Task(*row[:3], tuple(row[3])) for row in rows) for part, rows in found.items()})


LESSONS = 1000  # tasks whose other recipes become goals of lessons


def known_goals(split: Split, share: float) -> frozenset[str]:
    """The trained goals that lessons show: a drawn part of them."""
    goals = sorted({task.goal for task in split.train})
    return frozenset(random.Random("known goals").sample(goals, round(share * len(goals))))


def lessons(split: Split, most_commands: int, share: float = 1.0) -> tuple[list[Task], list[Task]]:
    """What the planner shows: train tasks of the known goals, and what else the recipes of some print, as goals of
    their own."""
    known = known_goals(split, share)
    hidden = {task.goal for task in (*split.train, *split.new_goals)}
    others = [
        Task(f"{task.task_id}/{goal}", goal, 0, task.commands)
        for task in split.train[:LESSONS] for goal in Recipes(task.commands).printed if goal not in hidden
    ]  # fmt: skip
    return [task for task in split.train if task.goal in known], [
        task for task in others if _solvable(task, most_commands)
    ]


def commands_needed(task: Task, limit: int = 100) -> int:
    """Length of the planner's episode."""
    env = TextCraft(task)
    for n in range(1, limit + 1):
        env.step(plan(env))
        if env.done:
            return n
    return limit + 1


def _solvable(task: Task, most_commands: int) -> bool:
    """Whether the lines printed say all that its goal needs: not so for some items that only distract."""
    try:
        return commands_needed(task) <= most_commands
    except KeyError:
        return False


def demonstration(
    task: Task, tokenizer: PreTrainedTokenizerFast, noise: float, horizon: int, strays: bool, rng: random.Random
) -> tuple[list[int], list[int]]:
    """Token ids of one episode of the noisy planner, its recipe lines shuffled, and a mask of the tokens to learn.

    Those are the planner's own commands, with `strays` also the stray ones; else these only stand in the history, so
    that the model sees how to go on from there.
    """
    lines = list(task.commands)
    rng.shuffle(lines)
    env = TextCraft(Task(task.task_id, task.goal, task.depth, tuple(lines)))
    parts = [(prompt_text(env.task), 0)]
    for _ in range(horizon):
        own = rng.random() >= noise
        command = plan(env) if own else stray(env, rng)
        observation, _, done = env.step(command)
        parts.append((OPEN + command + CLOSE, int(own or strays)))
        if done:
            break
        parts.append((answer_text(observation), 0))
    return tokens_of(parts, tokenizer)


def tokens_of(parts: Sequence[tuple[str, int]], tokenizer: PreTrainedTokenizerBase) -> tuple[list[int], list[int]]:
    """Ids of texts one after the other, and for each token whether it is to be learned."""
    ids, mask = [], []
    for found, (_, own) in zip(tokenizer([text for text, _ in parts]).input_ids, parts, strict=True):
        ids += found
        mask += [own] * len(found)
    return ids, mask


def imitate(
    model: PreTrainedModel, pad: int, draw: Callable[[random.Random], tuple[list[int], list[int]]], *, updates: int,
    batch: int,
    learning_rate: float, seed: int, advance: Callable[[int, float], bool | None],
) -> None:  # fmt: skip
    """Cross-entropy on the tokens to learn of drawn episodes; `advance(update, loss)` is called after each update.

    Ends after `updates` of them, or where `advance` gives True.
    """
    rng = random.Random(seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=learning_rate, weight_decay=0.01)
    device = model.device
    model.train()
    waiting: list[tuple[list[int], list[int]]] = []
    for update in range(1, updates + 1):
        if not waiting:  # batches of like lengths, out of a larger draw, cost little padding
            drawn = [draw(rng) for _ in range(16 * batch)]
            waiting = sorted(drawn, key=lambda row: len(row[0]))
            order = list(range(0, len(waiting), batch))
            rng.shuffle(order)
            waiting = [row for start in order for row in waiting[start : start + batch]]
        rows, waiting = waiting[:batch], waiting[batch:]
        longest = max(len(ids) for ids, _ in rows)
        ids = torch.tensor([row + [pad] * (longest - len(row)) for row, _ in rows], device=device)
        own = torch.tensor([mask + [0] * (longest - len(mask)) for _, mask in rows], device=device).bool()
        for group in optimizer.param_groups:
            group["lr"] = learning_rate * min(1.0, update / 50)
        states = model.model(input_ids=ids).last_hidden_state[
            :, :-1
        ]  # padded on the right: causal attention never looks
        loss = torch.nn.functional.cross_entropy(model.lm_head(states[own[:, 1:]]), ids[:, 1:][own[:, 1:]])
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        if advance(update, loss.item()):
            break


def teach(
    out: Path, tokenizer: PreTrainedTokenizerBase, settings: Settings, look: Callable[[PreTrainedModel], float],
    draw: Callable[[bool, random.Random], tuple[list[int], list[int]]], say: Callable[[str], None], device: str,
) -> tuple[PreTrainedModel, list[dict[str, object]]]:  # fmt: skip
    """A new model after two lessons, and how it did on the way: first it learns the planner's own commands, then all of
    them.

    look(model)       success, every `settings.lesson_check` updates
    draw(strays, rng) tokens of an episode, and those to learn
    Each lesson ends in a folder of its own, from which a warm start that was stopped goes on.
    """
    model: PreTrainedModel = make_model(
        tokenizer, width=settings.width, blocks=settings.blocks, heads=settings.heads, seed=0
    ).to(device)
    history: list[dict[str, object]] = []
    lessons_of = (("own commands", settings.lesson_rate, settings.lesson_updates),
                  ("all commands", settings.noisy_rate, settings.noisy_updates))  # fmt: skip
    for number, (name, rate, updates) in enumerate(lessons_of):
        folder = out / f"lesson{number + 1}"
        if not (folder / FACTS).exists():

            def advance(update: int, loss: float, name: str = name, policy: PreTrainedModel = model) -> None:
                if update % settings.lesson_check == 0:
                    history.append({"lesson": name, "update": update, "loss": round(loss, 4), "success": look(policy)})
                    policy.train()
                    say(f"warm start: {json.dumps(history[-1])}")

            imitate(
                model, tokenizer.pad_token_id, partial(draw, number > 0), updates=updates, batch=settings.lesson_batch,
                learning_rate=rate, seed=number, advance=advance,
            )  # fmt: skip
            save(folder, model, tokenizer, {"history": history})
        model = load(folder)[0].to(device)  # as it is kept
        history[:] = json.loads((folder / FACTS).read_text(encoding="utf-8"))["history"]
    return model, history


def save(folder: Path, model: Qwen2ForCausalLM, tokenizer: PreTrainedTokenizerFast, facts: dict[str, object]) -> None:
    """Weights in bfloat16: half the size, and every run starts from the very same ones."""
    copy.deepcopy(model).to(torch.bfloat16).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    (folder / FACTS).write_text(json.dumps(facts, indent=1) + "\n", encoding="utf-8")


def made_already(folder: Path, settings: Settings) -> bool:
    """Whether the folder holds a warm start; ValueError where it was made with other settings."""
    if not (folder / FACTS).exists():
        return False
    there = json.loads((folder / FACTS).read_text(encoding="utf-8"))["settings"]
    if other := settings.differ(there, settings.of_warm_start()):
        raise ValueError(f"{folder} was made with other settings ({', '.join(other)}); use another folder.")
    return True


def save_warm_start(
    folder: Path, model: Qwen2ForCausalLM, tokenizer: PreTrainedTokenizerFast, settings: Settings,
    facts: dict[str, object],
    side: str = "test",
) -> None:  # fmt: skip
    """facts[side], the success on these tasks, must be 0.2 to 0.5, which leaves room for training; ValueError else."""
    if not 0.2 <= float(str(facts[side])) <= 0.5:
        raise ValueError(
            f"the warm start solves {facts[side]:.0%} of the {side} tasks, and 20 to 50 % leave room for training: "
            "change "
            "lesson_updates, noisy_updates or noise."
        )
    parameters = sum(p.numel() for p in model.parameters())
    save(folder, model, tokenizer, {**facts, "parameters": parameters, "settings": settings.of_warm_start()})
    for lesson in folder.glob("lesson*"):
        shutil.rmtree(lesson)


def load(folder: Path) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Model in float32, and tokenizer: a warm start, or any causal language model in a local folder."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, local_files_only=True)
    # Loaded by the architecture's name it would use that architecture's splitting rules.
    own = (folder / FACTS).exists()
    tokenizer = (PreTrainedTokenizerFast if own else AutoTokenizer).from_pretrained(folder, local_files_only=True)
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token
    return model, tokenizer
