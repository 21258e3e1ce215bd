"""bipace_kernels.distributed: equal bits for every split, one plan, errors on all ranks (distributed_ranks.py)."""

import inspect
import json
import re
import sys
from dataclasses import replace

import numpy as np
import pytest
import torch
from batches import assert_same, make_batch
from distributed_ranks import WORLD, WRONG
from paths import ROOT, program, python
from refusals import refused
from spawned import run_ranks

import bipace_kernels as bk

API = (ROOT / "docs/api.md").read_text()
PAGE = (ROOT / "docs/distributed.md").read_text()
SIZES = range(WORLD, 0, -1)  # large ones first: then no rank waits for a group that it is not in


def of(found, case):
    """What the ranks of a case's group found, in rank order."""
    size = int(case.split(":")[1])
    results = [rank[case] for rank in found[WORLD - size :]]
    for result in results:
        assert not (isinstance(result, dict) and "failed" in result), result["failed"]
    return results


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    batches = [f"{case}:{size}:{last}" for size in SIZES for case, last in (("advantage", "0:4"), ("cluster", "0:2"))]
    # The last two leave the ranks unable to go on.
    cases = [*batches, "errors:3", "owner:3", "bytes:4", "silent:4", "dies:4"]
    return run_ranks("distributed_ranks.py", tmp_path_factory.mktemp("ranks"), cases, WORLD, 200)


@pytest.mark.parametrize("size", SIZES)
def test_any_split_gives_the_bits_of_one_process_and_labels_that_serve_a_single_controller(found, size):
    """distributed.cluster() is cluster() of the whole; under partition exact its labels replace the fingerprints."""
    for wrong in (*of(found, f"advantage:{size}:0:4"), *of(found, f"cluster:{size}:0:2")):
        assert wrong == []


@pytest.mark.slow
def test_500_batches_give_the_bits_of_one_process(tmp_path):
    cases = [f"advantage:{size}:0:500" for size in SIZES]
    found = run_ranks("distributed_ranks.py", tmp_path, cases, WORLD, 900)
    for case in cases:
        assert of(found, case) == [[]] * int(case.split(":")[1])


@pytest.mark.parametrize("name", WRONG)
def test_one_ranks_mistake_is_told_to_all(found, name):
    said = [rank[name] for rank in of(found, "errors:3")]
    assert said[0].startswith(WRONG[name][1]), said[0]
    assert said == [said[0]] * 3


def test_a_failure_of_one_owner_is_told_to_all_and_groups_work_after_errors(found):
    assert of(found, "owner:3") == ["RuntimeError: clustering failed on rank 0: MemoryError: no room"] * 3
    assert [rank["after"] for rank in of(found, "errors:3")] == ["", "", ""]
    for number, rank in enumerate(of(found, "errors:3")):
        where = "" if number == 2 else "rank 2: RuntimeError: "
        assert rank["own term of one"].startswith(f"RuntimeError: {where}estimator fails_on_the_last raised OSError")
        assert rank["bad states"].startswith("ValueError: with_bad_states() must have the result of one process")


def test_a_fingerprint_travels_at_most_once_and_nothing_else_is_wide(found):
    """Groups of equal size over four ranks: a quarter of each stays, the rest moves in bfloat16."""
    for straddling, at_home in of(found, "bytes:4"):
        assert straddling[0] == 30 * 512 * 2 and at_home[0] == 0
        assert straddling[1] == at_home[1] == 40 * 8 * 8 + 8  # and the length of the head
        assert straddling[2] == at_home[2] < 2000


def test_a_rank_that_is_silent_or_ends_is_an_error(found, tmp_path):
    for said in of(found, "silent:4")[:-1]:
        assert said.startswith("RuntimeError: the ranks of process_group cannot reach each other")
    last = found[-1]
    assert "silent:4" in last and "dies:4" not in last
    for rank in found[:-1]:
        assert rank["dies:4"].startswith("RuntimeError: the ranks of process_group cannot reach each other")


def test_the_plan_by_hand_and_a_bad_one_is_refused():
    plan = bk.distributed.plan_owners
    assert plan([[3, 0], [0, 3]]).tolist() == [0, 1]
    # Costs 100 and 81, a mean of 90.5: both on rank 0 are more than 1.25 of that.
    assert plan([[9, 9], [1, 0]]).tolist() == [0, 1] and plan([[8, 8, 8, 8], [1, 1, 1, 1]]).tolist() == [0, 0, 1, 1]
    # Four groups of cost 16 on three ranks: a second one is beyond 26.7 everywhere, so the last goes to the least load.
    assert plan([[4, 0, 3, 0], [0, 4, 1, 0], [0, 0, 0, 4]]).tolist() == [0, 1, 2, 0]
    assert plan([[2, 2, 2, 9]], [1.0, 1.0, 1.0, 1.0]).tolist() == [0, 0, 0, 0]
    assert plan(torch.zeros(3, 0, dtype=torch.int64)).tolist() == []
    for held, cost, says in (
        ([1, 2], None, "held must be counts [R, G]"),
        ([[1.0]], None, "held must be counts [R, G]"),
        ([[-1]], None, "held must be counts [R, G]"),
        ([[1]], [float("nan")], "cost must be finite"),
        ([[1]], [1.0, 2.0], "cost must have shape [N] = [1]"),
    ):
        refused(re.escape(says), bk.distributed.plan_owners, held, cost)


@pytest.mark.parametrize("seed", range(20))
def test_no_owner_is_overloaded(seed):
    rng = np.random.default_rng(seed)
    held = rng.integers(0, 50, (int(rng.integers(1, 9)), int(rng.integers(1, 40))))
    owner = bk.distributed.plan_owners(held).numpy()
    cost = held.sum(axis=0).astype(float) ** 2
    load = np.bincount(owner, weights=cost, minlength=len(held))
    assert load.max() <= max(1.25 * load.mean(), load.mean() + cost.max())


@pytest.mark.parametrize("seed", range(5))
def test_balanced_groups_stay_where_they_are(seed):
    rng = np.random.default_rng(seed)
    home = rng.permutation(np.repeat(np.arange(4), 5))
    held = np.zeros((4, 20), dtype=np.int64)
    held[home, np.arange(20)] = rng.integers(38, 42, 20)
    assert np.array_equal(bk.distributed.plan_owners(held).numpy(), home)


@pytest.mark.parametrize("config", [bk.Config.bipace(0.2), bk.Config.bigpo(0.2), bk.Config.bipace(0.2, "diff_peer")])
def test_owners_without_a_process_group(config):
    """plan_owners(), cluster() on each owner, advantage() on the labels: what workers of any kind can do."""
    batch = make_batch(5, groups=6, trajectories=6)
    holder = np.random.default_rng(5).integers(0, 3, batch.n)
    ids, group = np.unique(batch.group, return_inverse=True)
    held = np.bincount(holder * ids.size + group, minlength=3 * ids.size).reshape(3, -1)
    owner = bk.distributed.plan_owners(held).numpy()[group]
    labels = torch.zeros(batch.n, dtype=torch.int64)
    for rank in range(3):
        part = batch.take(np.flatnonzero(owner == rank))
        ids = {"trajectory": part.trajectory, "step": part.step}
        labels[owner == rank] = bk.cluster(part.fingerprint, part.group, config.epsilon, **ids)
    want = bk.advantage(**batch.arguments(), config=config)
    exact = replace(config, partition="exact")
    got = bk.advantage(**batch.arguments(fingerprint=None, observation=labels), config=exact)
    assert_same(got, want)


def test_its_advantage_takes_the_arguments_of_advantage_and_needs_a_group():
    own = dict(inspect.signature(bk.distributed.advantage, eval_str=True).parameters)
    own.pop("process_group")
    alone = dict(inspect.signature(bk.advantage, eval_str=True).parameters)
    alone.pop("layout")
    assert own == alone
    refused("init_process_group", bk.distributed.advantage, [0], [0], [0.0], config=bk.Config.grpo())


def test_it_is_imported_when_asked_for_and_the_pages_code_runs(tmp_path):
    blocks = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    start = (
        "import sys, bipace_kernels\nassert 'bipace_kernels.distributed' not in sys.modules\n"
        "import torch, torch.distributed as dist\nimport numpy as np, bipace_kernels as bk\n"
        f"dist.init_process_group('gloo', init_method='file://{tmp_path}/store', rank=0, world_size=1)\n"
        "rng = np.random.default_rng(0)\ngroup = np.zeros(6, int); trajectory = np.repeat([0, 1], 3)\n"
        "step = np.tile([0, 1, 2], 2)\n"
        "rewards = rng.normal(size=6); fingerprint = torch.randn(6, 8); keys = [1, 2, 1, 2, 1, 2]\npg = None\n"
    )
    python(start + "\n".join(blocks))


@pytest.mark.slow
def test_the_benchmark_runs(tmp_path):
    program(sys.executable, "-m", "bench", "distributed", "--quick", "--out", tmp_path, timeout=300, cwd=ROOT)
    assert len(json.loads((tmp_path / "distributed.json").read_text())["rows"]) == 5
    assert "| bk.distributed, straddling " in (tmp_path / "distributed.md").read_text()
