"""What can be read off the source of the Triton backend: fusion stated, nothing waits for the device, no kernel forgotten."""

import ast
import importlib

import benchmarks
import pytest
from paths import ROOT

PACKAGE = ROOT / "bipace_kernels" / "backends" / "triton"
FILES = sorted(PACKAGE.glob("*.py"))
TREES = {path.stem: ast.parse(path.read_text()) for path in FILES}

# Each of these reads tensor data on the host, or lets a size depend on it: on a GPU it waits, and no graph captures it.
WAITS = {
    "item", "tolist", "numpy", "cpu", "nonzero", "argwhere", "masked_select", "unique", "unique_consecutive",
    "synchronize", "is_nonzero", "allclose", "equal", "bincount",
}  # fmt: skip
COPIES = {"tensor", "as_tensor", "from_numpy"}  # torch.tensor(list): a copy from unpinned memory, which waits too


def is_jit(node):
    """Decorated with triton.jit, with or without arguments."""
    return any("triton.jit" in ast.unparse(d) for d in getattr(node, "decorator_list", []))


def jit_functions(tree):
    return {node.name for node in tree.body if isinstance(node, ast.FunctionDef) and is_jit(node)}


def launches(tree):
    """Calls `kernel[grid](...)`: the name and the call."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Subscript):
            yield ast.unparse(node.func.value), node


def fusion_is_stated(call, stem):
    """enable_fp_fusion=… at the launch, or in the dictionary of the module that is spread there."""
    for keyword in call.keywords:
        if keyword.arg == "enable_fp_fusion":
            return True
        if keyword.arg is None and isinstance(keyword.value, ast.Name):
            module = importlib.import_module(f"bipace_kernels.backends.triton.{stem}")
            spread = [keyword.value.id, *spread_in(TREES.get(stem, ast.Module()), keyword.value.id)]
            if any("enable_fp_fusion" in getattr(module, name, {}) for name in spread):
                return True
    return False


def spread_in(tree, variable):
    """Names of the dictionaries that are spread in the one which a local variable holds."""
    for node in ast.walk(tree):
        target = getattr(node, "target", None) or next(iter(getattr(node, "targets", [])), None)
        if isinstance(target, ast.Name) and target.id == variable and isinstance(node.value, ast.Dict):
            pairs = zip(node.value.keys, node.value.values, strict=True)
            yield from (value.id for key, value in pairs if key is None and isinstance(value, ast.Name))


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
def test_every_launch_states_fusion(stem):
    silent = [f"line {call.lineno}: {name}" for name, call in launches(TREES[stem]) if not fusion_is_stated(call, stem)]
    assert not silent, f"launches without enable_fp_fusion (its default differs between versions): {silent}"


@pytest.mark.parametrize("stem", TREES)
def test_host_code_never_waits(stem):
    assert not waiting(TREES[stem])


def test_every_launched_kernel_is_compiled_ahead():
    """A kernel that resources.launches() does not meet would first be compiled on a user's GPU."""
    triton = pytest.importorskip("triton")
    if triton.knobs.runtime.interpret:
        pytest.skip("TRITON_INTERPRET=1: kernels are interpreted, not compiled")
    launched = {name for tree in TREES.values() for name, _ in launches(tree)}
    named = {launch.name for launch in benchmarks.module("resources").launches()}
    kernels = set().union(*(jit_functions(tree) for tree in TREES.values()))
    assert {name.rpartition(".")[2] for name in launched} <= kernels, "a launch this test does not understand"
    missing = {name.rpartition(".")[2] for name in launched} - named
    assert not missing, f"launched, but not by resources.launches(): {sorted(missing)}"


@pytest.mark.parametrize("name", ["gram._gram", "scan._scan_groups"])
def test_the_longest_group_compiles_nothing_anew(name):
    """Triton recompiles for a size of 1 or a multiple of 16 unless this is disabled: seconds in the middle of a training."""
    triton = pytest.importorskip("triton")
    if triton.knobs.runtime.interpret:
        pytest.skip("TRITON_INTERPRET=1: kernels are interpreted, not compiled")
    stem, _, kernel = name.partition(".")
    jit = getattr(importlib.import_module(f"bipace_kernels.backends.triton.{stem}"), kernel)
    assert {p.do_not_specialize for p in jit.params if p.name in ("units", "first_group")} == {True}


SAMPLE = """
import torch, triton
OPTIONS = {"enable_fp_fusion": False}

@triton.jit
def kernel(x):
    x.item()

def host(x, n):
    y = x.nonzero()
    z = torch.tensor([1])
    x.to("cpu"), x.repeat_interleave(n)
    x.repeat_interleave(n, output_size=4)
    kernel[(1,)](x, enable_fp_fusion=False)
    kernel[(1,)](x, num_warps=4)
"""


def test_the_checks_see_what_they_look_for():
    tree = ast.parse(SAMPLE)
    assert [text.partition(": ")[2] for text in waiting(tree)] == [
        "x.nonzero", "torch.tensor", "x.to('cpu')", "x.repeat_interleave(n)"
    ]  # fmt: skip
    assert [fusion_is_stated(call, "__init__") for _, call in launches(tree)] == [True, False]
    assert jit_functions(tree) == {"kernel"}
