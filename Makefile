# The two to know: `make demo` and `make test`. What each needs is installed into a virtual environment
# first: the active one, or one made here. The demo takes 1.2 GB without a GPU; tests take more.
#
#   PYTHON       interpreter that makes the environment, 3.11 or newer
#   VENV         the environment; made if it does not exist
#   TORCH        what to install if there is no torch >= 2.11 in the environment
#   TORCH_INDEX  pip options for that: without a GPU those of torch's CPU build, for on Linux the
#                default index serves the CUDA build, several GB. Empty takes the default index
#   EXTRAS       extras that the demo installs: what serving needs, and with a GPU its kernels
#   PORT         that make serve listens on
#   WORKERS      test processes; each takes one core and about 1 GB
#   GPU_WORKERS  processes of the tests that need a GPU: 8 of each GPU, which they share
#   GPU_PAIRS    processes of the tests that need two: 3 of each pair
comma := ,
PYTHON ?= python3
VENV ?= $(or $(VIRTUAL_ENV),.venv)
TORCH ?= torch==2.13.0
GPU := $(shell command -v nvidia-smi 2>/dev/null)
TORCH_INDEX ?= $(if $(GPU),,--retries 1 --index-url https://download.pytorch.org/whl/cpu)
EXTRAS ?= $(if $(GPU),serve$(comma)cuda,serve)
WORKERS ?= 2
GPU_WORKERS ?= $(if $(GPU),$(shell expr 8 '*' $$(nvidia-smi -L | wc -l)),8)
GPU_PAIRS ?= $(shell expr 3 '*' '(' '(' $(GPU_WORKERS) + 15 ')' / 16 ')')
PORT ?= 8000

PYTEST = $(BIN)/python -m pytest --numprocesses=$(WORKERS) --dist=loadfile --durations=20
BIN := $(VENV)/bin
# One environment may serve several checkouts in turn; only the last one installed counts.
CHECKOUT := $(shell pwd | cksum | cut -d' ' -f1)
# What the demo needs, and what the tests and linters do; the second includes the first.
INSTALLED := $(VENV)/.dsa-compile-$(CHECKOUT)
DEVELOPED := $(VENV)/.dsa-compile-$(CHECKOUT)-dev
SOURCES := $(wildcard $(foreach folder,dsa_compile passes lowering runtime,$(folder)/*.py $(folder)/*/*.py))

# The demo's model: the trained one if it is here, else one of random weights, spoken to in token ids.
TRAINED := examples/tiny_v32/checkpoint
ifneq ($(wildcard $(TRAINED)/config.json),)
MODEL := $(TRAINED)
PROMPTS := --prompt "def main(argv=None):" "import os"
else
MODEL := demo/model
PROMPTS := --prompt-ids "3 1 4 1 5 9 2 6 5 3 5 8 9 7 9 3 2 3 8 4 6 2 6" "2 7 1 8 2 8"
endif

export PIP_DISABLE_PIP_VERSION_CHECK := 1

.PHONY: help install demo demo-bisect serve test test-ci test-all test-bounds test-faults test-gpu lint docs bench clean
help:
	@echo "make demo    compile a small model, generate from the artifact, show what a pass did"
	@echo "make demo-bisect  plant a bug in a copy of the compiler, and find the rewrite that has it"
	@echo "make serve   compile a small model and serve it on port 8000 (PORT=)"
	@echo "make test    run the tests but the slow ones"
	@echo "make test-ci  run the slow tests that CI runs after those"
	@echo "make test-all  run all tests: before a release"
	@echo "make test-bounds  make test with the oldest torch, transformers, Triton and numpy that are declared"
	@echo "make test-faults  plant every fault, and score verify and bisect; hours"
	@echo "make test-gpu  the tests that need a GPU, on one"
	@echo "make lint    ruff and mypy"
	@echo "make docs    the documentation as a site, with search and the Python API: build/site"
	@echo "make bench   run the benchmarks"
	@echo "make clean   remove the demo, build output and caches; $(VENV) stays"

install: $(INSTALLED)

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	  echo "Python 3.11 or newer is needed; name one, as in: make $(MAKECMDGOALS) PYTHON=python3.12"; \
	  exit 1; }
	@echo "$(PYTHON) -m venv $(VENV)"
	@$(PYTHON) -m venv $(VENV) || { rm -f $@; \
	  echo "No virtual environment could be made; on Debian: apt install python3-venv"; exit 1; }

$(INSTALLED): pyproject.toml | $(BIN)/python
	@rm -f $(VENV)/.dsa-compile-*
	@$(BIN)/python -c 'import sys; from importlib.metadata import version; \
	  sys.exit(tuple(map(int, version("torch").split(".")[:2])) < (2, 11))' 2>/dev/null \
	  || $(BIN)/python -m pip install $(TORCH_INDEX) '$(TORCH)' \
	  || $(BIN)/python -m pip install '$(TORCH)'
	$(BIN)/python -m pip install --quiet --editable '.[$(EXTRAS)]'
	@touch $@

$(DEVELOPED): pyproject.toml $(INSTALLED)
	$(BIN)/python -m pip install --quiet --editable '.[dev,docs,eval,serve,cuda]'
	@touch $@

demo/model/config.json: examples/small_random.py examples/small_models/models.py | $(INSTALLED)
	@rm -rf demo/model
	$(BIN)/python examples/small_random.py demo/model

demo/artifact/manifest.json: $(MODEL)/config.json $(SOURCES) | $(INSTALLED)
	@mkdir -p demo
	$(BIN)/dsa-compile $(MODEL) -o demo/artifact --target cpu --force

# The model is tiny: more threads would only wait for each other.
demo: export OMP_NUM_THREADS ?= 1
demo: demo/artifact/manifest.json
	$(BIN)/dsa-generate demo/artifact --temperature 0 --max-tokens 24 $(PROMPTS)
ifeq ($(MODEL),demo/model)
	@echo "(The weights are random, and so is what the model says.)"
endif
	@echo
	@echo "What one pass did, from demo/artifact/passes/*_recognize_swiglu/changes.diff:"
	@echo
	@cat demo/artifact/passes/*_recognize_swiglu/changes.diff
	@echo
	@echo "artifact:    demo/artifact"
	@echo "graphs:      demo/artifact/graphs/*.py"
	@echo "pass diffs:  demo/artifact/passes/*/changes.diff"
	@echo "To use the commands yourself: source $(BIN)/activate"

serve: export OMP_NUM_THREADS ?= 1
serve: demo/artifact/manifest.json
	$(BIN)/dsa-serve demo/artifact --port $(PORT)

demo-bisect: export OMP_NUM_THREADS ?= 1
demo-bisect: $(MODEL)/config.json | $(INSTALLED)
	$(BIN)/python examples/plant_bug.py $(MODEL) demo/planted

test: $(DEVELOPED)
	$(PYTEST) -m "not slow" $(TESTS)

# What `make test` leaves out, but one case of each test: whole geometries, emulated kernels, ranks.
test-ci: $(DEVELOPED)
	$(PYTEST) -m "slow and not nightly" $(TESTS)

# The slow ones too: whole geometries, planted faults, emulated kernels.
test-all: $(DEVELOPED)
	$(PYTEST) $(TESTS)

# In an environment of its own, at the lower bounds that pyproject.toml declares.
BOUNDS_VENV ?= build/bounds
test-bounds: export PIP_CONSTRAINT = $(CURDIR)/build/bounds.txt
test-bounds:
	@mkdir -p build
	sed -nE 's/^ *"(torch|transformers|triton|numpy)>=([0-9.]+).*/\1==\2.*/p' pyproject.toml > $(PIP_CONSTRAINT)
	$(MAKE) test VENV=$(BOUNDS_VENV) TORCH=torch

# test-ci has a fixed draw of twelve.
test-faults: export OMP_NUM_THREADS ?= 1
test-faults: $(DEVELOPED)
	@mkdir -p demo
	@rm -f demo/planted_faults.json
	$(BIN)/python -m tests.planted_bugs.score --workers $(WORKERS) --out demo/planted_faults.json

# Fails, and says so, where there is no GPU. A line for each test; each process takes the next GPU, and a
# test that fills one waits for the others on it. Those of several GPUs come last, where nothing else waits
# for a turn on one of theirs; most of their time goes to loading, hence three at once.
test-gpu: $(DEVELOPED)
	$(BIN)/python -m pytest -vv --numprocesses=$(GPU_WORKERS) --dist=loadgroup -o faulthandler_timeout=300 --durations=20 \
	  -m "gpu and not several_gpus" --require-gpu $(TESTS)
	$(BIN)/python -m pytest -vv --numprocesses=$(GPU_PAIRS) -o faulthandler_timeout=300 --durations=20 -m several_gpus $(TESTS) \
	  || [ $$? -eq 5 ]  # none of TESTS

lint: $(DEVELOPED)
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	@rm -rf build/lint && mkdir -p build/lint/dsa_compile
	@ln -s $(addprefix $(CURDIR)/,$(wildcard dsa_compile/*) passes lowering runtime) build/lint/dsa_compile
	$(BIN)/mypy
	cd build/lint && $(abspath $(BIN))/lint-imports --no-cache ../../pyproject.toml

docs: $(DEVELOPED)
	$(BIN)/python -m sphinx -q -W --keep-going -c docs/site . build/site
	@echo build/site/index.html

# All but those that want an artifact, a server or a GPU.
bench: $(DEVELOPED)
	@for script in $(filter-out %/drafting.py %/drawn_drafts.py %/offline_load.py %/plain_drafter.py %/projection_error.py %/ranks_decode.py %/engine_overlap.py %/mixed_sampling.py %/mixed_steps.py %/shared_selection.py %/verify_kernels.py %/serve_load.py %/screenshots.py,$(wildcard benchmarks/*.py)); do echo "== $$script"; PYTHONPATH=. $(BIN)/python $$script || exit 1; done

clean:
	rm -rf demo build dist *.egg-info .mypy_cache .pytest_cache .ruff_cache .hypothesis
