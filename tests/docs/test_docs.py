"""Documentation that cannot drift: public names, defaults, code that runs; the site's navigation and strict build."""

import importlib.util
import inspect
import json
import re
import sys

import doc_blocks
import pytest
import torch
import yaml
from marks import slow
from paths import ROOT, program
from tiny_encoder import Encoder

import bipace_kernels as bk
from bipace_kernels.features import embedders
from bipace_kernels.ops import registry as _ops

API = (ROOT / "docs/api.md").read_text()
README = (ROOT / "README.md").read_text()
GPU = (ROOT / "docs/gpu.md").read_text()
PUBLIC = {
    f"{prefix}.{name}": getattr(module, name)
    for prefix, module in (("bk", bk), ("bk.hidden", bk.hidden), ("bk.distributed", bk.distributed))
    for name in module.__all__
}
# What needs a trainer is run by tests/integrations.
OF_README = [b.code for b in doc_blocks.blocks("README.md", "python") if "bipace_kernels.integrations" not in b.code]


@pytest.mark.parametrize("name", PUBLIC)
def test_every_public_name_is_documented(name):
    module, _, own = name.rpartition(".")
    listed = rf"`?{re.escape(own)}\b"
    if module == "bk.hidden":
        listed = rf"`({re.escape(module)}\.)?{own}\b|{re.escape(name)}\("
    assert re.search(listed, API), f"{name} is missing in docs/api.md"
    thing = PUBLIC[name]
    if inspect.isclass(thing) or inspect.isfunction(thing) or module == "bk.hidden":
        assert inspect.getdoc(thing), f"{name} has no docstring"


@pytest.mark.parametrize("name", [name for name, thing in PUBLIC.items() if inspect.isfunction(thing)])
def test_documented_signatures_equal_the_code(name):
    """The call printed in docs/api.md, with its defaults; functions of hidden and distributed name every argument."""
    call = re.search(rf"```python\s+{re.escape(name)}\((.*?)\)\s+```", API, re.DOTALL)
    assert call, f"no signature of {name} in docs/api.md"
    assert re.sub(r"\s+", " ", call[1]) == doc_blocks.signature(PUBLIC[name])
    described = r"^{}\s{{2,}}" if name.startswith("bk.hidden.") else r"\b{}\b"
    text = inspect.getdoc(PUBLIC[name])
    if named := re.search(r"The other arguments are those of (`bipace_kernels\.)?(\w+)\(\)", text):
        module = "bk" if named[1] else name.rpartition(".")[0]
        text += f"\n{inspect.getdoc(PUBLIC[f'{module}.{named[2]}'])}"
    for parameter in inspect.signature(PUBLIC[name]).parameters if name.count(".") > 1 else ():
        assert re.search(described.format(parameter), text, re.MULTILINE), parameter


def test_the_documented_classes_equal_the_code():
    documented = re.search(r"`EpsilonController\((.*?)\)`:", API, re.DOTALL)[1]
    assert documented == doc_blocks.signature(bk.EpsilonController)
    extraction = bk.hidden.vllm.Extraction
    assert re.search(r"bk\.hidden\.vllm\.Extraction\((.*?)\)", API)[1] == doc_blocks.signature(extraction)
    for method in (name for name in vars(extraction) if not name.startswith("_")):
        called = doc_blocks.signature(getattr(extraction, method)).removeprefix("self").removeprefix(", ")
        assert f"`{method}({called})`" in API, method
    for name in ("ActorHidden", "Ngram", "Identity", "Sentence", "named"):
        documented = re.search(rf"^\* `{name}\((.*?)\)`:", API, re.MULTILINE)[1]
        parts = inspect.signature(getattr(bk.embedders, name)).parameters.values()
        wanted = [(p.name, "" if p.default is p.empty else repr(p.default)) for p in parts]
        assert re.findall(r"(\w+)(?:=([^,)]+))?", documented) == wanted, name


@pytest.mark.parametrize("thing", [bk.advantage, bk.Config, bk.EpsilonController, bk.hidden.vllm.Extraction])
def test_a_docstring_explains_every_argument(thing):
    for name in inspect.signature(thing).parameters:
        assert re.search(rf"^{name}\s{{2,}}", inspect.getdoc(thing), re.MULTILINE), name


def test_environment_variables_are_read_in_one_file_and_documented():
    used = set()
    for path in (ROOT / "bipace_kernels").rglob("*.py"):
        names = set(re.findall(r"environ.*?\"(BIPACE_\w+)\"", path.read_text()))
        assert not names or path.name == "env.py", path
        used |= names
    assert used and all(name in API for name in used)


@pytest.mark.parametrize("block", range(len(OF_README)))
def test_readmes_code_runs_and_prints_what_its_comments_say(block, capsys):
    exec(compile(OF_README[block], f"README.md, block {block}", "exec"), {"__name__": "readme"})
    printed = capsys.readouterr().out.splitlines()
    for said in re.findall(r"# (tensor\(\[.*?\]\))", OF_README[block]):
        assert said in printed


@pytest.mark.parametrize("page", ["README.md", *(f"docs/{path.name}" for path in sorted(ROOT.glob("docs/*.md")))])
def test_every_block_is_run_or_marked_as_a_fragment(page):
    """A test that names the page runs all of its Python (of trinity.md: the YAML) that is not marked."""
    run = {"docs/trinity.md": "yaml"}.get(page, "python")
    named = any(f'"{page}"' in test.read_text() for test in ROOT.glob("tests/*/test_*.py"))
    for block in doc_blocks.blocks(page, "python", "bash", "yaml"):
        runs = block.fragment or (named and block.language == run)
        assert runs, f"{page}, line {block.line}: {doc_blocks.FRAGMENT} or a test"


@pytest.mark.parametrize("page", ["docs/estimator.md", "docs/gae.md", slow("docs/gpu.md")])
def test_pages_that_need_nothing_else_run(page):
    doc_blocks.run(page, {"__name__": "page"})


@pytest.fixture
def batch(monkeypatch):
    """Four rollouts of three steps, under the names that the pages use."""
    monkeypatch.setattr(embedders, "_load", lambda model, device: Encoder())
    torch.manual_seed(0)
    group, trajectory, step = [0] * 6 + [1] * 6, [i // 3 for i in range(12)], [0, 1, 2] * 4
    words = ["go east", "go west", "look"]
    return {
        "bk": bk, "torch": torch, "group": group, "trajectory": trajectory, "step": step,
        "rewards": torch.rand(12), "hidden": torch.randn(12, 16), "states": torch.randn(12, 16),
        "keys": torch.arange(12) % 3, "texts": [words[i % 3] for i in range(12)],
        "layout": bk.layout(group=group, trajectory=trajectory, step=step),
    }  # fmt: skip


def test_the_pages_on_action_keys_epsilon_and_embedders_run(batch):
    tokenizers = pytest.importorskip("trained_tokenizers")
    tokenizer = tokenizers.byte_level()
    ids = torch.tensor([tokenizer.encode(text).ids[:2] for text in ("<action>go</action>", "look", "wait")])
    made = doc_blocks.run("docs/action_keys.md", {
        **batch, "tokenizer": tokenizer, "response_ids": ids, "response_mask": torch.ones_like(ids),
        "action_vectors": torch.randn(12, 4), "action": torch.rand(12, 4), "action_range": 2.0, "model": Encoder(),
        "actions": batch["texts"],
    })  # fmt: skip
    assert made["result"].advantage.shape == (12,) and made["keys"].shape == (12,)
    batches = [tuple(batch[name] for name in ("hidden", "rewards", "keys", "layout"))] * 3
    made = doc_blocks.run("docs/epsilon.md", {**batch, "batches": batches})
    assert made["labels"].shape == (3, 12) and made["result"].advantage.shape == (12,)
    assert bk.EpsilonController(0.1).load_state_dict(made["state"]) is None
    assert doc_blocks.run("docs/embedders.md", batch)["result"].advantage.shape == (12,)


def test_the_page_on_hidden_states_runs(tmp_path, monkeypatch):
    tm, stand_in = (pytest.importorskip(name) for name in ("tiny_models", "vllm_stand_in"))
    monkeypatch.setitem(sys.modules, "vllm", stand_in)
    tm.make().save_pretrained(tmp_path / "model")
    prompt_ids, prompt_mask = tm.prompts(4, 10)
    response_mask = torch.tensor([[1, 1, 0, 1, 0, 0]] * 4)
    made = doc_blocks.run("docs/hidden_states.md", {
        "model": tm.make(), "prompt_ids": prompt_ids, "prompt_mask": prompt_mask, "response_mask": response_mask,
        "input_ids": torch.cat([prompt_ids, tm.prompts(4, 6, side="right", seed=3)[0].clamp(min=1)], 1),
        "attention_mask": torch.cat([prompt_mask, torch.ones_like(response_mask)], 1),
        "model_folder": str(tmp_path / "model"), "states_folder": tmp_path / "states",
        "prompts": [{"prompt_token_ids": row.tolist()} for row in prompt_ids],
    })  # fmt: skip
    assert made["owner"].tolist() == [0, 0, 1, 1, 2, 2, 3, 3]
    assert made["fingerprint"].shape == (4, 48)  # of the last of three ways to have it


@pytest.mark.slow
def test_the_page_on_calibration_runs(tmp_path, monkeypatch):
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("sklearn")
    folder = str(ROOT / "examples/textcraft/warm_start")
    monkeypatch.chdir(tmp_path)
    made = doc_blocks.run("docs/calibration.md", {
        "bk": bk, "model": transformers.AutoModelForCausalLM.from_pretrained(folder).float().eval(),
        "tokenizer": transformers.AutoTokenizer.from_pretrained(folder),
        "prompts": [f"{word} {number} planks" for word in ("get", "craft") for number in range(20)],
        "task_types": ["get"] * 20 + ["craft"] * 20,
    })  # fmt: skip
    assert made["found"].choice is not None and (tmp_path / "calibration/states").is_dir()


def test_every_op_is_listed_with_its_arguments():
    listed = dict(re.findall(r"^\| `(\w+)\((.*?)\)` \|", GPU, re.MULTILINE))
    assert listed.pop("advantage") == "..." and sorted(listed) == sorted(_ops.OPS)
    for name, arguments in listed.items():
        schema = getattr(torch.ops.bipace, name).default._schema.arguments
        positional = [a.name for a in schema if not a.kwarg_only]
        keywords = [a.name for a in schema if a.kwarg_only]
        assert arguments == ", ".join(positional + (["*", *keywords] if keywords else [])), name


def test_every_module_and_folder_of_tests_is_on_the_map():
    """A module stands in the row of its package; those of a backend are named after their stages."""
    text = (ROOT / "docs/development.md").read_text()
    packages = [ROOT / "bipace_kernels", ROOT / "integrations", *(ROOT / "bipace_kernels").glob("*/")]
    for package in packages:
        modules = {path.stem.strip("_") for path in package.glob("*.py")} - {"init", "main", "version"}
        if modules:
            row = re.search(rf"^\| `{package.relative_to(ROOT)}/` \| (.*) \|$", text, re.MULTILINE)
            assert row, f"no row for {package.name}/"
            assert modules <= set(re.findall(r"\w+", row[1])), modules - set(re.findall(r"\w+", row[1]))
    for folder in (ROOT / "tests").iterdir():
        assert not any(folder.glob("*.py")) or f"`tests/{folder.name}/`" in text, f"no word on tests/{folder.name}/"


SITE = yaml.safe_load((ROOT / "mkdocs.yml").read_text())


def places(entry):
    """Paths of the navigation."""
    if isinstance(entry, str):
        return [entry]
    return [path for part in (entry.values() if isinstance(entry, dict) else entry) for path in places(part)]


def test_every_page_is_in_the_navigation_once():
    pages = [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("examples/*.md"), *ROOT.glob("examples/*/*.md")]
    pages += [*ROOT.glob("bench/*.md"), *ROOT.glob("bench/truth/*.md")]
    pages += [ROOT / "integrations/README.md", ROOT / "csrc/README.md"]
    assert sorted(places(SITE["nav"])) == sorted(str(path.relative_to(ROOT)) for path in pages)


def test_every_public_name_is_in_the_reference_once():
    listed = [
        name
        for page in ROOT.glob("docs/reference/*.md")
        for name in re.findall(r"^::: bk\.([\w.]+)$", page.read_text(), re.MULTILINE)
    ]
    public = {f"embedders.{name}" for name in ("Embedder", "ActorHidden", "Ngram", "Identity", "Sentence", "named")}
    for module, prefix in ((bk, ""), (bk.hidden, "hidden."), (bk.distributed, "distributed.")):
        things = {name: getattr(module, name) for name in module.__all__}
        public |= {prefix + name for name, x in things.items() if inspect.isfunction(x) or inspect.isclass(x)}
    assert sorted(listed) == sorted(public | {"hidden.vllm.Extraction"})


@pytest.mark.slow
def test_the_site_builds_strictly(tmp_path):
    """As `make docs` builds it: no warning, and a docstring's columns are rows of a table."""
    for name in ("mkdocs", "material", "mkdocstrings"):
        if importlib.util.find_spec(name) is None:
            pytest.skip(f"{name} is not installed (make docs)")
    argv = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", tmp_path / "site"]
    done = program(*argv, cwd=ROOT, env={"NO_MKDOCS_2_WARNING": "1"})
    assert "WARNING" not in done.stderr
    page = (tmp_path / "site/docs/reference/advantages.html").read_text()
    assert "<tr><td><code>trajectory</code></td><td>[N] trajectory id, unique in the batch</td></tr>" in page
    assert '<a href="../estimator.html">docs/estimator.md</a>' in page
    assert (tmp_path / "site/search/search_index.js").exists()  # read by pages that are opened from a disk
    scripts = re.findall(r'<script src="([^"]*)"', page)
    assert "../site/iframe-worker.js" in scripts and not [one for one in scripts if "//" in one]  # offline, too
    index = json.loads((tmp_path / "site/search/search_index.json").read_text())["docs"]
    assert not [entry["location"] for entry in index if entry["location"].startswith(("bench/results", "CHANGELOG"))]
    assert [entry for entry in index if entry["location"].startswith("docs/estimator.html#41-an-estimator-of-your-own")]
    for name in ("advantage", "Config", "AdvantageResult", "metrics"):
        assert re.search(rf'id="bipace_kernels\.[\w.]*\b{name}"', page), name
