"""README's lines for TRL run as they stand, with a tiny model in place of the one from the hub."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

pytest.importorskip("trl", reason="TRL is not installed: make test-integrations")

import tiny_trl as tt
import tool_turns

README = (Path(__file__).resolve().parents[2] / "README.md").read_text()


def test_the_lines_for_trl_run(tmp_path, monkeypatch):
    (code,) = [block for block in re.findall(r"```python\n(.*?)```", README, re.DOTALL) if "BiPACEGRPOTrainer" in block]
    tokenizer = tool_turns.tokenizer()
    model = tt.make_model(vocab_size=len(tokenizer), max_position_embeddings=1024, eos_token_id=tokenizer.eos_token_id)
    model.save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    for written, used in (
        ('"Qwen/Qwen3-0.6B"', repr(str(tmp_path / "model"))),
        ('"out"', repr(str(tmp_path / "out"))),
        ("max_steps=20", "max_steps=1, use_cpu=True, bf16=False, report_to=[]"),
        ("max_completion_length=1024", "max_completion_length=32"),
    ):
        assert code.count(written) == 1, written
        code = code.replace(written, used)
    names = {"__name__": "readme"}
    exec(compile(code, "README.md", "exec"), names)
    assert names["trainer"].state.global_step == 1
    assert any("bipace/mean_advantage" in line for line in names["trainer"].state.log_history)
