# Runs with GNU make 3.81 and a POSIX shell. `make help` lists the targets.
# PYTHON=...   the interpreter for the virtual environment (default: python3, or a newer python3.x on PATH)
# ARGS=...     more arguments for the command that the target runs

VENV ?= .venv
PYTHON ?=
ARGS ?=
PEERS ?= $(wildcard ../shared/peers)
PYTEST_ARGS ?=
# six tests at a time (on two processors, four leave them idle for a third of the time); those of Spark stay on one worker, or on two if they are long
# a worker that dies is replaced (tests/scheduling.py)
PARALLEL ?= -n 6 --dist loadgroup --max-worker-restart=4
# types are checked for the oldest Python, which pyproject.toml names, and for the newest
NEWEST = 3.14
# examples of each property in the long tests
EXAMPLES ?= 300
# one word of the shell, whatever is in it
quoted = '$(subst ','\'',$(1))'
# SUM is split at spaces; a column with a space in its name: ARGS="--sum 'Unit Price'"
DEMO_ARGS = $(if $(BLOB),--blob $(call quoted,$(BLOB))) $(if $(INPUT),--input $(call quoted,$(INPUT))) \
	$(if $(KEY),--key $(call quoted,$(KEY))) $(foreach column,$(SUM),--sum $(call quoted,$(column))) \
	$(if $(SEED),--seed $(SEED)) $(if $(MIGRATE),--migrate) $(ARGS)
BIN = $(VENV)/bin
STAMP = $(VENV)/.installed

.DEFAULT_GOAL := help
.PHONY: help install docs demo bench test test-long test-heavy test-adopt test-by-need test-clouds test-spark-suites journeys soak fuzz test-faults test-all test-lowest test-pythons test-containers lint format dev-up dev-down release clean

help: ## List the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  %-18s %s\n", $$1, $$2}' Makefile

install: $(STAMP) ## Make the virtual environment and install everything

$(STAMP): pyproject.toml constraints.txt scripts/install.sh
	@PYTHON='$(PYTHON)' sh scripts/install.sh '$(VENV)'

demo: $(STAMP) ## Run the demo (MIGRATE=1, BLOB=s3|gcs|azure, INPUT=file.csv.gz KEY=column SUM="column ...", SEED=n)
	@$(BIN)/statemgr demo $(DEMO_ARGS)

bench: $(STAMP) ## Measure beside the references (PEERS=directory of harnesses, ARGS="--case NAME --size small")
	@$(BIN)/statemgr bench $(if $(PEERS),--peers $(call quoted,$(PEERS))) $(ARGS)

test: $(STAMP) ## Run the tests on local servers, but for the long ones (PYTEST_ARGS=...)
	@$(BIN)/python -m pytest $(PARALLEL) -m 'not long and not heavy' $(PYTEST_ARGS)

test-long: $(STAMP) ## Run the long tests: crash matrices, several brokers, long properties
	@STATEMGR_TEST_EXAMPLES=$(EXAMPLES) $(BIN)/python -m pytest $(PARALLEL) -m '(long or property) and not heavy' $(PYTEST_ARGS)

test-heavy: $(STAMP) ## Run the tests that take minutes or several JVMs, and the rest of the crash matrices, one after the other
	@$(BIN)/python -m pytest -m heavy $(PYTEST_ARGS)

test-adopt: $(STAMP) ## Adopt real applications of all shapes, and random ones (SEED=n, TOPOLOGIES=n), with kills at every step
	@STATEMGR_TEST_SEED=$(or $(SEED),0) STATEMGR_TEST_TOPOLOGIES=$(or $(TOPOLOGIES),10) $(BIN)/python -m pytest \
		$(PARALLEL) -m heavy tests/operations/adopt $(PYTEST_ARGS)

journeys: $(STAMP) ## Adopt, move, rescale and roll back other software's jobs of a million keys (KEYS=n)
	@STATEMGR_TEST_JOURNEY_KEYS=$(or $(KEYS),1000000) $(BIN)/python -m pytest -s tests/operations/test_journeys.py $(PYTEST_ARGS)

test-by-need: $(STAMP) ## Live random histories of states that are read by need (HISTORIES=10000, SEED=first seed)
	@STATEMGR_TEST_HISTORIES=$(or $(HISTORIES),10000) STATEMGR_TEST_SEED=$(or $(SEED),0) $(BIN)/python -m pytest \
		$(PARALLEL) tests/core/unit/test_tasks_by_need.py -k random_histories $(PYTEST_ARGS)

test-clouds: $(STAMP) ## Run the tests of blob stores on fake-gcs-server, Azurite and two S3 servers
	@$(BIN)/python -m pytest -m 'heavy or not heavy' tests/clouds $(PYTEST_ARGS)
	@for kind in seaweedfs moto; do STATEMGR_TEST_S3_KIND=$$kind $(BIN)/python -m pytest -m 'not heavy' \
		tests/core/conformance/test_blob_store.py tests/operations/gc/test_collect.py -k s3 $(PYTEST_ARGS) || exit 1; done

test-spark-suites: $(STAMP) ## Run the suites of Spark's stateful operators that PySpark ships, on both engines
	@$(BIN)/python -m pytest -m heavy tests/spark/test_spark_suites.py $(PYTEST_ARGS)

simulate: $(STAMP) ## Live histories that seeds decide, on servers in memory (SEEDS=0:10000, ARGS="--replay SEED")
	@$(BIN)/python -m tests.simulation --seeds $(or $(SEEDS),0:1000) $(ARGS)

test-faults: $(STAMP) ## Run the tests of three brokers, of networks that are cut, and of disks that fail, fill or lose power
	@$(BIN)/python -m pytest -m heavy tests/clusters tests/disks $(PYTEST_ARGS)

fuzz: $(STAMP) ## Fuzz decoders, configuration, command line, page and answers of servers (MINUTES=10, SEED=n, ARGS="--target NAME")
	@$(BIN)/python -m tests.fuzz --minutes $(or $(MINUTES),10) $(if $(SEED),--seed $(SEED)) $(ARGS)

soak: $(STAMP) ## Run a loop and a Spark query under random faults of all kinds, and check their history (MINUTES=30, SEED=n, SPARK=0, INPUT=file.csv.gz KEY=column)
	@STATEMGR_TEST_SOAK_MINUTES=$(or $(MINUTES),30) STATEMGR_TEST_SOAK_SEED=$(SEED) STATEMGR_TEST_SOAK_SPARK=$(SPARK) \
		STATEMGR_TEST_SOAK_INPUT=$(call quoted,$(INPUT)) STATEMGR_TEST_SOAK_KEY=$(call quoted,$(KEY)) \
		$(BIN)/python -m pytest -s tests/clusters/test_soak.py $(PYTEST_ARGS)

test-all: $(STAMP) ## Run every test
	@STATEMGR_TEST_EXAMPLES=$(EXAMPLES) $(BIN)/python -m pytest $(PARALLEL) $(PYTEST_ARGS)

test-lowest: $(STAMP) ## Run unit tests, tasks and S3 with the oldest versions that pyproject.toml allows
	@$(BIN)/uv venv --quiet --clear --seed --python $(BIN)/python $(VENV)-lowest
	@$(BIN)/uv pip install --quiet --python $(VENV)-lowest/bin/python --resolution lowest-direct -e '.[demo,dev,docs,otel]'
	@$(VENV)-lowest/bin/python -m pytest $(PARALLEL) -m 'not long and not heavy' tests/core/unit tests/core/conformance \
		tests/core/integration/test_task.py tests/core/integration/test_s3_bucket.py $(PYTEST_ARGS)

test-pythons: $(STAMP) ## Run a part of the tests on each other Python of this machine (ARGS=--quick for the tests without servers)
	@$(BIN)/python scripts/pythons.py $(ARGS)

test-containers: $(STAMP) ## Run the integration tests on containers (needs Docker)
	@STATEMGR_TEST_SERVERS=containers $(BIN)/python -m pytest -m 'integration or containers' $(PYTEST_ARGS)

docs: $(STAMP) ## Build the site into site/; a broken link fails
	@NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet
	@echo "Open site/index.html"

lint: $(STAMP) ## Check style, types and the floors
	@$(BIN)/ruff format --check .
	@$(BIN)/ruff check .
	@$(BIN)/mypy
	@$(BIN)/mypy --python-version $(NEWEST)
	@$(BIN)/lint-imports

format: $(STAMP) ## Format the code
	@$(BIN)/ruff check --fix-only --quiet .
	@$(BIN)/ruff format .

dev-up: $(STAMP) ## Start a local Kafka broker and S3 server
	@$(BIN)/statemgr dev up $(ARGS)

dev-down: $(STAMP) ## Stop them
	@$(BIN)/statemgr dev down $(ARGS)

release: $(STAMP) ## Build a release twice, try it on each Python, write its SBOM, and upload it (INDEX=upload address)
	@$(BIN)/python scripts/release.py $(if $(INDEX),--index $(call quoted,$(INDEX))) $(ARGS)

clean: ## Stop local servers; remove the virtual environment, state and caches
	@if [ -d .statemgr/dev ] && [ -x $(BIN)/statemgr ]; then $(BIN)/statemgr dev down; fi
	@rm -rf $(VENV) $(VENV)-lowest $(VENV)-3.* .statemgr site build dist .mypy_cache .pytest_cache .ruff_cache .import_linter_cache .hypothesis
