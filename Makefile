# Installs into .venv on first use and again when pyproject.toml changes. `make help` lists the targets.
#   make PYTHON=python3.12 test        another Python, 3.11 or newer
#   make TORCH_INDEX=https://download.pytorch.org/whl/cpu demo        CPU wheels where pip would take CUDA ones
#   make TORCH=torch==2.14.1 test      another torch; remove .venv first

PYTHON ?= python3
TORCH ?= torch==2.13.0
TORCH_INDEX ?=

BIN := .venv/bin
DEV = $(BIN)/prefect-torch-elastic dev
PIP = $(BIN)/python -m pip --disable-pip-version-check -qq
# Progress goes to stderr: stdout belongs to the program that a target runs.
SAY = @printf '%s\n' >&2

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help demo ui test test-e2e test-kueue lint clean

help: ## Say what each target does
	@sed -n 's/^\([a-z0-9-]*\):.*## \(.*\)/  make \1|\2/p' Makefile | awk -F'|' '{ printf "%-16s %s\n", $$1, $$2 }'

demo: .venv/.installed ## Train a small GPT, split over three work pools, and kill a rank on the way (flows/pretrain.py)
	$(SAY) "Starting a Prefect server and three work pools in .demo/; nothing of yours is touched."
	@$(DEV) run flows/pretrain.py -p kill_at=450 --home .demo
	$(SAY) "To look at the run in Prefect's UI: make ui"

ui: .venv/.installed ## Leave the server and the pools of the demo running, and print the UI's address
	@$(DEV) up --detach --home .demo
	$(SAY) "To end it: .venv/bin/prefect-torch-elastic dev down --home .demo"

test: .venv/.installed-dev ## Run the tests that need no gang under a server (at most 10 minutes on 2 cores)
	@$(BIN)/python -m pytest -q -m "not (e2e or kueue or chaos or soak or benchmark or gpu)"

test-e2e: .venv/.installed-dev ## Run real gangs under a real Prefect server (at most 30 minutes)
	@$(BIN)/python -m pytest -q -m e2e

test-kueue: .venv/.installed-dev ## Run gangs on a simulated cluster through deaths, drains and broken watches (about 10 minutes)
	@$(BIN)/python -m pytest -q -m kueue tests/e2e

lint: .venv/.installed-dev ## Check style, types and layers
	$(SAY) "ruff: style and format"
	@$(BIN)/ruff check --quiet .
	@$(BIN)/ruff format --quiet --diff .
	$(SAY) "pyright: types"
	@PYRIGHT_PYTHON_IGNORE_WARNINGS=1 $(BIN)/pyright --warnings --project pyproject.toml
	$(SAY) "import-linter: layers"
	@$(BIN)/lint-imports --no-logo

clean: ## Remove .venv, caches and the demo's data
	@[ ! -e .demo/stack.json ] || $(DEV) down --home .demo
	@rm -rf .venv .demo build dist *.egg-info .pytest_cache .ruff_cache .hypothesis .import_linter_cache
	@find . -name __pycache__ -type d -prune -exec rm -rf {} +

# torch comes first and alone: with it in place, the resolver has no reason to fetch a CUDA build later.
.venv/.torch:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	  printf '%s\n' "\`$(PYTHON)\` is missing or older than 3.11. Name another one: make PYTHON=python3.12 ..." >&2; exit 1; }
	$(SAY) "Creating .venv"
	@$(BIN)/python -m pip --version >/dev/null 2>&1 || $(PYTHON) -m venv .venv
	$(SAY) "Installing $(TORCH) (the largest part, a few minutes on a slow line)"
	@$(PIP) install $(if $(TORCH_INDEX),--extra-index-url $(TORCH_INDEX)) $(TORCH)
	@touch $@

.venv/.installed: pyproject.toml | .venv/.torch
	$(SAY) "Installing prefect-torch-elastic and Prefect"
	@$(PIP) install --editable '.[torch]'
	@touch $@

.venv/.installed-dev: pyproject.toml | .venv/.torch
	$(SAY) "Installing prefect-torch-elastic, Prefect and the development tools"
	@$(PIP) install --editable '.[torch,store,kubernetes,dev]'
	@touch .venv/.installed $@
