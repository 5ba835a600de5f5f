# recbft: `make help` lists what can be made. Works with GNU make 3.81 and later, on Linux and macOS.

VENV := .venv
BIN := $(VENV)/bin
RUNS := runs
PIP := $(BIN)/python -m pip
# Set PYTHON to choose the interpreter; otherwise the first suitable one of these is taken.
PYTHONS := $(if $(PYTHON),$(PYTHON),python3 python3.12 python3.11 python3.13 python3.14 python3.15 python3.10 python)
# Tests share the machine: one thread each, up to four at a time. A worker gets neighbouring tests, which share what is
# trained once.
PYTEST_ARGS ?= -n auto --maxprocesses 4 --dist worksteal

.PHONY: help install quickstart test check format clean
.DEFAULT_GOAL := help

help:
	@echo 'make install      create $(VENV) and install recbft in it'
	@echo 'make quickstart   install, train SASRec with precision tracking on a bundled data set, print the results'
	@echo 'make test         install what tests need and run them all'
	@echo 'make check        check format, lint and types'
	@echo 'make format       rewrite files in the format that check wants'
	@echo 'make clean        delete $(VENV) and caches; runs are kept'
	@echo
	@echo 'PYTHON=python3.11 chooses the interpreter.'

install: $(VENV)/.installed

quickstart: $(VENV)/.installed
	$(BIN)/recbft train --config configs/quickstart.yaml --out $(RUNS)/quickstart --overwrite

test: $(VENV)/.dev
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest $(PYTEST_ARGS)

check: $(VENV)/.dev
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

format: $(VENV)/.dev
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

clean:
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

$(VENV)/.created:
	@for python in $(PYTHONS); do \
	  if $$python -c 'import sys; sys.exit(not (3, 10) <= sys.version_info[:2] <= (3, 15))' 2>/dev/null; then \
	    echo "creating $(VENV) with $$($$python -V) ($$python)"; \
	    $$python -m venv --clear $(VENV) && touch $@ && exit 0; \
	    echo "error: '$$python -m venv' failed; install its venv module (on Debian: apt install python3-venv)" >&2; exit 1; \
	  fi; \
	done; \
	echo 'error: none of "$(PYTHONS)" is Python 3.10 to 3.15; install one, or name it: make $(MAKECMDGOALS) PYTHON=/path/to/python' >&2; \
	exit 1

# torch goes first and pinned, so that no requirement of another package can choose a different, larger build.
# RecBole's wheel carries the ml-100k data; without it recbft trains on its own synthetic data.
$(VENV)/.installed: $(VENV)/.created pyproject.toml setup.py constraints.txt
	$(PIP) install --quiet -c constraints.txt torch
	$(PIP) install --quiet -c constraints.txt -e .
	@$(PIP) install --quiet --no-deps recbole==1.2.1 \
	  || echo 'note: RecBole could not be installed; the synthetic data set takes the place of ml-100k'
	@touch $@

$(VENV)/.dev: $(VENV)/.installed
	$(PIP) install --quiet -c constraints.txt -e '.[dev]'
	@touch $@
