"""First version: the reference serves until the kernels land."""
from ..reference.clusters import cluster_cosine, scan_rows

__all__ = ["cluster_cosine", "scan_rows"]
