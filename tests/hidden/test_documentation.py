"""docs/hidden_states.md: its code runs; docs/api.md: what it says of Extraction.  tests/docs has the functions."""

import inspect
import re
import sys

import pytest
import tiny_models as tm
import torch
import vllm_stand_in
from paths import ROOT

import bipace_kernels as bk

PAGE = (ROOT / "docs/hidden_states.md").read_text()
API = (ROOT / "docs/api.md").read_text()
BLOCKS = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)


@pytest.mark.parametrize("block", range(len(BLOCKS)))
def test_the_pages_code_runs(block, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "vllm", vllm_stand_in)
    if "vllm" in BLOCKS[block]:
        tm.make().save_pretrained(tmp_path / "model")
    prompt_ids, prompt_mask = tm.prompts(4, 10)
    response_ids, _ = tm.prompts(4, 6, side="right", seed=3)
    response_mask = torch.tensor([[1, 1, 0, 1, 0, 0]] * 4)
    given = {
        "bk": bk, "model": tm.make(), "prompt_ids": prompt_ids, "response_mask": response_mask,
        "input_ids": torch.cat([prompt_ids, response_ids.clamp(min=1)], 1),
        "attention_mask": torch.cat([prompt_mask, torch.ones_like(response_mask)], 1),
        "prompt_mask": prompt_mask, "model_folder": str(tmp_path / "model"), "states_folder": tmp_path / "states",
        "prompts": [{"prompt_token_ids": row.tolist()} for row in prompt_ids],
    }  # fmt: skip
    exec(compile(BLOCKS[block], f"docs/hidden_states.md, block {block}", "exec"), given)
    assert given["fingerprint"].shape[1] == 48
    if "owner" in given:
        assert given["owner"].tolist() == [0, 0, 1, 1, 2, 2, 3, 3]


def test_the_documented_extraction_equals_the_code():
    thing = bk.hidden.vllm.Extraction
    documented = re.search(r"bk\.hidden\.vllm\.Extraction\((.*?)\)", API)[1]
    parts = [p.name + ("" if p.default is p.empty else f"={p.default!r}") for p in _parameters(thing)]
    assert documented.replace("*, ", "") == ", ".join(parts)
    for method in (m for m in vars(thing) if not m.startswith("_")):
        called = ", ".join(
            f"{p.name}={p.default!r}" if p.default is not p.empty else p.name
            for p in _parameters(getattr(thing, method))
            if p.name != "self"
        )
        assert f"`{method}({called})`" in API, method
    for parameter in _parameters(thing):
        assert re.search(rf"^{parameter.name}\s{{2,}}", inspect.getdoc(thing), re.MULTILINE), parameter


def _parameters(thing):
    return inspect.signature(thing).parameters.values()
