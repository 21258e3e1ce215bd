"""GRPO with TRL at the smallest: a random Qwen2 of nine blocks, a tokenizer of bytes, and trainers that keep their batches."""

from __future__ import annotations

import random
from typing import Any

import pytest

pytest.importorskip("trl", reason="TRL is not installed: make test-integrations")

import torch
from datasets import Dataset
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

import bipace_kernels as bk
from bipace_kernels.integrations.trl import BiPACEGRPOConfig, BiPACEGRPOTrainer

PROMPTS = ["ab", "cde", "f", "gh"]
LAYER = -8


def make_tokenizer() -> Any:
    """Every byte is a token; <eos> and <pad> beside them."""
    vocabulary = {c: i for i, c in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    tokenizer = Tokenizer(models.BPE(vocabulary, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<pad>", "<eos>"])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>")


TOKENIZER = make_tokenizer()


def make_model(seed: int = 0) -> Any:
    torch.manual_seed(seed)
    config = Qwen2Config(
        hidden_size=32, intermediate_size=64, num_hidden_layers=9, num_attention_heads=4, num_key_value_heads=2,
        vocab_size=len(TOKENIZER), max_position_embeddings=256, pad_token_id=TOKENIZER.pad_token_id,
        eos_token_id=TOKENIZER.eos_token_id, bos_token_id=None,
    )  # fmt: skip
    return Qwen2ForCausalLM(config)


def reward(completions: list[Any], **_: Any) -> list[float]:
    return [float(len(str(c)) % 5) for c in completions]


def rollout(prompts: list[Any], trainer: Any, *, extras: Any = ("step_rewards",)) -> dict[str, list[Any]]:
    """One to three turns of one to four tokens, three bytes of observation between them; few distinct actions."""
    rng = random.Random(f"{trainer.state.global_step} {trainer.accelerator.process_index}")
    out: dict[str, list[Any]] = {k: [] for k in ("prompt_ids", "completion_ids", "logprobs", "env_mask", *extras)}
    for prompt in prompts:
        turns = [TOKENIZER(rng.choice(["go", "look", "x"]))["input_ids"] for _ in range(rng.randint(1, 3))]
        between = [rng.choice(["<A>", "<B>"]) for _ in turns[1:]]
        ids, mask = list(turns[0]), [1] * len(turns[0])
        for observation, turn in zip(between, turns[1:], strict=True):
            ids += TOKENIZER(observation)["input_ids"] + turn
            mask += [0] * 3 + [1] * len(turn)
        own = {
            "prompt_ids": TOKENIZER(prompt)["input_ids"], "completion_ids": ids, "logprobs": [0.0] * len(ids),
            "env_mask": mask, "step_rewards": [rng.randint(0, 3) / 2 for _ in turns],
            "observations": [f"{prompt} {i // 2}" for i in range(len(turns))],
            "actions": [rng.choice(["north", "south"]) for _ in turns],
        }  # fmt: skip
        for name in out:
            out[name].append(own[name])
    return out


class Keeping(BiPACEGRPOTrainer):  # type: ignore[misc]
    """Keeps each training batch: what went in, what TRL made of it, the rewards, and the hidden states as Hugging Face has
    them, from a forward of its own."""

    def _generate_and_score_completions(self, inputs: Any) -> Any:
        output = super()._generate_and_score_completions(inputs)
        if self.model.training:
            ids = torch.cat([output["prompt_ids"], output["completion_ids"]], 1)
            mask = torch.cat([output["prompt_mask"], output["completion_mask"]], 1)
            with torch.no_grad():
                states = self.model(ids, attention_mask=mask, output_hidden_states=True).hidden_states[LAYER]
            if not hasattr(self, "batches"):
                self.batches = []
            self.batches.append({"inputs": inputs, "output": dict(output), "rewards": self.seen, "states": states})
        return output

    def _calculate_rewards(self, *args: Any, **kwargs: Any) -> Any:
        self.seen = super()._calculate_rewards(*args, **kwargs)
        return self.seen


def make_trainer(folder: Any, cls: Any = Keeping, model: Any = None, reward_funcs: Any = None, **options: Any) -> Any:
    """A trainer for two updates; options are arguments of the trainer or of its configuration."""
    own = {k: options.pop(k) for k in ("rollout_func", "tools", "environment_factory", "peft_config", "callbacks")
           if k in options}  # fmt: skip
    settings: dict[str, Any] = {
        "per_device_train_batch_size": 8, "num_generations": 4, "max_steps": 2, "max_completion_length": 8,
        "report_to": [], "use_cpu": True, "logging_steps": 1, "save_strategy": "no", "disable_tqdm": True,
        "learning_rate": 1e-3, "bf16": False,
    }  # fmt: skip
    args = BiPACEGRPOConfig(output_dir=str(folder), **{**settings, **options})
    return cls(
        make_model() if model is None else model, reward_funcs or [reward], args,
        train_dataset=Dataset.from_dict({"prompt": PROMPTS}), processing_class=TOKENIZER, **own,
    )  # fmt: skip


def by_hand(batch: dict[str, Any], config: bk.Config, *, mode: str = "action_tag") -> torch.Tensor:
    """[B, T] what the page says, token by token: loops, bk.advantage() and nothing of the adapter."""
    output, g = batch["output"], 4
    written = output["completion_mask"] * output.get("tool_mask", torch.ones_like(output["completion_mask"]))
    width = output["prompt_ids"].shape[1]
    rows: list[dict[str, Any]] = []
    spans: list[tuple[int, int, int]] = []
    for b, mask in enumerate(written.tolist()):
        starts = [t for t, m in enumerate(mask) if m and (t == 0 or not mask[t - 1])]
        total = float(batch["rewards"][b].nansum()) if not bool(batch["rewards"][b].isnan().all()) else float("nan")
        extra = batch["inputs"][b]
        before = 0
        for i, t in enumerate(starts or [0]):
            end = t
            while end < len(mask) and mask[end]:
                end += 1
            ids = output["completion_ids"][b, t:end].tolist()
            prompt = output["prompt_ids"][b][output["prompt_mask"][b].bool()]
            heard = prompt if i == 0 else output["completion_ids"][b, before:t]
            last = i + 1 == max(1, len(starts))
            rows.append({
                "group": b // g, "trajectory": b, "step": i, "episode_return": total,
                "rewards": extra["step_rewards"][i] if "step_rewards" in extra else total * last if last else 0.0,
                "fingerprint": batch["states"][b, width + t - 1],
                "observation": extra["observations"][i] if "observations" in extra else TOKENIZER.decode(heard),
                "action": extra["actions"][i] if "actions" in extra else None,
                "text": TOKENIZER.decode(ids, skip_special_tokens=True), "ids": ids,
            })  # fmt: skip
            spans.append((b, t, end))
            before = end
    records = {k: [row[k] for row in rows] for k in ("group", "trajectory", "step", "rewards", "episode_return")}
    if rows[0]["action"] is not None:
        keys, _ = bk.action_keys([row["action"] for row in rows], mode="text")
    else:
        keys, _ = bk.action_keys([row["ids"] for row in rows], mode=mode, token_bytes=bk.token_bytes(TOKENIZER),
                                 mask=[[1] * len(row["ids"]) for row in rows])  # fmt: skip
    result = bk.advantage(
        **records, fingerprint=torch.stack([row["fingerprint"] for row in rows]), action_key=keys,
        observation=[row["observation"] for row in rows], config=config,
    )  # fmt: skip
    found = torch.zeros(written.shape)
    for (b, t, end), value in zip(spans, result.advantage.tolist(), strict=True):
        found[b, t:end] = value
    return found
