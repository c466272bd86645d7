# Every target with one line of help: `make help`. All of them install what they need first.
SHELL := /bin/bash
PYTHON ?= python3.11
PYTHON_FOUND := $(shell command -v $(PYTHON) 2>/dev/null || command -v python3)
BIN := .venv/bin
LAKE ?= lake
SAMPLE ?= sample
SOURCE ?=
ARGS ?=
DRY ?=
DRY_RUN := $(if $(DRY),--dry-run)
export NOVELTY_LAKE := $(LAKE)

.DEFAULT_GOAL := help
.PHONY: help setup doctor demo sample lint test test-all bench lock docs status verify query report \
        all novelcraft kowl threedos semantic condda serve server deploy stop publish

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

# One that fails does not stop the next. DRY=1 on these targets only says what a build would make.
all: setup ## build all that is named: make all NOVELCRAFT=… KOWL=… THREEDOS=… SEMANTIC=… CONDDA=…
	@failed=""; \
	build() { \
	  name=$$1; option=$$2; given=$$3; shift 3; \
	  if test -z "$$given"; then echo "$$name: skipped, no source named"; return; fi; \
	  $(BIN)/novelty build $$name $$option "$$given" $(DRY_RUN) "$$@" || failed="$$failed $$name"; \
	}; \
	build novelcraft --source "$(NOVELCRAFT)" $(NOVELCRAFT_ARGS); \
	build kowl --lists "$(KOWL)" $(KOWL_ARGS); \
	build threedos --source "$(THREEDOS)" $(THREEDOS_ARGS); \
	build semantic --source "$(SEMANTIC)" $(SEMANTIC_ARGS); \
	build condda --tests "$(CONDDA)" $(CONDDA_ARGS); \
	if test -n "$$failed"; then echo "failed:$$failed" >&2; exit 1; fi

novelcraft: setup ## build NovelCraft: make novelcraft SOURCE=dir_or_zip [ARGS=...]
	$(BIN)/novelty build novelcraft --source "$(SOURCE)" $(DRY_RUN) $(ARGS)

kowl: setup ## build KOWL-718: make kowl SOURCE=lists_dir [ARGS="--videos dir"]
	$(BIN)/novelty build kowl --lists "$(SOURCE)" $(DRY_RUN) $(ARGS)

threedos: setup ## build 3DOS: make threedos SOURCE=modelnet40=dir_or_zip [ARGS="--lists dir"]
	$(BIN)/novelty build threedos $(if $(SOURCE),--source "$(SOURCE)") $(DRY_RUN) $(ARGS)

semantic: setup ## build semantic anomalies: make semantic SOURCE=cifar10=dir_or_archive
	$(BIN)/novelty build semantic --source "$(SOURCE)" $(DRY_RUN) $(ARGS)

condda: setup ## run the agents over CONDDA/OND tests: make condda SOURCE=tests_dir
	$(BIN)/novelty build condda --tests "$(SOURCE)" $(DRY_RUN) $(ARGS)

serve: setup ## serve CONDDA/OND tests on loopback: make serve SOURCE=tests_dir
	$(BIN)/novelty serve condda --tests "$(SOURCE)" $(ARGS)

server: setup ## scheduled builds: start the Prefect server and worker of service.yaml
	$(BIN)/novelty service start

deploy: setup ## bring the deployments to the running server (PREFECT_API_URL: to that one)
	$(BIN)/novelty service deploy

stop: setup ## stop what `make server` started
	$(BIN)/novelty service stop

status: setup ## every table: rows, bytes, age, fresh or stale
	$(BIN)/novelty status

verify: setup ## re-hash every table
	$(BIN)/novelty verify

report: setup ## write the HTML reports again
	$(BIN)/novelty report

query: setup ## run SQL on the catalogue: make query SQL='select ...'
	$(BIN)/novelty query "$(SQL)"

publish: setup ## tables as a folder with a card: make publish BENCHMARK=kowl DIR=folder [ARGS=...]
	$(BIN)/novelty publish "$(BENCHMARK)" "$(DIR)" $(ARGS)

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
