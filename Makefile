# make demo   three synthetic sites train together
# make test   the test suite
# make test-medspacy  a model in a medspaCy pipeline, in .venv-medspacy: that holds spaCy 3.7 and NumPy 1.26
# make mutate each line that docs/papers.md points at is changed: its tests must notice
# make lint   style and types
# make bench  every benchmark, each ratio beside its limits and goal
# make docs   the pages as a site: build/site
# make wheel  the package as a wheel in dist, tried from a folder of its own
# make sbom   what is installed in .venv, as CycloneDX: build/sbom.json
# make audit  known flaws of what is installed in .venv; asks the package index
# make clean  removes the virtual environment, runs and caches
#
# Everything lives in .venv; pip and `make audit` alone use the network.

PYTHON ?= python3
# Which build of it comes is the package index's choice; CONTRIBUTING.md says how to get another.
TORCH ?= torch==2.13.0
# More arguments for pytest and for tools/mutate.py: make test ARGS="-k crf".
ARGS ?=
# A process a core; none for tests that start processes of their own: make test WORKERS=
WORKERS ?= -n auto --dist worksteal

# Tests start many processes, and pytest rewrites every test file: without bytecode files
# each process compiles all of it again.
unexport PYTHONDONTWRITEBYTECODE

VENV := .venv
BIN := $(VENV)/bin
TOOLS := build/tools
MEDSPACY := .venv-medspacy
# Errors alone: twice quiet leaves out warnings of caches, versions and users.
INSTALL := pip install -qq --disable-pip-version-check --root-user-action=ignore

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.NOTPARALLEL: # two pips must not write into one environment
.PHONY: help demo test test-medspacy mutate lint format bench docs wheel sbom audit clean

help:
	@sed -n 's/^# \(make .*\)/\1/p' $(firstword $(MAKEFILE_LIST))

demo: $(VENV)/.base
	$(BIN)/fednotes simulate demo --out runs/demo --overwrite

test: $(VENV)/.dev
	$(BIN)/python -m pytest $(WORKERS) $(ARGS)

test-medspacy: $(MEDSPACY)/.done
	$(MEDSPACY)/bin/python -m pytest -p no:cacheprovider -m medspacy tests/apps/serving/test_medspacy.py

mutate: $(VENV)/.dev
	$(BIN)/python tools/mutate.py $(ARGS)

lint: $(VENV)/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-logo

format: $(VENV)/.dev
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: $(VENV)/.dev
	$(BIN)/python tools/bench.py $(ARGS)

docs: $(VENV)/.dev
	$(BIN)/python -m $(INSTALL) -e '.[docs]'
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet
	@echo "build/site/index.html; its search needs a server:" \
		"$(BIN)/python -m http.server --bind 127.0.0.1 --directory build/site"

# From a folder with nothing but what the wheel holds, before the editable install of .venv.
wheel: $(VENV)/.base $(TOOLS)/.done
	rm -rf dist build/wheel build/wheel-demo
	$(TOOLS)/bin/python -m build --outdir dist > build/wheel.log 2>&1 || { tail build/wheel.log >&2; exit 1; }
	$(BIN)/python -m $(INSTALL) --no-deps --target build/wheel dist/*.whl
	PYTHONPATH=build/wheel $(BIN)/python -c 'import fednotes; assert "build/wheel" in fednotes.__file__'
	PYTHONPATH=build/wheel $(BIN)/python -m fednotes simulate demo --out build/wheel-demo \
		--set training.epochs=1 > build/wheel.log || { tail build/wheel.log >&2; exit 1; }
	test -s build/wheel-demo/report.html
	@ls -l dist

sbom: $(VENV)/.dev $(TOOLS)/.done
	$(TOOLS)/bin/cyclonedx-py environment --pyproject pyproject.toml --output-reproducible \
		--output-file build/sbom.json $(BIN)/python

# A package with flaws that are long known tells whether their list can be reached: without it
# pip-audit finds nothing wrong with anything.
audit: $(VENV)/.dev $(TOOLS)/.done
	@echo jinja2==2.4.1 > build/known
	@$(TOOLS)/bin/pip-audit --no-deps --disable-pip --requirement build/known 2> /dev/null \
		| grep -q 'PYSEC\|GHSA\|CVE' || { echo "make audit asks the package index for known flaws, which gives none" \
			"from here: run it on a machine that reaches it, or give build/sbom.json to a" \
			"scanner of yours" >&2; exit 1; }
	PIPAPI_PYTHON_LOCATION=$(BIN)/python $(TOOLS)/bin/pip-audit --local --skip-editable

# These stay out of the environment that they judge.
$(TOOLS)/.done:
	$(PYTHON) -m venv --clear $(TOOLS)
	$(TOOLS)/bin/python -m $(INSTALL) 'build>=1.2,<2' 'cyclonedx-bom>=7,<8' 'pip-audit>=2.9,<3'
	@touch $@

# medspaCy stays out of .venv, whose NumPy and spaCy are newer than it takes.
$(MEDSPACY)/.done: pyproject.toml
	$(PYTHON) -m venv --clear $(MEDSPACY)
	$(MEDSPACY)/bin/python -m $(INSTALL) '$(TORCH)'
	$(MEDSPACY)/bin/python -m $(INSTALL) 'medspacy>=1.3.1,<1.4' 'numpy>=1.26,<2' 'pytest>=9,<10' -e .
	@touch $@

clean:
	rm -rf $(VENV) $(MEDSPACY) runs build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find src tests tools benchmarks -name __pycache__ -type d -prune -exec rm -rf {} +

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
	$(BIN)/python -m $(INSTALL) '$(TORCH)'
	@touch $@

$(VENV)/.base: $(VENV)/.torch pyproject.toml
	$(BIN)/python -m $(INSTALL) -e .
	@touch $@

# The development environment is the base one and more.
$(VENV)/.dev: $(VENV)/.torch pyproject.toml
	$(BIN)/python -m $(INSTALL) -e '.[dev]'
	@touch $(VENV)/.base $@
