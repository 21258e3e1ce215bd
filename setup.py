"""Packages and the native build; everything else about the project is in pyproject.toml.

Imports no torch, touches no network: the native code has no torch header, so one wheel per CPython serves every torch.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

ROOT = Path(__file__).resolve().parent


class CMakeBuild(build_ext):
    """Builds `bipace_kernels._native` by CMake, which holds the list of sources and flags."""

    def build_extension(self, ext: Extension) -> None:
        import pybind11

        target = Path(self.get_ext_fullpath(ext.name)).resolve()
        build = Path(os.environ.get("BIPACE_BUILD_DIR", ROOT / self.build_temp)).resolve()
        build.mkdir(parents=True, exist_ok=True)
        configure = [
            "cmake", "-S", str(ROOT), "-B", str(build),
            f"-DPython_EXECUTABLE={sys.executable}",
            f"-Dpybind11_DIR={pybind11.get_cmake_dir()}",
            *(["-G", "Ninja"] if shutil.which("ninja") else []),
            *os.environ.get("CMAKE_ARGS", "").split(),
        ]  # fmt: skip
        subprocess.run(configure, check=True)
        jobs = os.environ.get("MAX_JOBS") or str(os.cpu_count() or 1)
        subprocess.run(["cmake", "--build", str(build), "--target", "_native", "--parallel", jobs], check=True)
        built = sorted(build.glob("_native*.so"))
        if len(built) != 1:
            raise RuntimeError(
                f"expected one _native*.so in {build}, found {[p.name for p in built]}; remove the folder"
            )
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(built[0], target)


setup(
    # `integrations/` stands at the top of the repository and installs as bipace_kernels.integrations; packages are
    # listed by hand so that no other top-level folder can slip into a user's site-packages.
    packages=[
        "bipace_kernels",
        "bipace_kernels.cli",
        "bipace_kernels.cpu",
        "bipace_kernels.cuda",
        "bipace_kernels.hidden",
        "bipace_kernels.reference",
        "bipace_kernels.triton_kernels",
        "bipace_kernels.integrations",
        *(f"bipace_kernels.integrations.{p.parent.name}" for p in sorted(ROOT.glob("integrations/*/__init__.py"))),
        "bipace_kernels.bench",
    ],
    package_dir={
        "bipace_kernels": "bipace_kernels",
        "bipace_kernels.integrations": "integrations",
        "bipace_kernels.bench": "bench",
    },
    package_data={
        "bipace_kernels": ["py.typed", "*.pyi"],
        "bipace_kernels.bench": ["chain.cu"],
        "bipace_kernels.integrations": ["**/*.yaml"],
    },
    ext_modules=[Extension("bipace_kernels._native", sources=[])],
    cmdclass={"build_ext": CMakeBuild},
    zip_safe=False,
)
