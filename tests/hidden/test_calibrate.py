"""calibrate(): states as extract() gives them, the paper's rule, and a folder that is resumed."""

import errno
import json
import os
import sys
from unittest.mock import Mock

import numpy as np
import pytest
import tiny_models
import torch
from refusals import refused

import bipace_kernels as bk
from bipace_kernels.calibration import result as calibration, states as _calibration_states
from bipace_kernels.hidden import extract_layers, layers
from bipace_kernels.support.files import locked

module = sys.modules["bipace_kernels.calibration.calibrate"]
pytest.importorskip("sklearn", reason="scikit-learn is not installed")
LAYERS, POOLINGS, RADII = [-8, -4], ("last", "mean"), [0.05, 0.2]


@pytest.fixture(scope="module")
def model():
    return tiny_models.make()


@pytest.fixture(scope="module")
def data():
    """36 prompts of 3 kinds that differ in their tokens, two of them twice."""
    generator = torch.Generator().manual_seed(3)
    prompts, labels = [], []
    for i in range(36):
        kind = i % 3
        length = 3 + int(torch.randint(0, 9, (1,), generator=generator))
        prompts.append((torch.randint(0, 30, (length,), generator=generator) + 3 + 30 * kind).tolist())
        labels.append(f"kind {kind}")
    return [*prompts, prompts[0], prompts[7]], [*labels, labels[0], labels[7]]


def scan(model, data, **changes):
    settings = {"layers": LAYERS, "pooling": POOLINGS, "epsilons": RADII, "folds": 3, "token_budget": 60, **changes}
    return bk.calibrate(model, *data, **settings)


@pytest.fixture(scope="module")
def found(model, data):
    return scan(model, data)


def test_numbers_are_those_of_a_direct_computation(model, data, found):
    from sklearn.linear_model import LogisticRegression
    from sklearn.model_selection import StratifiedGroupKFold, cross_val_score
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import StandardScaler

    prompts, labels = data
    states = extract_layers(model, prompts, None, LAYERS, pooling=POOLINGS)
    scanned = [(row.layer, row.pooling, row.epsilon) for row in found.scan]
    assert scanned == [(layer, how, epsilon) for layer, how in states for epsilon in RADII]
    same = [prompts.index(prompt) for prompt in prompts]
    for (layer, how), x in states.items():
        rows = [row for row in found.scan if (row.layer, row.pooling) == (layer, how)]
        probe = make_pipeline(StandardScaler(), LogisticRegression(max_iter=2000))
        cut = StratifiedGroupKFold(3, shuffle=True, random_state=0)
        scores = cross_val_score(probe, x.numpy(), labels, groups=same, cv=cut)
        for row in rows:
            sizes = np.bincount(bk.cluster(x, [0] * 38, row.epsilon))
            assert row.accuracy == pytest.approx(scores.mean())
            assert (row.clusters, row.median_size) == (len(sizes), np.median(sizes))
            assert row.singletons == pytest.approx((sizes == 1).mean())
            assert row.largest == pytest.approx(sizes.max() / 38)
    assert (found.n_prompts, found.n_distinct, found.n_labels, found.n_groups) == (38, 36, 3, 1)
    chosen = states[found.choice.layer, found.choice.pooling]
    assert found.choice.epsilon == bk.choose_epsilon(chosen, [0] * 38).epsilon


def test_clusters_stay_inside_groups(model, data):
    group = ["a"] * 20 + ["b"] * 18
    got = scan(model, data, group=group, layers=[-4], pooling="last", epsilons=[1.0])
    (x,) = extract_layers(model, data[0], None, [got.scan[0].layer], pooling=("last",)).values()
    labels = bk.cluster(x, group, 1.0)
    assert not set(labels[:20].tolist()) & set(labels[20:].tolist())
    largest = (labels[:20].bincount().max() + labels[20:].bincount().max()) / 38
    assert (got.scan[0].clusters, got.n_groups) == (int(labels.max()) + 1, 2)
    assert got.scan[0].largest == pytest.approx(float(largest))
    assert got.choice is None  # fewer clusters than are wanted
    assert "neither one giant" in got.reason
    refused("must have a choice", got.yaml)
    assert "**Nothing chosen:**" in got.markdown()


def rows_of(table):
    """The paper's scan of Qwen2.5-1.5B: layer, clusters, singletons, median size, accuracy."""
    return [
        module._scanned(
            (layers.Layer(block, 28), "last"),
            {"accuracy": accuracy, "stderr": 0.0, "scan": [
                {"epsilon": 0.05, "clusters": n, "singletons": alone, "median_size": size, "largest": 0.5,
                 "alone": n * alone / 240},
            ]},
            0, 5,
        )
        for block, n, alone, size, accuracy in table
    ]  # fmt: skip


PAPER = [
    (4, 2, 0.0, 120, 0.717), (8, 4, 0.25, 17.5, 0.804), (12, 3, 0.0, 40, 0.788), (16, 12, 0.167, 15, 0.808),
    (20, 9, 0.333, 17, 0.762), (24, 4, 0.0, 30.5, 0.783), (27, 4, 0.25, 32, 0.812),
]  # fmt: skip


class Fixed:
    """States that are there already."""

    def load(self, pair):
        return torch.randn(40, 8, generator=torch.Generator().manual_seed(0))


def test_the_papers_candidates_and_scan_give_its_layer():
    scanned = rows_of(PAPER)
    how = (Fixed(), [0] * 40, 5, "auto")
    limits = {"band": (4, 8), "bounds": (0.02, 0.4)}
    choice, reason = module._choose(scanned, *how, **limits)
    assert calibration.layer_value(choice.layer) == -12
    assert "block 27 before the final norm (not in hidden_states), last, has 0.812 but no such ε" in reason
    free, _ = module._choose(rows_of([(*row[:1], 5, *row[2:]) for row in PAPER]), *how, **limits)
    assert calibration.layer_value(free.layer) == "block 27"
    tied = rows_of([(*row[:4], 0.8) for row in PAPER if row[0] in (16, 20)])
    assert module._choose(tied, *how, **limits)[0].layer.block == 16
    assert module._candidates(None, 28) == [f"block {b}" for b in (4, 8, 12, 16, 20, 24, 27)]
    assert module._candidates("all", 3) == ["block 0", "block 1", "block 2"]
    assert module._candidates(None, 1) == ["block 0"]


def test_all_alone_or_one_giant_does_not_qualify():
    measured = {"epsilon": 0.1, "clusters": 40, "singletons": 1.0, "median_size": 1, "largest": 0.1, "alone": 0.95}
    pair = (layers.Layer(3, 9), "last")

    def qualifies(**changes):
        return module._scanned(pair, {"accuracy": 1, "stderr": 0, "scan": [{**measured, **changes}]}, 0, 5).qualifies

    assert not qualifies() and qualifies(alone=0.94)
    assert not qualifies(alone=0.1, largest=0.95) and qualifies(alone=0.1, largest=0.94, clusters=5)
    assert not qualifies(alone=0.1, clusters=4)


@pytest.fixture
def forwards(monkeypatch):
    """(layers, poolings, prompts) of each extraction; stops before number `stop`."""
    calls, stop = [], []

    def spy(model, prompts, mask, layers, **rest):
        if stop and len(calls) == stop[0]:
            raise KeyboardInterrupt
        calls.append(([str(layer) for layer in layers], rest["pooling"], len(prompts)))
        return extract_layers(model, prompts, mask, layers, **rest)

    monkeypatch.setattr(_calibration_states, "extract_layers", spy)
    return calls, stop


def test_a_stopped_run_goes_on(model, data, found, forwards, tmp_path):
    calls, stop = forwards
    stop.append(2)
    with pytest.raises(KeyboardInterrupt):
        scan(model, data, out=tmp_path)
    done = sum(n for _, _, n in calls)
    stop.clear()
    got = scan(model, data, out=tmp_path)
    assert 0 < done < 36
    assert sum(n for _, _, n in calls) == 36  # each distinct prompt once
    assert got.reused >= done and got == found
    before = len(calls)
    again = scan(model, data, out=tmp_path)
    assert len(calls) == before
    assert again == found and again.reused == 38 and again.seconds["probes"] == 0
    states = extract_layers(model, data[0], None, [-4])
    torch.testing.assert_close(torch.from_numpy(np.load(tmp_path / "states/block_5.last.npy")), *states.values())


def test_files_of_states_have_their_place_on_the_disk_or_are_not_begun(model, data, tmp_path, monkeypatch):
    """A write to a page of a mapped file for which the disk has no room ends the process (SIGBUS)."""
    path = tmp_path / "states.npy"
    with path.open("wb") as file:
        file.truncate(1 << 22)
    assert path.stat().st_blocks * 512 < 1 << 22
    _calibration_states._allocate(path)
    assert path.stat().st_blocks * 512 >= 1 << 22
    full = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    monkeypatch.setattr(os, "posix_fallocate", Mock(side_effect=full))
    with pytest.raises(OSError, match=r"No space left on device: block_\d+\.\w+\.npy needs .* MiB for states"):
        scan(model, data, out=tmp_path)
    assert not list(tmp_path.rglob("block_*.npy"))


def test_other_settings_compute_what_is_missing(model, data, forwards, tmp_path):
    calls, _ = forwards
    scan(model, data, out=tmp_path, layers=[-4], pooling="last")
    calls.clear()
    more = scan(model, data, out=tmp_path, layers=[-4, -2], pooling="last")
    assert {name for names, _, _ in calls for name in names} == {"block 7 (hidden_states[8] = [−2])"}
    assert more == scan(model, data, layers=[-4, -2], pooling="last")
    calls.clear()
    other = scan(model, data, out=tmp_path, layers=[-4, -2], pooling="last", epsilons=[0.3])
    assert not calls and {row.epsilon for row in other.scan} == {0.3}
    reversed_labels = (data[0], data[1][:36][::-1] + data[1][36:])
    relabelled = scan(model, reversed_labels, out=tmp_path, layers=[-4], pooling="last")
    assert not calls and relabelled == scan(model, reversed_labels, layers=[-4], pooling="last")
    assert relabelled.scan[0].accuracy != more.scan[0].accuracy
    file = tmp_path / "states/block_5.last.npy"
    whole = file.read_bytes()
    for content in (b"", whole[:64], whole[:-8], None):  # a file that was cut off or is gone is computed again
        file.write_bytes(content) if content is not None else file.unlink()
        assert scan(model, data, out=tmp_path, layers=[-4, -2], pooling="last") == more and file.read_bytes() == whole
    with locked(tmp_path / "states"):
        refused("another one is writing", scan, model, data, out=tmp_path, layers=[-4], pooling="last")


def test_another_model_or_other_prompts_are_refused(model, data, tmp_path):
    scan(model, data, out=tmp_path, layers=[-4], pooling="last")
    other = tiny_models.make()
    with torch.no_grad():
        next(other.parameters())[3, 5] *= 1.001
    with pytest.raises(ValueError, match=r"holds states of another model; .* restart=True"):
        scan(other, data, out=tmp_path, layers=[-4], pooling="last")
    reordered = tiny_models.make()
    weight = reordered.model.layers[0].self_attn.q_proj.weight.data
    weight.copy_(weight.flip(0))  # as conversions reorder heads for RoPE
    refused("states of another model", scan, reordered, data, out=tmp_path, layers=[-4], pooling="last")
    prompts = [[*data[0][0], 9], *data[0][1:]]
    refused("holds states of other prompts", scan, model, (prompts, data[1]), out=tmp_path, layers=[-4], pooling="last")
    anew = scan(other, data, out=tmp_path, layers=[-4], pooling="last", restart=True)
    assert anew == scan(other, data, layers=[-4], pooling="last") and anew.reused == 0
    other.register_buffer("steering", torch.ones(3))
    refused("states of another model", scan, other, data, out=tmp_path, layers=[-4], pooling="last")
    peft = pytest.importorskip("peft", reason="peft is not installed")
    adapted = peft.get_peft_model(tiny_models.make(), peft.LoraConfig(target_modules=["q_proj"]))
    scan(adapted, data, out=tmp_path, layers=[-4], pooling="last", restart=True)
    with adapted.disable_adapter():
        refused("states of another model", scan, adapted, data, out=tmp_path, layers=[-4], pooling="last")


def test_written_forms(found):
    content = json.loads(json.dumps(found.as_json(), allow_nan=False))
    assert len(content["scan"]) == 8 and content["choice"]["layer"] in LAYERS
    yaml = dict(line.split(": ") for line in found.yaml().splitlines()[1:])
    assert list(yaml) == ["layer", "pooling", "epsilon"] and int(yaml["layer"]) == content["choice"]["layer"]
    assert float(yaml["epsilon"]) == pytest.approx(found.choice.epsilon, rel=1e-5)
    text = found.markdown("x.png")
    assert f"**Chosen: {found.choice.layer}" in text and "![Heat map of the scan](x.png)" in text
    assert text.count("| **block") == 2  # in the slice and in the whole scan
    assert calibration.layer_value(layers.Layer(8, 9, normed=True)) == -1


@pytest.mark.parametrize(("changes", "message"), [
    ({"labels": ["a"] * 38}, "labels must hold at least two distinct values.* got 1"),
    ({"labels": ["a"] * 36 + ["b"] * 2}, "'b' has 2; give more"),
    ({"labels": ["a", None] * 19}, r"labels\[1\] must be a value, got None"),
    ({"prompts": "text"}, "prompts must be a list of texts"),
    ({"prompts": ["text"] * 38}, r"tokenizer is missing, but prompts\[0\] is a text"),
    ({"prompts": [[]] + [[1, 2]] * 37}, r"prompts\[0\] must have at least one token"),
    ({"tokenizer": "folder"}, "tokenizer must be a transformers tokenizer, got str"),
    ({"out": 3}, "out must be a path, got int"),
    ({"layers": 3.5}, "layers must be a list of layers, 'all' or None, got 3.5"),
    ({"epsilons": [3.0]}, r"epsilon\[0\] must be 0 or in"),
    ({"folds": 1}, "folds must be an int of at least 2, got 1"),
])  # fmt: skip
def test_errors_name_argument_wish_fact_and_cure(model, data, changes, message):
    prompts, labels = changes.pop("prompts", data[0]), changes.pop("labels", data[1])
    refused(message, scan, model, (prompts, labels), error=(TypeError, ValueError), **changes)


def test_states_that_are_not_finite_name_layer_and_prompt(data):
    bad = tiny_models.make()
    with torch.no_grad():
        bad.model.layers[4].mlp.down_proj.weight[:] = float("inf")
    with pytest.raises(ValueError, match=r"states, but those of block 5 .* are not for prompts\[\d+\]; load it in"):
        scan(bad, data, layers=[-4], pooling="last")
