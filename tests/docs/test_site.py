"""The documentation as a site: every page and every public name has its place, and it builds strictly."""

import importlib.util
import inspect
import json
import re
import sys

import pytest
import yaml
from paths import ROOT, program

import bipace_kernels as bk

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
    assert len(listed) == len(set(listed))
    public = {f"embedders.{name}" for name in ("Embedder", "ActorHidden", "Ngram", "Identity", "Sentence", "named")}
    for module, prefix in ((bk, ""), (bk.hidden, "hidden."), (bk.distributed, "distributed.")):
        things = {name: getattr(module, name) for name in module.__all__}
        public |= {prefix + name for name, x in things.items() if inspect.isfunction(x) or inspect.isclass(x)}
    assert set(listed) == public | {"hidden.vllm.Extraction"}


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
