"""`python -m bench trainer_steps` runs with the real trainers. No timing decides."""

import json
import math

from bench import trainer_steps


def test_whole_steps_of_trl_and_verl_s_calculation(tmp_path):
    assert trainer_steps.main(["--quick", "--out", str(tmp_path)]) == 0
    found = json.loads((tmp_path / "steps.json").read_text())
    assert [row["way"] for row in found["rows"]] == [*trainer_steps.WAYS, *trainer_steps.VERL]
    assert sum("gae" in row["way"] for row in found["rows"]) == 3
    page = (tmp_path / "steps.md").read_text()
    for row in found["rows"]:
        assert row["pairs"] == 2
        assert row["stock_s"] > 0
        assert row["ours_s"] > 0
        assert all(map(math.isfinite, row["added"]))
        assert row["way"] in page
