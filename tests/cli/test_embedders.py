"""The embedders of `bipace report`: each at its own ε, with the numbers of a direct computation."""

import json

import numpy as np
import pytest
from cli_runs import direct, fail, observations, record, run, write
from tiny_encoder import Encoder

import bipace_kernels as bk
from bipace_kernels.cli import figures
from bipace_kernels.features import embedders

PLAIN = ("--epsilons", "0.25", "--no-similar")


@pytest.fixture
def drawn(monkeypatch):
    """What the figure of the embedders gets; nothing is drawn."""
    given = []
    for name in ("step_shares", "epsilon_curve"):
        monkeypatch.setattr(figures, name, lambda *_: None)
    monkeypatch.setattr(figures, "embedders", lambda path, *rest: given.append(rest))
    monkeypatch.setattr(embedders, "_load", lambda model, device: Encoder())
    return given


def test_each_at_its_own_epsilon(games, tmp_path, drawn):
    seen = observations(games)
    hidden = np.random.default_rng(3).standard_normal((len(seen), 5)).astype(np.float16)
    np.save(tmp_path / "hidden.npy", hidden)
    out = tmp_path / "out"
    args = ("--sentence", "/somewhere/some/encoder", "--fingerprint", tmp_path / "hidden.npy", "--out", out)
    shown = run("report", games, *PLAIN, *args).output
    (section,) = json.loads((out / "report.json").read_text())["sections"]
    found = section["embedders"]
    fingerprints = {
        "identity": embedders.Identity().embed(seen), "ngram": bk.ngram_fingerprint(seen),
        "sentence": embedders.Sentence(Encoder()).embed(seen), "actor_hidden": hidden,
    }  # fmt: skip
    assert list(found) == list(fingerprints)
    lay = direct(games, bk.Config(partition="exact", estimator="q_style"), observation=seen)._records().layout
    for name, fingerprint in fingerprints.items():
        entry = found[name]
        if name == "identity":
            assert entry["epsilon"] == 0 and entry["epsilon_probes"] == []
        else:
            choice = bk.choose_epsilon(fingerprint, layout=lay)
            assert (entry["epsilon"], entry["epsilon_reason"]) == (choice.epsilon, choice.reason)
            assert entry["epsilon_probes"] == [list(probe) for probe in choice.probes]
        result = direct(games, bk.Config.bipace(entry["epsilon"]), fingerprint=fingerprint)
        assert entry["metrics"] == {key.removeprefix("bipace/"): value for key, value in result.metrics().items()}
        r2 = result.value_r2()
        assert entry["value_r2"] == {"r2": r2.r2, "stderr": r2.stderr, "coverage": r2.coverage}
        assert entry["value_r2_interval95"] == pytest.approx([r2.r2 - 1.96 * r2.stderr, r2.r2 + 1.96 * r2.stderr])
    for field in ("metrics", "value_r2"):
        assert found["identity"][field] == section["partitions"]["exact"][field]
    text = (out / "report.md").read_text()
    assert "![Embedders](games_embedders.png)" in text and "Sentence encoder: `some/encoder`." in text
    ((title, rows, band),) = drawn
    assert title == "games.jsonl" and band == (4, 8)
    labels = ("identity", "n-grams", "sentence encoder", "hidden states")
    for label, entry, row in zip(labels, found.values(), rows, strict=True):
        assert row.label == f"{label}, ε {entry['epsilon']:.3g}"
        median, r2 = entry["metrics"]["median_cluster_size"], entry["value_r2"]["r2"]
        assert (row.metrics["median_cluster_size"], row.value_r2.r2) == (median, r2)
        numbers = f" {entry['metrics']['singleton_cluster_fraction']:.1%} | {median:g}"
        line, *_ = [line for line in text.splitlines() if line.startswith(f"| {label} |") and numbers in line]
        assert ("*" in line) == (not 4 <= median <= 8)
        # In the terminal's table identity is the exact partition; the kernel of Config.gae() has other rows.
        named = row.label.replace("identity, ε 0", "exact")
        (line,) = [line for line in shown.splitlines() if line.startswith(f"│ {named} ")]
        assert f"{r2:.3f}".replace("-", "−") in line
        assert (f"│ GAE's kernel over {label} " in shown) == (label in labels[2:])


def test_hidden_states_by_section_and_from_a_column(tmp_path, drawn):
    rng = np.random.default_rng(5)
    hidden = rng.standard_normal((24, 3)).round(3).astype(np.float32)
    places = [(i % 12 // 4, i % 4, f"seen {i % 5}", "go", float(i % 12 == 3)) for i in range(24)]
    rows = [record(*place, hidden=row.tolist()) for place, row in zip(places, hidden, strict=True)]
    paths = [write(tmp_path / f"{name}.jsonl", rows[begin : begin + 12]) for name, begin in (("a", 0), ("b", 12))]
    np.save(tmp_path / "hidden.npy", hidden)
    sides = []
    for args in (("--fingerprint", tmp_path / "hidden.npy"), ("--fingerprint-column", "hidden")):
        assert run("report", *paths, *PLAIN, *args, "--out", tmp_path / "out").exit_code == 0
        sections = json.loads((tmp_path / "out" / "report.json").read_text())["sections"]
        sides.append([section["embedders"]["actor_hidden"] for section in sections])
    assert sides[0] == sides[1]
    for begin, entry in zip((0, 12), sides[0], strict=True):
        rollout = [row["rollout"] for row in rows[:12]]
        lay = bk.layout([0] * 12, rollout, [row["step"] for row in rows[:12]])
        assert entry["epsilon"] == bk.choose_epsilon(hidden[begin : begin + 12], layout=lay).epsilon
    both = ("--fingerprint", tmp_path / "hidden.npy", "--fingerprint-column", "hidden")
    assert "give one of them" in fail("report", *paths, *PLAIN, *both, "--out", tmp_path / "out")
