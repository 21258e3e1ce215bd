"""The benchmark of taps and early exit: a tiny model goes through it, and both ways see the same states."""

import json

import pytest
from benchmarks import module
from paths import ROOT

pytest.importorskip("transformers", reason="transformers is not installed")

pytestmark = pytest.mark.usefixtures("one_thread")
hidden = module("hidden")
SAMPLE = ROOT / "examples/data/alfworld_scripted.jsonl.gz"


@pytest.mark.slow
def test_writes_what_it_shows_and_both_ways_see_the_same_states(tmp_path, capsys):
    assert hidden.main(["--quick", "--threads", "1", "--rollouts", str(SAMPLE), "--out", str(tmp_path)]) == 0
    document = json.loads((tmp_path / "hidden.json").read_text())
    assert (tmp_path / "hidden.md").read_text().strip() in capsys.readouterr().out
    names = ["tap", "early exit, equal lengths", "early exit, recorded lengths", "calibration"]
    assert [row["name"] for row in document["rows"]] == names
    for row in document["rows"]:
        assert row["difference"] < 1e-6 and row["ours_ms"] > 0 and row["theirs_ms"] > 0 and row["rounds"] == 2


def test_recorded_prompts_are_left_padded_and_say_how_many_are_distinct():
    ids, mask, note = hidden.recorded_prompts(hidden.TINY, SAMPLE)
    assert ids.shape == mask.shape == (6, ids.shape[1])
    assert bool((mask[:, -1] == 1).all()) and bool((ids[mask == 0] == 0).all()) and bool((ids[mask == 1] > 0).all())
    assert mask.sum(dim=1).max() == ids.shape[1] > mask.sum(dim=1).min()
    assert (ids[0] == ids[2]).all(), "rollouts of a group begin with the same prompt"
    assert note.startswith("6 prompts, 4 distinct, ")
