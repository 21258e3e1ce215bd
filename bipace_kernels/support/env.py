"""All environment variables of the package; they are only read here.

BIPACE_BACKEND      replaces backend="auto": "reference", "cpu", "triton" or "cuda"; it counts as requested by name
BIPACE_NUM_THREADS  threads of the cpu backend where no num_threads is given; default torch.get_num_threads()
BIPACE_ISA          caps the instruction set of the cpu backend: "baseline", "avx2" or "avx512"
"""

import os

ISA_NAMES = ("baseline", "avx2", "avx512")


def backend() -> str | None:
    """The value of BIPACE_BACKEND; None where it is unset or empty."""
    return os.environ.get("BIPACE_BACKEND") or None


def num_threads() -> int | None:
    """The value of BIPACE_NUM_THREADS; None where it is unset or empty.  ValueError unless it is a positive int."""
    text = os.environ.get("BIPACE_NUM_THREADS")
    if not text:
        return None
    if not (text.isdecimal() and len(text) < 20 and int(text)):
        raise ValueError(f"BIPACE_NUM_THREADS must be a positive integer, got {text!r}; unset it or set 1 or more.")
    return int(text)


def isa() -> str | None:
    """The value of BIPACE_ISA; None where it is unset or empty.  ValueError for an unknown name."""
    name = os.environ.get("BIPACE_ISA")
    if not name:
        return None
    if name not in ISA_NAMES:
        raise ValueError(f"BIPACE_ISA must be one of {', '.join(ISA_NAMES)}, got {name!r}; unset it to use the best.")
    return name
