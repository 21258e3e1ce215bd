PYTHON ?= python3
# In place: bipace_kernels/_native*.so beside the sources, for work with PYTHONPATH=.
build:
	$(PYTHON) setup.py -q build_ext --inplace
.PHONY: build
