# make demo   sets everything up and shows the package on recorded rollouts
# make test   sets everything up and runs the tests; make test-quick only the quickest
# make docs   builds the documentation into out/site and checks every link of it
# make check  lint, sanitizers, fuzzing, long property runs, Triton kernels for every architecture and by the oldest Triton
# make test-integrations   tests the adapters with the real trainers, in a separate environment; test-swift, test-trinity, test-sources likewise
# make textcraft   trains a small model by every method on TextCraft (hours on two cores; resumes after interruptions)
# make alfworld GAMES=FOLDER   the same on ALFWorld's own games
# make release-check   builds wheel and sdist, and tests each in an empty environment
# make gpu    checks and measures on this machine's GPU

# The tested torch: a release with a CPU build on PyPI's default index for the tested platform.  Any torch from 2.6 on
# works; `make demo TORCH=torch` takes the newest (with CUDA, several GB).
TORCH ?= torch==2.13.0
BASE_PYTHON ?= python3
VENV ?= .venv
PYTHON ?= $(VENV)/bin/python

.PHONY: demo docs test test-quick test-integrations test-swift test-trinity test-sources textcraft alfworld check environments all-environments lint format build bench gpu wheel release-check clean sanitize fuzz resources cuda-resources oldest-triton

demo: $(VENV)/.installed
	@echo "The demo on recorded rollouts: one to three minutes on two cores"
	$(VENV)/bin/python -c "import bipace_kernels" && BIPACE=$(VENV)/bin/bipace bash examples/demo.sh

# Runs parts in parallel, with one summary at the end (tests/run.py).  ARGS go to pytest: `make test ARGS="-k sweep"`.
ARGS ?=
test: $(VENV)/.tested
	$(PYTHON) tests/run.py test $(ARGS)

test-quick: $(VENV)/.tested
	$(PYTHON) tests/run.py quick $(ARGS)

# Trainers pin other packages, so they have a separate environment.  `MARK=slow`: the long tests (Ray, TransferQueue,
# ZeRO-3 if DeepSpeed is installed), which `make check` leaves out.  A test run that hangs is stopped.
TRAINERS ?= .venv-integrations
MARK ?= not slow
test-integrations: $(TRAINERS)/.installed
	timeout 2400 $(TRAINERS)/bin/python -m pytest tests/integrations -m "$(MARK)" -n 2 --dist loadfile -q

# ms-swift and Trinity-RFT pin other packages again: a folder each, which precedes the trainers' environment.  Likewise
# `sources`: trainers of docs/other_trainers.md, without what they need to run.
test-swift test-trinity test-sources: test-%: $(TRAINERS)/%/.installed
	PYTHONPATH=$(abspath $(TRAINERS)/$*) timeout 1200 $(TRAINERS)/bin/python -m pytest tests/integrations/test_$*.py -q

$(TRAINERS)/%/.installed: tests/integrations/requirements-%.txt | $(TRAINERS)/.installed
	rm -rf $(TRAINERS)/$*
	$(TRAINERS)/bin/python -m pip install -q --no-deps --target $(TRAINERS)/$* -r $<
	@touch $@

# Runs what is missing of the committed runs.  ARGS="--processes 1" takes one core; --model FOLDER and --device cuda
# train another model, whose runs need a separate folder (--out).
textcraft: $(TRAINERS)/.installed
	$(TRAINERS)/bin/python examples/textcraft/train.py all $(ARGS)

# The same on real ALFWorld games.  The first time GAMES=FOLDER says where they are; examples/alfworld/README.md.
GAMES ?=
PREPARED = out/alfworld/games
alfworld: $(TRAINERS)/.installed $(PREPARED)/index.json
	$(TRAINERS)/bin/python examples/alfworld/train_alfworld.py all --prepared $(PREPARED) $(ARGS)

# TextWorld has a separate environment: it pins older packages than the trainers need.
$(PREPARED)/index.json:
	@test -n "$(GAMES)" || { echo "make alfworld GAMES=FOLDER: a folder of ALFWorld games (examples/alfworld/README.md)"; exit 1; }
	$(BASE_PYTHON) -m venv out/alfworld/textworld
	out/alfworld/textworld/bin/python -m pip install -q "textworld[pddl]==1.7.0" typer rich
	out/alfworld/textworld/bin/python examples/alfworld/train_alfworld.py games --games $(GAMES) --prepared $(PREPARED)

$(TRAINERS)/.installed: tests/integrations/requirements.txt pyproject.toml setup.py CMakeLists.txt \
    cmake/cuda.cmake $(wildcard csrc/*/*.cpp csrc/*/*.h csrc/*/*.cu*)
	$(BASE_PYTHON) -m venv $(TRAINERS)
	$(TRAINERS)/bin/python -m pip install -q -r tests/integrations/requirements.txt
	$(TRAINERS)/bin/python -m pip install -q -e ".[cli]"
	@touch $@

# The oldest supported Triton, in a folder that precedes the newest one; with an older NumPy, since its interpreter
# uses one-element arrays as numbers, which NumPy 2.4 refuses.
OLDEST_TRITON = 3.6.0
OLDEST = $(abspath $(VENV))/triton-$(OLDEST_TRITON)

check: environments
	$(PYTHON) tests/run.py check $(ARGS)

# The environments that `make check` and .ci/run need before they run their parts in parallel.
environments: $(VENV)/.linted $(VENV)/.checked $(OLDEST)/.installed

all-environments: environments $(VENV)/.documented $(patsubst %,$(TRAINERS)/%/.installed,swift trinity sources)

lint: $(VENV)/.linted
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/mypy
	$(VENV)/bin/clang-format --dry-run --Werror $$(git ls-files 'csrc/*.h' 'csrc/*.cpp' 'csrc/*.cu' 'tests/*.h' 'tests/*.cpp' 'tests/*.cu')

format: $(VENV)/.linted
	$(VENV)/bin/ruff check --fix .
	$(VENV)/bin/ruff format .
	$(VENV)/bin/clang-format -i $$(git ls-files 'csrc/*.h' 'csrc/*.cpp' 'csrc/*.cu' 'tests/*.h' 'tests/*.cpp' 'tests/*.cu')

# Native tests under AddressSanitizer and UndefinedBehaviorSanitizer.
sanitize: $(VENV)/.checked
	PYTHON=$(PYTHON) tests/native/sanitize.sh

# 20,000 wrong calls of the torch ops.
fuzz: $(VENV)/.tested
	PYTHONPATH=. $(PYTHON) tests/native/fuzz_ops.py

# Registers, spills and shared memory of the Triton kernels: out/resources/resources.md.
resources: $(VENV)/.tested
	@mkdir -p out
	$(PYTHON) -m bench resources --out out/resources > out/resources.log || { cat out/resources.log; exit 1; }

# The same of the CUDA kernels, for every architecture of a release; needs nvcc.
cuda-resources: $(VENV)/.tested
	$(PYTHON) -m bench resources --cuda --out out/resources

# Only the kernels' own tests: whole calls use the same kernels with any Triton.
NOT_KERNELS = $(addprefix --ignore=tests/,pipeline/test_device_pipeline.py clusters/test_device_epsilon.py)
oldest-triton: $(OLDEST)/.installed
	PYTHONPATH=$(OLDEST) $(PYTHON) -c "import triton; assert triton.__version__ == '$(OLDEST_TRITON)', triton.__version__"
	PYTHONPATH=$(OLDEST) $(PYTHON) -m pytest tests/backends/test_triton_compile.py -n 2 -q
	PYTHONPATH=$(OLDEST) TRITON_INTERPRET=1 $(PYTHON) -m pytest -o python_files='test_device_*.py' -m "not slow" \
	  -n 2 -q -W ignore::DeprecationWarning $(NOT_KERNELS)

$(OLDEST)/.installed: $(VENV)/.tested
	$(VENV)/bin/python -m pip install -q --no-deps --upgrade --target $(OLDEST) triton==$(OLDEST_TRITON) "numpy<2.4"
	@touch $@

# Strict: a warning is an error (mkdocs.yml).  Without -q, which hides warnings from the count as well.
docs: $(VENV)/.documented
	NO_MKDOCS_2_WARNING=1 $(VENV)/bin/python -m mkdocs build

# Needs a GPU; `bench/gpu.sh --help` lists the parts.
OUT ?= out/gpu
gpu:
	bench/gpu.sh $(OUT)

bench: $(VENV)/.tested
	$(PYTHON) -m bench --out out/bench

wheel: $(VENV)/.installed
	$(PYTHON) -m pip wheel --no-deps -w dist .

# Wheel and sdist: built, checked, installed in empty environments and tested there.  About ten minutes.
release-check: $(VENV)/.checked
	$(PYTHON) -m pip install -q build twine check-wheel-contents
	PYTHON=$(abspath $(shell command -v $(PYTHON))) TORCH="$(TORCH)" tests/packaging/release_check.sh

# The compiled module next to the sources, for work with PYTHONPATH=.
build:
	$(PYTHON) setup.py -q build_ext --inplace

$(VENV)/bin/python:
	$(BASE_PYTHON) -m venv $(VENV)

# torch first and by itself: a looser range, taken by a dependency, could bring the CUDA build.
$(VENV)/.installed: $(VENV)/bin/python pyproject.toml setup.py CMakeLists.txt cmake/cuda.cmake $(wildcard csrc/*/*.cpp csrc/*/*.h csrc/*/*.cu*)
	@$(VENV)/bin/python -m pip --version > /dev/null 2>&1 || $(BASE_PYTHON) -m venv $(VENV)  # was interrupted before
	@echo "Installing $(TORCH) in $(VENV): 1 to 5 minutes, mostly the download"
	$(VENV)/bin/python -m pip install -q "$(TORCH)"
	@echo "Compiling bipace_kernels and installing what its program needs: 1 to 3 minutes"
	$(VENV)/bin/python -m pip install -q -e ".[cli]"
	@touch $@

# The packages of an extra of pyproject.toml.  `pip install -e .[test]` would compile everything again; by its name the
# package counts as installed, and only the extra's packages are installed.
extra = $(VENV)/bin/python -m pip install -q "bipace-kernels[$(1)]"

$(VENV)/.tested: $(VENV)/.installed
	$(call extra,test)
	@touch $@

$(VENV)/.checked: $(VENV)/.tested
	$(VENV)/bin/python -m pip install -q "pybind11>=2.13" "cmake>=3.22"
	@touch $@

$(VENV)/.linted: $(VENV)/.tested
	$(call extra,lint)
	@touch $@

$(VENV)/.documented: $(VENV)/.installed
	$(call extra,docs)
	@touch $@

clean:
	rm -rf build dist out *.egg-info $(VENV) $(TRAINERS) bipace_kernels/_native*.so bipace_kernels/_cuda*.so
