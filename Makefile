# Every target sets up its own environment first; `make help` lists them.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

.DEFAULT_GOAL := help
.PHONY: help setup run paper test test-long mutants check lint docs docs-serve package bench clean

help: ## Show this list
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | awk -F ':.*## ' '{printf "  make %-10s %s\n", $$1, $$2}'

$(STAMP): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	@touch $@

setup: $(STAMP) ## Create the environment in .venv

run: $(STAMP) ## The main job: DP-FedAvg against BLUR + LUS on embedded digits at epsilon = 2
	$(BIN)/fedblur table examples/quickstart.toml --out runs/quickstart

paper: $(STAMP) ## Render the pages of papers/ and their plots from the result files
	$(BIN)/fedblur paper papers/cheng2022
	$(BIN)/fedblur paper papers/beyond

# One thread a process: two processes of two threads each wait for one another on two cores, a third of the time.
test: $(STAMP) ## Run the whole test suite
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist loadgroup

test-long: $(STAMP) ## Run the tests of minutes too: federations of real processes that are killed, attacked, documented
	FEDBLUR_LONG=1 OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist loadgroup

mutants: $(STAMP) ## Plant a hundred privacy bugs, one at a time, and see a test fail for each (PART=3/10: every tenth)
	$(BIN)/python -m tests.mutants.run $(if $(PART),--part $(PART))

lint: $(STAMP) ## Style and types only
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

check: lint test ## Everything: style, types, tests

docs: $(STAMP) ## Build the documentation site into build/site, warnings as errors
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict

docs-serve: $(STAMP) ## Show the site on this machine, and build it anew when a page changes
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs serve --strict --watch src --watch website

package: $(STAMP) ## Build the wheel and the source archive in dist/, and check them
	$(BIN)/python -m build --no-isolation
	$(BIN)/python -m twine check --strict dist/*

bench: $(STAMP) ## Compare with pfl, Flower, FedJAX and a plain loop on this CPU (installs them; under 10 minutes)
	$(BIN)/python benchmarks/run.py

clean: ## Remove the environment and what runs have written
	rm -rf $(VENV) runs build dist benchmarks/.envs
