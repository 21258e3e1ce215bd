"""The GPU benchmarks as far as no GPU is needed: pages, targets, logs."""

import dataclasses
import json
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch
from benchmarks import PACKAGE, module
from paths import HELPERS, ROOT, program
from refusals import refused

pytest.importorskip(f"{PACKAGE}.gpu", reason="a wheel has no GPU benchmarks")
cases, checks, gpu, measure, report, rows, stages = map(
    module, ("gpu_cases", "gpu_checks", "gpu", "gpu_measure", "gpu_report", "gpu_rows", "stages")
)

SCRIPT = ROOT / "bench" / "gpu.sh"
TESTS = HELPERS.parent
CEILINGS = measure.GpuCeilings(copy_gb_s=1000.0, gemm_tflop_s=100.0, empty_us=5.0)
# What neither the measurements nor most tests on a GPU may need, though parts of the package do.
OTHERS = ["rich", "typer", "pyarrow", "matplotlib", "tqdm", *(set(checks.OPTIONAL) - {"pytest"})]


def _part(name="short", *measured, status="done"):
    about = module("measure").machine(2, "2")
    device = {**measure.gpu(), "name": "a GPU", "capability": "9.0"}
    part = rows.Part(name, about, device, "2026-01-01 00:00 UTC", status=status)
    bench = rows.Bench(part, measure.DryClock(), CEILINGS, seconds=100, save=lambda: None, say=print)
    for row in measured:
        row(bench)
    return dataclasses.asdict(part)


def _fixed(workload, name, ms, how=rows.REPLAY, kind="ours"):
    row = rows.GpuRow(workload, name, kind, how, median_ms=ms, iqr_ms=0.0, rounds=1)
    return lambda bench: bench._keep(row)


def test_the_floor_is_the_larger_of_bytes_and_operations():
    need = rows.Work(bytes=2_000_000, flop=300_000_000)
    part = _part("short", lambda bench: bench.row("w", "n", lambda: None, need=need))
    (row,) = part["rows"]
    assert row["floor_bytes_ms"] == pytest.approx(0.002)
    assert row["floor_flop_ms"] == pytest.approx(0.003)
    assert row["floor_ms"] == row["floor_flop_ms"]
    assert row["over_floor"] == pytest.approx(row["median_ms"] / 0.003)


def test_a_failing_row_spoils_nothing_but_itself():
    broken, absent = (Mock(side_effect=e) for e in (RuntimeError("out of\nluck"), ImportError("No module named 'x'")))
    kept = []
    part = _part("short", lambda b: b.row("w", "bad", broken), lambda b: kept.append(b.row("w", "good", lambda: 3)),
                 lambda b: b.row("w", "missing", absent), lambda b: kept.append(b.failures),
                 lambda b: b.row("w", "wrong", lambda: 3, check=lambda _: "DIFFERENT: 2 clusters"),
                 lambda b: kept.append(b.failures))  # fmt: skip
    assert [r["kind"] for r in part["rows"]] == ["failed", "ours", "not available", "ours"]
    assert part["rows"][0]["note"] == "RuntimeError: out of luck"
    assert kept[1:] == [1, 2], "a result that differs counts as a failure"
    assert "FAILED" not in report.as_markdown([_part("short", _fixed("w", "n", 1.0))])
    assert "| failed " in report.as_markdown([part])


def _by(backend, workload, name, ms, how=rows.REPLAY, **floors):
    row = rows.GpuRow(workload, report.by(backend, name), "ours", how, median_ms=ms, iqr_ms=0.0, rounds=1, **floors)
    return lambda bench: bench._keep(row)


def test_targets_are_met_or_missed():
    at, big, one = "16x400, K = 20", "64x2048, K = 64", "1x32768, K = 512"
    part = _part(
        "short",
        _by("triton", at, report.WHOLE, 0.45), _by("triton", at, report.WHOLE, 1.7, rows.EAGER),
        _by("triton", at, report.CLUSTERING, 0.2), _by("triton", at, report.SWEEP, 0.6),
        _by("cuda", at, report.WHOLE, 0.15), _by("cuda", at, report.CLUSTERING, 0.13),
        _by("cuda", at, report.GRAM, 0.04), _by("cuda", at, report.DECISIONS, 0.06),
        _by("cuda", at, report.STAGE, 0.12), _by("cuda", "1x400, K = 20", report.DECISIONS, 0.056),
        _by("cuda", big, report.GRAM, 2.0, floor_flop_ms=1.0), _by("cuda", one, report.WHOLE, 39.0),
        *(_by("cuda", f"1x2048, K = {k:,}", report.DECISIONS, ns * 2048e-6)
          for k, ns in ((2048, 900.0), (16, 90.0), (128, 210.0))),
        _fixed(at, stages.NUMPY, 40.0, "wall", "competitor"), _fixed(at, stages.NUMPY_POOL, 18.0, "wall", "competitor"),
        _fixed(at, report.LOOP, 500.0, "wall", "competitor"),
    )  # fmt: skip
    part["figures"] = {report.ACCURACY: 1.5e-6}
    met = {t.name: (pytest.approx(t.value) if t.value else None, t.met) for t in report.targets([part])}
    for name, wanted in {
        "triton: 16 × 400 × 3,584, whole chain": (0.45, True),
        "triton: the same, eager with a layout": (1.7, False),
        "triton: clustering of 16 × 400 against the NumPy/BLAS loop, all cores": (90.0, False),
        "triton: clustering of 16 × 400 against the torch loop on the GPU": (2500.0, True),
        "triton: clustering of 16 × 400 against community_detection": (None, None),
        "triton: sweep of 32 ε at 16 × 400 over one clustering": (3.0, True),
        "cuda: the same, eager with a layout": (None, None),
        "cuda: 16 × 400 × 3,584, clustering": (0.13, False),
        "cuda: 1 × 32,768 × 3,584, whole chain": (39.0, True),
        "cuda: clustering of 16 × 400 over Gram matrices + decisions, each by itself": (1.2, True),
        "cuda: one decision in a group of 2,048 at K ≤ 128": (210.0, False),
        "cuda: one decision in a group of 400 at K = 20": (140.0, True),
        "cuda: Gram matrices of 64 × 2,048, only triangles, of the measured product's rate": (0.5, False),
        "cuda: 16 × 400 × 3,584, whole chain: Triton's time over it": (3.0, True),
        "cuda: largest |cosine − float64| in 16 × 400 × 3,584": (1.5e-6, True),
    }.items():
        assert met[name] == wanted, name
    said = report.verdicts([part])
    assert "met: cuda: 16 × 400 × 3,584, whole chain ≤ 0.18 ms, measured 0.15 ms" in said
    assert any(line.startswith("MISSED: triton: the same, eager with a layout ≤ ") for line in said)
    assert said[-1].startswith("not measured: ") and said[0].startswith("met: ")
    page = re.sub(" {2,}", " ", report.as_markdown([part]))
    assert f"| {at} | {report.WHOLE} | graph replay | 0.45 | 0.15 | 3.00× |" in page
    assert "| 0.45 ms | yes |" in page and "| 1.7 ms | NO |" in page and "not measured" in page


def test_a_dry_run_reaches_no_target():
    part = _part("short", _by("cuda", "16x400, K = 20", report.WHOLE, 0.1), status="dry run")
    assert all(t.value is None for t in report.targets([part]))
    assert "no figure on this page is a measurement" in report.as_markdown([part])


def test_pages_of_several_runs_become_one(tmp_path, capsys):
    report.write(tmp_path / "a", [_part("short", _fixed("w", "n", 1.0)), _part("long")])
    report.write(tmp_path / "b", [_part("short", _fixed("w", "n", 2.0))])
    assert gpu.main(["--merge", str(tmp_path / "a"), str(tmp_path / "b"), "--out", str(tmp_path / "c")]) == 0
    found = json.loads((tmp_path / "c" / "gpu.json").read_text())
    assert [p["name"] for p in found["parts"]] == ["short", "long"]
    assert found["parts"][0]["rows"][0]["median_ms"] == 2.0
    assert "wrote" in capsys.readouterr().out
    assert not list((tmp_path / "c").glob("*.json.*"))


def test_figures_of_two_gpus_or_schemas_are_not_mixed(tmp_path):
    ours, other = _part("short"), _part("stages")
    other["gpu"]["name"] = "another GPU"
    for folder, part in (("a", ours), ("b", other)):
        report.write(tmp_path / folder, [part])
    with pytest.raises(ValueError, match="one kind of GPU, got a GPU, another GPU"):
        gpu.main(["--merge", str(tmp_path / "a"), str(tmp_path / "b"), "--out", str(tmp_path / "c")])
    if not torch.cuda.is_available():
        with pytest.raises(ValueError, match="one kind of GPU, got a GPU, none"):
            gpu._run("ceilings", gpu._parser().parse_args(["--out", str(tmp_path / "a")]))
    (tmp_path / "gpu.json").write_text('{"schema": 0, "parts": []}')
    refused("another folder", report.load, tmp_path / "gpu.json")


def test_without_a_gpu_it_says_not_measured(tmp_path, capsys):
    if torch.cuda.is_available():
        pytest.skip("there is a GPU here")
    assert gpu.main(["--out", str(tmp_path)]) == 0
    assert gpu.main(["short", "--out", str(tmp_path)]) == 1
    assert capsys.readouterr().out.count("not measured") == 2
    assert not list(tmp_path.iterdir())
    with pytest.raises(SystemExit):
        gpu.main(["nonsense"])


# Rows by which the targets look for figures of both backends, by part.
WANTED = {
    "short": {report.WHOLE, report.CLUSTERING},
    "sweep": {report.CLUSTERING, report.SWEEP},
    "stages": {report.GRAM, report.DECISIONS, report.KEYS, report.STAGE},
}


@pytest.mark.slow
@pytest.mark.parametrize("name", ["tests-cuda", "short", "sweep", "stages", "others", "sanitize-cuda"])
def test_a_dry_run_has_rows_of_both_backends(name, tmp_path):
    """By the CUDA emulator and Triton's interpreter: every row is right, or the program would end with 1."""
    program(sys.executable, "-m", PACKAGE, "gpu", name, "--dry", "--out", tmp_path, timeout=900)
    (part,) = report.load(tmp_path / "gpu.json")
    ours = [r["name"].partition(": ") for r in part["rows"] if r["kind"] == "ours"]
    names = {backend: {what for of, _, what in ours if of == backend} for backend in cases.BACKENDS}
    assert WANTED.get(name, set()) <= names["cuda"] & names["triton"]
    own = {report.GRAM + report.BY_WARPS}
    assert names["cuda"] - names["triton"] == (own if name == "stages" else set())
    if name not in ("stages", "others"):  # most stages only exist in Triton
        assert names["triton"] <= names["cuda"]
    assert bool(names["triton"]) == (name in gpu.PARTS)


def without_others(module, *arguments):
    """`python -m module` where none of them is installed."""
    missing = f"import runpy, sys; sys.modules |= dict.fromkeys({OTHERS})"
    code = f"{missing}; runpy.run_module({module!r}, None, '__main__', True)"
    env = {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    return program(sys.executable, "-c", code, *arguments, timeout=200, env=env).stdout


@pytest.mark.slow
def test_torch_and_numpy_are_enough_to_measure(tmp_path):
    without_others(PACKAGE, "gpu", "ceilings", "--dry", "--out", str(tmp_path))
    assert (tmp_path / "gpu.md").exists()


@pytest.mark.slow
def test_tests_on_a_gpu_need_only_pytest():
    """Those that draw their data say so; modules that need more are left out, and none breaks the collection."""
    listed = without_others("pytest", "-q", "-p", "no:cacheprovider", "-m", "gpu", "--collect-only", str(TESTS))
    assert "clusters/test_device_clusters.py" in listed and "error" not in listed.splitlines()[-1]
    assert "hypothesis is not installed" in without_others(
        "pytest", "-p", "no:cacheprovider", f"{TESTS / 'pipeline/test_theorems.py'}"
    )


def in_the_making(name, folder, seconds=60.0):
    return checks.Run(rows.Part(name, {}, {}, "2026-01-01 00:00 UTC"), folder, seconds, 1.0, False, lambda: None, print)


def test_a_backend_that_should_be_there_and_is_not_is_a_failure(monkeypatch, tmp_path):
    monkeypatch.setattr(checks, "absent", lambda backend: f"no {backend}")
    for should in (False, True):
        monkeypatch.setattr(checks, "expected", lambda _, should=should: should)
        run = in_the_making("smoke", tmp_path)
        assert checks.smoke(run) is not should
        assert run.part.lines == ["- cuda: not available: no cuda", "- triton: not available: no triton"]


@pytest.mark.slow
@pytest.mark.parametrize("backend", cases.BACKENDS)
def test_small_checks_without_a_gpu(backend):
    done = program(sys.executable, "-m", f"{PACKAGE}.gpu_smoke", "--dry", "--backend", backend, timeout=900)
    assert len(done.stdout.splitlines()) == len(module("gpu_smoke").checks(torch.device("cpu"), backend))


def test_outcomes_are_those_of_pytests_summary():
    log = """
tests/a.py::test_one PASSED                                     [ 10%]
tests/a.py::test_two[a b-1] FAILED                              [ 20%]
=========================== short test summary info ============================
SKIPPED [1] tests/b.py:7: needs two GPUs
FAILED tests/a.py::test_two[a b-1] - assert 0
==================== 1 failed, 1 passed, 1 skipped in 3.22s ====================
"""
    assert checks.outcomes(log) == [
        "SKIPPED [1] tests/b.py:7: needs two GPUs",
        "FAILED tests/a.py::test_two[a b-1] - assert 0",
        "1 failed, 1 passed, 1 skipped in 3.22s",
    ]


@pytest.mark.parametrize("backend", cases.BACKENDS)
@pytest.mark.parametrize("failing", ["memcheck", "racecheck", "initcheck"])
def test_what_the_sanitizer_finds(failing, backend, tmp_path, monkeypatch):
    """Triton's wide loads of scratch memory are reported, and are no failure; whatever else is found is one."""
    ran = []
    monkeypatch.setattr(checks, "absent", lambda _: "")
    monkeypatch.setattr(checks.shutil, "which", lambda name, path: name)
    monkeypatch.setattr(checks, "run_to_end", lambda argv, *_, **__: ran.append(argv) or 99 * (failing in argv))
    run = in_the_making("sanitize", tmp_path)
    part, fine = run.part, (failing, backend) == ("initcheck", "triton")
    assert checks.sanitize(run, backend) is fine
    assert any("no failure" in line for line in part.lines) is fine
    assert [argv[-2:] for argv in ran[1:]] == [["--backend", backend]] * 3  # the first is one line
    assert [line.startswith(f"- {failing}: status 99") for line in part.lines].count(True) == 1
    assert sum("nothing found" in line for line in part.lines) == 2


@pytest.mark.slow
def test_a_program_that_hangs_is_stopped(tmp_path):
    log = tmp_path / "log"
    argv = [sys.executable, "-c", "import time; print('began', flush=True); time.sleep(60)"]
    assert checks.run_to_end(argv, log, seconds=3) is None
    assert "began" in log.read_text()
    assert checks.run_to_end([sys.executable, "-c", "raise SystemExit(3)"], log, seconds=30) == 3
    assert checks.tail(log).endswith("raise SystemExit(3)")


def watch(program, folder, **limits):
    """What checks.watch() says of a program of bash, and the lines that it passed on."""
    lines, every = [], {"preparing": 60.0, "compiling": 60.0, "running": 60.0, **limits}
    end = time.monotonic() + every.pop("all", 60.0)
    said = checks.watch(["bash", "-c", program], folder / "log", lines.append, limits=every, deadline=end)
    return (*said, lines)


@pytest.mark.parametrize("phase", checks.LIMITS)
def test_a_program_that_hangs_in_a_phase_is_ended_by_its_limit(phase, tmp_path):
    program = f"echo before; echo '#running'; echo '#{phase}'; echo in it; exec sleep 1000"
    fine, why, lines = watch(program, tmp_path, **{phase: 0.5})
    assert not fine and why.startswith(f"STOPPED while {phase}, after ")
    assert lines == ["before", "in it"]


def test_a_phase_has_its_limit_in_all_and_no_other_counts(tmp_path):
    once = "echo '#compiling'; sleep 0.4; echo '#running'; "
    twice = f"{once}sleep 0.2; {once}echo done"
    assert watch(twice, tmp_path, running=10.0) == (True, "", ["done"])
    assert watch(twice, tmp_path, compiling=0.6)[1].startswith("STOPPED while compiling")
    assert watch("sleep 1000", tmp_path, all=0.3)[1].startswith("STOPPED while preparing")


def test_how_a_program_ended_is_one_line(tmp_path):
    assert watch("echo DIFFERENT; exit 1", tmp_path) == (False, "", ["DIFFERENT"])  # its own line says it
    assert watch("echo an illegal address >&2; exit 1", tmp_path) == (False, "FAILED: status 1: an illegal address", [])
    assert watch("echo half; echo core >&2; kill -SEGV $$", tmp_path) == (False, "FAILED: status -11: core", ["half"])


@pytest.mark.slow
def test_compilations_are_said():
    """Triton's, by a driver that only compiles."""
    pytest.importorskip("triton")
    code = f"""
import os, tempfile
os.environ["TRITON_CACHE_DIR"] = tempfile.mkdtemp()
import torch
import bipace_kernels as bk
from bipace_kernels.backends.triton import returns
from {PACKAGE} import gpu_checks, resources
from triton.runtime import driver, jit
run = jit.JITFunction.run
jit.JITFunction.run = lambda *arguments, **options: run(*arguments, **{{**options, "warmup": True}})
driver.set_active(resources.StandIn())
gpu_checks.watched()
rows = torch.arange(16)
layout, rewards = bk.layout(rows // 16, rows // 4, rows % 4).on(rows.device), torch.zeros(16, dtype=torch.float64)
for _ in range(2):
    returns.trajectory_returns(layout, rewards)
    returns.discounted_returns(layout, rewards, 0.95)
    print("called", flush=True)
"""
    done = program(sys.executable, "-c", code, env={"TRITON_INTERPRET": "0"}, timeout=600)
    before, first, second, *_ = done.stdout.split("called\n")
    said = before.split()
    assert said == ["#running", *["#compiling", "#running"] * 2]
    assert first == second == ""


# A check that hangs, one that dies, and others that are fine at once.
PROGRAM = """#!/bin/bash
echo '#running'
case "$*" in
  *"--backend cuda --check Config.hgpo()"*) echo $$ > "{folder}/hangs"; exec sleep 1000 ;;
  *"--check Config.grpo()"* | *first-gae-cuda*) kill -SEGV $$ ;;
  *) echo fine ;;
esac
"""
# An interpreter that builds nothing, and whose checks are that program.
INTERPRETER = """#!/bin/bash
case "$*" in
  *setup.py*) echo "bipace_kernels: nothing built" ;;
  "-m bench gpu"*) exec {python} -c '
import os, sys
os.sched_setaffinity(0, [min(os.sched_getaffinity(0))])  # one check after the other
sys.executable = "{folder}/program"
from {package} import gpu
sys.exit(gpu.main(sys.argv[1:]))' "${{@:4}}" ;;
  *) exec {python} "$@" ;;
esac
"""


@pytest.fixture
def interpreter(tmp_path):
    for name, text in (("program", PROGRAM), ("python", INTERPRETER)):
        path = tmp_path / name
        path.write_text(text.format(folder=tmp_path, python=sys.executable, package=PACKAGE))
        path.chmod(0o755)
    return tmp_path / "python"


def everything():
    """The lines of a first run in their order: (part, backend, check)."""
    smoke = module("gpu_smoke")
    names = {backend: list(smoke.checks(torch.device("cpu"), backend)) for backend in ("cuda", "triton")}
    assert next(iter(names["cuda"])).startswith("one tile")
    return [f"{backend}: {name}" for backend, of in names.items() for name in of], list(gpu.FIRST)


@pytest.mark.slow
def test_a_first_run_without_a_gpu(interpreter, tmp_path):
    """A check that hangs costs its limit and one line, one that dies one line; the rest goes on, in its order."""
    env = {"PYTHON": str(interpreter), "DRY": "1", "LIMIT": "2"}
    done = program("bash", SCRIPT, tmp_path / "out", "plan-1", env=env, status=1, timeout=900)
    small, first = everything()
    want = dict.fromkeys((*small, *first), "fine")
    want["cuda: Config.hgpo()"] = "STOPPED while running, after 2 s"
    died = ["cuda: Config.grpo()", "triton: Config.grpo()", "first-gae-cuda"]
    want |= dict.fromkeys(died, "FAILED: status -11")
    found = {part["name"]: part["lines"] for part in report.load(tmp_path / "out/gpu.json")}
    assert list(found) == ["smoke", "first"], done.stdout + done.stderr
    for name, lines in (("smoke", small), ("first", first)):
        assert [line.partition(": $ ")[0] for line in found[name]] == [f"- {line}: {want[line]}" for line in lines]
    said = done.stdout.splitlines()
    assert [line[3:] for line in said if line.startswith("== ") and line.count(" ") == 1] == ["build", "smoke", "first"]
    assert said[-1] == "FAILED: smoke first"


@pytest.mark.slow
def test_a_killed_first_run_has_all_its_lines_on_disk(interpreter, tmp_path):
    small, _ = everything()
    before = small[: small.index("cuda: Config.hgpo()")]
    argv = [str(interpreter), "-m", "bench", "gpu", "smoke", "--dry", "--limit", "900", "--out", str(tmp_path / "out")]
    with subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert [process.stdout.readline() for _ in before] == [f"{line}: fine\n" for line in before]
        while not (hangs := tmp_path / "hangs").exists() or not hangs.read_text().strip():
            assert process.poll() is None
            time.sleep(0.05)
        process.kill()
    (part,) = report.load(tmp_path / "out/gpu.json")
    assert part["lines"] == [f"- {line}: fine" for line in before] and part["status"] == "running"
    assert all(line in (tmp_path / "out/gpu.md").read_text() for line in part["lines"])
    while Path("/proc", hangs.read_text().strip(), "cmdline").exists():  # what hung ends with the one that watched it
        time.sleep(0.05)


def test_script_is_sound(tmp_path):
    program("bash", "-n", SCRIPT)
    program("bash", SCRIPT, status=2)
    tools = tmp_path / "bin"
    tools.mkdir()
    for name in ("bash", "dirname", "mktemp", "mkdir", "rm"):
        (tools / name).symlink_to(shutil.which(name))
    env = {"PATH": str(tools), "CXX": "", "DRY": "1", "PYTHON": sys.executable}
    said = program("bash", SCRIPT, tmp_path / "out", "build", env=env, status=1).stdout
    assert re.match(r"== build\nnot built, and nothing is downloaded: this machine lacks .*C\+\+ compiler.*\n== ", said)


@pytest.mark.parametrize("plan", ["plan-1", "plan-2", "plan-3"])
def test_a_plan_runs_its_parts_whatever_fails(plan, tmp_path):
    """By an interpreter that writes down what it is asked for, and fails at the first."""
    listed = dict(re.findall(r"^#   (plan-\d)\s+(.+)$", SCRIPT.read_text(), re.MULTILINE))[plan].split()
    by_tool = {"ncu", "ncu-cuda"}
    assert listed[0] == "build" and set(listed[1:]) <= {*gpu.PARTS, *gpu.CHECKS, *by_tool}
    first, *others = [name for name in listed[1:] if name not in by_tool]
    python = tmp_path / "python"
    python.write_text(f"""#!/bin/bash
case "$*" in
  "-c import os"*) dirname "$0" ;;
  *--targets*) echo "met: everything" ;;
  "-m bench gpu {first} "*) exit 1 ;;
esac
echo "$*" >> {tmp_path}/asked
""")
    python.chmod(0o755)
    done = program("bash", SCRIPT, tmp_path / "out", plan, env={"PYTHON": str(python)}, status=1)
    asked = re.findall(r"^-m bench gpu (\S+) --seconds (\d+)", (tmp_path / "asked").read_text(), re.MULTILINE)
    assert [name for name, _ in asked] == others
    assert all(int(seconds) <= 270 for _, seconds in asked[:-1]) and int(asked[-1][1]) < 540
    assert done.stdout.splitlines()[-2:] == ["met: everything", f"FAILED: {first}"]
