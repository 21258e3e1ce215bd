"""verl's configuration, a tokenizer, a tiny model and verl's FSDP engine around it, and advantages by hand: for the
adapter."""

import copy
import functools

import bipace_kernels.integrations.verl.plugin  # as verl loads it
import torch
import torch.distributed as dist
from bipace_kernels.integrations.verl.estimator import Bipace
from hydra import compose, initialize_config_module
from hydra.core.global_hydra import GlobalHydra
from omegaconf import OmegaConf, open_dict
from transformers import Qwen2Config, Qwen2ForCausalLM
from verl.utils.torch_functional import entropy_from_logits
from verl.workers.engine import EngineRegistry
from verl.workers.engine.fsdp import transformer_impl

import bipace_kernels as bk

LAYERS, DIM, VOCABULARY = 4, 32, 64


def config(*overrides):
    GlobalHydra.instance().clear()
    with initialize_config_module("verl.trainer.config", version_base=None):
        return compose("ppo_trainer", list(overrides))


@functools.cache
def default():
    return config()


def run_of(changes=(), **settings):
    """verl's configuration of a run with these settings, of method bipace without one, and changes as (key, value)."""
    cfg = copy.deepcopy(default())
    cfg.algorithm.adv_estimator, cfg.actor_rollout_ref.rollout.n = "bipace", 2
    with open_dict(cfg):
        cfg.algorithm.bipace = {"method": "bipace", **settings}
        for key, value in changes:
            OmegaConf.update(cfg, key, value)
    return cfg


def of(changes=(), **settings):
    """The estimator of such a run."""
    return Bipace(run_of(changes, **settings))


class Words:
    """A tokenizer whose ids are bytes."""

    def convert_tokens_to_ids(self, token):
        return None  # it has no token of this name

    def batch_decode(self, ids, skip_special_tokens):
        return [bytes(row).decode("latin-1") for row in ids]


def model():
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=VOCABULARY, hidden_size=DIM, intermediate_size=48, num_hidden_layers=LAYERS, num_attention_heads=4,
        num_key_value_heads=2, tie_word_embeddings=False,
    )  # fmt: skip
    return Qwen2ForCausalLM(config).eval()


def engine(module, monkeypatch, sp=1):
    cls = EngineRegistry.get_engine_cls("language_model", "fsdp")
    made = object.__new__(cls)
    made.module = module
    off = {"entropy_checkpointing": False, "entropy_from_logits_with_chunking": False}
    made.engine_config = type("Config", (), off)()
    made.ulysses_sequence_parallel_size, made.use_ulysses_sp = sp, sp > 1
    made.ulysses_parallel_group = dist.group.WORLD if sp > 1 else None
    made.pad_to_length = False
    made.compute_entropy_from_logits = entropy_from_logits
    made._autocast_dtype = torch.float32
    monkeypatch.setattr(made, "get_data_parallel_group", lambda: dist.new_group([dist.get_rank()]) if sp > 1 else None)
    monkeypatch.setattr(made, "get_data_parallel_size", lambda: 1)
    monkeypatch.setattr(transformer_impl, "get_device_id", lambda: "cpu")
    monkeypatch.setattr(transformer_impl, "get_device_name", lambda: "cpu")
    monkeypatch.setattr("verl.utils.seqlen_balancing.get_device_name", lambda: "cpu")
    return made


def advantages_of(rows, who, order, policy, layer, config):
    """bk.advantage() of rows of tokens, states by output_hidden_states, a row at a time: the result, and [T] of each
    row.

    rows   by name: input_ids, responses, response_mask, rm_scores; attention_mask where responses are padded
    who    prompt and number of each row's rollout
    order  rows that count, by rollout and time
    """
    records = {name: [] for name in ("group", "trajectory", "rewards", "fingerprint", "action_key")}
    spans = []
    for place, i in enumerate(order):
        mask, ids = rows["response_mask"][i].tolist(), rows["input_ids"][i]
        width = int(rows["attention_mask"][i][-len(mask) :].sum()) if "attention_mask" in rows else len(mask)
        last = place + 1 == len(order) or who[i] != who[order[place + 1]]
        starts = [t for t, on in enumerate(mask) if on and (t == 0 or not mask[t - 1])]
        with torch.no_grad():
            states = policy(ids[None], output_hidden_states=True).hidden_states[layer][0]
        for t in starts:
            records["group"].append(who[i][0])
            records["trajectory"].append(str(who[i]))
            records["rewards"].append(float(rows["rm_scores"][i].sum()) if last and t == starts[-1] else 0.0)
            records["fingerprint"].append(states[len(ids) - width + t - 1])
            records["action_key"].append(int(rows["responses"][i][t]))
            spans.append((i, t, next((u for u in range(t, len(mask)) if not mask[u]), len(mask))))
    records["fingerprint"] = torch.stack(records["fingerprint"])
    result = bk.advantage(**records, config=config)
    wanted = [torch.zeros(len(row)) for row in rows["response_mask"]]
    for (i, a, b), value in zip(spans, result.advantage, strict=True):
        wanted[i][a:b] = value
    return result, wanted
