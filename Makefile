# Every target with one line of help: `make help`. All of them install what they need first.
SHELL := /bin/bash
PYTHON ?= python3.11
PYTHON_FOUND := $(shell command -v $(PYTHON) 2>/dev/null || command -v python3)
BIN := .venv/bin
LAKE ?= lake
SAMPLE ?= sample
SOURCE ?=
ARGS ?=
export NOVELTY_LAKE := $(LAKE)

.DEFAULT_GOAL := help
.PHONY: help setup doctor demo sample lint test test-all bench lock docs status verify query report \
        novelcraft kowl

help: ## list the targets
	@grep -hE '^[a-z0-9-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 14

setup: .venv/.ready ## install everything into .venv (does nothing when it is fresh)

.venv/.ready: requirements.lock pyproject.toml
	@$(PYTHON_FOUND) -c 'import sys; sys.exit(sys.version_info[:2] != (3, 11))' || \
	  { echo "Python 3.11 is needed; found $$($(PYTHON_FOUND) --version). Name one: make setup PYTHON=/path/to/python3.11"; exit 2; }
	@test -x $(BIN)/python || $(PYTHON_FOUND) -m venv .venv
	$(BIN)/python -m pip install --quiet --no-deps --requirement requirements.lock
	$(BIN)/python -m pip install --quiet --no-deps --no-build-isolation --editable .
	$(BIN)/novelty doctor --install
	@touch $@

doctor: setup ## say what is missing on this machine and how to mend it
	$(BIN)/novelty doctor

sample: setup ## write the sample data sets to $(SAMPLE)
	$(BIN)/novelty sample --out $(SAMPLE)

demo: sample ## install, build every benchmark on sample data, show where the tables are
	$(BIN)/novelty demo --sample $(SAMPLE)

novelcraft: setup ## build NovelCraft: make novelcraft SOURCE=dir_or_zip [ARGS=...]
	$(BIN)/novelty build novelcraft --source "$(SOURCE)" $(ARGS)

kowl: setup ## build KOWL-718: make kowl SOURCE=lists_dir [ARGS="--videos dir"]
	$(BIN)/novelty build kowl --lists "$(SOURCE)" $(ARGS)

status: setup ## every table: rows, bytes, age, fresh or stale
	$(BIN)/novelty status

verify: setup ## re-hash every table
	$(BIN)/novelty verify

report: setup ## write the HTML reports again
	$(BIN)/novelty report

query: setup ## run SQL on the catalogue: make query SQL='select ...'
	$(BIN)/novelty query "$(SQL)"

docs: setup ## write docs/tables.md from the declarations
	$(BIN)/novelty dictionary

lint: setup ## ruff, mypy, layer check
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/python -m pytest tests/test_layers.py

test: lint ## lint and the whole fast suite
	$(BIN)/python -m pytest

test-all: lint ## lint and every test, slow ones too
	$(BIN)/python -m pytest -m ''

bench: setup ## speed measurements, side by side in one run
	@for f in benchmarks/[a-z]*.py; do echo "== $$f"; $(BIN)/python -m benchmarks.$$(basename $$f .py) || exit 1; done

lock: setup ## write requirements.lock from what is installed
	$(BIN)/python -m pip freeze --all --exclude pip --exclude-editable | sed -E 's/^torch(==| @ ).*/torch==2.13.0/' > requirements.lock
