"""Whether the Triton kernels can run here; Triton is only imported on demand."""

import functools
import re

OLDEST = (3, 6)


@functools.cache
def reason() -> str:
    """Why the Triton kernels cannot run here; empty where they can."""
    try:
        import triton
    except ImportError as error:
        return f"Triton is not installed: {error}"
    version = tuple(int(part) for part in re.findall(r"\d+", triton.__version__)[:2])
    if version < OLDEST:
        return f"Triton {triton.__version__} is older than {OLDEST[0]}.{OLDEST[1]}"
    if interpreted():
        return ""
    import torch

    return "" if torch.cuda.is_available() else "torch sees no GPU"


@functools.cache
def detail() -> str:
    """Triton's version, whether it interprets, and the GPUs that torch sees; empty without Triton."""
    try:
        import triton
    except ImportError:
        return ""
    import torch

    parts = [f"Triton {triton.__version__}"]
    if interpreted():
        parts.append("interpreted (TRITON_INTERPRET=1)")
    for index in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(index)
        parts.append(f"cuda:{index} {properties.name} (sm_{properties.major}{properties.minor})")
    return ", ".join(parts)


@functools.cache
def interpreted() -> bool:
    """Whether TRITON_INTERPRET=1 was set when Triton was first imported: kernels then run on CPU tensors."""
    try:
        import triton
    except ImportError:
        return False
    knobs = getattr(triton, "knobs", None)  # Triton of torch 2.6 has none, and is too old anyway
    return knobs is not None and bool(knobs.runtime.interpret)
