"""BiPACE in TRL on two processes (gloo): prompt groups that lie on both of them, and the advantages of one process."""

import json
import os
import sys
from pathlib import Path

import pytest
import tiny_trl as tt
import torch
from paths import HELPERS, program

import bipace_kernels as bk

SINGLETON = {"on_invalid": "singleton", "duplicates": "once"}


# 6 rows on each of two processes, groups of 4: the second group has two rows on either.
TWO_BATCHES = {"per_device_train_batch_size": 6, "num_iterations": 2, "max_steps": 3}
# Shuffled epochs do not come again in transformers after a checkpoint at the end of one.
MEMORY = {"bipace_method": "gae", "bipace_share": "memory", "bipace_memory_rows": 20, "shuffle_dataset": False}
WAYS = {
    "auto": {"per_device_train_batch_size": 6, "bipace_epsilon": "auto"},
    "follow": {"per_device_train_batch_size": 3, "gradient_accumulation_steps": 2, "bipace_epsilon": "follow"},
    "tapped": {**TWO_BATCHES, "bipace_method": "bigpo"},
    "gae": {**TWO_BATCHES, "bipace_method": "gae"},
    # No optimizer: transformers does not find the device "cpu:0" again, and a batch is scored before it is learned.
    "memory": {**TWO_BATCHES, **MEMORY, "save_strategy": "steps", "save_steps": 2, "save_only_model": True},
    "resumed": {**TWO_BATCHES, **MEMORY, "resume": "memory/checkpoint-2"},
    "seen by one": {"per_device_train_batch_size": 6, "seen_by": 1},
    "partly": {"per_device_train_batch_size": 6, "bipace_embedder": "ngram", "without": 1},
    "failing": {"per_device_train_batch_size": 6, "bad_rank": 1},
    "failing, tapped": {**TWO_BATCHES, "bad_rank": 1},
    "promptless": {"per_device_train_batch_size": 6, "promptless": 1},
    "promptless, tapped": {**TWO_BATCHES, "promptless": 1},
    "images": {"per_device_train_batch_size": 3, "gradient_accumulation_steps": 2, "images": 1},
}


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    return run(tmp_path_factory.mktemp("ranks"), WAYS)


def run(folder, ways, **more):
    paths = os.pathsep.join([str(Path(bk.__file__).parent.parent), os.environ.get("PYTHONPATH", "")])
    environment = {"OMP_NUM_THREADS": "1", "TRL_EXPERIMENTAL_SILENCE": "1", "CUDA_VISIBLE_DEVICES": ""}
    torchrun = ["-m", "torch.distributed.run", "--nproc_per_node=2", "--standalone"]
    argv = [sys.executable, *torchrun, HELPERS / "trl_ranks.py"]
    program(*argv, folder, json.dumps(ways), env={**environment, "PYTHONPATH": paths, **more}, timeout=220)
    return [torch.load(folder / f"rank{rank}.pt", weights_only=False) for rank in range(2)]


def compare(ranks, name, *configs, memory=None):
    """Two batches, each with its configuration, or all with the same."""
    batches = list(zip(*(rank[name]["batches"] for rank in ranks), strict=True))
    assert len(batches) == 2
    for both, config in zip(batches, configs * (2 // len(configs)), strict=True):
        wanted = tt.by_hand(*both, config=config, memory=memory)
        for batch, advantages in zip(both, wanted, strict=True):
            assert torch.equal(batch["output"]["advantages"], advantages)
    return batches


def test_advantages_are_those_of_one_process(ranks):
    epsilon = ranks[0]["auto"]["epsilon"]
    assert epsilon == ranks[1]["auto"]["epsilon"]
    (first, second), _ = compare(ranks, "auto", bk.Config.bipace(epsilon, **SINGLETON))
    assert len(first["inputs"]) == len(second["inputs"]) == 6
    log = ranks[0]["auto"]["log"][0]  # metrics are over both
    rows = first["turns"] + second["turns"]
    assert log["bipace/mean_cluster_size"] * log["bipace/cluster_count"] == pytest.approx(rows)
    found = [[log["bipace/epsilon"] for log in rank["follow"]["log"]] for rank in ranks]
    assert found[0] == found[1]
    compare(ranks, "follow", *(bk.Config.bipace(epsilon, **SINGLETON) for epsilon in found[0]))
    compare(ranks, "tapped", bk.Config.bigpo(**SINGLETON))
    compare(ranks, "gae", bk.Config.gae(**SINGLETON))
    compare(ranks, "seen by one", bk.Config.bipace(**SINGLETON))


def test_batches_before_are_in_the_memory_of_the_first_process(ranks):
    """And in the one file that it writes; a run that resumes there has the bits of the one that went on."""
    compare(ranks, "memory", bk.Config.gae(share="memory", **SINGLETON), memory=bk.ValueMemory(20))
    assert [rank["memory"]["memory"] for rank in ranks] == [rank["resumed"]["memory"] for rank in ranks] == [20, 0]
    for rank in ranks:
        (again,) = rank["resumed"]["batches"]
        assert torch.equal(again["output"]["advantages"], rank["memory"]["batches"][1]["output"]["advantages"])


def test_images_of_one_process_leave_all_without_hidden_states(ranks):
    """Those without would run a forward of their own, for which sharded parameters wait for the others."""
    assert all(rank["images"]["log"][-1]["bipace/embedder/ngram"] == 1.0 for rank in ranks)


def test_rewards_that_one_process_lacks_set_its_rows_aside_and_where_one_fails_all_do(ranks):
    """As rows without them in one process: a reward of its own kind would be compared with those of steps."""
    for first, second in zip(*(rank["partly"]["batches"] for rank in ranks), strict=True):
        assert first["output"]["advantages"].any() and not second["output"]["advantages"].any()
        turns = first["turns"] + second["turns"]
    for rank in ranks:
        assert rank["partly"]["log"][-1]["bipace/invalid_row_fraction"] == pytest.approx(second["turns"] / turns)
        assert rank["failing"]["error"].startswith("rank 1: step_rewards must have one entry per turn of the model")
        assert rank["failing, tapped"]["error"].startswith("rank 1: turn_starts must be columns below")
        for name in ("promptless", "promptless, tapped"):
            assert rank[name]["error"].startswith("rank 1: every prompt must have a token")


def sharded(**options):
    """One way for each forward that states may come from."""
    early = {"per_device_train_batch_size": 3, "gradient_accumulation_steps": 2}
    ways = {"loss": {"per_device_train_batch_size": 6}, "early exit": early, "tapped": TWO_BATCHES}
    return {name: {**way, **options} for name, way in ways.items()}


@pytest.mark.slow
def test_zero_3(tmp_path):
    pytest.importorskip("deepspeed", reason="DeepSpeed is not installed")
    sizes = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "gradient_clipping")
    stage = {"stage": 3, "stage3_param_persistence_threshold": 0}
    file = tmp_path / "zero.json"
    file.write_text(json.dumps({
        "zero_optimization": stage, "zero_allow_untested_optimizer": True, "zero_force_ds_cpu_optimizer": False,
        **dict.fromkeys(sizes, "auto"),
    }))  # fmt: skip
    ways = sharded(deepspeed=str(file))
    # A folder of its own for what DeepSpeed compiles: a process that was killed while it did leaves a lock behind.
    found = run(tmp_path, ways, DS_ACCELERATOR="cpu", TORCH_EXTENSIONS_DIR=str(tmp_path / "extensions"))
    for way in ways:
        compare(found, way, bk.Config.bipace(**SINGLETON))


@pytest.mark.slow
def test_fsdp(tmp_path):
    """accelerate's FSDP2, which trl_ranks.py lets shard on CPUs."""
    layers = {"fsdp_version": 2, "transformer_layer_cls_to_wrap": ["Qwen2DecoderLayer"]}
    ways = sharded(fsdp="full_shard auto_wrap", fsdp_config=layers)
    found = run(tmp_path, ways)
    for way in ways:
        assert all(rank[way]["parameters"] == {"DTensor"} for rank in found)
        compare(found, way, bk.Config.bipace(**SINGLETON))
