"""The benchmarks: installed they are bipace_kernels.bench, in a checkout the top-level folder `bench`."""

import importlib
import importlib.util

PACKAGE = "bipace_kernels.bench" if importlib.util.find_spec("bipace_kernels.bench") else "bench"


def module(name):
    return importlib.import_module(f"{PACKAGE}.{name}")
