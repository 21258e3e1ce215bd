"""The commands of the program `bipace`, a module each, and what they share.  Their options: bipace_kernels/program."""
