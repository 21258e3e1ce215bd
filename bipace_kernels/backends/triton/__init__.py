"""Triton kernels: the estimator on the device of the hidden states, on any GPU that Triton supports.

For the stages' inputs and outputs see contract.py.  Nothing here synchronizes.  Kernels are compiled by the user's
Triton (3.6 or newer) at first use; under TRITON_INTERPRET=1 they run on CPU tensors, for tests without a GPU.
"""
