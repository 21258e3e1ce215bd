"""What a process has imported; who may import whom (docs/development.md); calls that wait for an import."""

import ast
import functools
import importlib
import json
import sys

import pytest
from paths import HELPERS, ROOT, program
from refusals import refused

from bipace_kernels.support.when_imported import when_imported

CODE = f"""
import json, sys, threading, torch, numpy
sys.path.insert(0, {str(HELPERS)!r})
found, before = {{}}, set(sys.modules)
def look(when):
    found[when] = sorted(set(sys.modules) - before)
import bipace_kernels as bk
torch.ops.bipace.advantage.default
look("import")
found["threads"] = threading.active_count()
from batches import CONFIGS, make_batch
bk.advantage(config=CONFIGS["bipace"], backend="cpu", **make_batch(2).arguments())
look("call")
bk.hidden.tap, bk.hidden.vllm.Extraction
look("hidden")
print(json.dumps(found))
"""


@pytest.fixture(scope="module")
def found():
    """Modules that were not there with torch and NumPy, at each point; threads after the import."""
    return json.loads(program(sys.executable, "-c", CODE, timeout=300).stdout)


def tops(names):
    return {name.partition(".")[0] for name in names}


def test_the_import_takes_torch_and_numpy_and_nothing_else(found):
    """No other package, no compiled module of ours, no compiler of torch's, no process, no thread: it costs little."""
    new = found["import"]
    assert "bipace_kernels" in new and tops(new) - sys.stdlib_module_names <= {"bipace_kernels", "torch", "numpy"}
    assert not [name for name in new if name.startswith(("torch._dynamo", "torch._inductor", "subprocess"))]
    ours = {name for name in new if name.startswith("bipace_kernels.")}
    backends = tuple(f"backends.{name}" for name in ("cuda", "triton", "reference", "cpu"))
    later = ("_native", "_cuda", *backends, "hidden", "distributed", "cli", "integrations")
    assert not ours & {f"bipace_kernels.{name}" for name in later} and found["threads"] == 1


def test_calls_load_no_gpu_backend_and_hidden_states_no_model_library(found):
    new = found["call"]
    assert "bipace_kernels._native" in new and not tops(new) & {"triton", "cupy"}
    gpu = ("bipace_kernels.backends.cuda.", "bipace_kernels.backends.triton.")
    assert not [name for name in new if name.startswith(gpu)] and "bipace_kernels._cuda" not in new
    assert "bipace_kernels.hidden.vllm" in found["hidden"]
    assert not tops(found["hidden"]) & {"transformers", "vllm", "safetensors", "tokenizers"}


PACKAGE = ROOT / "bipace_kernels"
BACKENDS = PACKAGE / "backends"
SHARED = {"backends.schema", "backends.records", "backends.threads"}
ALLOWED = {
    "reference": SHARED,
    "cpu": SHARED | {"backends.native_loader"},
    "triton": SHARED | {"backends.triton_loader"},
    "cuda": SHARED | {"backends.cuda_loader", "backends.triton", "support.files", "support.lazy"},
}
OPTIONAL = {"typer", "rich", "pyarrow", "matplotlib", "jinja2", "sklearn", "threadpoolctl"}
OPTIONAL |= {"transformers", "sentence_transformers"}


@functools.cache
def imported(path, *, of_module_only=False):
    """Dotted names that a file of the package imports, outside `if TYPE_CHECKING`; relative ones in full."""
    here = path.relative_to(ROOT).with_suffix("").parts[:-1]
    found = set()

    def visit(node):
        if isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING":
            return
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)) and of_module_only:
            return
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            above = here[: len(here) - node.level + 1] if node.level else ()
            base = ".".join([*above, *filter(None, [node.module])])
            found.update(f"{base}.{alias.name}" for alias in node.names)
        for child in ast.iter_child_nodes(node):
            visit(child)

    visit(ast.parse(path.read_text()))
    return found


def test_no_module_imports_itself_through_others():
    modules = {".".join(path.relative_to(ROOT).with_suffix("").parts): path for path in PACKAGE.rglob("*.py")}
    edges = {}
    for name, path in modules.items():
        found = imported(path, of_module_only=True)
        found = found | {one.rpartition(".")[0] for one in found}
        edges[name] = (found & modules.keys()) - {name}
    done = set()

    def walk(name, above):
        assert name not in above, " imports ".join([*above[above.index(name) :], name])
        if name not in done:
            for other in sorted(edges[name]):
                walk(other, (*above, name))
            done.add(name)

    for name in modules:
        walk(name, ())


def ours(path):
    """What it imports of the package, as room or room.module."""
    names = [name.split(".")[1:3] for name in imported(path) if name.startswith("bipace_kernels.")]
    rooms = {path.name for path in PACKAGE.iterdir() if path.is_dir()}
    return {".".join(parts) if parts[0] in rooms else parts[0] for parts in names}


@pytest.mark.parametrize("backend", ALLOWED)
def test_a_backend_imports_nothing_above_it(backend):
    files = sorted((BACKENDS / backend).glob("*.py"))
    assert len(files) > 4
    for path in files:
        assert ours(path) <= ALLOWED[backend] | {f"backends.{backend}"}, path


def test_contracts_import_names_alone_and_nothing_imports_its_surroundings():
    around = {"cli", "program", "integrations", "bench"}
    files = [path for path in PACKAGE.rglob("*.py") if not around & set(path.relative_to(PACKAGE).parts)]
    assert len(files) > 60
    for path in files:
        assert not {name.split(".")[0] for name in ours(path)} & around, path
    assert ours(BACKENDS / "schema.py") == set()
    assert ours(BACKENDS / "contract.py") == {"backends.records", "backends.schema"}
    assert ours(BACKENDS / "records.py") <= {"backends.schema"} and ours(PACKAGE / "settings.py") == set()


def test_optional_packages_are_imported_where_they_are_needed():
    """Not at the head of a module of the library; the program and the adapters have theirs."""
    assert "matplotlib.colormaps" in imported(PACKAGE / "cli/figures.py", of_module_only=True), "the check sees them"
    for path in [*PACKAGE.rglob("*.py"), *ROOT.glob("bench/*.py")]:
        parts = path.relative_to(ROOT).parts
        if not {"cli", "program", "integrations"} & set(parts):
            heads = {name.split(".")[0] for name in imported(path, of_module_only=True)}
            assert not heads & OPTIONAL, path


@pytest.fixture
def package(tmp_path, monkeypatch):
    """A package `waited_for` with a module `part`, and what was called when."""
    folder = tmp_path / "waited_for"
    folder.mkdir()
    (folder / "__init__.py").write_text("")
    (folder / "part.py").write_text("value = 1\n")
    monkeypatch.syspath_prepend(tmp_path)
    for name in ("waited_for", "waited_for.part"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    yield []
    for name in ("waited_for", "waited_for.part"):
        sys.modules.pop(name, None)


def test_a_call_comes_after_the_module_s_own_code_and_once(package):
    """At once where the module is there."""
    when_imported("waited_for.part", lambda: package.append(sys.modules["waited_for.part"].value))
    when_imported("waited_for.part", lambda: package.append("second"))
    importlib.import_module("waited_for")
    assert package == []
    module = importlib.import_module("waited_for.part")
    importlib.reload(module)
    assert package == [1, "second"]
    when_imported("waited_for.part", lambda: package.append("at once"))
    assert package == [1, "second", "at once"]


def test_a_module_that_fails_calls_nothing_and_one_that_is_missing_is_missing(package, tmp_path):
    (tmp_path / "waited_for" / "part.py").write_text("raise OSError('own error')\n")
    when_imported("waited_for.part", lambda: package.append("called"))
    refused("own error", importlib.import_module, "waited_for.part", error=OSError)
    when_imported("waited_for.none", lambda: package.append("called"))
    refused(r"waited_for\.none", importlib.import_module, "waited_for.none", error=ModuleNotFoundError)
    assert package == []
