"""BiPACE in verl: `algorithm.adv_estimator=bipace`, and nothing to write.  docs/verl.md; files: integrations/README.md."""

from . import plugin as plugin  # before any other file of ours, whoever imports it
