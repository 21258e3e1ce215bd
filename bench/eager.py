"""Host time of a call on a GPU: Python, torch's operators and Triton's launches (`python -m bench eager`); needs no
GPU.

The tensors of a tiny batch are on the CPU and pass for a GPU's, so an operator takes about as long as its dispatch.
Triton compiles its kernels for sm_90 and prepares each launch as on a GPU, but its driver launches nothing, and neither
does the provider of the CUDA kernels.  So the time of the driver and of torch's allocator on a GPU is left out.

CPU time of this process.  Other processes on the machine make rounds longer, never shorter: compare the shortest, and
run two versions in turn.
"""

import argparse
import gc
import importlib
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import torch

import bipace_kernels as bk
from bipace_kernels.backends import cuda_loader, dispatch, triton_loader
from bipace_kernels.backends.cuda import _launch

from .resources import StandIn

SHARED = 227 << 10  # bytes of a block
BACKENDS = ("cuda", "triton")
CALLS = 5  # of a round: few, so that some rounds are not interrupted


class Driver(StandIn):
    """As much of Triton's driver as a launch asks for; nothing runs."""

    launches = 0
    utils = SimpleNamespace(
        load_binary=lambda name, kernel, shared, device: (object(), 0, 0, 0, 1024),
        get_device_properties=lambda device: {"max_shared_mem": SHARED},
        unload_module=lambda module: None,
    )

    def launcher_cls(self, source: Any, metadata: Any) -> Callable[..., None]:
        return self._launch

    def _launch(self, *arguments: Any) -> None:
        self.launches += 1

    def get_active_torch_device(self) -> torch.device:
        return torch.device("cpu")


class Provider:
    """Of CUDA kernels, none of which runs."""

    built = "sm_90a"
    launches = 0

    def launch(self, *arguments: Any) -> None:
        self.launches += 1

    def shared_memory(self, gpu: int) -> int:
        return SHARED


def stub() -> tuple[Driver, Provider]:
    """From here on CPU tensors pass for a GPU's, and nothing is launched in this process."""
    driver, provider = Driver(), Provider()
    importlib.import_module("triton.runtime.driver").driver.set_active(driver)
    _launch.stand_in = provider
    put: Callable[[Any, str, Any], None] = setattr
    for loader in (triton_loader, cuda_loader):
        put(loader, "reason", lambda: "")
    put(dispatch, "_why_not_on", lambda name, kind: "")
    return driver, provider


def batch() -> dict[str, Any]:
    """Arguments of advantage(): a layout of one prompt group, four rollouts of four steps."""
    rows = torch.arange(16)
    return {
        "layout": bk.layout(rows // 16, rows // 4, rows % 4),
        "rewards": torch.zeros(16),
        "fingerprint": torch.ones(16, 64, dtype=torch.bfloat16),
        "action_key": torch.zeros(16, dtype=torch.int64),
    }


def measure(call: Callable[[], Any], rounds: int) -> list[float]:
    """Milliseconds of CPU time of one call, in each round."""
    for _ in range(20):  # compiles
        call()
    found = []
    gc.collect()
    gc.disable()
    for _ in range(rounds):
        began = time.process_time_ns()
        for _ in range(CALLS):
            call()
        found.append((time.process_time_ns() - began) / CALLS / 1e6)
    gc.enable()
    return found


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="bench eager", description="Host time of advantage() on a GPU, with nothing launched; needs no GPU."
    )
    parser.add_argument("--rounds", type=int, default=800, metavar="N", help=f"of {CALLS} calls each (default: 800)")
    rounds = parser.parse_args(argv).rounds
    torch.set_num_threads(1)
    driver, provider = stub()
    jit = importlib.import_module("triton.runtime.jit").JITFunction
    prepared = jit.run
    for backend in BACKENDS:
        given: dict[str, Any] = {**batch(), "config": bk.Config.bipace(), "backend": backend}

        def call(given: dict[str, Any] = given) -> Any:
            return bk.advantage(**given)

        whole = measure(call, rounds)
        driver.launches = provider.launches = 0
        call()
        by_triton, by_cuda = driver.launches, provider.launches
        jit.run = lambda self, *arguments, **options: None
        without = measure(call, rounds)
        jit.run = prepared
        own = min(whole) - min(without)
        sys.stdout.write(
            f"advantage(), BiPACE preset, {backend}: {min(whole):.3f} ms (median {statistics.median(whole):.3f}), of "
            f"which Triton's {by_triton} launches {own:.3f}; launches of CUDA kernels: {by_cuda}\n"
        )
    return 0
