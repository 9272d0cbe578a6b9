# make demo, make test, make lint, make docs, make check: everything they need goes into $(VENV).
#
#   make test PEERS=1     also runs the tests that compare with torch and transformers (Python 3.11)
#   make test ALL=1       every draw, prompt and tree (ten minutes more)
#   make test-peers       loads our exports with SpecForge's and speculators' own classes (CPU, own environment)
#   make test-sglang      starts the real SGLang and compares (own environment, ten minutes)
#   make check-gpu        compiles the kernel and the step for an H200, no GPU needed (own environment)
#   make test PYTEST_ARGS="tests/test_tree.py -x"

PYTHON ?= python3
VENV ?= .venv
PIP_ARGS ?=
PYTEST_ARGS ?=
PYTEST_WORKERS ?= 2

# A CUDA build of torch is never wanted: it is installed first, alone, from the CPU index.
TORCH ?= torch==2.13.0 --index-url https://download.pytorch.org/whl/cpu
ifdef PEERS
EXTRAS := test,peers
else
EXTRAS := test
endif

BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install $(PIP_ARGS)
TEST_ENV := $(VENV)/.installed-$(EXTRAS)
DEMO_ENV := $(VENV)/.installed-demo

.PHONY: demo test lint docs model check clean

demo: $(DEMO_ENV)
	$(BIN)/python demo/run.py

model: $(DEMO_ENV)
	$(BIN)/python demo/model.py

test: $(TEST_ENV)
	$(BIN)/python demo/model.py
	$(BIN)/python -m pytest -q -n $(PYTEST_WORKERS) --dist loadscope --no-loadscope-reorder $(if $(ALL),--exhaustive) $(PYTEST_ARGS)

lint: $(TEST_ENV)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright --pythonpath $(BIN)/python
	$(BIN)/mkdocs build --quiet --strict

docs: $(TEST_ENV)
	$(BIN)/mkdocs build --strict

check: lint test

clean:
	rm -rf $(VENV) build dist .pytest_cache .ruff_cache .hypothesis *.egg-info
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

$(VENV)/bin/python:
	@$(PYTHON) -c 'import sys; sys.exit(0 if sys.version_info >= (3, 11) else \
	  "Python 3.11 or newer is needed; this is %d.%d: make PYTHON=..." % sys.version_info[:2])'
	$(PYTHON) -m venv $(VENV)
	$(PIP) --upgrade pip

$(VENV)/.installed-%: pyproject.toml | $(VENV)/bin/python
	$(if $(findstring peers,$*),$(PIP) $(TORCH))
	$(PIP) -e '.[$*]'
	@touch $@

# Our exports in SpecForge's and speculators' own classes, in an environment of their own (1 GB).
PEERS_VENV ?= .venv-peers
PEERS_ENV := $(PEERS_VENV)/.installed

.PHONY: test-peers
test-peers: $(PEERS_ENV)
	PYTHONPATH=. $(PEERS_VENV)/bin/python tests/make_peer_logits.py tests/data/exports --check

$(PEERS_ENV): tests/peers_requirements.txt pyproject.toml
	rm -rf $(PEERS_VENV)
	$(PYTHON) -m venv $(PEERS_VENV)
	$(PEERS_VENV)/bin/python -m pip install $(PIP_ARGS) $(TORCH)
	$(PEERS_VENV)/bin/python -m pip install $(PIP_ARGS) -e .
	$(PEERS_VENV)/bin/python -m pip install $(PIP_ARGS) --no-deps -r $<
	@touch $@

# The real SGLang on this machine's CPU, in an environment of its own (2.4 GB, ten minutes in all):
# right runs and one fault at a time, each judged by this package.
SGLANG_VENV ?= .venv-sglang
SGLANG_ARGS ?=
SGLANG_ENV := $(SGLANG_VENV)/.installed

.PHONY: test-sglang
test-sglang: $(TEST_ENV) $(SGLANG_ENV)
	$(BIN)/python demo/model.py
	$(BIN)/python tests/sglang_engine/run.py --sglang-python $(SGLANG_VENV)/bin/python $(SGLANG_ARGS)

$(SGLANG_ENV): tests/sglang_engine/requirements.txt
	rm -rf $(SGLANG_VENV)
	$(PYTHON) -m venv $(SGLANG_VENV)
	$(SGLANG_VENV)/bin/python -m pip install $(PIP_ARGS) $(TORCH)
	$(SGLANG_VENV)/bin/python -m pip install $(PIP_ARGS) --no-deps -r $<
	@touch $@

# The step compiled for an H200 on this machine's CPU: what the compiler made of it, and a failure
# where it spills, copies a cache or a weight, builds a mask or misses the kernel (docs/gpu.md).
#
#   make check-gpu PYTHON=python3.12 CHECK_GPU_ARGS="--out build/check-gpu.json"
GPU_VENV ?= .venv-gpu
CHECK_GPU_ARGS ?=
GPU_ENV := $(GPU_VENV)/.installed

.PHONY: check-gpu
check-gpu: $(GPU_ENV)
	$(GPU_VENV)/bin/python bench/check_gpu.py $(CHECK_GPU_ARGS)

$(GPU_ENV): bench/check-gpu.txt pyproject.toml
	rm -rf $(GPU_VENV)
	$(PYTHON) -m venv $(GPU_VENV)
	$(GPU_VENV)/bin/python -m pip install $(PIP_ARGS) -e . -c bench/check-gpu-jax.txt
	$(GPU_VENV)/bin/python -m pip install $(PIP_ARGS) --no-deps -r $<
	@touch $@
