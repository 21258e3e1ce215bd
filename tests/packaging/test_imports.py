"""What a process has imported: after the import, after a call on the CPU, with hidden states."""

import json
import sys

import pytest
from paths import HELPERS, program

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
    assert "bipace_kernels" in new
    assert tops(new) - sys.stdlib_module_names <= {"bipace_kernels", "torch", "numpy"}
    assert not [name for name in new if name.startswith(("torch._dynamo", "torch._inductor", "subprocess"))]
    ours = {name for name in new if name.startswith("bipace_kernels.")}
    backends = tuple(f"backends.{name}" for name in ("cuda", "triton", "reference", "cpu"))
    later = ("_native", "_cuda", *backends, "hidden", "distributed", "cli", "integrations")
    assert not ours & {f"bipace_kernels.{name}" for name in later}
    assert found["threads"] == 1


def test_calls_load_no_gpu_backend_and_hidden_states_no_model_library(found):
    new = found["call"]
    assert "bipace_kernels._native" in new
    assert not tops(new) & {"triton", "cupy"}
    gpu = ("bipace_kernels.backends.cuda.", "bipace_kernels.backends.triton.")
    assert not [name for name in new if name.startswith(gpu)]
    assert "bipace_kernels._cuda" not in new
    assert "bipace_kernels.hidden.vllm" in found["hidden"]
    assert not tops(found["hidden"]) & {"transformers", "vllm", "safetensors", "tokenizers"}
