"""Compiled C++ kernels (csrc/cpu): the default on CPUs."""

from . import clusters, episode, observations, returns, similar, values

__all__ = ["clusters", "episode", "observations", "returns", "similar", "values"]
