"""BiPACE in verl: `algorithm.adv_estimator=bipace`, without writing code.  docs/verl.md"""

from . import plugin as plugin  # before any other file of ours
