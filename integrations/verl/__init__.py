"""BiPACE in verl: `algorithm.adv_estimator=bipace`, without writing code.  docs/verl.md; files: integrations/README.md."""

from . import plugin as plugin  # before any other file of ours
