"""Step records of a training run: what is in the files, how many there are, and that every adapter writes them."""

import os
from functools import partial
from pathlib import Path
from unittest.mock import Mock

import pyarrow.parquet as pq
import pytest
import tiny_trl as tt
import torch
from bipace_cli.commands import app
from bipace_kernels.integrations import _recorder
from bipace_kernels.integrations._recorder import Recorder, shown
from bipace_kernels.integrations._rollout_rows import RolloutRows
from bipace_kernels.integrations._turns import Turns
from bipace_kernels.integrations.trl.rollouts import Reported
from bipace_kernels.integrations.trl.rows import TrlRows
from bipace_kernels.integrations.verl.estimator import estimate
from bipace_kernels.integrations.verl_agent import Settings, attach
from cli_runs import unpack
from refusals import refused
from trained_tokenizers import byte_level
from transformers import PreTrainedTokenizerFast
from typer.testing import CliRunner
from verl_agent_harness import config_of, rollout, trainer_of
from verl_stand_ins import Words, of

import bipace_kernels as bk

IDS = {"group": [0, 0, 0, 1, 1], "trajectory": [0, 0, 1, 2, 3], "step": [0, 1, 0, 0, 0]}
IDS = {name: torch.tensor(column) for name, column in IDS.items()}
RECORDS = {**IDS, "rewards": torch.tensor([0.0, 1.0, 0.5, 0.0, 1.0])}
OBSERVATIONS, ACTIONS = ["room", "hall", "room", "</script>", "roof"], ["go", "take", "wait", "<b>", ""]
STEPWISE = ("step_rewards",)
FIRST = {"kernel_directions": None, "kernel_inside": 0.0, "luck_noise": 0.0}  # whose kernel is short to write


class Clock:
    """Seconds that pass when the test says so; each reading takes `cost`."""

    def __init__(self):
        self.now, self.cost = 1000.0, 0.0

    def __call__(self):
        self.now += self.cost
        return self.now


def result_of(records=RECORDS):
    return bk.advantage(
        records["group"], records["trajectory"], records["rewards"], step=records["step"],
        observation=OBSERVATIONS, config=bk.Config.gigpo(),
    )  # fmt: skip


def texts(rows):
    return [OBSERVATIONS[i] for i in rows.tolist()], [ACTIONS[i] for i in rows.tolist()]


def record(recorder, update):
    recorder.expect(update, texts)
    recorder.write(RECORDS, result_of(), bk.Config.gigpo())


def updates(folder):
    return [int(path.stem.split("_")[1]) for path in sorted(Path(folder).glob("*"))]


def read(folder, update=0):
    return pq.read_table(Path(folder) / f"update_{update:08d}.parquet").to_pydict()


def inspected(path, folder):
    """The page of `bipace report --html` for a recorded file."""
    options = ["--epsilons", "0.25", "--no-similar", "--html", "--on-invalid", "singleton"]
    done = CliRunner().invoke(app, ["report", str(path), "--out", str(folder), *options])
    assert done.exit_code == 0, done.output
    return unpack((folder / "inspector.html").read_text(encoding="utf-8"))


def test_what_a_file_holds(tmp_path):
    record(Recorder(str(tmp_path / "a/b"), 10), 0)
    found, result = read(tmp_path / "a/b"), result_of()
    assert found == {
        "task_id": [0, 0, 0, 1, 1], "rollout": [0, 0, 1, 2, 3], "step": [0, 1, 0, 0, 0],
        "observation": OBSERVATIONS, "action": ACTIONS, "reward": [0.0, 1.0, 0.5, 0.0, 1.0],
        "bipace_advantage": result.advantage.tolist(), "bipace_cluster": result.cluster.tolist(),
    }  # fmt: skip


def test_the_credit_inspector_reads_which_rollouts_were_cut_off(tmp_path):
    records = {**RECORDS, "truncated": torch.tensor([False, True, False, True, False])}
    states, config = torch.nn.functional.one_hot(torch.tensor([0, 1, 0, 2, 2])).float(), bk.Config.gae()
    result = bk.advantage(**{k: records[k] for k in records}, fingerprint=states, config=config)
    recorder = Recorder(str(tmp_path), 1)
    recorder.expect(0, texts)
    recorder.write(records, result, config)
    assert read(tmp_path)["truncated"] == [False, True, False, True, False]
    page = inspected(tmp_path / "update_00000000.parquet", tmp_path / "page")
    without = tmp_path / "without.parquet"
    pq.write_table(pq.read_table(tmp_path / "update_00000000.parquet").drop_columns(["truncated"]), without)
    assert page != inspected(without, tmp_path / "other")


@pytest.mark.parametrize("share", ["batch", "group", "memory", "own"])
def test_why_gae_gave_a_step_its_advantage_is_recorded(tmp_path, share):
    """V̂, R, δ and A_S by their definitions, and the nearest states with k of the kernel, centred as in training."""
    generator = torch.Generator().manual_seed(0)
    trajectory, n = torch.arange(6).repeat_interleave(4), 24
    records = {
        "group": trajectory // 3, "trajectory": trajectory, "step": torch.tensor([0, 1, 3, 4]).repeat(6),
        "rewards": torch.rand(n, generator=generator).double(), "truncated": trajectory % 2 == 0,
        "fingerprint": torch.rand(n, 5, generator=generator) - 0.5, "valid": torch.arange(n) != 20,
    }  # fmt: skip
    records["fingerprint"][9] = torch.nan
    kernel = {"value": lambda rows: rows.returns / 2} if share == "own" else {"share": share, **FIRST}
    config = bk.Config.gae(on_invalid="singleton", gae_lambda=0.0, step_norm="none", **kernel)
    memory = bk.ValueMemory(100) if share == "memory" else None
    result = bk.advantage(**records, config=config, memory=memory)
    recorder = Recorder(str(tmp_path), 1)
    recorder.expect(0, lambda rows: (["room"] * len(rows), ["go"] * len(rows)))
    recorder.write(records, result, config)
    found, rows = read(tmp_path), [i for i in range(n) if i != 20]
    for name, column in (("value", result.value), ("returns", result.returns), ("step_term", result.step_advantage)):
        assert found[f"bipace_{name}"] == column[rows].tolist()
    # With λ = 0, A_S before it is divided is δ.
    assert found["bipace_delta"] == pytest.approx(result.step_advantage[rows].tolist(), abs=1e-6)
    if share in ("memory", "own"):
        assert "bipace_neighbours" not in found
        return
    x = torch.nn.functional.normalize(records["fingerprint"].double(), dim=1)
    usable = [i for i in rows if i != 9]
    for at, i in enumerate(rows):
        own = [j for j in usable if records["group"][j] == records["group"][i]]
        z = x - x[usable if share == "batch" else own].mean(0)
        others = [j for j in own if j != i] if i != 9 else []
        late = ((records["step"] - records["step"][i]).double() / config.kernel_time) ** 2 / 2
        k = ((torch.cosine_similarity(z, z[i : i + 1]) - 1) / config.kernel_width - late).exp()
        wanted = sorted(others, key=lambda j: -k[j])[:5]
        assert [rows[j] for j in found["bipace_neighbours"][at]] == wanted
        assert found["bipace_kernel"][at] == pytest.approx(k[wanted].tolist(), rel=1e-6)
    page = inspected(tmp_path / "update_00000000.parquet", tmp_path / "page")
    columns = page["columns"]
    assert page["neighbours"] == "trained"
    assert columns["trained"]["delta"] == pytest.approx(found["bipace_delta"], rel=1e-3)
    place = {line - 1: i for i, line in enumerate(columns["line"])}
    near = [found["bipace_neighbours"][line - 1] for line in columns["line"]]
    assert columns["neighbours"] == [[place[j] for j in of_row] for of_row in near]


def test_padding_and_copies_are_left_out_groups_stay_whole_and_long_texts_are_cut(tmp_path):
    valid = torch.tensor([True, True, True, False, True])
    assert shown(*IDS.values(), valid).tolist() == [0, 1, 2, 4]
    again = {name: torch.cat([column, column[:2]]) for name, column in IDS.items()}
    assert shown(*again.values()).tolist() == [0, 1, 2, 3, 4]
    recorder = Recorder(str(tmp_path), 1)
    recorder.expect(0, lambda rows: (["x" * 20_000, "\ud800", 3, "d", "e"], ACTIONS))
    recorder.write(RECORDS, result_of(), bk.Config.gigpo())
    assert [len(text) for text in read(tmp_path)["observation"][:3]] == [10_000, 1, 1]
    assert shown(*IDS.values(), most=4).tolist() == [0, 1, 2]
    assert shown(*IDS.values(), most=1).tolist() == [0, 1, 2], "a file is never without a group"


def test_every_n_updates_and_the_newest_files_stay(tmp_path, monkeypatch):
    monkeypatch.setattr(_recorder, "FILES", 3)
    monkeypatch.setattr(Path, "unlink", lambda path: (os.remove(path), path.stat()))  # as if another run removed it
    recorder = Recorder(str(tmp_path), 4)
    recorder._began -= 1e6  # a run that is long enough for any cost
    for update in range(0, 30, 3):
        record(recorder, update)
    said = r"holds update_00000012\.parquet, .* another run, or .* resumed\. .* its own folder"
    with pytest.warns(RuntimeWarning, match=said):
        record(recorder, 2)
    record(recorder, 5)
    assert updates(tmp_path) == [2, 18, 24] and not list(tmp_path.glob("*.begun"))


def test_recording_takes_at_most_one_percent_of_the_run(tmp_path):
    clock = Clock()
    recorder = Recorder(str(tmp_path), 1, clock=clock)
    written = []
    for update in range(300):
        clock.now += 10  # an update
        clock.cost = 2.0  # reading the clock again: what a file takes
        record(recorder, update)
        clock.cost = 0.0
        if update in updates(tmp_path):
            written.append(update)
            assert update == 0 or recorder._spent <= 0.01 * (clock.now - recorder._began)
    assert written[0] == 0 and 5 < len(written) < 30, "each costs 2 s of 10 s: one in twenty"


@pytest.mark.parametrize(
    ("error", "reason"), [(OSError(28, "No space left on device"), "No space left"), (ValueError("bad"), "ValueError")]
)
def test_a_failure_ends_the_recording_and_not_the_run(error, reason, tmp_path, monkeypatch):
    recorder = Recorder(str(tmp_path), 1, "bipace_")
    monkeypatch.setattr(pq, "write_table", Mock(side_effect=error))
    with pytest.warns(RuntimeWarning, match=rf"bipace_record_dir=.*: update 3 cannot be written \({reason}"):
        record(recorder, 3)
    monkeypatch.undo()
    recorder._began -= 1e6
    record(recorder, 4)
    assert updates(tmp_path) == []


def test_a_folder_that_cannot_be_made_is_an_error_before_the_run(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match=r"bipace_record_dir=.* cannot be made: .*; name another"):
        Recorder(str(tmp_path / "file/folder"), 1, "bipace_")
    for wrong in ({"record_dir": ""}, {"record_dir": 3}, {"record_every": 0}):
        refused(r"record_(dir|every) must be", of, **wrong)


WRITTEN = (*STEPWISE, "observations", "actions")
UNREAD = {"bipace_method": "gae", "bipace_value": "step", "bipace_reward_beyond_steps": "ignore"}


@pytest.mark.parametrize(("extras", "options"), [
    (STEPWISE, {}), (STEPWISE, {"bipace_embedder": "ngram"}), (WRITTEN, {}), (WRITTEN, {"bipace_method": "gigpo"}),
    (WRITTEN, UNREAD),
])  # fmt: skip
def test_trl(tmp_path, monkeypatch, extras, options):
    monkeypatch.setenv("TRL_EXPERIMENTAL_SILENCE", "1")
    trainer = tt.make_trainer(
        tmp_path, rollout_func=partial(tt.rollout, extras=extras), bipace_record_dir=str(tmp_path / "steps"),
        bipace_record_every=5, **options,
    )  # fmt: skip
    trainer.train()
    assert updates(tmp_path / "steps") == [0]
    batch, found = trainer.batches[0], read(tmp_path / "steps")
    rows = [(b, i) for b, row in enumerate(batch["inputs"]) for i in range(len(row["step_rewards"]))]
    assert list(zip(found["rollout"], found["step"], strict=True)) == rows
    assert found["task_id"] == [b // 4 for b, _ in rows]
    assert found["reward"] == [r for row in batch["inputs"] for r in row["step_rewards"]]
    for k, (b, i) in enumerate(rows):
        row = batch["inputs"][b]
        if "actions" in row:
            assert (found["observation"][k], found["action"][k]) == (row["observations"][i], row["actions"][i])
        else:
            assert found["action"][k] in ("go", "look", "x")
            assert found["observation"][k] in ([row["prompt"]] if i == 0 else ["<A>", "<B>"])
        assert found["bipace_advantage"][k] in batch["output"]["advantages"][b].tolist()
    page = inspected(tmp_path / "steps/update_00000000.parquet", tmp_path / "report")
    assert [row["key"] for row in page["estimators"]][-1] == "trained"
    assert page["columns"]["cluster"]["trained"] == found["bipace_cluster"]
    assert page["columns"]["advantage"]["trained"] == [float(f"{a:.4g}") for a in found["bipace_advantage"]]


def test_trl_only_the_process_that_records_needs_the_folder(tmp_path, monkeypatch):
    monkeypatch.setenv("TRL_EXPERIMENTAL_SILENCE", "1")
    (tmp_path / "file").write_text("")
    refused("cannot be made", tt.make_trainer, tmp_path, bipace_record_dir=str(tmp_path / "file"))
    monkeypatch.setattr("accelerate.Accelerator.is_main_process", False)
    tt.make_trainer(tmp_path, bipace_record_dir=str(tmp_path / "file"))


def test_trl_a_last_turn_without_an_action_is_recorded_as_it_trained(tmp_path):
    """With the empty action; an earlier turn without an entry has its text, whose key training used."""
    mask, one = torch.tensor([[1, 0, 1, 0, 1]]), torch.ones(1)
    reported = Reported(None, [{}], Turns.of(mask), None)
    rows = TrlRows(
        mask=mask, scores=one, responses=torch.arange(5)[None], prompts=lambda: [mask[0]], valid=one.bool(),
        reported=reported, dropped=one.bool(), extra={"observations": None, "actions": [[["go", "on"], [], []]]},
    )  # fmt: skip
    done = rows.actions(Words(), torch.arange(3))
    assert done == ["go\non", Words().batch_decode([[2]], skip_special_tokens=True)[0], ""]


def test_verl(tmp_path):
    """Two prompts of two rollouts, one of them with two turns; padding is left out."""
    mask = torch.tensor([[1, 1, 0, 1], [1, 1, 0, 0], [1, 0, 0, 0], [1, 1, 0, 0], [1, 0, 0, 0]])
    scores = torch.zeros(5, 4)
    scores[0, 3] = 1.0
    rows = RolloutRows(
        mask=mask, scores=scores, responses=torch.arange(20).reshape(5, 4),
        prompts=lambda: [torch.tensor([50 + i]) for i in range(5)],
        group=["p", "p", "q", "q", "pad"], trajectory=[0, 1, 2, 3, 4], place=[0] * 5,
        valid=torch.tensor([True] * 4 + [False]),
    )  # fmt: skip
    bipace, words = of(method="gigpo", record_dir=str(tmp_path), record_every=10), Words()
    with bipace.handed_over(rows, words, 7):
        advantages, _ = estimate(scores, mask, config=None, index=None)
    found = read(tmp_path, 7)
    assert found["step"] == [0, 1, 0, 0, 0] and len(set(found["task_id"])) == 2 and len(set(found["rollout"])) == 4
    assert found["reward"] == [0.0, 1.0, 0.0, 0.0, 0.0]
    decode = partial(words.batch_decode, skip_special_tokens=True)
    assert found["observation"] == decode([[50], [2], [51], [52], [53]])
    assert found["action"] == decode([[0, 1], [3], [4, 5], [8], [12, 13]])
    assert found["bipace_advantage"] == [advantages[i, t].item() for i, t in ((0, 0), (0, 3), (1, 0), (2, 0), (3, 0))]


def test_verl_agent(tmp_path):
    special = {"eos_token": "<|im_end|>", "pad_token": "<|endoftext|>"}
    tokenizer, folder = PreTrainedTokenizerFast(tokenizer_object=byte_level(), **special), tmp_path / "steps"
    config = config_of(
        tmp_path, "algorithm.gigpo.bisim_grouping=True", "algorithm.gigpo.bisim_embedder=identity",
        f"algorithm.gigpo.bipace_record_dir={folder}", "algorithm.gigpo.bipace_record_every=3",
    )  # fmt: skip
    settings, batch = Settings.of(config), rollout(10, tokenizer)
    trainer = trainer_of(config, tokenizer, batch)
    attach(type(trainer), settings)
    trainer.fit()
    (update,) = updates(folder)
    found = read(folder, update)
    pairs = list(zip(found["rollout"], found["step"], strict=True))
    assert len(set(pairs)) == len(pairs) > 10 and len(set(found["task_id"])) == 3
    seen = set(map(str, batch.non_tensor_batch["anchor_obs"]))
    assert set(found["observation"]) <= seen and all(found["action"])
    trained = trainer.actor_rollout_wg.seen.batch["advantages"].flatten().tolist()
    assert set(found["bipace_advantage"]) <= set(trained)
