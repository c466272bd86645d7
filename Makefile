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

# build NAME SOURCE [ARGS]: what a source means to each benchmark. The folders that `novelty sample`
# writes have the layout that is looked for: lists/ and videos/, or one entry for each data set.
define BUILD
build() { \
  name=$$1; given=$$2; shift 2; options=(); sets=""; \
  case $$name in \
    novelcraft) options=(--source "$$given");; \
    condda) options=(--tests "$$given");; \
    kowl) options=(--lists "$$given"); \
      if test -d "$$given/lists"; then options=(--lists "$$given/lists"); \
        if test -d "$$given/videos"; then options+=(--videos "$$given/videos"); fi; \
      fi;; \
    threedos) sets="modelnet40 scanobjectnn shapenet";; \
    semantic) sets="cifar10 stl10 imagenet";; \
  esac; \
  for set in $$sets; do \
    for found in "$$given/$$set" "$$given/$$set".{zip,tar,tar.gz,tgz}; do \
      if test -e "$$found"; then options+=(--source "$$set=$$found"); fi; \
    done; \
  done; \
  if test -n "$$given" -a $${#options[@]} = 0; then options=(--source "$$given"); fi; \
  $(BIN)/novelty build $$name "$${options[@]}" $(DRY_RUN) "$$@"; \
}
endef

# One that fails does not stop the next. DRY=1 on these targets only says what a build would make.
all: setup ## build all: make all SOURCE=folder_of_benchmarks, or NOVELCRAFT=… KOWL=… THREEDOS=… SEMANTIC=… CONDDA=…
	@$(BUILD); failed=""; begun=""; \
	named() { \
	  name=$$1; given=$$2; shift 2; \
	  for found in "$(SOURCE)/$$name" "$(SOURCE)/$$name".{zip,tar,tar.gz,tgz}; do \
	    if test -z "$$given" -a -n "$(SOURCE)" -a -e "$$found"; then given=$$found; fi; \
	  done; \
	  if test -z "$$given"; then echo "$$name: skipped, no source named"; return; fi; \
	  begun=yes; build $$name "$$given" "$$@" || failed="$$failed $$name"; \
	}; \
	named novelcraft "$(NOVELCRAFT)" $(NOVELCRAFT_ARGS); \
	named kowl "$(KOWL)" $(KOWL_ARGS); \
	named threedos "$(THREEDOS)" $(THREEDOS_ARGS); \
	named semantic "$(SEMANTIC)" $(SEMANTIC_ARGS); \
	named condda "$(CONDDA)" $(CONDDA_ARGS); \
	if test -z "$$begun"; then \
	  echo "nothing to build: name sources, such as NOVELCRAFT=file.zip, or SOURCE=folder with novelcraft/, kowl/, …" >&2; exit 2; \
	fi; \
	if test -n "$$failed"; then echo "failed:$$failed" >&2; exit 1; fi

novelcraft: setup ## build NovelCraft: make novelcraft SOURCE=dir_or_zip [ARGS=...]
	@$(BUILD); build $@ "$(SOURCE)" $(ARGS)

kowl: setup ## build KOWL-718: make kowl SOURCE=lists_dir [ARGS="--videos dir"]
	@$(BUILD); build $@ "$(SOURCE)" $(ARGS)

threedos: setup ## build 3DOS: make threedos SOURCE=modelnet40=dir_or_zip [ARGS="--lists dir"]
	@$(BUILD); build $@ "$(SOURCE)" $(ARGS)

semantic: setup ## build semantic anomalies: make semantic SOURCE=cifar10=dir_or_archive
	@$(BUILD); build $@ "$(SOURCE)" $(ARGS)

condda: setup ## run the agents over CONDDA/OND tests: make condda SOURCE=tests_dir
	@$(BUILD); build $@ "$(SOURCE)" $(ARGS)

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

# By the environment, so that quotes and dollars in it stay what they are.
query: export NOVELTY_SQL := $(value SQL)
query: setup ## run SQL on the catalogue: make query SQL='select ...'
	@$(BIN)/novelty query "$$NOVELTY_SQL"

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

test-all: lint .venv/peers/.ready ## lint and every test, slow ones and comparisons with peers too
	$(BIN)/python -m pytest -m ''
	PYTHONPATH=.venv/peers $(BIN)/python -m pytest -n 0 tests/scores/test_peer.py

# In a folder of their own and without what they depend on: theirs would bring another torch.
.venv/peers/.ready: requirements-peers.lock .venv/.ready
	$(BIN)/python -m pip install --quiet --upgrade --no-deps --target .venv/peers --requirement requirements-peers.lock
	@touch $@

bench: .venv/peers/.ready ## speed measurements, side by side in one run
	@export PYTHONPATH=.venv/peers; for f in benchmarks/[a-z]*.py; do echo "== $$f"; $(BIN)/python -m benchmarks.$$(basename $$f .py) || exit 1; done

lock: setup ## write requirements.lock from what is installed
	$(BIN)/python -m pip freeze --all --exclude pip --exclude-editable | sed -E 's/^torch(==| @ ).*/torch==2.13.0/' > requirements.lock
