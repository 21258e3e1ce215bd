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
from setuptools.command.build_py import build_py

ROOT = Path(__file__).resolve().parent


class CMakeBuild(build_ext):
    """Builds `bipace_kernels._native`, and `._cuda` where the kernels are wanted, by CMake: it has the sources and
    flags.

    BIPACE_CUDA=auto|0|1 and BIPACE_CUDA_ARCHS (e.g. "80 90") go through to cmake/cuda.cmake, which says what it
    decided.
    """

    has_cuda = False
    begun: tuple[Path, ...] = ()  # the mark of a build that has not ended

    def build_extension(self, ext: Extension) -> None:
        name = ext.name.rpartition(".")[2]
        target = Path(self.get_ext_fullpath(ext.name)).resolve()
        build = Path(os.environ.get("BIPACE_BUILD_DIR", ROOT / self.build_temp)).resolve()
        if name == "_native":  # the first of the two
            self.configure(build)
        decision = (build / "bipace_cuda.txt").read_text().splitlines()
        if name == "_cuda":
            # On stderr, so that pip shows it with -v and `setup.py -q` does not hide it.
            print(f"bipace_kernels: {decision[1]}", file=sys.stderr, flush=True)
            self.has_cuda = decision[0] == "ON"
            if not self.has_cuda:
                target.unlink(missing_ok=True)  # of an earlier build
                return
        jobs = os.environ.get("MAX_JOBS") or str(os.cpu_count() or 1)
        subprocess.run(["cmake", "--build", str(build), "--target", name, "--parallel", jobs], check=True)
        built = sorted(build.glob(f"{name}*.so"))
        if len(built) != 1:
            raise RuntimeError(
                f"expected one {name}*.so in {build}, found {[p.name for p in built]}; remove the folder"
            )
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(built[0], target)

    def run(self) -> None:
        try:
            super().run()
        except subprocess.CalledProcessError:  # an error of the compiler, after which no half-written file is left
            self.ended()
            raise
        self.ended()

    def ended(self) -> None:
        for begun in self.begun:
            begun.unlink(missing_ok=True)

    def configure(self, build: Path) -> None:
        import pybind11

        if not any(map(shutil.which, (os.environ.get("CXX", "c++").split()[0], "g++", "clang++"))):
            raise SystemExit(
                "bipace_kernels is built by a C++17 compiler, and none was found: install one (apt-get install g++, or "
                "dnf install gcc-c++), or name yours in CXX, and try again."
            )
        # An interrupted build may have left half an object, which make takes for a whole one; and modules linked for
        # another Python are beside those of this one.  The folder may be the user's: only what CMake made goes.
        begun = build / "bipace_build_begun"
        if begun.exists():
            shutil.rmtree(build / "CMakeFiles", ignore_errors=True)
        build.mkdir(parents=True, exist_ok=True)
        begun.touch()
        self.begun = (begun,)
        for linked in [*build.glob("_native*.so"), *build.glob("_cuda*.so")]:
            linked.unlink()
        # The cache of an earlier build may refer to files that are gone: the ninja of pip's build environment, another
        # Python's headers.  Objects are kept, and only what has changed is compiled.
        (build / "CMakeCache.txt").unlink(missing_ok=True)
        archs = os.environ.get("BIPACE_CUDA_ARCHS", "").replace(",", " ").replace(";", " ").split()
        configure = [
            "cmake", "-S", str(ROOT), "-B", str(build),
            f"-DPython_EXECUTABLE={sys.executable}",
            f"-Dpybind11_DIR={pybind11.get_cmake_dir()}",
            f"-DBIPACE_CUDA={os.environ.get('BIPACE_CUDA') or 'auto'}",
            f"-DBIPACE_CUDA_ARCHS={';'.join(archs)}",
            *(["-G", "Ninja"] if shutil.which("ninja") else []),
            *os.environ.get("CMAKE_ARGS", "").split(),
        ]  # fmt: skip
        subprocess.run(configure, check=True)

    def copy_extensions_to_source(self) -> None:
        """Next to the sources; removes kernels of an earlier build if this build has none."""
        super().copy_extensions_to_source()
        if not self.has_cuda:
            for stale in (ROOT / "bipace_kernels").glob("_cuda*.so"):
                stale.unlink()


CHECKOUT = ("gpu", "truth", "readme_chart")  # modules of bench/


class LeaveOut(build_py):
    """Leaves benchmarks that need a checkout out of a wheel: those of a GPU, and those that read the repository."""

    def run(self) -> None:
        if not self.editable_mode:  # else modules of an earlier version, in the same tree, would be in the wheel
            for name in ("bipace_kernels", "bipace_cli"):
                shutil.rmtree(Path(self.build_lib) / name, ignore_errors=True)
        super().run()

    def find_package_modules(self, package: str, package_dir: str) -> list[tuple[str, str, str]]:
        modules = super().find_package_modules(package, package_dir)
        return [m for m in modules if m[0] != "bipace_kernels.bench" or not m[1].startswith(CHECKOUT)]


setup(
    # `integrations/` is at the top of the repository and installs as bipace_kernels.integrations; packages are
    # listed explicitly so that no other top-level folder ends up in a user's site-packages.  bipace_cli is the
    # program's options, beside bipace_kernels so that `bipace --help` loads no torch.
    packages=[
        "bipace_kernels",
        "bipace_cli",
        *(
            ".".join(path.parent.relative_to(ROOT).parts)
            for path in sorted(ROOT.glob("bipace_kernels/*/**/__init__.py"))
            if path.parent.name != "program"
        ),
        "bipace_kernels.integrations",
        *(
            ".".join(("bipace_kernels", *path.parent.relative_to(ROOT).parts))
            for path in sorted(ROOT.glob("integrations/*/**/__init__.py"))
        ),
        "bipace_kernels.bench",
        # Sources of the CUDA kernels, for CuPy to compile if the build did not.
        "bipace_kernels.csrc.common",
        "bipace_kernels.csrc.cuda",
    ],
    package_dir={
        "bipace_kernels": "bipace_kernels",
        "bipace_kernels.integrations": "integrations",
        "bipace_kernels.bench": "bench",
        "bipace_cli": "bipace_kernels/cli/program",
        "bipace_kernels.csrc": "csrc",
    },
    # Only package_data says what is included; MANIFEST.in is for the sdist.
    include_package_data=False,
    package_data={
        "bipace_kernels": ["py.typed", "*.pyi"],
        "bipace_kernels.cli": ["templates/*"],
        "bipace_kernels.csrc.common": ["*.h"],
        "bipace_kernels.csrc.cuda": ["*.cu", "*.h", "flags.txt"],
        "bipace_kernels.integrations": ["**/*.yaml"],
    },
    # Optional: a build without CUDA kernels has no such file.
    ext_modules=[
        Extension("bipace_kernels._native", sources=[]),
        Extension("bipace_kernels._cuda", sources=[], optional=True),
    ],
    cmdclass={"build_ext": CMakeBuild, "build_py": LeaveOut},
    zip_safe=False,
)
