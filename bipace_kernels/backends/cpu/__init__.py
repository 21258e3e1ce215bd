"""Compiled C++ kernels (csrc/cpu): the default on CPUs.  For the stages' inputs and outputs see contract.py."""
