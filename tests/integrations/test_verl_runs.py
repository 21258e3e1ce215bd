"""verl's trainers as a whole, by `python -m verl.trainer.main_ppo`, on CPUs: two updates whose advantages are
bk.advantage()'s.

Real: Ray, TransferQueue, data loader, agent loop workers, reward loop, replay buffer, balancing, FSDP2 on gloo (model,
optimizer, log-probs, PPO loss), synchronisation of weights, metrics.  verl_on_cpu.py has what is not.
"""

import json
import os
import subprocess
import sys

import pytest
import torch

import bipace_kernels as bk

pytest.importorskip("transfer_queue")
import tiny_trl as tt
from bipace_kernels.integrations.verl.estimator import HIDDEN, IDS, LABELS
from datasets import Dataset
from paths import HELPERS
from verl_stand_ins import advantages_of

pytestmark = pytest.mark.slow
TIMEOUT = 280  # of a run, which takes about a minute of two idle cores
TEMPLATE = "{% for m in messages %}<{{ m['content'] }}>{% endfor %}{% if add_generation_prompt %}:{% endif %}"


@pytest.fixture(scope="module")
def start(tmp_path_factory):
    """A folder with a model, its tokenizer, prompts, and a reward."""
    folder = tmp_path_factory.mktemp("start")
    model = tt.make_model()
    model.lm_head.weight.data *= 40  # it knows what it wants: actions come again
    model.save_pretrained(folder / "model")
    tokenizer = tt.make_tokenizer()
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(folder / "model")
    rows = [
        {"prompt": [{"role": "user", "content": text}], "data_source": "tiny", "reward_model": {"ground_truth": ""},
         "extra_info": {"index": i}}
        for i, text in enumerate(tt.PROMPTS)
    ]  # fmt: skip
    Dataset.from_list(rows).to_parquet(str(folder / "data.parquet"))
    reward = "def compute_score(data_source, solution_str, **_):\n    return float(sum(map(ord, solution_str)) % 7)\n"
    (folder / "reward.py").write_text(reward)
    return folder


def train(start, folder, environment, *changes):
    arguments = [
        f"data.train_files={start}/data.parquet", f"data.val_files={start}/data.parquet", "data.train_batch_size=2",
        "data.max_prompt_length=32", "data.max_response_length=16", "data.dataloader_num_workers=0",
        f"actor_rollout_ref.model.path={start}/model",
        "+actor_rollout_ref.model.override_config.attn_implementation=eager",
        "actor_rollout_ref.model.enable_gradient_checkpointing=False",
        "actor_rollout_ref.actor.strategy=fsdp2", "actor_rollout_ref.actor.optim.lr=1e-3",
        "actor_rollout_ref.actor.ppo_mini_batch_size=2", "actor_rollout_ref.actor.use_dynamic_bsz=True",
        "actor_rollout_ref.actor.fsdp_config.use_torch_compile=False",
        "+actor_rollout_ref.actor.fsdp_config.mixed_precision.param_dtype=fp32",
        "actor_rollout_ref.rollout.name=hf", "actor_rollout_ref.rollout.n=3",
        "actor_rollout_ref.rollout.agent.num_workers=1", "actor_rollout_ref.rollout.tensor_model_parallel_size=1",
        "actor_rollout_ref.rollout.agent.default_agent_loop=turns",
        "reward.num_workers=1", f"reward.custom_reward_function.path={start}/reward.py",
        "algorithm.adv_estimator=bipace", "+algorithm.bipace.action_key_mode=first_n",
        "+algorithm.bipace.n_action_tokens=1", "+algorithm.bipace.method=bipace",
        "trainer.device=cpu", "trainer.nnodes=1", "trainer.n_gpus_per_node=1", "trainer.total_training_steps=2",
        "trainer.val_before_train=False", "trainer.test_freq=-1", "trainer.save_freq=-1", "trainer.logger=[file]",
        f"trainer.default_local_dir={folder}/checkpoints",
        "transfer_queue.backend.SimpleStorage.num_data_storage_units=1",
        "ray_kwargs.ray_init.num_cpus=12", "+ray_kwargs.ray_init.num_gpus=3",
        "+ray_kwargs.ray_init.include_dashboard=False", "+ray_kwargs.ray_init.object_store_memory=100000000", *changes,
    ]  # fmt: skip
    paths = os.pathsep.join([str(HELPERS), environment["PYTHONPATH"]])
    environment = {
        **environment, "PYTHONPATH": paths, "VERL_ON_CPU_FOLDER": str(folder), "VERL_PLATFORM": "cpu",
        "VERL_USE_EXTERNAL_MODULES": "verl_on_cpu", "VERL_ENGINE_DEVICE": "cuda", "VERL_ENGINE_VENDOR": "nvidia",
        "RAY_worker_niceness": "0", "VERL_FILE_LOGGER_PATH": f"{folder}/log.jsonl", "HF_HUB_OFFLINE": "1",
    }  # fmt: skip
    with open(folder / "out.txt", "w") as out:
        done = subprocess.run(
            [sys.executable, "-W", "ignore", "-m", "verl.trainer.main_ppo", *arguments], env=environment, stdout=out,
            stderr=subprocess.STDOUT, timeout=TIMEOUT, check=False, cwd=folder,
        )  # fmt: skip
    assert done.returncode == 0, (folder / "out.txt").read_text()[-6000:]


def rows_of(folder, step, ranks, answer):
    """The rows of an update as the workers got them, of all ranks, without padding."""
    rows = {}
    for rank in range(ranks):
        found = torch.load(folder / f"update-{step}-{rank}.pt", weights_only=False)
        assert {HIDDEN, LABELS} & set(found["answered"]) == {answer}
        assert not {HIDDEN, LABELS, IDS} & set(found["names"])  # nobody sends the states on
        for name, values in found["rows"].items():
            rows.setdefault(name, []).extend(values)
    real = [i for i, uid in enumerate(rows["uid"]) if not str(uid).startswith("pad")]
    return {name: [values[i] for i in real] for name, values in rows.items()}


def by_hand(rows, model, epsilon):
    number = rows["bipace_row" if "bipace_row" in rows else "session_id"]
    who = [(str(uid), int(n)) for uid, n in zip(rows["uid"], number, strict=True)]
    # A step's prompt is longer than the last.
    order = sorted(range(len(who)), key=lambda i: (who[i], len(rows["input_ids"][i])))
    return advantages_of(rows, who, order, model, tt.LAYER, bk.Config.bipace(epsilon))


def check(folder, ranks=1, answer=HIDDEN):
    """Two updates, by the records; between them the weights move and are handed on to the rollouts."""
    logs = {line["step"]: line["data"] for line in map(json.loads, (folder / "log.jsonl").read_text().splitlines())}
    model, weights = tt.make_model().eval(), {step: torch.load(folder / f"weights-{step}.pt") for step in range(3)}
    assert not torch.equal(weights[0]["lm_head.weight"], weights[2]["lm_head.weight"])
    learned = False
    for step in (1, 2):
        rows = rows_of(folder, step, ranks, answer)
        model.load_state_dict(weights[step - 1])
        result, wanted = by_hand(rows, model, logs[step]["bipace/epsilon"])
        assert len(rows["uid"]) >= 6
        learned |= any(row.any() for row in wanted)
        for got, mine in zip(rows["advantages"], wanted, strict=True):
            torch.testing.assert_close(got, mine, atol=1e-5, rtol=0)
        for name, value in result.metrics().items():
            assert logs[step][name] == pytest.approx(value, abs=1e-5), name
        assert logs[step]["bipace/embedder/actor_hidden"] == 1.0
    assert learned  # chance may give the rollouts of a batch equal rewards, not of two


WAYS = {
    "a row per rollout": [],
    "a row per step, epsilon chosen and saved": ["actor_rollout_ref.rollout.agent.default_agent_loop=steps",
                                                 "+algorithm.bipace.epsilon=auto", "trainer.save_freq=2"],
    "two workers that cluster": ["trainer.n_gpus_per_node=2", "+algorithm.bipace.cluster_on=workers"],
    "colocate_async": ["trainer.v1.trainer_mode=colocate_async"],
    "separate_async": [
        "trainer.v1.trainer_mode=separate_async", "trainer.v1.separate_async.parameter_sync_step=1",
        "actor_rollout_ref.rollout.nnodes=1", "actor_rollout_ref.rollout.n_gpus_per_node=1",
        "actor_rollout_ref.rollout.checkpoint_engine.backend=file",
    ],
    "v0": ["trainer.use_v1=False"],
}  # fmt: skip


@pytest.mark.parametrize("way", WAYS)
def test_two_updates(start, installed, tmp_path, way):
    train(start, tmp_path, installed, *WAYS[way])
    check(tmp_path, *((2, LABELS) if "workers" in way else ()))
    if "saved" in way:
        chosen = json.loads((tmp_path / "checkpoints/global_step_2/bipace.json").read_text())["epsilon"]
        first, second = map(json.loads, (tmp_path / "log.jsonl").read_text().splitlines())
        for line in (first, second):  # verl's means of metrics round
            assert line["data"]["bipace/epsilon"] == pytest.approx(chosen)
