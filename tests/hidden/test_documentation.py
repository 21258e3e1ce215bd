"""docs/hidden_states.md and docs/api.md: the code runs, the signatures are the code's, every name is explained."""

import inspect
import re
import sys
from pathlib import Path

import pytest
import tiny_models as tm
import torch
import vllm_stand_in

import bipace_kernels as bk

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs/hidden_states.md").read_text()
API = (ROOT / "docs/api.md").read_text()
BLOCKS = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
FUNCTIONS = [name for name in bk.hidden.__all__ if inspect.isfunction(getattr(bk.hidden, name))]


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


@pytest.mark.parametrize("name", FUNCTIONS)
def test_documented_signatures_equal_the_code(name):
    call = re.search(rf"```python\s+bk\.hidden\.{name}\((.*?)\)\s+```", API, re.DOTALL)
    assert call, f"no signature of {name} in docs/api.md"
    parts, star = [], False
    for p in inspect.signature(getattr(bk.hidden, name)).parameters.values():
        if p.kind is p.KEYWORD_ONLY and not star:
            parts.append("*")
            star = True
        parts.append(p.name + ("" if p.default is p.empty else f"={p.default!r}"))
    assert re.sub(r"\s+", " ", call[1]) == ", ".join(parts)
    text = inspect.getdoc(getattr(bk.hidden, name))
    if named := re.search(r"The other arguments are those of (\w+)\(\)", text):
        text += f"\n{inspect.getdoc(getattr(bk.hidden, named[1]))}"
    for parameter in inspect.signature(getattr(bk.hidden, name)).parameters:
        assert re.search(rf"^{parameter}\s{{2,}}", text, re.MULTILINE), parameter


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


def test_every_public_name_is_documented():
    for name in bk.hidden.__all__:
        assert re.search(rf"`(bk\.hidden\.)?{name}\b|bk\.hidden\.{name}\(", API), name
        assert inspect.getdoc(getattr(bk.hidden, name))
