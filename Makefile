# Every target first installs what it needs, and no more, into .venv; `make help` lists them.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
INSTALL := $(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt
# One thread a process: two processes of two threads each wait for one another on two cores, a third of the time.
# Python keeps what it compiled, also where PYTHONDONTWRITEBYTECODE is set: tests start many processes.
PYTEST := PYTHONDONTWRITEBYTECODE= OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist loadgroup

.DEFAULT_GOAL := help
.PHONY: help setup run paper test test-fast test-long mutants check lint docs docs-serve package bench clean

help: ## Show this list
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | awk -F ':.*## ' '{printf "  make %-10s %s\n", $$1, $$2}'

$(BIN)/python:
	$(PYTHON) -m venv $(VENV)

# .venv/.library, .venv/.docs ...: empty files that say what is installed. An extra brings what the smaller ones have.
$(VENV)/.library: pyproject.toml constraints.txt | $(BIN)/python
	$(INSTALL) -e .
	@touch $@

WITH_test := docs package
WITH_dev := docs package test
$(VENV)/.%: pyproject.toml constraints.txt | $(BIN)/python
	$(INSTALL) -e '.[$*]'
	@touch $@ $(addprefix $(VENV)/.,library $(WITH_$*))

setup: $(VENV)/.dev ## Create the environment in .venv, with everything for development

run: $(VENV)/.library ## Train DP-FedAvg, BLUR + LUS and the recipe on embedded digits at epsilon = 2, and write a report
	$(BIN)/fedblur table examples/quickstart.toml --out runs/quickstart
	$(BIN)/fedblur report runs/quickstart

paper: $(VENV)/.library ## Render the pages of papers/ and their plots from the result files
	$(BIN)/python -m papers.rendering papers/cheng2022 papers/beyond

test: $(VENV)/.test ## Run the test suite (about 6 minutes on 2 cores)
	$(PYTEST)

test-fast: $(VENV)/.test ## Run the quick tests only (under a minute)
	$(PYTEST) -m 'not slow and not long'

test-long: $(VENV)/.dev ## Run everything: also full sweeps, and federations of real processes that are killed or attacked
	FEDBLUR_LONG=1 $(PYTEST)

mutants: $(VENV)/.test ## Plant a hundred privacy bugs, one at a time: a test must fail for each (PART=3/10: every tenth)
	$(BIN)/python -m tests.mutants.run $(if $(PART),--part $(PART))

lint: $(VENV)/.test ## Style and types only
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

check: lint test ## Everything: style, types, tests

docs: $(VENV)/.docs ## Build the documentation site into build/site, warnings as errors
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict

docs-serve: $(VENV)/.docs ## Show the site on this machine and rebuild it when a page changes
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs serve --strict --watch src --watch website

package: $(VENV)/.package ## Build the wheel and the source archive in dist/, and check them
	$(BIN)/python -m build --no-isolation
	$(BIN)/python -m twine check --strict dist/*

bench: $(VENV)/.library ## Compare with pfl, Flower, FedJAX and a plain loop on this CPU (installs them; under 10 minutes)
	$(BIN)/python benchmarks/run.py

clean: ## Remove the environment and all that runs wrote
	rm -rf $(VENV) runs build dist benchmarks/.envs
