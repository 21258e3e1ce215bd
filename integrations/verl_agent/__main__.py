"""python -m bipace_kernels.integrations.verl_agent ARGUMENTS: those of verl-agent's main (launch.py), run in its folder."""

import sys

from .launch import main

if __name__ == "__main__":
    main(sys.argv[1:])
