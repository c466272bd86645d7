# Every target with one line of help: `make help`. All of them install what they need first.
SHELL := /bin/bash
PYTHON ?=
TORCH ?=
EXTRAS ?=
BIN := .venv/bin
LAKE ?= $(or $(NOVELTY_LAKE),lake)
SAMPLE ?= sample
SOURCE ?=
ARGS ?=
DRY ?=
DRY_RUN := $(if $(DRY),--dry-run)
export NOVELTY_LAKE := $(LAKE)

.DEFAULT_GOAL := help
.PHONY: help setup setup-blender doctor demo sample lint test test-all test-install faults bench lock wheel docs status verify query report \
        all novelcraft kowl threedos semantic condda serve server deploy stop publish

help: ## list the targets
	@grep -hE '^[a-z0-9-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 14

setup: .venv/.ready ## install into .venv: make setup [EXTRAS=none|video,s3|all] [TORCH=cpu|cuda|index_url] [PYTHON=…]

# Named choices are looked at again; .ci/install/packages.py says what they mean.
ifneq ($(strip $(TORCH)),)
.PHONY: .venv/.ready .venv/.all .venv/.dev
endif
ifneq ($(strip $(EXTRAS)),)
.PHONY: .venv/.ready
endif

# install EXTRAS [--dev]: the system's libraries first, then an environment, then what goes into it.
define INSTALL
install() { \
  python=$$(bash .ci/install/python "$(PYTHON)") || exit 2; \
  "$$python" -m tasks.operations.doctor --install; \
  if ! test -x $(BIN)/python; then "$$python" -m venv .venv || exit 2; fi; \
  $(BIN)/python .ci/install/packages.py --torch "$(TORCH)" --extras "$$@"; \
}
endef

.venv/.ready: requirements.lock pyproject.toml
	@$(INSTALL); install "$(EXTRAS)"

.venv/.all: requirements.lock pyproject.toml
	@$(INSTALL); install all

.venv/.dev: requirements.lock requirements-dev.lock pyproject.toml
	@$(INSTALL); install all --dev

setup-blender: ## bpy in an environment of its own: then NOVELTY_BLENDER_PYTHON=.venv-blender/bin/python
	@python=$$(bash .ci/install/python "$(PYTHON)") || exit 2; \
	"$$python" -m tasks.operations.doctor --install; \
	if ! test -x .venv-blender/bin/python; then "$$python" -m venv .venv-blender || exit 2; fi; \
	.venv-blender/bin/python .ci/install/packages.py --without-base --extras blender

doctor: ## say what is missing on this machine and how to mend it; needs no setup
	@for python in python3.11 python3 python $(BIN)/python; do \
	  if $$python -c 'import sys; sys.exit(sys.version_info < (3, 8))' >/dev/null 2>&1; then \
	    if test -e $(BIN); then exec $$python -m tasks.operations.doctor --python $(BIN)/python; fi; \
	    exec $$python -m tasks.operations.doctor; \
	  fi; \
	done; bash .ci/install/python

sample: .venv/.all ## write the sample data sets to $(SAMPLE)
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
  if test -z "$$given"; then options=(); fi; \
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
	$(BIN)/novelty condda serve $(if $(SOURCE),--tests "$(SOURCE)") $(ARGS)

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

lint: .venv/.dev ## ruff, mypy, layer check
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/python -m pytest tests/test_layers.py

test: lint ## lint and the whole fast suite
	$(BIN)/python -m pytest

test-all: lint .venv/peers/.ready ## lint and every test, slow ones and comparisons with peers too; coverage
	$(BIN)/python -m pytest -m '' --cov --cov-report term --cov-report html:build/coverage
	PYTHONPATH=.venv/peers $(BIN)/python -m pytest -n 0 tests/scores/test_peer.py

# In a folder of their own and without what they depend on: theirs would bring another torch.
.venv/peers/.ready: requirements-peers.lock .venv/.dev
	$(BIN)/python -m pip install --quiet --upgrade --no-deps --target .venv/peers --requirement requirements-peers.lock
	@touch $@

faults: .venv/.dev ## fail or kill at every file-system call of a small build, gc, drop, restore (an hour)
	$(BIN)/python -m pytest -n 2 --dist load -m slow tests/crash/test_faults.py

bench: .venv/peers/.ready ## speed measurements, side by side in one run
	@export PYTHONPATH=.venv/peers; for f in benchmarks/[a-z]*.py; do echo "== $$f"; $(BIN)/python -m benchmarks.$$(basename $$f .py) || exit 1; done

wheel: setup ## dist/*.whl, and constraints.txt with the locked versions
	@grep -oE '^[A-Za-z0-9._-]+==[^ ]+' requirements.lock > constraints.txt
	$(BIN)/python -m pip wheel --quiet --no-build-isolation --no-deps --wheel-dir dist .
	@ls dist/*.whl

lock: ## write requirements.lock and requirements-dev.lock from pyproject.toml; versions stay as they are
	@python=$$(bash .ci/install/python "$(PYTHON)") || exit 2; \
	if ! test -x $(BIN)/python; then "$$python" -m venv .venv || exit 2; fi; \
	$(BIN)/python .ci/install/lock.py

test-install: ## prove the installation without this machine's pip settings (network, 10 GB for a while)
	bash .ci/install/proof
