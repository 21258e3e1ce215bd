"""docs/hidden_states.md and docs/api.md: the code runs, the signatures are the code's, every name is explained."""

from __future__ import annotations

import inspect
import re
from pathlib import Path

import pytest
import tiny_models as tm
import torch

import bipace_kernels as bk

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs/hidden_states.md").read_text()
API = (ROOT / "docs/api.md").read_text()
BLOCKS = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
FUNCTIONS = [name for name in bk.hidden.__all__ if inspect.isfunction(getattr(bk.hidden, name))]


@pytest.mark.parametrize("block", range(len(BLOCKS)))
def test_the_pages_code_runs(block):
    prompt_ids, prompt_mask = tm.prompts(4, 10)
    response_ids, _ = tm.prompts(4, 6, side="right", seed=3)
    response_mask = torch.tensor([[1, 1, 0, 1, 0, 0]] * 4)
    given = {
        "bk": bk, "model": tm.make(), "prompt_ids": prompt_ids, "response_mask": response_mask,
        "input_ids": torch.cat([prompt_ids, response_ids.clamp(min=1)], 1),
        "attention_mask": torch.cat([prompt_mask, torch.ones_like(response_mask)], 1),
        "prompt_mask": prompt_mask,
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
    for parameter in inspect.signature(getattr(bk.hidden, name)).parameters:
        assert re.search(rf"^{parameter}\s{{2,}}", text, re.MULTILINE), parameter


def test_every_public_name_is_documented():
    for name in bk.hidden.__all__:
        assert re.search(rf"`(bk\.hidden\.)?{name}\b|bk\.hidden\.{name}\(", API), name
        assert inspect.getdoc(getattr(bk.hidden, name))


def test_hidden_is_imported_when_asked_for_and_brings_no_transformers():
    import subprocess
    import sys

    code = (
        "import sys, bipace_kernels as bk; assert 'bipace_kernels.hidden' not in sys.modules; bk.hidden.tap; "
        "assert 'transformers' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
