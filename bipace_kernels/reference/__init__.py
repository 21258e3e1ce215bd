"""Obvious float64 loops that read like the paper; a backend that may be selected, and the truth the others are tested against."""

from . import clusters, episode, observations, returns, similar, values

__all__ = ["clusters", "episode", "observations", "returns", "similar", "values"]
