"""python -m bipace_kernels.cli: the same program as `bipace`."""

from bipace_kernels.cli import main

main()
