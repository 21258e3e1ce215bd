"""A plain installation has torch and NumPy: the estimator works, and what needs more names the extra."""

import contextlib
import importlib.metadata
import json
import sys

import pytest
from cli_runs import record, write
from marks import slow
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from paths import ROOT, program

import bipace_kernels as bk
from bipace_kernels.support import optional

SAMPLE = ROOT / "examples/data/textcraft_scripted.jsonl.gz"
EVERYTHING = (
    "typer", "click", "rich", "pyarrow", "matplotlib", "PIL", "sklearn", "scipy", "threadpoolctl", "pandas",
    "transformers", "sentence_transformers", "tokenizers", "xxhash", "packaging", "yaml", "tqdm",
)  # fmt: skip
BLOCK = """
import sys
class Block:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {blocked!r}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)
sys.meta_path.insert(0, Block())
"""


def run(code, *blocked, cwd=ROOT):
    """Python in a separate process, in which these packages are not installed."""
    code, env = BLOCK.format(blocked=blocked) + code, {"PYTHONPATH": str(ROOT)}
    return program(sys.executable, "-c", code, status=None, cwd=cwd, env=env)


def command(*words, blocked, **how):
    """The program `bipace` in such a process."""
    return run(f"from bipace_cli import main\nmain({[str(word) for word in words]!r})", *blocked, **how)


def sentence(done):
    """The one line of stderr of a program that ended with status 2."""
    assert done.returncode == 2, done.stderr
    assert done.stdout == ""
    (line,) = done.stderr.splitlines()
    assert line.startswith("error: ")
    return line.removeprefix("error: ")


def needs(subject, package, extra):
    return f'{subject} needs the package {package}, which is not installed: pip install "bipace-kernels[{extra}]"'


def project():
    tomllib = pytest.importorskip("tomllib", reason="Python 3.10 reads no TOML")
    with (ROOT / "pyproject.toml").open("rb") as file:
        return tomllib.load(file)["project"]


def test_extras_have_the_packages_that_errors_name():
    extras = project()["optional-dependencies"]
    for package, extra in optional.PACKAGES.values():
        assert any(Requirement(line).name == package for line in extras[extra]), (package, extra)


def test_the_estimator_needs_torch_and_numpy_alone():
    code = """
import sys, json
import bipace_kernels as bk, bipace_kernels.integrations
group, trajectory, rewards = [0] * 4, [0, 0, 1, 1], [0.0, 1.0, 0.0, 0.0]
texts = list("abab")
keys, _ = bk.action_keys(texts, mode="text")
more = {"observation": texts, "fingerprint": bk.ngram_fingerprint(texts), "action_key": keys}
found = {}
for backend in ("reference", "cpu"):
    for name in ("grpo", "gigpo", "hgpo", "bigpo", "bipace"):
        result = bk.advantage(group, trajectory, rewards, config=getattr(bk.Config, name)(), backend=backend, **more)
        result.metrics()
        found[f"{backend} {name}"] = result.cluster.tolist()
bk.choose_epsilon(more["fingerprint"], group)
bk.hidden.turn_positions
bk.distributed.plan_owners
bk.embedders.named("ngram").embed(texts)
try:
    bk.embedders.Sentence("somewhere")
except ImportError as error:
    found["error"] = str(error)
print(json.dumps(found))
"""
    done = run(code, *EVERYTHING)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found.pop("error") == needs("the sentence embedder", "sentence-transformers", "sentence")
    assert len(found) == 10 and found["cpu bipace"] == [0, 1, 0, 1]


@pytest.mark.parametrize("words", [["info"], slow(["--help"]), slow([])])
def test_the_program_without_its_packages(words):
    assert sentence(command(*words, blocked=EVERYTHING)) == needs("the program bipace", "typer", "cli")


@pytest.mark.slow
@pytest.mark.parametrize(("module", "subject"), [("bipace_kernels.cli", "the program bipace"), ("bench", "bench")])
def test_modules_that_are_programs(module, subject):
    code = f"import runpy, sys\nsys.argv = ['program']\nrunpy.run_module({module!r}, None, '__main__', alter_sys=True)"
    said = sentence(run(code, *EVERYTHING))
    assert said.startswith(f"{subject} needs the package ") and said.endswith('pip install "bipace-kernels[cli]"')


@pytest.mark.slow
def test_commands_that_need_one_package_more(tmp_path):
    """Reported before anything is read or computed; everything that does not need the package keeps working."""
    plots, tables = ("matplotlib", "sklearn"), ("pyarrow",)
    report = ("report", SAMPLE, "--out", tmp_path / "report")
    assert sentence(command(*report, blocked=plots)) == needs("bipace report", "matplotlib", "cli")
    said = sentence(command(*report, "--html", blocked=("jinja2",)))
    assert said == needs("bipace report --html", "Jinja2", "cli")
    (tmp_path / "in.parquet").write_bytes(b"")
    for read, written in ((SAMPLE, "out.parquet"), (tmp_path / "in.parquet", "o.csv")):
        said = sentence(command("advantage", read, "--out", tmp_path / written, blocked=tables))
        assert said == needs("a Parquet file", "pyarrow", "parquet")
    assert {path.name for path in tmp_path.iterdir()} == {"in.parquet"}
    done = command("advantage", SAMPLE, "--out", tmp_path / "out.csv", blocked=plots + tables)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "out.csv").read_text().count("\n") == 8271


def test_a_package_that_is_there_and_broken_says_why(monkeypatch, tmp_path):
    """Not "not installed": its own error, which names what it misses."""
    (tmp_path / "sentence_transformers.py").write_text("import something_else_that_is_missing")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "sentence_transformers", raising=False)
    with pytest.raises(ModuleNotFoundError, match="something_else_that_is_missing") as error:
        bk.embedders.Sentence("somewhere")
    assert not isinstance(error.value, optional.MissingPackageError)


def only_cli():
    """Modules of this environment that `pip install .[cli]` does not bring."""
    read = project()
    extras = read["optional-dependencies"]
    wanted = [Requirement(text) for text in (*read["dependencies"], *extras["cli"][1:], *extras["parquet"])]
    have = set()
    while wanted:
        one = wanted.pop()
        name = canonicalize_name(one.name)
        if name not in have and (one.marker is None or one.marker.evaluate({"extra": ""})):
            have.add(name)
            with contextlib.suppress(importlib.metadata.PackageNotFoundError):
                wanted += map(Requirement, importlib.metadata.requires(name) or ())
    found = importlib.metadata.packages_distributions()
    others = [name for name, of in found.items() if not have & set(map(canonicalize_name, of))]
    return [name for name in others if not name.startswith(("bipace", "_"))]


COMMANDS = (
    "info",
    "bench ngrams --quick --out OUT/bench",
    "advantage DATA --out OUT/a.parquet --preset gae",
    "report DATA --out OUT/report --html --no-similar --epsilons 0.25",
    "truth --estimator mine.py:MINE --sets model0 --only GRPO --rollouts 2 --out OUT/truth",
)


@pytest.mark.parametrize("line", COMMANDS, ids=lambda line: line.split()[0])
def test_every_command_runs_with_only_the_packages_of_cli(line, tmp_path):
    (tmp_path / "mine.py").write_text("import bipace_kernels as bk\nMINE = bk.Config.gae('group')\n")
    rows = [record(i, t, f"s{t}", "go", float(i == t)) for i in range(3) for t in range(3)]
    data, refused = write(tmp_path / "rollouts.jsonl", rows), only_cli()
    assert {"pytest", "tqdm", "transformers"} & set(refused) and "torch" not in refused
    words = line.replace("DATA", str(data)).replace("OUT", str(tmp_path / "out")).split()
    done = command(*words, blocked=refused, cwd=tmp_path)
    assert done.returncode == 0, done.stderr


def test_what_needs_more_than_the_programs_extra_says_what_to_install(tmp_path):
    """`truth` without its sets runs."""
    blocked = only_cli()
    calibrate = command("calibrate", tmp_path, tmp_path / "prompts.jsonl", "--out", tmp_path / "c", blocked=blocked)
    assert sentence(calibrate) == needs("bipace calibrate", "transformers", "hidden")
    done = run("from bench.truth import run\nassert run([], 1) == []", *blocked)
    assert done.returncode == 0, done.stderr
