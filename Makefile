# make demo    train three synthetic sites together
# make test    run the test suite
# make test-medspacy  test a model in a medspaCy pipeline, in .venv-medspacy (spaCy 3.7, NumPy 1.26)
# make mutate  change each line that docs/papers.md names, and check that its tests notice
# make lint    check style, types and imports
# make format  format the code
# make bench   run all benchmarks; print each ratio beside its limits and goal
# make docs    build the web site of the pages in build/site
# make wheel   build a wheel in dist, and try it in an empty folder
# make sbom    list the packages in .venv as CycloneDX, in build/sbom.json
# make audit   check the packages in .venv for known vulnerabilities; asks the package index
# make clean   remove the virtual environments, runs, builds and caches
#
# Everything is installed in .venv. Only pip and `make audit` use the network.

PYTHON ?= python3
# The package index decides which build is installed; CONTRIBUTING.md says how to get another one.
TORCH ?= torch==2.13.0
# More arguments for pytest and for tools/mutate.py: make test ARGS="-k crf".
ARGS ?=
# One process per core. Use none for tests that start processes themselves: make test WORKERS=
WORKERS ?= -n auto --dist worksteal

# Tests start many processes, and pytest rewrites every test file: without bytecode files
# each process compiles all of it again.
unexport PYTHONDONTWRITEBYTECODE

VENV := .venv
BIN := $(VENV)/bin
TOOLS := build/tools
MEDSPACY := .venv-medspacy
# -qq shows only errors, without warnings about caches, versions and users.
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

# PYTHONPATH puts the content of the wheel before the editable install of .venv.
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

# If pip-audit cannot reach the list of vulnerabilities, it finds none. It is therefore first tried
# on a package whose vulnerabilities have long been known.
audit: $(VENV)/.dev $(TOOLS)/.done
	@echo jinja2==2.4.1 > build/known
	@$(TOOLS)/bin/pip-audit --no-deps --disable-pip --requirement build/known 2> /dev/null \
		| grep -q 'PYSEC\|GHSA\|CVE' || { echo "make audit cannot get known vulnerabilities from the package index:" \
			"run it on a machine that reaches the index, or give build/sbom.json" \
			"(make sbom) to a scanner of your own" >&2; exit 1; }
	PIPAPI_PYTHON_LOCATION=$(BIN)/python $(TOOLS)/bin/pip-audit --local --skip-editable

# These tools are not installed in the environment that they examine.
$(TOOLS)/.done:
	$(PYTHON) -m venv --clear $(TOOLS)
	$(TOOLS)/bin/python -m $(INSTALL) 'build>=1.2,<2' 'cyclonedx-bom>=7,<8' 'pip-audit>=2.9,<3'
	@touch $@

# medspaCy is not installed in .venv, because it needs older versions of NumPy and spaCy.
$(MEDSPACY)/.done: pyproject.toml
	$(PYTHON) -m venv --clear $(MEDSPACY)
	$(MEDSPACY)/bin/python -m $(INSTALL) '$(TORCH)'
	$(MEDSPACY)/bin/python -m $(INSTALL) 'medspacy>=1.3.1,<1.4' 'numpy>=1.26,<2' 'pytest>=9,<10' -e .
	@touch $@

clean:
	rm -rf $(VENV) $(MEDSPACY) runs build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find src tests tools benchmarks -name __pycache__ -type d -prune -exec rm -rf {} +

# An environment with only torch. Torch is installed first, with a fixed version, so that no other
# package replaces it with another build.
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

# The development environment extends the base environment.
$(VENV)/.dev: $(VENV)/.torch pyproject.toml
	$(BIN)/python -m $(INSTALL) -e '.[dev]'
	@touch $(VENV)/.base $@
