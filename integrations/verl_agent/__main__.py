"""python -m bipace_kernels.integrations.verl_agent, with the arguments of verl-agent's main, in its folder."""

import sys

from .launch import main

if __name__ == "__main__":
    main(sys.argv[1:])
