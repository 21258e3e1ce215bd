"""BiPACE in Trinity-RFT: an advantage function for its registry.  docs/trinity.md"""

from .advantage_fn import BiPACEAdvantage

__all__ = ["BiPACEAdvantage"]
