"""GRPO with TRL at the smallest: a random Qwen2 of nine blocks, a tokenizer of bytes, and trainers that keep their
batches."""

import random
from typing import Any

import torch
from bipace_kernels.integrations._replace import replace
from bipace_kernels.integrations.trl import BiPACEGRPOConfig, BiPACEGRPOTrainer
from bipace_kernels.integrations.trl.trainer import ROW
from datasets import Dataset
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

import bipace_kernels as bk

PROMPTS = ["ab", "cde", "f", "gh"]
LAYER = -8


def make_tokenizer() -> Any:
    """Every byte is a token; plus <eos> and <pad>."""
    vocabulary = {c: i for i, c in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    tokenizer = Tokenizer(models.BPE(vocabulary, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<pad>", "<eos>"])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>")


TOKENIZER = make_tokenizer()
TABLE = bk.token_bytes(TOKENIZER)


def make_model(**changes: Any) -> Any:
    torch.manual_seed(0)
    settings = {
        "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 9, "num_attention_heads": 4,
        "num_key_value_heads": 2, "vocab_size": len(TOKENIZER), "max_position_embeddings": 256, "bos_token_id": None,
        "pad_token_id": TOKENIZER.pad_token_id, "eos_token_id": TOKENIZER.eos_token_id, **changes,
    }  # fmt: skip
    return Qwen2ForCausalLM(Qwen2Config(**settings))


def reward(completions: list[Any], **_: Any) -> list[float]:
    return [float(len(str(c)) % 5) for c in completions]


def rollout(prompts: list[Any], trainer: Any, *, extras: Any = ("step_rewards",), failed: int = 0) -> dict[str, Any]:
    """One to three turns of one to four tokens, three bytes between them, few actions; no turn in `failed` rows."""
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
            "actions": [rng.choice(["north", "south"]) for _ in turns], "truncated": len(turns) != 2,
        }  # fmt: skip
        for name in out:
            out[name].append(own[name])
    for row in range(failed):
        out["env_mask"][row], out["step_rewards"][row] = [0] * len(out["env_mask"][row]), []
    return out


class Keeping(BiPACEGRPOTrainer):  # type: ignore[misc]
    """Keeps each training batch: what went in, TRL's output, rewards, and hidden states from a forward of its own.

    Batches are seen from below: a trainer with methods of its own that see them gets its states elsewhere.
    """

    def given(self, inputs: Any) -> Any:
        """The rows, with what their rollouts gave by turn."""
        return inputs

    def _calculate_rewards(self, *args: Any, **kwargs: Any) -> Any:
        self.seen = super()._calculate_rewards(*args, **kwargs)
        return self.seen


def _generate_and_score_completions(run: Any, self: Any, inputs: Any) -> Any:
    output = run(self, inputs)
    if self.model.training and isinstance(self, Keeping):
        ids = torch.cat([output["prompt_ids"], output["completion_ids"]], 1)
        mask = torch.cat([output["prompt_mask"], output["completion_mask"]], 1)
        with torch.no_grad(), self.accelerator.autocast():
            states = self.model(ids, attention_mask=mask, output_hidden_states=True).hidden_states[LAYER]
        given = {"inputs": self.given(inputs), "output": dict(output), "rewards": self.seen}
        self.__dict__.setdefault("batches", []).append({**given, "states": states, "ids": ids})
    return output


def _compute_loss(run: Any, self: Any, model: Any, inputs: Any) -> Any:
    loss = run(self, model, inputs)
    if ROW in inputs and isinstance(self, Keeping):  # the advantages are there by now, in the order of shuffled rows
        self.batches[-1]["output"]["advantages"] = inputs["advantages"][inputs[ROW].argsort()]
    return loss


replace(BiPACEGRPOTrainer, _generate_and_score_completions, _compute_loss)


def make_trainer(folder: Any, cls: Any = Keeping, model: Any = None, reward_funcs: Any = None, **options: Any) -> Any:
    """A trainer for two updates; options are arguments of the trainer or of its configuration."""
    names = ("rollout_func", "tools", "environment_factory", "peft_config", "eval_dataset", "processing_class")
    own = {"processing_class": TOKENIZER, **{name: options.pop(name) for name in names if name in options}}
    data = options.pop("train_dataset", None) or Dataset.from_dict({"prompt": PROMPTS})
    settings: dict[str, Any] = {
        "per_device_train_batch_size": 8, "max_steps": 2, "max_completion_length": 8,
        "report_to": [], "use_cpu": True, "logging_steps": 1, "save_strategy": "no", "disable_tqdm": True,
        "learning_rate": 1e-3, "bf16": False, "num_generations": 4, "bipace_method": "bipace",
    }  # fmt: skip
    args = BiPACEGRPOConfig(output_dir=str(folder), **{**settings, **options})
    model = make_model() if model is None else model
    return cls(model, reward_funcs or [reward], args, train_dataset=data, **own)


def by_hand(
    *ranks: dict[str, Any], config: bk.Config, mode: str = "action_tag", memory: bk.ValueMemory | None = None
) -> list[torch.Tensor]:
    """[B, T] of each rank's batch, as the page says, token by token: loops and bk.advantage() alone."""
    g, rows, spans = 4, [], []
    for rank, batch in enumerate(ranks):
        output = batch["output"]
        written = output["completion_mask"] * output.get("tool_mask", torch.ones_like(output["completion_mask"]))
        width = output["prompt_ids"].shape[1]
        first = rank * len(written)
        for b, mask in enumerate(written.tolist()):
            starts = [t for t, m in enumerate(mask) if m and (t == 0 or not mask[t - 1])] or [0]
            scores, extra, before = batch["rewards"][first + b], batch["inputs"][b], 0
            total = float("nan") if bool(scores.isnan().all()) else float(scores.nansum())
            given = extra.get("step_rewards") or [0.0] * (len(starts) - 1) + [total]
            beyond = total - sum(given) if config.estimator == "gae" and total == total else 0.0
            for i, t in enumerate(starts):
                end = next((u for u in range(t, len(mask)) if not mask[u]), len(mask))
                ids = output["completion_ids"][b, t:end].tolist()
                prompt = output["prompt_ids"][b][output["prompt_mask"][b].bool()]
                rows.append({
                    "group": (first + b) // g, "trajectory": first + b, "step": i, "episode_return": total,
                    "rewards": given[i] + (beyond if t == starts[-1] else 0.0),
                    "fingerprint": batch["states"][b, width + t - 1],
                    "observation": extra["observations"][i] if "observations" in extra else TOKENIZER.decode(
                        prompt if i == 0 else output["completion_ids"][b, before:t], skip_special_tokens=True),
                    "action": extra["actions"][i] if "actions" in extra else None, "ids": ids,
                    "truncated": extra.get("truncated", False),
                })  # fmt: skip
                spans.append((rank, b, t, end))
                before = end
    names = ("group", "trajectory", "step", "rewards", "episode_return", "truncated")
    records = {name: [row[name] for row in rows] for name in names}
    if rows[0]["action"] is not None:
        keys, parsed = bk.action_keys([row["action"] for row in rows], mode="text")
    else:
        masks = [[1] * len(row["ids"]) for row in rows]
        keys, parsed = bk.action_keys([row["ids"] for row in rows], mode=mode, token_bytes=TABLE, mask=masks)
    result = bk.advantage(
        **records, fingerprint=torch.stack([row["fingerprint"] for row in rows]), action_key=keys,
        action_parsed=None if mode == "first_n" else parsed, observation=[row["observation"] for row in rows],
        memory=memory, config=config,
    )  # fmt: skip
    found = [torch.zeros(batch["output"]["completion_mask"].shape) for batch in ranks]
    for (rank, b, t, end), value in zip(spans, result.advantage.tolist(), strict=True):
        found[rank][b, t:end] = value
    return found
