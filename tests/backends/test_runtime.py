"""Backends, environment variables, threads, forks, imports."""

import os
import re
import signal
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from batches import CONFIGS, make_batch
from paths import ROOT, python
from refusals import refused

import bipace_kernels as bk
from bipace_kernels.backends import cuda_loader, dispatch, native_loader, threads as _threads, triton_loader
from bipace_kernels.backends.cpu import similar
from bipace_kernels.inputs.ids import number_objects

BATCH = make_batch(2, groups=8)
WANT = bk.advantage(config=CONFIGS["bipace"], **BATCH.arguments())
CUDA = torch.device("cuda", 0)


def test_backends_say_why_not():
    status = bk.backends()
    assert list(status) == ["reference", "cpu", "triton", "cuda"]
    assert status["reference"].available and status["cpu"].available
    if not torch.cuda.is_available():
        # torch before 2.10 includes a Triton that is too old, and CPU-only builds include none
        why = r"torch sees no GPU|Triton 3\.[2-5]\.\d+ is older than 3\.6|Triton is not installed: .*"
        assert re.fullmatch(rf"triton: not available \(({why})\); runs .*", str(status["triton"]))
    assert str(status["cpu"]).startswith("cpu: available; runs returns, episode, clusters")
    assert status["cuda"].stages == ("clusters", "values", "action_keys")
    assert str(status).splitlines() == [str(each) for each in status.values()]


def test_mypy_sees_every_module_of_the_table():
    text = (ROOT / "tests/backends/contract.py").read_text()
    table = {(dispatch.package_of(name, stage), stage) for name in dispatch.NAMES[1:] for stage in dispatch.STAGES}
    assert len(table) > 25
    for package, stage in table:
        kind = "".join(word.title() for word in stage.split("_"))
        checked = re.search(rf"list\[stages\.{kind}\] = \[([^\]]*)\]", text)
        assert checked and f"{package}.{stage}" in checked[1].split(", "), (package, stage)


def test_what_auto_takes(monkeypatch):
    """CUDA tensors: cuda if it is there, else triton; CPU tensors: cpu, else reference."""
    monkeypatch.setattr(triton_loader, "reason", lambda: "")
    monkeypatch.setattr(triton_loader, "interpreted", lambda: False)
    status = bk.backends()
    assert status["cpu"].taken_for == ("cpu",) and status["triton"].taken_for == ("cuda",)
    assert dispatch.choose("auto", CUDA).name == "triton"
    assert dispatch.choose("auto", torch.device("cpu")).name == "cpu" and dispatch.choose("triton").name == "triton"
    monkeypatch.setenv("BIPACE_BACKEND", "cpu")
    assert dispatch.taken_for("cpu") == ("cpu", "") and dispatch.taken_for("cuda")[0] is None


@pytest.mark.parametrize("name", ["cpu", "reference"])
def test_a_name_never_moves_tensors(name, monkeypatch):
    with pytest.raises(bk.BackendError, match=rf"backend='{name}' cannot run on tensors on cuda:0: .*\.cpu\(\)"):
        dispatch.choose(name, CUDA)
    monkeypatch.setenv("BIPACE_BACKEND", name)
    with pytest.raises(bk.BackendError, match=rf"'{name}' \(from BIPACE_BACKEND\) cannot run on tensors on cuda:0"):
        dispatch.choose("auto", CUDA)


def test_triton_on_cpu_tensors_needs_its_interpreter(monkeypatch):
    monkeypatch.setattr(triton_loader, "reason", lambda: "")
    monkeypatch.setattr(triton_loader, "interpreted", lambda: False)
    with pytest.raises(bk.BackendError, match=r"'triton' cannot run on tensors on cpu.*\.cuda\(\).*TRITON_INTERPRET=1"):
        bk.advantage(config=CONFIGS["bipace"], backend="triton", **BATCH.arguments())
    monkeypatch.setattr(triton_loader, "interpreted", lambda: True)
    assert dispatch.choose("triton", torch.device("cpu")).name == "triton"


def test_an_old_triton_is_told_and_nothing_more(monkeypatch):
    """torch 2.6 brings Triton 3.2, which has no knobs."""
    cached = (triton_loader.reason, triton_loader.detail, triton_loader.interpreted)
    monkeypatch.setitem(sys.modules, "triton", SimpleNamespace(__version__="3.2.0"))
    for function in cached:
        function.cache_clear()
    try:
        status = bk.backends()["triton"]
        assert not status.available and status.reason == "Triton 3.2.0 is older than 3.6" and "3.2.0" in status.detail
    finally:
        for function in cached:
            function.cache_clear()


def test_no_backend_for_a_gpu_says_why_and_what_to_do(monkeypatch):
    monkeypatch.setattr(cuda_loader, "reason", lambda: "no NVIDIA driver was found")
    monkeypatch.setattr(triton_loader, "reason", lambda: "Triton 2.0 is older than 3.6")
    said = r"cuda: no NVIDIA driver.*triton: Triton 2\.0.*\.cpu\(\)"
    refused(said, dispatch.choose, "auto", CUDA, error=bk.BackendError)
    refused(r"backend='triton' cannot run here: Triton 2\.0", dispatch.choose, "triton", CUDA, error=bk.BackendError)
    monkeypatch.setattr(cuda_loader, "reason", lambda: "")
    monkeypatch.setattr(triton_loader, "reason", lambda: "Triton is not installed: no module")
    status = bk.backends()["cuda"]
    assert not status.available and "Triton runs all stages except clusters, values, action_keys" in status.reason


def test_environment_replaces_auto_and_counts_as_a_name(monkeypatch):
    monkeypatch.setenv("BIPACE_BACKEND", "reference")
    assert dispatch.choose("auto").name == "reference" and dispatch.choose("cpu").name == "cpu"
    monkeypatch.setenv("BIPACE_BACKEND", "cuda")
    monkeypatch.setattr(cuda_loader, "reason", lambda: "torch sees no GPU")
    with pytest.raises(bk.BackendError, match=r"backend='cuda' \(from BIPACE_BACKEND\) cannot run here: torch sees"):
        dispatch.choose("auto")
    monkeypatch.setenv("BIPACE_BACKEND", "fast")
    refused("BIPACE_BACKEND must be one of", dispatch.choose, "auto")


def test_auto_falls_back_once_with_the_reason_and_a_name_never_does(monkeypatch):
    monkeypatch.setattr(native_loader, "_import", lambda: (None, "no such file"))
    monkeypatch.setattr(native_loader, "reason", native_loader.reason.__wrapped__)
    with pytest.warns(RuntimeWarning, match="falls back to backend='reference'.*no such file"):
        result = bk.advantage(config=CONFIGS["bipace_exact"], **BATCH.arguments())
    assert torch.equal(result.cluster, bk.advantage(config=CONFIGS["bipace_exact"], **BATCH.arguments()).cluster)
    with pytest.raises(bk.BackendError, match="backend='cpu' cannot run here: no such file"):
        bk.advantage(config=CONFIGS["bipace"], backend="cpu", **BATCH.arguments())
    refused("pip install -e", native_loader.load.__wrapped__, error=ImportError)


def test_threads(monkeypatch):
    assert _threads.count() == torch.get_num_threads()
    with _threads.using(3):
        assert _threads.count() == 3
        with _threads.using(None), _threads.using(1):
            assert _threads.count() == 1
        assert _threads.count() == 3
    with _threads.using(np.int64(10**6)):
        assert _threads.count() == max(16, os.cpu_count() or 1)
    monkeypatch.setenv("BIPACE_NUM_THREADS", "5")
    assert _threads.count() == 5
    with _threads.using(1):
        assert _threads.count() == 1
    for bad in ("many", "0", "\N{SUPERSCRIPT TWO}", "9" * 5000):
        monkeypatch.setenv("BIPACE_NUM_THREADS", bad)
        refused(f"BIPACE_NUM_THREADS must be a positive integer, got '{bad}'", _threads.using(None).__enter__)
    for bad in (0, True, 1.5):
        refused("num_threads must be None or an int of at least 1", _threads.using(bad).__enter__)


def test_pool_runs_every_task_once_and_calls_from_several_threads_at_once():
    native = native_loader.load()
    for threads in (1, 2, 7, 64):
        assert native.parallel_squares(1000, threads) == [i * i for i in range(1000)]

    call = partial(bk.advantage, config=CONFIGS["bipace"], num_threads=3, **BATCH.arguments())
    with ThreadPoolExecutor(6) as pool:
        results = list(pool.map(lambda _: call(), range(30)))
    assert len(results) == 30 and all(torch.equal(result.advantage, WANT.advantage) for result in results)


def test_no_thread_forks_while_another_imports_a_stage_or_is_inside_numpy(monkeypatch):
    """A child would have half a module, and OpenBLAS ends its threads at a fork, for which the call would wait forever.

    Imports wait for each other too: threads that import one package at once may meet Python's _DeadlockError.
    """

    def during(call, *args):
        forks.append(pool.submit(lambda: os.waitpid(os.fork() or os._exit(0), 0)))
        time.sleep(0.1)
        early.append(forks[-1].done())
        return call(*args)

    forks, early, fresh, config = [], [], dispatch.Backend("cpu"), bk.Config.gae()
    with ThreadPoolExecutor(1) as pool:
        monkeypatch.setattr(np.linalg, "eigh", partial(during, np.linalg.eigh))
        result = bk.advantage(config=config, backend="reference", **BATCH.arguments())
        bk.kernel_value_r2(result, BATCH.fingerprint, config)
        monkeypatch.setattr(dispatch.importlib, "import_module", partial(during, str))
        assert fresh.returns == "bipace_kernels.backends.cpu.returns"
    assert len(early) == 3 and not any(early) and all(one.done() for one in forks)


def test_same_bits_in_another_process():
    code = """
from batches import CONFIGS, make_batch
import bipace_kernels as bk
from bipace_kernels.backends import native_loader
r = bk.advantage(config=CONFIGS["bipace"], **make_batch(2, groups=8).arguments())
print(native_loader.load().isa(), (r.advantage.numpy().tobytes() + r.cluster.numpy().tobytes()).hex())
"""
    isa = native_loader.load().isa().replace("avx512", "avx2")
    found = python(code, BIPACE_NUM_THREADS="1", PYTHONHASHSEED="7", BIPACE_ISA=isa)
    assert found == f"{isa} {(WANT.advantage.numpy().tobytes() + WANT.cluster.numpy().tobytes()).hex()}"


def test_results_do_not_depend_on_torchs_flags():
    torch.set_float32_matmul_precision("medium")
    try:
        again = bk.advantage(config=CONFIGS["bipace"], **BATCH.arguments())
    finally:
        torch.set_float32_matmul_precision("highest")
    assert torch.equal(again.advantage, WANT.advantage) and torch.equal(again.cluster, WANT.cluster)


def test_the_process_ends_while_daemon_threads_compute():
    """Python unwinds a thread that requests the GIL during interpreter shutdown, which C++ frames must not abort."""
    python("""
import threading, time
from bipace_kernels.backends import native_loader
native = native_loader.load()
def compute(n):
    while True:
        native.parallel_squares(n, 1)
for n in (10, 10, 20_000_000):
    threading.Thread(target=compute, args=(n,), daemon=True).start()
time.sleep(0.1)
""")


@contextmanager
def alarms(times, every=0.01):
    """A handler for a signal that comes again and again: KeyboardInterrupt from its call number `times` on.

    From then on once a second: a signal may come while its handler runs, or while a callback does whose errors Python
    ignores, such as those of its garbage collector.
    """
    called = []

    def count(*_):
        called.append(1)
        if len(called) >= times:
            signal.setitimer(signal.ITIMER_REAL, 1, 1)
            raise KeyboardInterrupt

    before = signal.signal(signal.SIGALRM, count)
    try:
        signal.setitimer(signal.ITIMER_REAL, every, every)
        yield called
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


@pytest.mark.parametrize("threads", [1, 2])
def test_ctrl_c_ends_a_long_call(threads):
    """The handler runs while native code does: signals that come before a call returns would count once, after it."""
    rng = np.random.default_rng(0)  # texts of which difflib compares nearly every pair of places: half a minute
    texts = ["".join(map(chr, rng.integers(300, 450, 80_000))) for _ in range(2)]
    texts, offsets = texts * threads, torch.arange(0, 2 * threads + 1, 2)
    with alarms(3) as called, pytest.raises(KeyboardInterrupt), _threads.using(threads):
        similar.cluster_similar(texts, offsets, 0.3)
    assert len(called) >= 3
    assert bk.advantage(config=CONFIGS["bipace"], **BATCH.arguments()).metrics() == WANT.metrics()


def _exact(native, out):
    codes, ends = torch.arange(len(out)).flip(0), torch.tensor([0, len(out)])
    return lambda: native.cluster_exact(codes.data_ptr(), ends.data_ptr(), 1, out.data_ptr())


def _history(native, out):
    codes, ends = torch.arange(len(out) // 8), torch.tensor([0, len(out) // 8])
    return lambda: native.cluster_history(
        codes.data_ptr(), 0, ends.data_ptr(), 1, ends.data_ptr(), 1, 8, out.data_ptr()
    )


def _different_texts(native, out):
    """One group, no two of whose texts are long enough for each other: none is compared, and the group is one task."""
    texts = tuple("a" * (k % 7 + 1) + chr(300 + k) * (1 + k // 7) for k in range(len(out)))
    ends = torch.tensor([0, len(out)])
    return lambda: native.cluster_similar(texts, ends, 1, 0.999, 1, out)


def _one_long_text(native, out):
    text, ends = torch.full((1 << 25,), 97, dtype=torch.uint8), torch.tensor([0, 1 << 25])
    rows = torch.zeros(1, 64)

    def call():
        try:
            native.ngram_fingerprints(text.data_ptr(), ends.data_ptr(), 1, 3, 64, rows.data_ptr(), 1)
        finally:
            out[-1] = int(rows.any()) - 1  # -1: the row is not written

    return call


def _token_ids(native, out):
    rows, offsets = ([5] * len(out),), torch.tensor([0, len(out)])
    return lambda: native.flatten_rows(rows, 1, offsets.data_ptr(), out.data_ptr(), False)


@pytest.mark.parametrize(("prepare", "n"), [
    (_exact, 1 << 23), (_history, 1 << 23), (_token_ids, 1 << 24), (_different_texts, 6000), (_one_long_text, 1),
])  # fmt: skip
def test_ctrl_c_ends_a_loop_over_many(prepare, n):
    """Before the last number is written, not when the call returns."""
    whole, out = (torch.full((n,), -7) for _ in range(2))
    prepare(native_loader.load(), whole)()
    call = prepare(native_loader.load(), out)
    with pytest.raises(KeyboardInterrupt), alarms(1):
        call()
    assert whole[-1] >= 0 and out[-1] != whole[-1]


@pytest.mark.parametrize("values", [("a", b"a") * (1 << 22), (1,) * (1 << 23), np.zeros((1 << 15, 1 << 16), "u1")])
def test_ctrl_c_ends_the_numbering_of_many(values):
    """The handler runs between two parts: signals that come before the end would count once, after it."""
    with pytest.raises(KeyboardInterrupt), alarms(3) as called:
        number_objects(values)
    assert len(called) >= 3


def test_ctrl_c_ends_the_encoding_of_many_texts():
    """Before the last one, which is none."""
    n = 1 << 20
    keys, parsed = torch.zeros(n, dtype=torch.int64), torch.zeros(n, dtype=torch.bool)
    texts = (*("é" * 40,) * (n - 1), 5)
    with pytest.raises(KeyboardInterrupt), alarms(1):
        native_loader.load().text_keys(texts, 2, keys, parsed, 1)


def test_calls_of_usual_size_start_no_threads_of_torch():
    """On a machine with other work each parallel region of torch's waits for a time slice: 3 ms became 140."""
    code = """
import os, numpy as np, torch
import bipace_kernels as bk
torch.set_num_threads(4)
count = lambda: len(os.listdir("/proc/self/task"))
n, rng = 6400, np.random.default_rng(0)
group, trajectory, step = np.repeat(np.arange(16), 400), np.repeat(np.arange(128), 50), np.tile(np.arange(50), 128)
given = {
    "step": step, "observation": [f"o{i}" for i in rng.integers(0, 99, n)], "action_key": rng.integers(0, 9, n),
    "fingerprint": rng.normal(size=(n, 4)).astype(np.float32), "valid": rng.random(n) < 0.9,
}
before = count()
exact, values = bk.Config.bipace(partition="exact"), (bk.Config.gae(), bk.Config.gae("cluster"))
for config in (bk.Config.grpo(), bk.Config.gigpo(on_invalid="singleton"), bk.Config.hgpo(), exact, "bipace", *values):
    bk.advantage(group, trajectory, rng.normal(size=n), config=config, num_threads=1, **given).metrics()
bk.cluster(given["fingerprint"], group, num_threads=1)
after = count()
torch.arange(n)[torch.randperm(n)]
print(after - before, count() - after)
"""
    ours, torchs = map(int, python(code).split())
    assert torchs > 0, "the test needs a torch that works in threads"
    assert ours == 0
