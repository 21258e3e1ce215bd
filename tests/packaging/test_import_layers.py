"""Who may import whom: docs/development.md."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "bipace_kernels"
SHARED = {"schema", "_masks", "_threads"}
BACKENDS = {
    "reference": SHARED,
    "cpu": SHARED | {"_native_loader"},
    "triton_kernels": SHARED | {"_triton_loader"},
    "cuda": SHARED | {"_cuda_loader", "triton_kernels"},
}
OPTIONAL = {
    "typer",
    "rich",
    "pyarrow",
    "matplotlib",
    "jinja2",
    "sklearn",
    "transformers",
    "sentence_transformers",
    "threadpoolctl",
}


def imported(path: Path, *, of_module_only: bool = False) -> set[str]:
    """Dotted names that a file of the package imports, outside `if TYPE_CHECKING`; relative ones in full."""
    here = path.relative_to(ROOT).with_suffix("").parts[:-1]
    found: set[str] = set()

    def visit(node: ast.AST) -> None:
        if isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING":
            return
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)) and of_module_only:
            return
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = ".".join(
                [*here[: len(here) - node.level + 1], *filter(None, [node.module])] if node.level else [node.module]
            )
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
        edges[name] = {
            one for one in found | {one.rpartition(".")[0] for one in found} if one in modules and one != name
        }
    done: set[str] = set()

    def walk(name: str, above: tuple[str, ...]) -> None:
        assert name not in above, " imports ".join([*above[above.index(name) :], name])
        if name not in done:
            for other in sorted(edges[name]):
                walk(other, (*above, name))
            done.add(name)

    for name in modules:
        walk(name, ())


def ours(path: Path) -> set[str]:
    """First parts of what it imports of the package."""
    return {name.split(".")[1] for name in imported(path) if name.startswith("bipace_kernels.")}


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_backend_imports_nothing_above_it(backend):
    files = sorted((PACKAGE / backend).glob("*.py"))
    assert len(files) > 4
    for path in files:
        assert ours(path) <= BACKENDS[backend] | {backend}, path


def test_contracts_import_names_alone():
    assert ours(PACKAGE / "schema.py") == set()
    assert ours(PACKAGE / "stages.py") == {"schema"}
    assert ours(PACKAGE / "_masks.py") <= {"schema"}


def test_the_package_does_not_import_its_surroundings():
    around = {"cli", "program", "integrations", "bench"}
    files = [path for path in PACKAGE.rglob("*.py") if not around & set(path.relative_to(PACKAGE).parts)]
    assert len(files) > 60
    for path in files:
        assert not ours(path) & around, path


def test_optional_packages_are_imported_where_they_are_needed():
    """Not at the head of a module of the library; the program and the adapters have theirs."""
    assert imported(PACKAGE / "cli/figures.py", of_module_only=True) & {"matplotlib.colormaps"}, (
        "the check sees imports"
    )
    for path in [*PACKAGE.rglob("*.py"), *ROOT.glob("bench/*.py")]:
        parts = path.relative_to(ROOT).parts
        if not {"cli", "program", "integrations"} & set(parts):
            heads = {name.split(".")[0] for name in imported(path, of_module_only=True)}
            assert not heads & OPTIONAL, path
