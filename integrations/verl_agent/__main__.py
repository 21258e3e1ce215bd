"""python -m bipace_kernels.integrations.verl_agent ARGUMENTS: those of `python -m verl.trainer.main_ppo`, and BiPACE's keys.

With algorithm.adv_estimator=hgpo, of `python -m recipe.hgpo.main_hgpo`.  Run it where verl-agent is run.
"""

import sys

from .launch import main

if __name__ == "__main__":
    main(sys.argv[1:])
