"""python -m bipace_kernels.cli: the same program as `bipace`."""

from bipace_cli import main  # type: ignore[import-not-found]  # installed from bipace_kernels/cli/program

main()
