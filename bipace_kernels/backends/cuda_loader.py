"""Whether the CUDA kernels can run here, and what compiles them: the build, or CuPy at first use.

CUDA modules are only imported on demand; `import bipace_kernels` loads no compiled kernel.
"""

import functools
import importlib
import importlib.util
from types import ModuleType
from typing import Any

from . import native_loader

OLDEST_CUPY = 13
OLDEST_GPU = (8, 0)  # asynchronous copies, bfloat16 on tensor cores, reductions of a warp


@functools.cache
def module() -> tuple[ModuleType | None, str]:
    """The kernels that were compiled when the package was built (bipace_kernels._cuda), or None and the reason."""
    try:
        return importlib.import_module("bipace_kernels._cuda"), ""
    except ImportError as error:
        decision = native_loader.cuda_decision()
        if decision.startswith("no CUDA kernels"):
            return None, f"this build has {decision}"
        return None, f"bipace_kernels._cuda does not load: {error}"


def has_cupy() -> bool:
    """Whether CuPy is installed, which compiles the kernels where the build left them out."""
    return importlib.util.find_spec("cupy") is not None


def _why_not_cupy() -> str:
    """Why CuPy cannot compile the kernels; empty where it can."""
    if not has_cupy():
        return "there is no CuPy to compile them (pip install cupy-cuda13x, or build with BIPACE_CUDA=1)"
    try:
        cupy = importlib.import_module("cupy")
        cupy.cuda.nvrtc.getVersion()
    except Exception as error:  # of whatever library is missing, or does not fit the driver
        return f"CuPy, which compiles them otherwise, does not work here: {type(error).__name__}: {error}"
    if int(cupy.__version__.partition(".")[0]) < OLDEST_CUPY:
        return f"CuPy {cupy.__version__}, which compiles them otherwise, is older than {OLDEST_CUPY}"
    return ""


@functools.cache
def reason() -> str:
    """Why the CUDA kernels cannot run here; empty where they can."""
    compiled, why = module()
    if compiled is None and (without := _why_not_cupy()):
        return f"{why}, and {without}"
    import torch

    return _why_not(compiled, torch)


def _why_not(compiled: Any, torch: Any) -> str:
    """Why driver, torch or GPUs cannot run the kernels; empty where they can."""
    if compiled is not None:
        driver, runtime = compiled.versions()
        needed = _text(runtime // 1000 * 1000)  # minor versions are compatible
        if driver == 0:
            return f"no NVIDIA driver was found; the kernels need one for CUDA {needed} or newer"
        if driver < runtime // 1000 * 1000:
            return f"the NVIDIA driver is too old: it must be for CUDA {needed} or newer, found {_text(driver)}"
    if torch.version.cuda is None:
        return f"torch {torch.__version__} is a build without CUDA, so no tensor can be on a GPU"
    if not torch.cuda.is_available():
        return "torch sees no GPU"
    gpus = [torch.cuda.get_device_capability(index) for index in range(torch.cuda.device_count())]
    present = {f"sm_{major}{minor}": (major, minor) for major, minor in gpus}
    if compiled is None:
        if max(present.values(), default=(0, 0)) >= OLDEST_GPU:
            return ""
        return f"the GPUs here are {', '.join(present)}, and the kernels need sm_80 or newer"
    if not any(serves(compiled.built, capability) for capability in present.values()):
        return f"the GPUs here are {', '.join(present)}, and this build has kernels for {compiled.built}"
    return ""


def serves(built: str, capability: tuple[int, int]) -> bool:
    """Whether kernels built for, e.g., "sm_80 sm_90a compute_90" run on a GPU of a compute capability.

    Machine code runs on its own major version from its minor version on, PTX on all later ones; a letter (90a)
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


def _text(version: int) -> str:
    """ "13.0" of 13000, "none" of 0."""
    return f"{version // 1000}.{version % 1000 // 10}" if version else "none"


@functools.cache
def detail() -> str:
    """What compiled the kernels, for which GPUs, and the driver needed and found."""
    compiled, why = module()
    if compiled is None:
        return f"compiled by CuPy at first use ({why})" if has_cupy() else why
    driver, runtime = compiled.versions()
    return (
        f"built with CUDA {_text(runtime)} for {compiled.built}; driver needed: CUDA {_text(runtime // 1000 * 1000)}, "
        f"found: {_text(driver)}"
    )
