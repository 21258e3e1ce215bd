"""verl's FSDP engine on a CPU, a tiny Qwen2 in it: states of every turn beside the log-probs, in every layout.

The engine is verl's own class from forward_backward_batch() on; building it needs GPUs, so its attributes are set here,
and the model is not sharded (bipace_kernels.hidden has its own tests of FSDP).
"""

import os
from contextlib import nullcontext
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.distributed as dist
from bipace_kernels.integrations._rollout_rows import RolloutRows, numbered
from bipace_kernels.integrations.verl import driver_v0
from bipace_kernels.integrations.verl.engine import labels_of
from bipace_kernels.integrations.verl.estimator import HIDDEN, NAME, Bipace
from marks import slow
from refusals import refused
from spawned import spawn
from transformers.masking_utils import create_causal_mask
from verl import DataProto
from verl.trainer.ppo import ray_trainer
from verl.utils import tensordict_utils as tu
from verl.utils.ulysses import set_ulysses_sequence_parallel_group
from verl.workers.utils.padding import left_right_2_no_padding
from verl_stand_ins import VOCABULARY, engine, model, run_of

# Row by row: tokens of the prompt, and the response's mask.  Two turns; one; none (truncated); one, behind tool tokens.
ROWS = [(5, [1, 1, 0, 0, 1]), (3, [1, 1, 1]), (4, [0, 0]), (2, [0, 1, 1, 0, 0, 1, 1])]
TURNS = [2, 1, 1, 2]  # a row without a turn has the state before its response
SETTINGS = {"temperature": 1.0, "calculate_entropy": False, "compute_loss": False}


def sequences():
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(0, VOCABULARY, (p + len(m),), generator=generator) for p, m in ROWS]


def batch_v1(**settings):
    """What TransferQueue gives a worker: everything jagged."""

    def jagged(rows):
        return torch.nested.as_nested_tensor([torch.as_tensor(row) for row in rows], layout=torch.jagged)

    ids = sequences()
    mask = jagged([m for _, m in ROWS])
    tensors = {
        "input_ids": jagged(ids),
        "position_ids": jagged([torch.arange(len(row)) for row in ids]),
        "prompts": jagged([row[:p] for row, (p, _) in zip(ids, ROWS, strict=True)]),
        "responses": jagged([row[p:] for row, (p, _) in zip(ids, ROWS, strict=True)]),
        "response_mask": mask,
        "loss_mask": mask,
    }
    return tu.get_tensordict(tensors, {**SETTINGS, **settings})


def padded():
    """What RayPPOTrainer holds: prompts padded on the left, responses on the right."""
    p_max, t_max = max(p for p, _ in ROWS), max(len(m) for _, m in ROWS)
    b = len(ROWS)
    ids, attended = torch.zeros(b, p_max + t_max, dtype=torch.int64), torch.zeros(b, p_max + t_max, dtype=torch.int64)
    mask = torch.zeros(b, t_max, dtype=torch.int64)
    for i, (row, (p, m)) in enumerate(zip(sequences(), ROWS, strict=True)):
        at = slice(p_max - p, p_max + len(m))
        ids[i, at], attended[i, at], mask[i, : len(m)] = row, 1, torch.tensor(m)
    return {
        "input_ids": ids, "attention_mask": attended, "position_ids": (attended.cumsum(1) - 1).clamp(min=0),
        "prompts": ids[:, :p_max], "responses": ids[:, p_max:], "response_mask": mask,
    }  # fmt: skip


def batch_v0(**settings):
    """What RayPPOTrainer sends: made packed rows of by verl's own function."""
    return left_right_2_no_padding(tu.get_tensordict(padded(), {**SETTINGS, **settings}))


def layout(packed, dynamic):
    return {
        "use_remove_padding": packed, "use_dynamic_bsz": dynamic, "use_fused_kernels": False,
        "max_token_len_per_gpu": 16, "micro_batch_size_per_gpu": 2,
    }  # fmt: skip


def asks(layer, early_exit=False):
    """What the driver sends beside a batch."""
    return {NAME: {"layer": layer, "early_exit": early_exit}}


@pytest.fixture(scope="module")
def group(tmp_path_factory):
    dist.init_process_group("gloo", init_method=f"file://{tmp_path_factory.mktemp('gloo')}/store", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def expected(module, layer):
    """hidden_states at the token before each turn, each row in a forward of its own."""
    found = []
    for row, (p, m) in zip(sequences(), ROWS, strict=True):
        states = module(row[None], output_hidden_states=True).hidden_states[layer][0]
        starts = [t for t, on in enumerate(m) if on and (t == 0 or not m[t - 1])] or [0]
        found.append(states[[p + t - 1 for t in starts]])
    return found


def close(states, wanted):
    for mine, theirs in zip(states, wanted, strict=True):
        torch.testing.assert_close(mine, theirs, atol=1e-6, rtol=0)


@pytest.mark.parametrize("make", [batch_v1, batch_v0])
@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize("dynamic", [True, False])
def test_states_come_back_beside_the_log_probs(group, monkeypatch, make, packed, dynamic):
    module = model()
    made = engine(module, monkeypatch)
    with torch.no_grad():
        plain = made.forward_backward_batch(make(**layout(packed, dynamic)), None, forward_only=True)["model_output"]
        out = made.forward_backward_batch(make(**layout(packed, dynamic), **asks(-2)), None, forward_only=True)
        wanted = expected(module, -2)
    states = out["model_output"][HIDDEN].unbind()
    assert [len(rows) for rows in states] == TURNS
    close(states, wanted)
    assert HIDDEN not in plain  # nobody asked: nothing is kept
    for mine, theirs in zip(out["model_output"]["log_probs"].unbind(), plain["log_probs"].unbind(), strict=True):
        assert torch.equal(mine, theirs)


@pytest.mark.parametrize("packed", [True, False])
def test_a_forward_of_its_own_ends_early(group, monkeypatch, packed):
    module = model()
    made = engine(module, monkeypatch)
    ran = []
    for i, block in enumerate(module.model.layers):
        block.register_forward_hook(lambda *_, i=i: ran.append(i))
    settings = {**layout(packed, False), **asks(-3, early_exit=True)}
    with torch.no_grad():
        out = made.forward_backward_batch(batch_v1(**settings), None, forward_only=True)["model_output"]
        assert list(out) == [HIDDEN] and sorted(set(ran)) == [0, 1]
        wanted = expected(module, -3)
    close(out[HIDDEN].unbind(), wanted)
    with pytest.raises(ValueError, match="use_fused_kernels=False"):
        made.forward_backward_batch(batch_v1(**{**settings, "use_fused_kernels": True}), None, forward_only=True)


def test_training_forwards_keep_nothing(group, monkeypatch):
    module = model()
    made = engine(module, monkeypatch)
    made.engine_config.use_no_sync_for_gradient_accumulation = False
    monkeypatch.setattr(made, "_gradient_sync_context", lambda **_: nullcontext())
    data = batch_v1(**layout(True, False), **asks(-2), return_model_output=True)

    def loss(model_output, data, dp_group):
        return sum(row.sum() for row in model_output["log_probs"].unbind()), {}

    out = made.forward_backward_batch(data, loss, forward_only=False)["model_output"]
    assert list(out) == ["log_probs"] and module.lm_head.weight.grad is not None


def test_wrong_use_names_the_setting(group, monkeypatch):
    made = engine(model(), monkeypatch)
    with pytest.raises(ValueError, match=r"algorithm\.bipace\.layer=-9: layer must be .* 4 blocks"):
        made.forward_backward_batch(batch_v1(**layout(True, False), **asks(-9)), None, forward_only=True)
    fused = {**layout(True, False), "use_fused_kernels": True}
    words = "embedder=actor_hidden has no hidden states: .*use_fused_kernels=False.*embedder=auto, .*embedder=ngram"
    refused(words, made.forward_backward_batch, batch_v1(**fused, **asks(-2, early_exit=True)), None, forward_only=True)
    data = batch_v1(**layout(True, False), **asks(-2))
    del data["response_mask"]
    with pytest.raises(ValueError, match=r"response_mask must come with .* AgentLoopOutput\.response_mask"):
        made.forward_backward_batch(data, None, forward_only=True)
    assert made._tapped is None


@pytest.mark.parametrize("bypass", [False, True])
def test_the_v0_driver_keeps_the_states_and_uses_them(group, monkeypatch, bypass):
    module = model()
    made = engine(module, monkeypatch)
    asked = []

    def compute_log_prob(data):
        asked.append(set(data.keys()))
        tu.assign_non_tensor(data, **layout(True, True))
        with torch.no_grad():
            output = made.forward_backward_batch(data, None, forward_only=True)["model_output"]
        return tu.get_tensordict(output, {"metrics": {"mfu": 0.0}})

    changes = [("algorithm.rollout_correction.bypass_mode", bypass)]
    trainer = object.__new__(ray_trainer.RayPPOTrainer)
    trainer.config = run_of(changes, embedder="actor_hidden", layer=-2, epsilon=0.5, action_key_mode="first_n")
    trainer.bipace, trainer.bipace_hidden, trainer.tokenizer = Bipace(trainer.config), {}, None
    trainer.actor_rollout_wg = SimpleNamespace(compute_log_prob=compute_log_prob, world_size=1)
    monkeypatch.setattr(trainer, "_get_dp_size", lambda *_: 2, raising=False)

    def balanced():
        uid = np.array(list("aabb"), dtype=object)
        batch = DataProto.from_dict(tensors=padded(), non_tensors={"uid": uid}, meta_info={"temperature": 1.0})
        trainer._balance_batch(batch, metrics={})
        return batch

    data = balanced()
    numbers = data.non_tensor_batch["bipace_row"].astype(int)
    moved = (numbers - numbers.min()).tolist()
    assert sorted(moved) == [0, 1, 2, 3]
    if not bypass:
        data = data.union(trainer._compute_old_log_prob(data)[0])
        assert trainer.actor_rollout_wg.compute_log_prob is compute_log_prob
    states = trainer.states_of(data)
    assert len(asked) == 1 and NAME in asked[0]
    with torch.no_grad():
        wanted = expected(module, -2)
    close(states, [wanted[row] for row in moved])
    assert issubclass(ray_trainer.RayPPOTrainer, driver_v0.Trainer)

    # Rollout correction rejects tokens before verl computes advantages: they get 0, and turns stay as they were.
    monkeypatch.setattr(driver_v0, "_trainer", trainer)
    written, found = data.batch["response_mask"], []
    data.batch["token_level_rewards"] = data.batch["token_level_scores"] = torch.rand(written.shape)
    for kept in () if bypass else (written, written * (torch.arange(written.shape[1]) != 1)):
        data.batch["response_mask"], trainer.bipace_hidden = kept, dict(zip(numbers, states, strict=True))
        ray_trainer.compute_advantage(data, "bipace", gamma=1.0, lam=1.0, num_repeat=2, config=None)
        found.append(data.batch["advantages"])
        assert found[0].any() and torch.equal(found[-1], found[0] * kept)

    # States of a batch that never came to its advantages are not those of the next one, whose forward gives none.
    stale, fresh = balanced(), balanced()
    trainer.bipace.bypass = False
    trainer._compute_old_log_prob(stale)
    assert trainer.bipace_hidden
    refused("holds states of 4 rows, but the batch has 4 and their row numbers", trainer.states_of, fresh)


def _slice(rank, folder):
    """One of two Ulysses ranks, with half of the packed row; the model is run whole, its output sliced."""
    os.environ["RANK"], os.environ["WORLD_SIZE"] = str(rank), "2"
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    with pytest.MonkeyPatch.context() as patch, torch.no_grad():
        set_ulysses_sequence_parallel_group(dist.group.WORLD)
        module = model()
        wanted = expected(module, -2)
        gather_and_slice(module, rank)
        made = engine(module, patch, sp=2)
        out = made.forward_backward_batch(batch_v1(**layout(True, False), **asks(-2)), None, forward_only=True)
        close(out["model_output"][HIDDEN].unbind(), wanted)
    dist.destroy_process_group()


def gather_and_slice(module, rank):
    """What Ulysses' attention does in effect: every block works on the whole row, and each rank keeps its slice."""
    decoder = module.model
    run = decoder.forward

    def whole(x, dim):
        parts = [torch.empty_like(x) for _ in range(2)]
        dist.all_gather(parts, x.contiguous())
        return torch.cat(parts, dim)

    def forward(input_ids, position_ids, **rest):
        return run(input_ids=input_ids, position_ids=position_ids, **rest)

    for block in decoder.layers:
        stock = block.forward

        def sliced(hidden, *args, stock=stock, position_ids=None, position_embeddings=None, attention_mask=None, **kw):
            full, ids = whole(hidden, 1), whole(position_ids, 1)
            none = {"attention_mask": None, "past_key_values": None}
            mask = create_causal_mask(config=module.config, inputs_embeds=full, position_ids=ids, **none)
            rotary = decoder.rotary_emb(full, ids)
            out = stock(full, attention_mask=mask, position_ids=ids, position_embeddings=rotary, **kw)
            return out[:, rank * hidden.shape[1] : (rank + 1) * hidden.shape[1]]

        block.forward = sliced
    decoder.forward = forward


def test_ulysses_slices_are_put_together(tmp_path):
    spawn(__file__, "_slice", (str(tmp_path),), nprocs=2)


def _shuffled_batch(generator):
    """RolloutRows of a batch as trainer_v1 has them: three prompts of several rollouts, rows per rollout or per step,
    some of no turn, some copies, some padding, some states that are zero or not finite.  (rows as tuples, their
    states)"""

    def draw(*shape):
        return torch.randn(*shape, generator=generator)

    def upto(n):
        return int(torch.randint(0, n + 1, (1,), generator=generator))

    rows = []
    for prompt in range(3):
        seen = draw(2, 8)  # states that come again
        for session in range(2 + upto(2)):
            for place in range(1 + upto(2)):
                mask = [on for _ in range(upto(3)) for on in (1, 1, 0)] or [0]
                turns = max(1, sum(mask) // 2)
                states = (seen[torch.randint(0, 2, (turns,), generator=generator)] + 0.3 * draw(turns, 8)).bfloat16()
                if upto(6) == 0:
                    states[upto(turns - 1)] = 0.0 if upto(1) else float("nan")
                rows.append((f"uid{prompt}", session, place, True, mask, states))
    rows += [rows[upto(len(rows) - 1)], ("pad0", 0, 0, False, [0], draw(1, 8).bfloat16())]
    return [rows[i] for i in torch.randperm(len(rows), generator=generator)]


def _cluster(rank, folder, ranks):
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store{ranks}", rank=rank, world_size=ranks)
    generator = torch.Generator().manual_seed(ranks)
    for copies in ("once", "count") * 20:
        rows = _shuffled_batch(generator)
        group, trajectory, place, valid, masks, states = zip(*rows, strict=True)
        width = max(map(len, masks))
        mask = torch.tensor([row + [0] * (width - len(row)) for row in masks])
        pairs = list(zip(group, trajectory, strict=True))
        score = {pair: float(torch.randn(1, generator=generator)) for pair in sorted(set(pairs))}
        score[pairs[0]] = float("nan")  # set aside: its states must move no cluster
        scores = torch.zeros(mask.shape)
        scores[:, 0] = torch.tensor([score[pair] for pair in pairs])
        kept = {
            "mask": mask, "scores": scores, "responses": torch.randint(0, 2, mask.shape, generator=generator),
            "prompts": list, "group": group, "trajectory": trajectory, "place": place, "valid": torch.tensor(valid),
        }  # fmt: skip
        settings = {"epsilon": 0.2, "duplicates": copies}
        bipace = Bipace(run_of(action_key_mode="first_n", n_action_tokens=1, **settings))
        taken = RolloutRows(**kept).taking_part(bipace.states)
        ids = torch.stack([*numbered(group, trajectory), torch.tensor(place), taken.long()], 1)
        ends = [round(len(rows) * r / ranks) for r in range(ranks + 1)]
        mine = slice(ends[rank], ends[rank + 1])
        jagged = torch.nested.as_nested_tensor(list(states[mine]), layout=torch.jagged)
        labels = labels_of(jagged, ids[mine], dist.group.WORLD, on_invalid="singleton", **settings)
        found = [None] * ranks
        dist.all_gather_object(found, [row.tolist() for row in labels.unbind()])
        labels = [torch.tensor(row) for part in found for row in part]
        driver, metrics = RolloutRows(**kept, hidden=states).advantage(bipace.states, None, scores)
        workers, also = RolloutRows(**kept, labels=labels).advantage(bipace.states, None, scores)
        both = torch.cat(labels)
        assert torch.equal(driver.cluster, torch.where(driver.cluster < 0, both, torch.maximum(both, -1 - both)))
        assert torch.equal(driver.cluster, workers.cluster)
        for name in ("advantage", "step_advantage", "episode_advantage", "returns", "branch"):
            assert torch.equal(getattr(driver, name), getattr(workers, name)), name
        assert str(metrics) == str(also)
        assert driver.step_advantage.any() and (driver.cluster.max() + 1 < len(driver.cluster))
    dist.destroy_process_group()


@pytest.mark.parametrize("ranks", [1, 2, slow(3)])
def test_workers_find_the_clusters_of_the_driver(tmp_path, ranks):
    """cluster_on=workers: labels and advantages bit for bit, whichever ranks the rows are on."""
    pytest.importorskip("transfer_queue")
    spawn(__file__, "_cluster", (str(tmp_path), ranks), nprocs=ranks)
