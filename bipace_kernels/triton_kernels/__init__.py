"""Triton kernels: the estimator where the hidden states are, on any GPU that Triton serves.

The stages have the names of `cpu/` and `reference/`.  Two things differ, because nothing here may wait for the device:
sizes that the host must know (records, groups, the longest group) come as ints, and rows set aside stay in place behind
a mask instead of being taken out.  Kernels are compiled by the user's Triton (3.6 or newer) at first use; under
TRITON_INTERPRET=1 they run on CPU tensors, which is how they are tested without a GPU.
"""
