# Each target prepares what it needs; a second run starts at once.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# a file's tests stay together, as they share what they build, and so do all with one cluster, browser or adapter
SHARED := -n auto --dist loadfile --no-loadscope-reorder
# Python compiles a module when it is imported; pip would compile 23,000, which takes more than a minute
INSTALL := $(BIN)/python -m pip install --quiet --disable-pip-version-check --no-input --no-compile -c constraints.txt
# compiled modules are kept: the tests start dozens of processes that read them
unexport PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := help
.PHONY: help demo test quick check format bench docs figures clean

help:  ## list the targets
	@awk -F ':.*## ' '/^[a-z]+:.*## / {printf "make %-8s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

demo: $(VENV)/.dev  ## train two small nets on bundled digits, compare them, write a report
	@$(BIN)/netkin demo --overwrite

test: $(VENV)/.dev  ## run tests, doctests and the README's example; pass options with ARGS="-k cka"
	@$(BIN)/python -m pytest $(SHARED) $(ARGS)

quick: $(VENV)/.dev  ## run the tests that need no browser, cluster, other program, real data or long training
	@$(BIN)/python -m pytest $(SHARED) -m "not slow" --hypothesis-profile=quick $(ARGS)

check: $(VENV)/.dev  ## see that all is formatted, linted and type-checked
	@$(BIN)/ruff format --check .
	@$(BIN)/ruff check .
	@$(BIN)/mypy

format: $(VENV)/.dev  ## format, and mend what ruff can mend
	@$(BIN)/ruff format .
	@$(BIN)/ruff check --fix .

bench: $(VENV)/.dev  ## measure speed against peers, as ratios
	@$(BIN)/python bench/run.py $(ARGS)

docs: $(VENV)/.docs  ## rebuild the generated pages and the site
	@$(BIN)/python docs/generate.py
	@$(BIN)/python docs/gallery.py
	@NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet
	@echo "open site/index.html; with search: $(BIN)/python -m http.server --directory site"

figures: $(VENV)/.dev  ## draw the pictures of the docs again; needs Chromium
	@$(BIN)/python docs/gallery.py --pictures

clean:  ## remove the environments, the site and all caches
	rm -rf $(VENV) .bench-venv site docs/claims.html docs/pages build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find src tests bench docs reproductions -name __pycache__ -type d -prune -exec rm -rf {} +

$(VENV)/.python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10) and "netkin needs Python 3.10 or newer: make PYTHON=python3.11")'
	@$(PYTHON) -m venv $(VENV)
	@touch $@

$(VENV)/.dev: $(VENV)/.python pyproject.toml constraints.txt
	@echo "installing netkin and its tools into $(VENV) (the first time takes minutes)"
	@$(INSTALL) -e ".[dev]"
	@touch $@

$(VENV)/.docs: $(VENV)/.dev
	@$(INSTALL) -e ".[docs]"
	@touch $@
