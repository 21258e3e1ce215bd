"""Makes the truth sets of bench/truth again: `python -m bench.make_truth --help`."""
