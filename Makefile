# make demo   three synthetic sites train together
# make test   the test suite
# make lint   style and types
# make bench  every benchmark, a ratio each
# make clean  removes the virtual environment, runs and caches
#
# Everything lives in .venv; pip is the only thing here that uses the network.

PYTHON ?= python3
# Which build of it comes is the package index's choice; CONTRIBUTING.md says how to get another.
TORCH ?= torch==2.13.0
# More arguments for pytest: make test ARGS="-k crf".
ARGS ?=

VENV := .venv
BIN := $(VENV)/bin

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.NOTPARALLEL: # two pips must not write into one environment
.PHONY: help demo test lint format bench clean

help:
	@sed -n 's/^# \(make .*\)/\1/p' $(firstword $(MAKEFILE_LIST))

demo: $(VENV)/.base
	$(BIN)/fednotes simulate demo --out runs/demo --overwrite

test: $(VENV)/.dev
	$(BIN)/python -m pytest $(ARGS)

lint: $(VENV)/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(VENV)/.dev
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: $(VENV)/.dev
	@set -e; for file in benchmarks/*.py; do \
		test -e "$$file" || continue; \
		echo "== $$file"; $(BIN)/python "$$file"; \
	done

clean:
	rm -rf $(VENV) runs build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find src tests benchmarks -name __pycache__ -type d -prune -exec rm -rf {} +

# The environment with torch alone. Torch comes first and pinned, so that nothing later pulls in
# another build of it.
$(VENV)/.torch:
	@command -v $(PYTHON) > /dev/null || { \
		echo "fednotes needs Python 3.11 or newer, and there is no '$(PYTHON)' here:" \
			"install it, or name it: make PYTHON=/path/to/python3.11" >&2; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
		echo "fednotes needs Python 3.11 or newer, and '$(PYTHON)' is" \
			"$$($(PYTHON) --version 2>&1): name a newer one: make PYTHON=python3.11" >&2; exit 1; }
	$(PYTHON) -m venv --clear $(VENV)
	$(BIN)/python -m pip install --quiet '$(TORCH)'
	@touch $@

$(VENV)/.base: $(VENV)/.torch pyproject.toml
	$(BIN)/python -m pip install --quiet -e .
	@touch $@

# The development environment is the base one and more.
$(VENV)/.dev: $(VENV)/.torch pyproject.toml
	$(BIN)/python -m pip install --quiet -e '.[dev]'
	@touch $(VENV)/.base $@
