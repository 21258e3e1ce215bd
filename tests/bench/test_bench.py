"""The benchmark suite runs end to end on tiny sizes, and what it compares with computes the same. No timing decides."""

import json
import math
from typing import get_type_hints

import numpy as np
import pytest
import torch
from benchmarks import PACKAGE, module
from refusals import refused

pytest.importorskip(PACKAGE)
run, competitors, measure = map(module, ("__main__", "competitors", "measure"))
roofline, stages, workloads = map(module, ("roofline", "stages", "workloads"))
TINY = workloads.TINY


@pytest.mark.slow
def test_all_stages_run_no_result_differs_and_the_json_keeps_its_schema(tmp_path):
    assert run.main(["--quick", "--threads", "2", "--out", str(tmp_path)]) == 0
    found, page = json.loads((tmp_path / "bench.json").read_text()), (tmp_path / "bench.md").read_text()
    assert set(found) == {"schema", "machine", "ceilings", "rows", "scaling", "growth", "memory", "targets"}
    assert found["schema"] == stages.SCHEMA and found["machine"]["threads"] == 2
    for name in ("cpu", "cores", "package", "torch", "numpy", "blas", "commit", "date"):
        assert found["machine"][name]
    assert all(value > 0 for value in found["ceilings"].values())
    assert set(stages.STAGES) - {"scaling", "memory"} == {row["stage"] for row in found["rows"]}
    assert len(found["scaling"]) >= 4 and len(found["memory"]) >= 2
    for name in ("clusters.png", "calls.png", "texts.png"):
        assert (tmp_path / name).read_bytes().startswith(b"\x89PNG") and f"]({name})" in page
    kinds = get_type_hints(stages.Row)
    for row in found["rows"]:
        assert row.keys() == kinds.keys() and row["side"] in page
        assert "DIFFERENT" not in row["agreement"] and "beyond" not in row["agreement"]
        for name, kind in kinds.items():
            assert isinstance(row[name], kind), (name, row)
        if row["kind"] == "not available":
            assert row["note"] and row["median_ms"] is None
        else:
            assert row["median_ms"] > 0 and row["rounds"] >= 2 and math.isfinite(row["ratio"])
    for stage in ("clusters", "advantage", "ngrams"):  # the copy is on every chart that has fingerprints
        assert any(r["stage"] == stage and r["kind"] == "bound" for r in found["rows"])
    assert {t["met"] for t in found["targets"]} == {None}, "tiny sizes must not claim a target"


def test_planted_states_come_out():
    x = stages.Hidden(TINY)
    assert stages._check_states(x.batch, x.cluster())
    wrong = x.cluster().clone()
    wrong[0] = wrong[-1]
    refused("planted clusters", stages._check_states, x.batch, wrong, error=RuntimeError)


def test_workloads_are_seeded_and_strings_fresh():
    a, b = workloads.steps(TINY), workloads.steps(TINY)
    assert all(np.array_equal(getattr(a, k), getattr(b, k)) for k in ("group", "trajectory", "rewards", "state"))
    assert torch.equal(workloads.fingerprints(a), workloads.fingerprints(b))
    texts = workloads.observations(a)
    copies = workloads.fresh(texts)
    assert copies == texts == workloads.observations(b)
    assert not any(x is y for x, y in zip(copies, texts, strict=True))
    assert len({id(x) for x in copies}) == len(copies)


def test_every_state_is_visited():
    for shape in (*workloads.CLUSTERING, workloads.TRAINING[0]):
        batch = workloads.steps(shape)
        for start, end in zip(batch.offsets, batch.offsets[1:], strict=False):
            assert len(np.unique(batch.state[start:end])) == shape.states


def test_differences_are_told():
    assert stages.partition_agreement([0, 0, 1], [5, 5, 2]) == "same partition"
    assert stages.partition_agreement([0, 0, 1], [0, 1, 1]).startswith("DIFFERENT: 2 clusters against 2, 3 in")
    assert "1 rows beyond" in stages.number_agreement(torch.tensor([0.0, 1.0]), torch.tensor([0.0, 1.1]))


def test_turns_are_taken():
    order = []
    sides = [measure.Side(n, lambda _, n=n: order.append(n)) for n in ("a", "b")]
    timings = measure.compare(sides, measure.Effort(rounds=3, fewest=3, flush_bytes=64))
    assert order == ["a", "b"] * 4  # one warm-up each, then three rounds
    assert all(len(t.samples) == 3 for t in timings.values())
    timing = measure.Timing([5.0, 1.0, 2.0, 3.0, 4.0])
    assert (timing.median, timing.iqr, measure.Timing([7.0]).iqr) == (3.0, 2.0, 0.0)


def test_cluster_work_counts_open_centroids():
    fingerprint = torch.zeros(5, 10)
    # Group of three: labels 0, 1, 0 meet 0, 1 and 2 open centroids; group of two: labels 2, 2 meet 0 and 1.
    work = roofline.cluster_work(fingerprint, np.array([0, 1, 0, 2, 2]), [0, 3, 5])
    assert work.flop == 2 * 10 * (0 + 1 + 2 + 0 + 1) + 6 * 5 * 10
    assert work.bytes == 5 * 10 * 4 + 5 * 8


def test_high_water_sees_memory_that_was_given_back():
    def run_():
        return int(torch.ones(8 << 20).sum())  # 32 MiB, gone when the call returns

    assert 30 << 20 < measure.high_water(run_) < 80 << 20


def test_targets_take_the_best_competitor_and_tell_what_did_not_run():
    found = stages.Results()
    assert all(t.value is None and t.met is None for t in stages.targets(found))
    for side, ratio in ((stages.NUMPY, 9.0), (stages.NUMPY_POOL, 5.5)):
        found.rows.append(stages.Row("clusters", "16x130-k12", side, "", "", "competitor", 1.0, 0.0, 1, ratio=ratio))
    found.scaling = [stages.Point("ours", n, 1, 1, "", ms, 0.0, 1) for n, ms in ((10, 1.0), (20, 2.2))]
    reached = {t.name: t for t in stages.targets(found)}
    first = reached["clustering against NumPy/BLAS, 16x130-k12"]
    assert first.value == 5.5 and first.met is False
    grown = reached["time per record, largest / smallest batch at fixed K"]
    assert grown.value == pytest.approx(1.1) and grown.met is True
