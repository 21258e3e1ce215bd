"""Whether the CUDA kernels can run here, and who has compiled them: the build, or CuPy at first use.

Nothing of CUDA is imported before someone asks; `import bipace_kernels` loads no compiled kernel.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
from types import ModuleType
from typing import Any

from . import _native_loader


@functools.cache
def module() -> tuple[ModuleType | None, str]:
    """The kernels that were compiled when the package was built (bipace_kernels._cuda), or None and why."""
    try:
        return importlib.import_module("bipace_kernels._cuda"), ""
    except ImportError as error:
        decision = _native_loader.cuda_decision()
        if decision.startswith("no CUDA kernels"):
            return None, f"this build has {decision}"
        return None, f"bipace_kernels._cuda does not load: {error}"


def has_cupy() -> bool:
    """Whether CuPy is installed, which compiles the kernels where the build left them out."""
    return importlib.util.find_spec("cupy") is not None


@functools.cache
def reason() -> str:
    """Why the CUDA kernels cannot run here; empty where they can."""
    missing = stages_missing()
    if missing:
        return f"this version's CUDA kernels are not complete: {', '.join(missing)} are missing"
    compiled, why = module()
    if compiled is None and not has_cupy():
        return f"{why}, and there is no CuPy to compile them (pip install cupy-cuda13x, or build with BIPACE_CUDA=1)"
    import torch

    return _why_not(compiled, torch)


def stages_missing() -> list[str]:
    """Stages of the device chain that have no CUDA kernels yet."""
    from . import cuda, triton_kernels

    return sorted(set(triton_kernels.__all__) - set(cuda.__all__))


def _why_not(compiled: Any, torch: Any) -> str:
    """What the driver, torch and the GPUs say against the kernels; empty: nothing."""
    if compiled is not None:
        driver, runtime = compiled.versions()
        needed = needs(runtime)
        if driver == 0:
            return f"no NVIDIA driver was found; the kernels need one for CUDA {needed} or newer"
        if driver < runtime // 1000 * 1000:
            return (
                f"the NVIDIA driver is too old: the kernels need one for CUDA {needed} or newer, found {_text(driver)}"
            )
    if torch.version.cuda is None:
        return f"torch {torch.__version__} is a build without CUDA, so that no tensor can be on a GPU"
    if not torch.cuda.is_available():
        return "torch sees no GPU"
    if compiled is None:
        return ""
    found = {f"sm_{major}{minor}": (major, minor) for major, minor in capabilities(torch)}
    if not any(serves(compiled.built, capability) for capability in found.values()):
        return f"the GPUs here are {', '.join(found)}, and this build has kernels for {compiled.built}"
    return ""


def capabilities(torch: Any) -> list[tuple[int, int]]:
    """Compute capabilities of the GPUs that torch sees."""
    return [torch.cuda.get_device_capability(index) for index in range(torch.cuda.device_count())]


def serves(built: str, capability: tuple[int, int]) -> bool:
    """Whether kernels built for, e.g., "sm_80 sm_90a compute_90" run on a GPU of a compute capability.

    Machine code runs on its own major version from its minor version on, PTX on all that came later; a letter (90a)
    binds either to one architecture.
    """
    for target in built.split():
        kind, _, number = target.partition("_")
        major, minor = divmod(int(number.rstrip("af")), 10)
        if not number.isdigit():
            fits = (major, minor) == capability
        elif kind == "sm":
            fits = major == capability[0] and minor <= capability[1]
        else:
            fits = (major, minor) <= capability
        if fits:
            return True
    return False


def needs(runtime: int) -> str:
    """The oldest CUDA that a driver must serve for kernels built with a runtime; a major version is compatible in itself."""
    return _text(runtime // 1000 * 1000)


def _text(version: int) -> str:
    """ "13.0" of 13000, "none" of 0."""
    return f"{version // 1000}.{version % 1000 // 10}" if version else "none"


@functools.cache
def detail() -> str:
    """Who compiled the kernels, for what, and the driver needed and found."""
    compiled, why = module()
    if compiled is None:
        return f"compiled by CuPy at first use ({why})" if has_cupy() else why
    driver, runtime = compiled.versions()
    return (
        f"built with CUDA {_text(runtime)} for {compiled.built}; driver needed: CUDA {needs(runtime)}, "
        f"found: {_text(driver)}"
    )
