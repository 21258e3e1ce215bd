"""GPU resources of the kernels, from the compiled code; needs no GPU (`python -m bench resources [--cuda]`).

The stages of `bipace_kernels.backends.triton` are called as usual, and Triton is stopped where it would compile for the
launch. Each configuration found so is compiled ahead to machine code; registers, stack and local memory come from
`cuobjdump -res-usage` (the toolkit's or Triton's own), dynamic shared memory from Triton. A stack or local memory means
that registers were spilled to device memory.
"""

import dataclasses
import functools
import importlib
import re
import shutil
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import torch

import bipace_kernels as bk
from bipace_kernels.backends.schema import Kernel, Terms, Tokens

from . import cuda_resources, report

# Shared memory that one program may ask for, in bytes (CUDA C++ Programming Guide, compute capabilities).
SHARED_LIMIT = {80: 163 << 10, 90: 227 << 10, 100: 227 << 10, 120: 99 << 10}
ARCHITECTURES = (80, 90, 100)
_SIZES = {"GLOBAL", "REG", "STACK", "SHARED", "LOCAL"}


@dataclass(frozen=True)
class Launch:
    """One configuration of one kernel, as it is launched."""

    module: str
    kernel: Any
    signature: Mapping[str, str]
    constexprs: Mapping[str, Any]
    options: Mapping[str, Any]
    archs: Sequence[int] = ARCHITECTURES  # where it is launched

    @property
    def name(self) -> str:
        return str(self.kernel.__name__)

    def runs_on(self, arch: int) -> bool:
        """Whether that architecture launches it; one that the tests do not compile for launches what all of them do."""
        return arch in self.archs or (arch not in ARCHITECTURES and len(self.archs) == len(ARCHITECTURES))

    @property
    def variant(self) -> str:
        """What distinguishes this configuration from the kernel's others."""
        names = [name for name in self.kernel.arg_names if name not in self.constexprs]
        pointers = sorted({kind for name in names if (kind := self.signature[name]).startswith("*")})
        return ", ".join([*(f"{k}={v}" for k, v in self.constexprs.items()), *pointers])


@dataclass(frozen=True)
class Usage:
    """Resources of one compiled configuration."""

    module: str
    kernel: str
    variant: str
    arch: int
    warps: int
    stages: int
    registers: int  # per thread
    stack: int  # bytes per thread; above 0 where registers are spilled
    local: int  # bytes per thread
    shared: int  # bytes per program, static and dynamic
    limit: int  # of shared memory on that architecture

    @property
    def spills(self) -> bool:
        return self.stack > 0 or self.local > 0

    @property
    def wrong(self) -> bool:
        return self.spills or self.shared > self.limit


class StandIn:
    """As much of a Triton driver as it takes to compile for a launch, for an sm_90."""

    def get_current_device(self) -> str:
        return "stand-in"  # compiled kernels are kept per device: these must not be taken for a real one's

    def get_current_stream(self, device: str) -> int:
        return 0

    def get_current_target(self) -> Any:
        return importlib.import_module("triton.backends.compiler").GPUTarget("cuda", 90, 32)


def launches() -> list[Launch]:
    """Every configuration that usual calls of the stages launch, each once."""
    jit = importlib.import_module("triton.runtime.jit")
    driver = importlib.import_module("triton.runtime.driver").driver
    knobs = importlib.import_module("triton").knobs.runtime
    large = importlib.import_module("bipace_kernels.backends.triton.gram").LARGE
    found: dict[str, Launch] = {}
    options: dict[str, Any] = {}
    run = jit.JITFunction.run

    def launch(self: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> None:
        options.clear()
        options.update({name: value for name, value in kwargs.items() if name not in self.arg_names})
        run(self, *args, grid=grid, warmup=True, **kwargs)

    def compile_for_it(*, fn: Any, compile: Mapping[str, Any], **rest: Any) -> bool:
        kernel = fn.jit_function
        constexprs = {kernel.arg_names[place[0]]: value for place, value in compile["constants"].items()}
        archs = (90, 100) if constexprs.get("BLOCK_K") == large["BLOCK_K"] else ARCHITECTURES
        module = kernel.__module__.rpartition(".")[2]
        one = Launch(module, kernel, dict(compile["signature"]), constexprs, dict(options), archs)
        found.setdefault(f"{one.name}: {one.variant}", one)
        return True  # and nothing is compiled

    with (
        mock.patch.object(jit.JITFunction, "run", launch),
        mock.patch.object(knobs, "jit_cache_hook", compile_for_it),
        mock.patch.object(driver, "_active", StandIn()),
    ):
        _call_stages()
    return list(found.values())


def _call_stages() -> None:
    """Usual calls of the stages, on CPU tensors that pass for a GPU's; no value is read."""
    names = ["action_keys", "clusters", "combine", "critic", "episode", "gram", "numbering", "returns", "values"]
    keys, clusters, combine, critic, episode, gram, numbering, returns, values = (
        importlib.import_module(f"bipace_kernels.backends.triton.{name}") for name in names
    )
    n = 2 * 4 * 100
    rows, floats, codes = torch.arange(n), torch.zeros(n), torch.zeros(n, dtype=torch.int64)
    true = torch.ones(n, dtype=torch.bool)
    usual = bk.layout(rows // 400, rows // 100, rows % 100).on(torch.device("cpu"))
    masked = dataclasses.replace(usual, usable=true, taken=true, spoilt=true[: usual.n_trajectories])

    states = torch.empty(n, 3584, dtype=torch.bfloat16)
    for x, tile in ((states, gram.LARGE), (states, gram.SMALL), (states.half(), gram.LARGE), (states.float(), None)):
        clusters.cluster_sweep(masked, x, [0.1], clusters.Cut(tile=tile))
    clusters.cluster_sweep(masked, states, [0.0, 0.1, 0.2])
    clusters.scan_rows(masked, states)
    numbering.dense_labels(torch.arange(numbering.FEW + 1))

    returns.all_returns(usual, floats.double(), true, 0.95)
    returns.discounted_returns(usual, floats.double(), 0.95)
    returns.trajectory_returns(usual, floats.double())
    for scope in ("trajectory", "step"):
        episode.episode_advantage(masked, floats[: usual.n_trajectories], scope, "std", "zero", 1e-6)
    for records in (usual, dataclasses.replace(usual, longest_group=values.SORT_FROM + 1)):
        for estimator, norm in (("mean", "none"), ("mean", "std"), ("q_style", "none"), ("diff_peer", "none")):
            values.step_advantage(records, floats, codes, codes, estimator, norm, 1e-6)
    values.hgpo_advantage(usual, floats, codes.expand(3, n).clone(), floats, "none", 1e-6, 1.0, True)
    terms = Terms(codes, floats, codes.to(torch.uint8))
    combine.combine(masked, floats, floats, terms, (1.0, 0.5))

    kernel = Kernel(0.5, 8.0, 1.0, 0.0, "batch", 0.8, 0.1)
    for width in (0, 512):
        wide = critic.unit_rows(masked, states, width)
    whitened = critic.whitened_rows(masked, wide, rows[:128], 64)
    centred = critic.centred_rows(masked, whitened, "group")
    critic.kernel_values(masked, centred, centred, floats, rows[:128], kernel)
    critic.same_action_advantage(masked, centred, floats.double(), codes, true, kernel)
    critic.cluster_values(masked, floats, codes, 3.0)
    critic.gae_advantage(masked, floats.double(), floats.double(), true, 0.95, 0.5)
    critic.normed_advantage(masked, floats.double(), floats, "batch")

    table = torch.arange(257), torch.arange(256, dtype=torch.uint8)
    ids = torch.zeros(2, 200, dtype=torch.int64)
    for mode in ("first_n", "action_tag", "text"):
        keys.hash_token_ids(Tokens(ids, None, ids > 0, *table, 200), mode, 8, keys.CUT)
        flat = Tokens(ids.view(-1), torch.tensor([0, 200, 400]), ids.view(-1), *table, 200)
        keys.hash_token_ids(flat, mode, 8, keys.CUT)


def compile_ahead(launch: Launch, arch: int) -> Usage:
    """Compiles for sm_<arch> and reads the resources."""
    compiled = build(launch, arch)
    sizes, made = read(compiled.asm["cubin"]), compiled.metadata
    return Usage(
        launch.module, launch.name, launch.variant, arch, int(made.num_warps), int(made.num_stages),
        sizes["REG"], sizes["STACK"], sizes["LOCAL"], int(made.shared), SHARED_LIMIT[arch],
    )  # fmt: skip


def build(launch: Launch, arch: int) -> Any:
    """What Triton compiles for sm_<arch>; pointers are taken as 16-byte aligned, as torch allocates them."""
    compiler = importlib.import_module("triton.compiler")
    target = importlib.import_module("triton.backends.compiler").GPUTarget("cuda", arch, 32)
    names = list(launch.kernel.arg_names)
    signature = {n: "constexpr" if n in launch.constexprs else launch.signature[n] for n in names}
    aligned = {(i,): [["tt.divisibility", 16]] for i, n in enumerate(names) if signature[n].startswith("*")}
    source = compiler.ASTSource(launch.kernel, signature, dict(launch.constexprs), aligned)
    return compiler.compile(source, target=target, options=dict(launch.options))


def read(cubin: bytes) -> dict[str, int]:
    """Sizes of the one function in a cubin."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "kernel.cubin"
        path.write_bytes(cubin)
        done = subprocess.run([cuobjdump(), "-res-usage", str(path)], capture_output=True, text=True, check=True)
    (text,) = re.findall(r"^\s*Function \S+:\s*\n(.*)$", done.stdout, re.MULTILINE)
    sizes = {name: int(value) for name, value in re.findall(r"([A-Z]+):(\d+)", text)}
    return {name: value for name, value in sizes.items() if name in _SIZES}


@functools.cache
def cuobjdump() -> str:
    """The toolkit's cuobjdump, or the one that Triton carries."""
    found = shutil.which("cuobjdump")
    if found is not None:
        return found
    triton = importlib.import_module("triton")
    own = Path(str(triton.__file__)).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    if not own.exists():
        raise FileNotFoundError(f"cuobjdump is neither on the PATH nor at {own}; install the CUDA toolkit")
    return str(own)


_TRITON: report.Columns = {
    "module": "{module}", "kernel": "`{kernel}`", "sm": "{arch}", "warps": "{warps}", "stages": "{stages}",
    "registers": "{registers}", "stack": "{stack}", "local": "{local}", "shared": "{shared}", "of": "{limit}",
    "configuration": "{variant}",
}  # fmt: skip
_CUDA: report.Columns = {
    "source": "{source}", "kernel": "`{kernel}`", "sm": "{arch}", "registers": "{registers}", "stack": "{stack}",
    "spill stores": "{spill_stores}", "spill loads": "{spill_loads}", "static shared": "{shared}",
    "serialized": lambda row: "yes" if row["serialized"] else "no",
}  # fmt: skip


def as_markdown(rows: Sequence[Usage | cuda_resources.Kernel], compiler: str) -> str:
    cuda = compiler.startswith("nvcc")
    return report.page(
        f"Resources of the {'CUDA' if cuda else 'Triton'} kernels",
        f"Written by `python -m bench resources{' --cuda' * cuda}`: {compiler}, no GPU took part. Registers, stack, "
        "local memory and spills are per thread, shared memory per block, in bytes. A stack or local memory of a "
        "Triton kernel means spilled registers.",
        f"{len(rows)} compiled configurations, {sum(row.spills for row in rows)} with spills.",
        report.table(_CUDA if cuda else _TRITON, map(dataclasses.asdict, rows)),
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Compiles everything, prints the table, writes the files; exit status 1 where something spills or serializes."""
    parser = report.parser("resources", "Registers, spills and shared memory of every kernel; needs no GPU.",
                           writes="resources.json and resources.md (cuda_resources of --cuda)")  # fmt: skip
    parser.add_argument("--cuda", action="store_true", help="of the CUDA kernels, by nvcc; else of Triton's")
    parser.add_argument("--arch", type=int, nargs="+", choices=sorted(SHARED_LIMIT), metavar="SM",
                        help=f"of {', '.join(map(str, SHARED_LIMIT))} (default: all; of Triton 80 90 100)")  # fmt: skip
    arguments = parser.parse_args(argv)
    rows: list[Usage | cuda_resources.Kernel]
    if arguments.cuda:
        name, compiler = "cuda_resources", cuda_resources.version()
        rows = [*cuda_resources.compile_all(arguments.arch or SHARED_LIMIT)]
    else:
        name, compiler = "resources", f"Triton {importlib.import_module('triton').__version__}"
        archs = arguments.arch or ARCHITECTURES
        rows = [compile_ahead(launch, arch) for launch in launches() for arch in archs if launch.runs_on(arch)]
    document = {"schema": 1, "compiler": compiler, "rows": [dataclasses.asdict(row) for row in rows]}
    report.publish(name, document, as_markdown(rows, compiler), arguments.out)
    return int(any(row.wrong for row in rows))
