"""Who may import whom: docs/development.md."""

import ast
import functools

import pytest
from paths import ROOT

PACKAGE = ROOT / "bipace_kernels"
BACKENDS = PACKAGE / "backends"
SHARED = {"backends.schema", "backends.records", "backends.threads"}
ALLOWED = {
    "reference": SHARED,
    "cpu": SHARED | {"backends.native_loader"},
    "triton": SHARED | {"backends.triton_loader"},
    "cuda": SHARED | {"backends.cuda_loader", "backends.triton", "support.files"},
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
    assert ours(BACKENDS / "records.py") <= {"backends.schema"}
    assert ours(PACKAGE / "settings.py") == set()


def test_optional_packages_are_imported_where_they_are_needed():
    """Not at the head of a module of the library; the program and the adapters have theirs."""
    assert "matplotlib.colormaps" in imported(PACKAGE / "cli/figures.py", of_module_only=True), "the check sees them"
    for path in [*PACKAGE.rglob("*.py"), *ROOT.glob("bench/*.py")]:
        parts = path.relative_to(ROOT).parts
        if not {"cli", "program", "integrations"} & set(parts):
            heads = {name.split(".")[0] for name in imported(path, of_module_only=True)}
            assert not heads & OPTIONAL, path
