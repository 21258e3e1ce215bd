"""CUDA kernels of the expensive stages: clusters, values and action keys.

For the stages' inputs and outputs see contract.py.  A function here does not check or synchronize; it allocates
the outputs and launches kernels of csrc/cuda/ by name (_launch.py).  All other stages run in Triton.
"""
