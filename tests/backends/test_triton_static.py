"""What can be read off the source of the Triton backend: nothing waits for the device, no kernel is forgotten."""

import ast

import pytest
from paths import ROOT

PACKAGE = ROOT / "bipace_kernels" / "backends" / "triton"
FILES = sorted(PACKAGE.glob("*.py"))
TREES = {path.stem: ast.parse(path.read_text()) for path in FILES}

# Each of these reads tensor data on the host, or lets a size depend on it: on a GPU it waits, and no graph captures it.
WAITS = {
    "item", "tolist", "numpy", "cpu", "nonzero", "argwhere", "masked_select", "unique", "unique_consecutive",
    "synchronize", "is_nonzero", "allclose", "equal", "bincount", "cholesky_solve",
}  # fmt: skip
COPIES = {"tensor", "as_tensor", "from_numpy"}  # torch.tensor(list): a copy from unpinned memory, which waits too


def is_jit(node):
    """Decorated with triton.jit, with or without arguments."""
    return any("triton.jit" in ast.unparse(d) for d in getattr(node, "decorator_list", []))


def jit_functions(tree):
    return {node.name for node in tree.body if isinstance(node, ast.FunctionDef) and is_jit(node)}


def launches(tree):
    """Names of the kernels in calls `kernel[grid](...)` and `launch(kernel, ...)`."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Subscript):
            yield ast.unparse(node.func.value)
        elif isinstance(node, ast.Call) and ast.unparse(node.func) == "launch":
            yield ast.unparse(node.args[0])


def host_code(tree):
    """All nodes outside the kernels."""
    for node in ast.iter_child_nodes(tree):
        if not is_jit(node):
            yield node
            yield from host_code(node)


def waiting(tree):
    """Names in host code that would wait for the device, with their lines."""
    found = []
    for node in host_code(tree):
        if isinstance(node, ast.Attribute):
            owner = ast.unparse(node.value)
            if node.attr in WAITS or (owner == "torch" and node.attr in COPIES):
                found.append(f"line {node.lineno}: {ast.unparse(node)}")
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            cut = node.func.attr == "repeat_interleave" and not any(k.arg == "output_size" for k in node.keywords)
            moved = node.func.attr == "to" and "cpu" in [getattr(a, "value", None) for a in node.args]
            if cut or moved:
                found.append(f"line {node.lineno}: {ast.unparse(node)}")
    return found


@pytest.mark.parametrize("stem", TREES)
def test_host_code_never_waits(stem):
    assert not waiting(TREES[stem])


def test_every_launched_kernel_is_compiled_ahead():
    """A kernel that resources.launches() does not meet would first be compiled on a user's GPU."""
    compiled = pytest.importorskip("compiled_triton")  # which skips where kernels are interpreted
    launched = {name.rpartition(".")[2] for stem, tree in TREES.items() if stem != "_launch" for name in launches(tree)}
    kernels = set().union(*(jit_functions(tree) for tree in TREES.values()))
    assert launched <= kernels, "a launch this test does not understand"
    assert not launched - {launch.name for launch in compiled.LAUNCHES}


SAMPLE = """
import torch, triton

@triton.jit
def kernel(x):
    x.item()

def host(x, n):
    y = x.nonzero()
    z = torch.tensor([1])
    x.to("cpu"), x.repeat_interleave(n)
    x.repeat_interleave(n, output_size=4)
    kernel[(1,)](x, num_warps=4)
    launch(kernel, (1,), x, num_warps=4)
"""


def test_the_checks_see_what_they_look_for():
    tree = ast.parse(SAMPLE)
    assert [text.partition(": ")[2] for text in waiting(tree)] == [
        "x.nonzero", "torch.tensor", "x.to('cpu')", "x.repeat_interleave(n)"
    ]  # fmt: skip
    assert list(launches(tree)) == ["kernel", "kernel"] and jit_functions(tree) == {"kernel"}
