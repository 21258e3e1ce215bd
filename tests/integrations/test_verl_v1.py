"""verl's v1 trainer on TransferQueue and a local Ray: two updates of its own _step_once(), on a tiny Qwen2.

Real: TransferQueue, the trainer's methods from the sampled batch to the metrics, verl's bridge between the queue and
workers, its FSDP engine from forward_backward_batch() on, and its PPO loss.  Stand-ins: rollouts (rows put into the
queue as agent loops put them), the worker group (it calls the engine in this process), the sampler.
"""

import functools
import itertools
import os
import uuid

import pytest
import torch
import torch.distributed as dist
from refusals import refused

import bipace_kernels as bk

pytest.importorskip("transfer_queue")
from bipace_kernels.integrations.verl.estimator import HIDDEN, IDS, LABELS, NAME
from verl_stand_ins import Words, advantages_of, engine, model, run_of

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def queue(tmp_path_factory):
    os.environ["RAY_worker_niceness"] = "0"  # noqa: SIM112  # else a busy machine hardly lets the queue's actors start
    import ray
    import transfer_queue as tq
    from omegaconf import OmegaConf

    ray.init(num_cpus=10, include_dashboard=False, log_to_driver=False, object_store_memory=100 << 20)
    tq.init(OmegaConf.create({"backend": {"SimpleStorage": {"num_data_storage_units": 1}}}))
    dist.init_process_group("gloo", init_method=f"file://{tmp_path_factory.mktemp('gloo')}/store", rank=0, world_size=1)
    yield tq
    dist.destroy_process_group()
    tq.close()
    ray.shutdown()


class Sampler:
    """Puts rollouts into the queue as AgentLoopWorkerTQ does, and gives them out as ReplayBuffer does.

    Two prompts, three rollouts each.  multi_turn: a row per rollout; else a row per step, each with its rollout's
    reward.
    """

    def __init__(self, multi_turn):
        self.multi_turn, self.generator = multi_turn, torch.Generator().manual_seed(3)

    def sample(self, global_steps, partition_id, batch_size):
        import transfer_queue as tq
        from verl.experimental.agent_loop.agent_loop import AgentLoopMetrics, AgentLoopOutput
        from verl.utils.tensordict_utils import list_of_dict_to_tensordict

        def ids(n):
            return torch.randint(1, 64, (n,), generator=self.generator).tolist()

        keys, fields, tags = [], [], []
        for prompt in range(2):
            uid, start = uuid.uuid4().hex, ids(4)
            for session in range(3):
                turns = [(ids(3), ids(2)) for _ in range(1 + (session + prompt) % 3)]
                if self.multi_turn:
                    mask = [on for _ in turns for on in [1, 1, 1, 0, 0]][:-2]
                    rows = [(start, list(itertools.chain(*itertools.chain(*turns)))[:-2], mask)]
                else:
                    rows = [(start[:1] + b if i else start, a, [1, 1, 1]) for i, (a, b) in enumerate(turns)]
                for number, (begin, response, mask) in enumerate(rows):
                    output = AgentLoopOutput(
                        prompt_ids=begin, response_ids=response, response_mask=mask, metrics=AgentLoopMetrics(),
                        response_logprobs=[-1.0] * len(response), reward_score=float(session == prompt), num_turns=2,
                        extra_fields={"min_global_steps": 1, "max_global_steps": 1},
                    )  # fmt: skip
                    field = {**output.as_dict(), "uid": uid, "session_id": session}
                    field["loss_mask"] = field["response_mask"]
                    field["input_ids"] = torch.tensor(begin + response)
                    field["position_ids"] = torch.arange(len(begin + response))
                    field["multi_modal_inputs"] = {}
                    keys.append(f"{uid}_{session}_{number}")
                    fields.append(field)
                    tags.append(
                        {"prompt_len": len(begin), "response_len": len(response), "seq_len": len(begin + response),
                         "min_global_steps": 1, "max_global_steps": 1, "global_steps": global_steps}
                    )  # fmt: skip
        made = list_of_dict_to_tensordict(fields)
        return tq.kv_batch_put(keys=keys, fields=made, tags=tags, partition_id=partition_id), {}


class Workers:
    """A worker group of one, in this process: verl's bridge to the queue, its engine, its loss."""

    def __init__(self, monkeypatch, actor):
        from verl.utils.transferqueue_utils import tqbridge

        self.engine = engine(model(), monkeypatch)
        self.engine.engine_config.use_no_sync_for_gradient_accumulation = False
        monkeypatch.setattr(self.engine, "get_data_parallel_group", lambda: dist.group.WORLD)
        self.optimizer = torch.optim.SGD(self.engine.module.parameters(), lr=0.1)
        self.actor, self.seen, self.states = actor, [], []
        self._dispatch_info = {"actor": [0]}
        self.compute_log_prob, self.update_actor = tqbridge()(self._log_prob), tqbridge()(self._update)

    def _run(self, data, loss, forward_only):
        from verl.utils import tensordict_utils as tu

        layout = {"use_remove_padding": True, "use_dynamic_bsz": True, "use_fused_kernels": False}
        tu.assign_non_tensor(data, max_token_len_per_gpu=300, **layout)
        return self.engine.forward_backward_batch(data, loss, forward_only)["model_output"]

    def _log_prob(self, data):
        from verl.utils import tensordict_utils as tu

        self.seen.append(set(data.keys()))
        with torch.no_grad():
            return tu.get_tensordict(self._run(data, None, True), {"metrics": {"mfu": 0.0}})

    def _update(self, data):
        from verl.utils import tensordict_utils as tu
        from verl.workers.utils.losses import ppo_loss

        self.seen.append(set(data.keys()))
        self.optimizer.zero_grad()
        self._run(data, functools.partial(ppo_loss, config=self.actor), False)
        self.optimizer.step()
        return tu.get_tensordict({}, {"metrics": {"mfu": [0.0]}})


@pytest.fixture
def trainer(queue, monkeypatch):
    """A v1 trainer of a run with these settings, past everything that needs GPUs and servers."""
    from verl.trainer.ppo.v1 import get_trainer_cls
    from verl.workers.config import FSDPActorConfig

    def make(multi_turn=True, changes=(), **settings):
        changes = [
            ("actor_rollout_ref.rollout.n", 3), ("actor_rollout_ref.actor.ppo_mini_batch_size", 4),
            ("actor_rollout_ref.actor.use_dynamic_bsz", True), ("algorithm.adv_estimator", "bipace"), *changes,
        ]  # fmt: skip
        cfg = run_of(changes, **{"layer": -2, "action_key_mode": "first_n", "n_action_tokens": 1, **settings})
        monkeypatch.setattr(get_trainer_cls("sync"), "_build_replay_buffer", lambda self: Sampler(multi_turn))
        module = "verl.trainer.ppo.v1.trainer_base"
        monkeypatch.setattr(f"{module}.RolloutMoELoadBalanceMetricsAccumulator", lambda **_: None)
        made = get_trainer_cls("sync")(cfg)
        actor = FSDPActorConfig(strategy="fsdp", rollout_n=3, ppo_mini_batch_size=4, use_dynamic_bsz=True)
        made.actor_rollout_wg, made.tokenizer = Workers(monkeypatch, actor), Words()
        made.tokenizer.eos_token_id = 0
        made.checkpoint_manager = type("Manager", (), {"sleep_replicas": lambda self: None})()
        made.resource_pool_manager = type("Pool", (), {"get_n_gpus": lambda self: 1})()
        made.reward_loop_manager = type("Rewards", (), {"reward_loop_worker_handles": []})()
        made.use_reference_policy, made.ref_in_actor, made.curr_step_profile, made.global_steps = True, True, False, 1
        return made

    return make


def by_hand(tq, batch, module, config):
    """The batch's advantages, [B] rows of tokens; those of its records; and the result."""
    names = ["input_ids", "responses", "response_mask", "rm_scores", "advantages"]
    data = tq.kv_batch_get(keys=batch.keys, partition_id=batch.partition_id, select_fields=names)
    rows = {name: data[name].unbind() for name in names}
    keys = [key.rsplit("_", 2) for key in batch.keys]
    real = [i for i, key in enumerate(batch.keys) if not key.startswith("pad")]
    order = sorted(real, key=lambda i: (keys[i][0], *map(int, keys[i][1:])))
    result, wanted = advantages_of(rows, [tuple(key[:2]) for key in keys], order, module, -2, config)
    return rows["advantages"], wanted, result


def agree(queue, batch, before, config, atol=1e-6):
    """The batch has the advantages of its records; these, and their result."""
    got, wanted, result = by_hand(queue, batch, before, config)
    for mine, theirs in zip(got, wanted, strict=True):
        torch.testing.assert_close(mine, theirs, atol=atol, rtol=0)
    assert any(row.any() for row in got)
    return wanted, result


def of_now(run):
    """A copy of the policy."""
    before = model()
    before.load_state_dict(run.actor_rollout_wg.engine.module.state_dict())
    return before


@pytest.mark.parametrize("multi_turn", [True, False])
@pytest.mark.parametrize("method", ["bipace", "gae"])
def test_an_update_on_the_advantages_of_the_records(queue, trainer, method, multi_turn):
    """Without whitening, whose basis depends on the last bits of equal states.  test_verl_runs.py has whole runs."""
    run = trainer(multi_turn, method=method, **({"epsilon": 0.6} if method == "bipace" else {"kernel_directions": 0}))
    before, metrics, timing = of_now(run), {}, {"step": 1.0}
    batch = run._step_once(metrics, timing, 2)
    assert len(batch) == 12 and sum(key.startswith("pad") for key in batch.keys) == (6 if multi_turn else 0)
    config = bk.Config.bipace(0.6) if method == "bipace" else bk.Config.gae(kernel_directions=None)
    wanted, result = agree(queue, batch, before, config, atol=2e-6)
    assert metrics["bipace/embedder/actor_hidden"] == 1.0 and ("bipace/epsilon" in metrics) == (method == "bipace")
    for name, value in result.metrics().items():
        assert metrics[name] == pytest.approx(value, abs=1e-5), name
    log_prob, *others = run.actor_rollout_wg.seen
    assert NAME in log_prob and len(others) == 2  # the reference's and the update's, neither tapped nor sent the states
    assert not any(other & {NAME, HIDDEN, LABELS, IDS} for other in others)
    run._compute_metrics(batch, metrics, timing, global_steps=1, epoch=0)
    assert metrics["critic/advantages/max"] == pytest.approx(max(float(row.max()) for row in wanted), abs=1e-6)
    queue.kv_clear(keys=batch.keys, partition_id="train")


def test_bypass_mode_runs_a_forward_that_ends_early(queue, trainer):
    bypass = [("algorithm.rollout_correction.bypass_mode", True)]
    run = trainer(changes=bypass, embedder="actor_hidden", epsilon=0.6)
    run.use_reference_policy = False
    before = of_now(run)
    batch = run._step_once({}, {}, 2)
    agree(queue, batch, before, bk.Config.bipace(0.6))
    queue.kv_clear(keys=batch.keys, partition_id="train")


def test_a_failure_writes_nothing(queue, trainer):
    run = trainer(epsilon=0.6)
    object.__setattr__(run.bipace.settings, "n_action_tokens", 0)
    sampled = []
    sample = run.replay_buffer.sample
    run.replay_buffer.sample = lambda **kw: (sampled.append(sample(**kw)), sampled[0])[1]
    refused("n must be", run._step_once, {}, {}, 2)
    keys = sampled[0][0].keys
    assert "advantages" not in queue.kv_batch_get(keys=keys, partition_id="train")
    queue.kv_clear(keys=list(queue.kv_list("train")["train"]), partition_id="train")


def test_other_estimators_are_verl_s_own(queue, trainer):
    run = trainer(changes=[("algorithm.adv_estimator", "grpo")])
    assert run.bipace is None
    metrics = {}
    batch = run._step_once(metrics, {}, 2)
    assert not any(name.startswith("bipace") for name in metrics)
    assert not any(NAME in seen for seen in run.actor_rollout_wg.seen)
    queue.kv_clear(keys=batch.keys, partition_id="train")
