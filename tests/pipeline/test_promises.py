"""What the README promises and a short test cannot show: bits over repetitions, installs, forks, memory, calls."""

import json
import os
import shutil
import site
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from batches import OUTPUTS
from marks import slow
from paths import ROOT, copy_tracked, python

import bipace_kernels as bk

OFFSETS = 16  # elements: 64 bytes of float32, so every alignment that a vector load can meet
needs_proc = pytest.mark.skipif(not os.access("/proc/self/clear_refs", os.W_OK), reason="needs Linux's /proc")


def everywhere(fingerprint):
    """The same matrix at every element offset of a larger buffer, between sentinels that would change results."""
    views = []
    for offset in range(OFFSETS):
        buffer = torch.full((fingerprint.numel() + OFFSETS,), float("nan"), dtype=fingerprint.dtype)
        view = buffer[offset : offset + fingerprint.numel()].view_as(fingerprint)
        views.append(view.copy_(fingerprint))
    assert len({view.data_ptr() % 64 for view in views}) == 64 // fingerprint.element_size()
    return views


def undecided(seed, groups, dim, epsilon):
    """Ragged groups whose second row is as far from the first as the threshold's edge: one other last bit decides."""
    rng = np.random.default_rng(seed)
    rows, group = [], []
    for g in range(groups):
        u, w = np.linalg.qr(rng.normal(size=(dim, 2)))[0].T
        cosine = 1 - epsilon - 1e-5 + 3e-8 * rng.normal()
        near = [u, cosine * u + np.sqrt(1 - cosine**2) * w]
        near += [u + 0.1 * rng.normal(size=dim) for _ in range(int(rng.integers(0, 12)))]
        rows += near
        group += [g] * len(near)
    return torch.from_numpy(np.array(rows, dtype=np.float32)), torch.tensor(group)


@pytest.mark.slow
def test_the_same_bits_a_thousand_times():
    config = bk.Config.bipace(0.2)
    fingerprint, group = undecided(1, 60, 67, config.epsilon)
    rng, n = np.random.default_rng(2), len(group)
    given = {"group": group, "trajectory": np.arange(n), "rewards": rng.normal(size=n), "action_key": np.arange(n) % 3}
    views = everywhere(fingerprint)

    def bits(fingerprint, threads):
        result = bk.advantage(config=config, num_threads=threads, fingerprint=fingerprint, **given)
        found = {name: getattr(result, name).numpy().tobytes() for name in OUTPUTS}
        return {**found, "metrics": json.dumps(result.metrics()).encode()}

    want = bits(views[0], 1)
    labels = np.frombuffer(want["cluster"], np.int64)
    first = np.flatnonzero(np.r_[True, np.diff(group.numpy()) > 0])
    joined = int((labels[first] == labels[first + 1]).sum())
    assert 10 <= joined <= 50, f"{joined} of 60 pairs joined: the data no longer sits on the threshold"
    for i in range(1000):
        threads, offset = i % 8 + 1, i // 8 % OFFSETS
        again = bits(views[offset], threads)
        changed = [name for name in want if again[name] != want[name]]
        assert not changed, f"{changed} in repetition {i}, {threads} threads, offset {offset}"


@pytest.mark.slow
def test_editable_install(tmp_path):
    """`pip install -e` maps integrations/ and bench/ below the package and leaks neither as a top-level name."""
    copy, venv, elsewhere = tmp_path / "copy", tmp_path / "venv", tmp_path / "elsewhere"
    copy_tracked(copy)
    elsewhere.mkdir()
    subprocess.run([sys.executable, "-m", "venv", str(venv)], check=True, capture_output=True)
    interpreter = str(venv / "bin" / "python")
    env = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV")}
    env |= {"PYTHONNOUSERSITE": "1", "MAX_JOBS": "2"}
    done = subprocess.run(
        [interpreter, "-m", "pip", "install", "-q", "--no-deps", "-e", str(copy)],
        cwd=elsewhere, env=env, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]

    # The dependencies are borrowed from the running environment, all but a bipace_kernels that may stand there.
    borrowed = tmp_path / "borrowed"
    borrowed.mkdir()
    for folder in dict.fromkeys(p for p in sys.path if p.endswith(("site-packages", "dist-packages"))):
        for path in Path(folder).iterdir():
            ours = path.name.lower().lstrip("_").startswith(("bipace", "editable___bipace"))
            if not ours and path.suffix != ".pth" and not (borrowed / path.name).is_symlink():
                (borrowed / path.name).symlink_to(path)
    (packages,) = venv.glob("lib/python*/site-packages")
    (packages / "borrowed.pth").write_text(f"{borrowed}\n")

    code = """
import importlib, importlib.util, json
names = ["bipace_kernels", "bipace_kernels.integrations", "bipace_kernels.bench", "bipace_kernels.cli"]
files = [importlib.import_module(name).__file__ for name in names]
leaked = [name for name in ("integrations", "bench", "tests", "csrc") if importlib.util.find_spec(name)]
import bipace_kernels as bk
rewards, gigpo = [0.0, 1.0, 0.0, 0.0], bk.Config.gigpo()
r = bk.advantage([0] * 4, [0, 0, 1, 1], rewards, observation=list("abab"), config=gigpo, backend="cpu")
print(json.dumps([*files, leaked, r.cluster.tolist()]))
"""
    argv = [interpreter, "-c", code]
    done = subprocess.run(argv, cwd=elsewhere, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    *files, leaked, cluster = json.loads(done.stdout)
    folders = ("bipace_kernels", "integrations", "bench", "bipace_kernels/cli")
    assert [Path(file).parent for file in files] == [copy / folder for folder in folders]
    assert (leaked, cluster) == ([], [0, 1, 0, 1])


@pytest.mark.slow
def test_import_writes_no_file(tmp_path):
    """In a copy of the package, so that other tests' bytecode is not taken for a file of ours."""
    of_others = shutil.ignore_patterns("__pycache__")
    shutil.copytree(ROOT / "bipace_kernels", tmp_path / "lib/bipace_kernels", ignore=of_others)
    for name in ("cwd", "home", "tmp"):
        (tmp_path / name).mkdir()
    code = f"""
import os, torch, numpy
from pathlib import Path
root = Path({str(tmp_path)!r})
def listing():
    stats = [(str(p), p.stat()) for p in sorted(root.rglob("*"))]
    return [(name, s.st_size, s.st_mtime_ns) for name, s in stats]
before, environment = listing(), dict(os.environ)
import bipace_kernels
assert Path(bipace_kernels.__file__).is_relative_to(root), bipace_kernels.__file__
assert listing() == before, sorted(set(listing()) ^ set(before))
assert dict(os.environ) == environment
"""
    python(
        code, timeout=120, cwd=tmp_path / "cwd", PYTHONPATH=str(tmp_path / "lib"), PYTHONDONTWRITEBYTECODE="1",
        HOME=str(tmp_path / "home"), PYTHONUSERBASE=site.getuserbase(), TMPDIR=str(tmp_path / "tmp"),
    )  # fmt: skip


EVERY_FUNCTION = """
import os, signal, sys, threading, warnings
warnings.simplefilter("ignore")
import torch
import bipace_kernels as bk
from bipace_kernels.backends import records
from bipace_kernels.distributed import plan_owners
from bipace_kernels.hidden import last_tokens, turn_positions

torch.set_num_threads(4)
n = int(sys.argv[1])
group, trajectory, step = torch.arange(n) // 40, torch.arange(n) // 10, torch.arange(n) % 10
x, rewards, twice = torch.randn(n, 8), torch.randn(n), torch.arange(n) % 10 // 2
columns = dict(group=group, trajectory=trajectory, step=step, rewards=rewards, fingerprint=x, action_key=group % 3)
rows = torch.randperm(n)
mixed = {name: column[rows] for name, column in columns.items()}
holed, wide = x.double(), x.double()
holed[::7] = float("nan")
texts = [f"<action>go {i % 50}</action>" for i in range(n)]
ids, mask, some, ones = torch.randint(0, 9, (n, 4)), torch.ones(n, 4, dtype=torch.bool), rewards > -1, torch.ones(n)
halves = torch.ones(n, 4, dtype=torch.int32)[:, ::2]
lay, result, padding = bk.layout(group, trajectory, step), bk.advantage(**columns), torch.zeros(n, dtype=torch.bool)
reward64, memory, op = rewards.double()[rows], bk.ValueMemory(10**6), torch.ops.bipace
table = torch.ones(2, n, dtype=torch.int64)

def advantage(config, memory=None, **changes):
    return lambda: bk.advantage(**{**columns, **changes}, config=config, memory=memory).metrics()

def state():
    again = bk.ValueMemory(n // 3)
    again.load_state_dict(memory.state_dict())
    return again.state_dict()

own = bk.Config(estimator=lambda records: records.returns.double().abs().float(), partition="cosine")
calls = {
    "advantage": advantage(None), "advantage, mixed": advantage(None, **mixed),
    "advantage, set aside": advantage(bk.Config.bipace(on_invalid="singleton"), fingerprint=holed),
    "advantage, exact": advantage(bk.Config.gigpo(), observation=texts),
    "advantage, history": advantage(bk.Config.hgpo(), observation=texts),
    "advantage, copies": advantage(bk.Config.bipace(duplicates="once"), step=twice, rewards=ones),
    "advantage, group": advantage(bk.Config.gae(share="group")),
    "advantage, batch": advantage(bk.Config.gae(share="batch")),
    "advantage, own": advantage(own),
    "ValueMemory": advantage(bk.Config.gae(share="memory"), memory), "ValueMemory.state_dict": state,
    "layout": lambda: bk.layout(group, trajectory, twice, valid=some).once().source(),
    "Layout": lambda: (lay.time(), lay.on("cpu"), lay.restrict(some)),
    "trajectory_ids": lambda: bk.trajectory_ids(group, trajectory),
    "cluster": lambda: bk.cluster(x, group, [0.1, 0.2]),
    "action_clusters": lambda: bk.action_clusters(x, group, 0),
    "choose_epsilon": lambda: bk.choose_epsilon(x, group),
    "EpsilonController": lambda: bk.EpsilonController(objective="value_r2").update(x, layout=lay, returns=rewards),
    "discounted_returns": lambda: bk.discounted_returns(rewards, trajectory, step=step),
    "AdvantageResult": lambda: (result.metrics(), result.value_r2(), result.with_bad_states(padding).metrics()),
    "kernel_value_r2": lambda: bk.kernel_value_r2(result, x, bk.Config.gae(share="group")),
    "action_keys": lambda: (bk.action_keys(texts), bk.action_keys(ids, mode="first_n", mask=mask)),
    "ngram_fingerprint": lambda: bk.ngram_fingerprint(texts, dim=16),
    "embedders": lambda: [e.embed(y) for e, y in ((bk.embedders.Ngram(dim=16), texts),
        (bk.embedders.Identity(), texts), (bk.embedders.ActorHidden(), wide))],
    "to_tokens": lambda: bk.to_tokens(rewards, mask),
    "hidden": lambda: (last_tokens(mask), turn_positions(mask, 1)),
    "distributed": lambda: plan_owners(table),
    "ops": lambda: (
        op.discounted_returns(reward64, None, lay.trajectory_offsets, 0.9, n_trajectories=lay.n_trajectories),
        op.cluster_cosine(x, lay.order, lay.group_offsets, None, 0.1, taken=some, n_groups=lay.n_groups,
            longest_group=lay.longest_group)),
}
wanted = {name: str(call()) for name, call in calls.items()}
inside, leave, runs = threading.Event(), threading.Event(), records.runs
records.runs = lambda offsets: (inside.set(), leave.wait(), runs(offsets))[2]
held = records.Records(torch.device("cpu"), n_records=1, trajectory_offsets=torch.tensor([0, 1]))
threading.Thread(target=lambda: held.time, daemon=True).start()  # may hold a lock of all Records
inside.wait()
records.runs = runs
for name, want in wanted.items():
    pid = os.fork()
    if pid == 0:
        signal.alarm(600)  # ends a child that hangs; one on a busy machine is slow
        status = 1
        try:
            torch.set_default_dtype(torch.float64)
            with torch.device("meta"):
                found = calls[name]()
            torch.set_default_dtype(torch.float32)
            same = str(found) == want or name.startswith("ValueMemory")  # which holds more at the second call
            status = 3 if not same else 0 if torch.get_num_threads() == 4 else 2
        finally:
            os._exit(status)
    status = os.waitpid(pid, 0)[1]
    assert status == 0, f"{name}: wait status {status} (14: hung, 512: torch keeps one thread, 768: differs)"
# Types that compute nothing, and what needs a model.
others = {name for name in bk.__all__ if name.endswith(("Error", "Status", "Choice", "R2", "__"))}
others |= {"Branch", "Calibration", "Config", "StepRecords", "TokenBytes", "backends", "calibrate", "token_bytes"}
print(sorted(set(bk.__all__) - others - {name.partition(",")[0] for name in calls}))
"""


@pytest.mark.parametrize("n", [8000, slow(100_000)])
def test_every_function_works_in_a_forked_child_of_a_process_that_called_it(n):
    """The child inherits torch's thread pool without its threads: a call that entered it would wait forever.

    It also sets torch's defaults, with which native code once wrote beyond what torch then allocated.
    """
    assert python(EVERY_FUNCTION, str(n), timeout=1800, OMP_NUM_THREADS="4") == "[]"


def test_a_forked_child_works_whatever_gpu_is_the_default():
    """It cannot use one that its parent used, and a torch without CUDA has none: asking which it is fails in both."""
    code = """
import os
import torch
import bipace_kernels as bk
rows = dict(group=[0, 0], trajectory=[0, 1], rewards=[1.0, 0.0], config="grpo")
want = bk.advantage(**rows).metrics()
torch.set_default_device("cuda")
pid = os.fork()
if pid == 0:
    os._exit(0 if bk.advantage(**rows).metrics() == want else 2)
print(os.waitpid(pid, 0)[1])
"""
    assert python(code) == "0"


@pytest.mark.slow
def test_fork_while_another_thread_is_inside_the_pool():
    """The child inherits a pool whose owner does not exist there; it must neither wait for it nor lose its threads."""
    code = """
import os, signal, threading, time, warnings
warnings.simplefilter("ignore")
import torch
import bipace_kernels as bk
from batches import CONFIGS, make_batch
batch = make_batch(2, groups=8)

def bits(threads):
    r = bk.advantage(config=CONFIGS["bipace"], backend="cpu", num_threads=threads, **batch.arguments())
    return b"".join(x.numpy().tobytes() for x in (r.advantage, r.step_advantage, r.returns, r.cluster, r.branch))

def n_tasks():
    return len(os.listdir("/proc/self/task"))

want = bits(1)
assert bits(4) == want

def child():
    pid = os.fork()
    if pid == 0:
        signal.alarm(20)  # ends a child that hangs
        status = 1
        try:
            alone = n_tasks() == 1
            same = bits(4) == want and bits(3) == want
            status = 0 if alone and same and n_tasks() > 1 else 2 if same else 3  # 2: no threads of its own
        finally:
            os._exit(status)
    return pid

g = torch.Generator().manual_seed(1)
busy, group = torch.randn(4 * 250, 768, generator=g), torch.arange(4).repeat_interleave(250)
labels = bk.cluster(busy, group, 0.1, num_threads=1)
calls, inside, stop, wrong = 0, False, False, []

def work():
    global calls, inside
    while not stop:
        calls, inside = calls + 1, True
        same = torch.equal(bk.cluster(busy, group, 0.1, num_threads=3), labels)
        inside = False
        if not same:
            wrong.append(calls)
        time.sleep(0.002)

worker = threading.Thread(target=work, daemon=True)  # a failure below must end the process
worker.start()
forks = during = 0
while during < 10 and forks < 400:
    while inside:
        time.sleep(0.0002)
    while not inside:
        time.sleep(0.0002)
    time.sleep(0.003)  # past the checks, into the clustering
    call = calls
    pid = child()
    during += inside and calls == call  # still the same call: it was inside at the moment of the fork
    forks += 1
    status = os.waitpid(pid, 0)[1]
    assert status == 0, f"wait status {status}: the child hung (14), differs (768) or has no threads of its own (512)"
stop = True
worker.join()
assert not wrong and bits(4) == want
assert during >= 10, f"only {during} of {forks} forks met a running call"
print("fine")
"""
    assert python(code, timeout=240) == "fine"


@pytest.mark.slow
@needs_proc
@pytest.mark.parametrize("states", [20, 400])
def test_cluster_takes_at_most_half_of_the_fingerprints(states):
    """16 × 400 × 3584; 400 states: every record a singleton, whose centroid is its row and not a copy."""
    code = f"""
import json, torch
import bipace_kernels as bk
from bench import measure, workloads
batch = workloads.steps(workloads.Shape("promise", 16, 8, 50, 3584, {states}, ""))
fingerprint, group = workloads.fingerprints(batch), torch.from_numpy(batch.group)
tiny = torch.randn(64, 3584), torch.arange(64) // 4
bk.cluster(*tiny, workloads.EPSILON, num_threads=2)  # imports, pool and allocator arenas: paid once per process
extra = measure.high_water(lambda: bk.cluster(fingerprint, group, workloads.EPSILON, num_threads=2))
clusters = len(bk.cluster(fingerprint, group, workloads.EPSILON, num_threads=2).unique())
print(json.dumps([extra, clusters, fingerprint.numel() * 4]))
"""
    extra, clusters, size = json.loads(python(code, timeout=240).splitlines()[-1])
    assert clusters == 16 * states and size == 16 * 400 * 3584 * 4
    # The promise adds 4·K·D bytes and 64 MB; a copy of all rows would fit in those, so the test only allows the half.
    assert extra <= size // 2, f"{extra / 2**20:.0f} MB beyond the inputs"


WALK = """
import os, sys, torch
import bipace_kernels as bk

torch.manual_seed(0)
groups, length, dim = 16, 400, 64
group = torch.arange(groups).repeat_interleave(length)
trajectory = torch.arange(groups * 8).repeat_interleave(length // 8)
keys = torch.randint(0, 4, (groups * length,))
given = {
    "group": group, "trajectory": trajectory, "rewards": torch.rand(groups * length),
    "step": torch.arange(length // 8).repeat(groups * 8), "fingerprint": torch.randn(groups * length, dim),
    "action_key": keys, "action_parsed": keys >= 0,
}
bk.advantage(**given)
root, calls = os.path.dirname(bk.__file__), []


def note(frame, event, argument):
    if event == "call" and frame.f_code.co_filename.startswith(root):
        calls.append(os.path.relpath(frame.f_code.co_filename, root))


sys.setprofile(note)
bk.advantage(**given)
sys.setprofile(None)
print(len(calls), *sorted(set(calls)))
"""


def test_a_call_is_a_short_walk():
    """In a process of its own: a compiler that other tests load makes the walk longer."""
    calls, *modules = python(WALK).split()
    assert int(calls) <= 140 and len(modules) <= 18, (calls, modules)
