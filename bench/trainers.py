"""`python -m bench trainers [--quick] [--out DIR]`: what the adapters add to a training step.  Needs TRL and verl."""

import gc
import importlib
from collections.abc import Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from .measure import Effort, Side, compare, threads
from .report import about, page, parser, publish, shorts, table

Tensor = torch.Tensor
PROMISED_MS = 5.0  # at most, at the tiny size
ABOUT = """\
A batch after its log-prob forward, which gave the hidden states, on to the advantages [B, T] and all metrics; sides
take turns with cold caches, one thread, medians.  The forward and the tap in it are not here: `python -m bench hidden`
has them.

- **TRL**: `bipace_advantages()`, which `BiPACEGRPOTrainer` runs besides TRL's own, so its time is what is added.
  Beside it TRL's own arithmetic for method grpo (means and σ of groups), which is a few calls on [B] numbers.
- **verl**: `compute_advantage(…, "bipace")` of verl's driver with the rows handed over, in place of
  `compute_advantage(…, "grpo")`: what is added is the difference.

Random rows; turns of 22 tokens with an action tag each, answers of four between them, hidden states of few distinct
directions.
"""


@dataclass(frozen=True)
class Batch:
    """Rows of a batch: prompts × rollouts, each of several turns with a tool's answer of four tokens between them."""

    name: str
    prompts: int = 4
    rollouts: int = 8
    turns: int = 4
    width: int = 64

    @property
    def rows(self) -> int:
        return self.prompts * self.rollouts

    def text(self) -> str:
        return f"{self.name}: {self.rows} rows of {self.turns} turns, width {self.width:,}"

    def tensors(self) -> dict[str, Tensor]:
        """Byte ids, masks, hidden states [rows · turns, width] and rewards [rows]."""
        generator = torch.Generator().manual_seed(0)
        actions = [list(f"<action>{name}</action>".encode()) for name in ("north", "south", "stay ")]
        answer = list(b"wall")
        which = torch.randint(len(actions), (self.rows, self.turns), generator=generator).tolist()
        rows = [[token for turn in row for token in actions[turn] + answer] for row in which]
        mask = torch.tensor(([1] * len(actions[0]) + [0] * len(answer)) * self.turns).expand(self.rows, -1)
        centres = torch.randn(16, self.width, generator=generator)
        state = torch.randint(16, (self.rows * self.turns,), generator=generator)
        noise = torch.randn(len(state), self.width, generator=generator)
        prompt = torch.tensor(list(b"look around")).expand(self.rows, -1)
        return {
            "prompts": prompt, "responses": torch.tensor(rows), "mask": mask.clone(),
            "hidden": centres[state] + 0.1 * noise,
            "reward": torch.randint(2, (self.rows,), generator=generator).float(),
        }  # fmt: skip


SIZES = (Batch("tiny"), Batch("ALFWorld, 7B", prompts=16, turns=50, width=3584))


def byte_tokenizer() -> Any:
    """A Hugging Face tokenizer whose ids are bytes."""
    tokenizers, transformers = importlib.import_module("tokenizers"), importlib.import_module("transformers")
    shown = {*range(33, 127), *range(161, 173), *range(174, 256)}  # byte-level BPE writes other bytes as 256, 257, …
    spare = iter(range(256, 512))
    alphabet = {chr(b) if b in shown else chr(next(spare)): b for b in range(256)}
    made = tokenizers.Tokenizer(tokenizers.models.BPE(alphabet, []))
    made.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = tokenizers.decoders.ByteLevel()
    return transformers.PreTrainedTokenizerFast(tokenizer_object=made)


def trl_sides(batch: Batch, tokenizer: Any) -> list[Side]:
    """TRL's own arithmetic, and the adapter's call with what it reads of a trainer."""
    adapter = importlib.import_module("bipace_kernels.integrations.trl")
    data, g = batch.tensors(), batch.rollouts
    trainer = SimpleNamespace(
        accelerator=SimpleNamespace(num_processes=1, process_index=0), num_generations=g, processing_class=tokenizer,
        reward_weights=torch.ones(1),
    )  # fmt: skip
    output = {
        "prompt_ids": data["prompts"], "prompt_mask": torch.ones_like(data["prompts"]),
        "completion_ids": data["responses"],
        "completion_mask": torch.ones_like(data["mask"]), "tool_mask": data["mask"],
    }  # fmt: skip
    states = adapter.States(adapter.Settings(method="bipace"), "bipace_")
    rewards, inputs = data["reward"][:, None], [{}] * batch.rows

    def own(_: Any) -> Tensor:
        total = rewards.nansum(1)
        grouped = total.view(-1, g)
        mean, std = (x.repeat_interleave(g) for x in (grouped.nanmean(1), grouped.std(1)))
        return ((total - mean) / (std + 1e-4)).nan_to_num(0.0)

    def ours(_: Any) -> Any:
        return adapter.bipace_advantages(trainer, inputs, output, rewards, states, hidden=data["hidden"])

    return [Side("TRL's own", own), Side("TRL, what BiPACE adds", ours)]


def verl_sides(batch: Batch, tokenizer: Any) -> list[Side]:
    """verl's compute_advantage() with either estimator, on a DataProto."""
    importlib.import_module("bipace_kernels.integrations.verl.plugin")  # as verl loads it
    verl, ray_trainer = importlib.import_module("verl"), importlib.import_module("verl.trainer.ppo.ray_trainer")
    driver = importlib.import_module("bipace_kernels.integrations.verl.driver_v0")
    hydra = importlib.import_module("hydra")
    words = ["algorithm.adv_estimator=bipace", f"actor_rollout_ref.rollout.n={batch.rollouts}"]
    with hydra.initialize_config_module("verl.trainer.config", version_base=None):
        config = hydra.compose("ppo_trainer", [*words, "+algorithm.bipace.method=bipace"])
    bipace = importlib.import_module("bipace_kernels.integrations.verl.estimator").Bipace(config)
    data = batch.tensors()
    scores = torch.zeros(data["mask"].shape)
    scores[:, -1] = data["reward"]
    attended = torch.ones(batch.rows, data["prompts"].shape[1] + scores.shape[1], dtype=torch.int64)
    names = np.repeat([f"p{i}" for i in range(batch.prompts)], batch.rollouts).astype(object)

    def prepare() -> Any:
        tensors = {
            "prompts": data["prompts"], "responses": data["responses"], "response_mask": data["mask"],
            "attention_mask": attended, "token_level_scores": scores, "token_level_rewards": scores,
        }  # fmt: skip
        return verl.DataProto.from_dict(tensors=tensors, non_tensors={"uid": names})

    def own(rows: Any) -> Any:
        return ray_trainer.compute_advantage(rows, "grpo", num_repeat=batch.rollouts)

    def ours(rows: Any) -> Any:
        with bipace.handed_over(driver.rows_of(rows, data["hidden"].split(batch.turns)), tokenizer):
            return ray_trainer.compute_advantage(rows, "bipace", num_repeat=batch.rollouts)

    return [Side("verl's own", own, prepare), Side("verl with BiPACE", ours, prepare)]


def measure(batch: Batch, effort: Effort) -> list[dict[str, Any]]:
    """Each trainer's own side, then ours, in milliseconds; `added` compares ours with the trainer's own."""
    tokenizer, rows = byte_tokenizer(), []
    for make, replaced in ((trl_sides, False), (verl_sides, True)):
        sides = make(batch, tokenizer)
        gc.freeze()  # the trainers' own objects are many, and would be gone through before each call
        own, ours = compare(sides, effort).values()
        wall, cpu = ours.median - own.median * replaced, ours.cpu_median - own.cpu_median * replaced
        for side, t, added in zip(sides, (own, ours), ((None, None), (wall, cpu)), strict=True):
            row = {"batch": batch.text(), "side": side.name, "median_ms": t.median, "cpu_ms": t.cpu_median}
            rows.append({**row, "rounds": t.rounds, "added_ms": added[0], "added_cpu_ms": added[1]})
    return rows


def main(argv: Sequence[str] | None = None) -> int:
    """Measures, shows the table, writes trainers.json and trainers.md."""
    options = parser("trainers", "What the adapters add to a training step.",
                     writes="trainers.json and trainers.md", quick="only the tiny batch")  # fmt: skip
    options.add_argument("--rounds", type=int, default=25, metavar="N", help="calls of each side (%(default)s)")
    arguments = options.parse_args(argv)
    sizes, rounds = (SIZES[:1], 2) if arguments.quick else (SIZES, arguments.rounds)
    with threads(1) as on:
        of = {name: importlib.import_module(name).__version__ for name in ("trl", "verl", "transformers")}
        rows = [row for batch in sizes for row in measure(batch, Effort(rounds=rounds, seconds=4.0))]
    columns = {
        "batch": "{batch}", "side": "{side}", "median ms": "{median_ms:.3g}", "CPU ms": "{cpu_ms:.3g}",
        "rounds": "{rounds}", "added ms": shorts("added_ms"), "added CPU ms": shorts("added_cpu_ms"),
    }  # fmt: skip
    most = max(row["added_cpu_ms"] for row in rows if row["batch"].startswith("tiny") and row["added_ms"])
    promise = f"Promised at the tiny size: at most {PROMISED_MS:g} ms; in CPU time at most {most:.3g} ms were seen."
    versions = ", ".join(f"{name} {version}" for name, version in of.items())
    title = "What the trainers' adapters add to a step"
    text = page(title, f"{versions}; {about(on)}", ABOUT, table(columns, rows), promise)
    publish("trainers", {"schema": 1, "machine": on, "versions": of, "rows": rows}, text, arguments.out)
    return 0
