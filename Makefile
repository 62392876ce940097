# Everything runs in .venv, which scripts/bootstrap.sh makes when it is missing or out of date.
SHELL := bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
.PHONY: help setup lint format test test-all faults fuzz test-unit test-integration test-gpu test-software-gpu bench docs audit upgrade dist kk math search

BIN := .venv/bin
# More arguments for pytest: make test-unit ARGS="-k shaping -x"; ARGS="-n 0 --pdb" for one worker.
ARGS ?=
# Two workers. A file's tests stay on one of them and share what its fixtures trained or started. pytest-randomly
# shuffles files and tests and prints its seed; ARGS=--randomly-seed=N repeats an order. It does not set the
# seed before each test, as two workers would then choose the same ports.
PYTEST := $(BIN)/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder --randomly-dont-reset-seed --durations=15

help: ## show this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "make %-17s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

setup: ## make .venv (SG_HARDWARE=cpu|8x80gb|... overrides detection)
	@scripts/bootstrap.sh

lint: setup ## ruff, mypy, the arrows between packages, Dockerfiles, job files
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/hadolint docker/*.Dockerfile
	$(BIN)/shellcheck -x scripts/*.sh examples/scripts/*.sh tests/*.sh .ci/run examples/launch/*.sbatch

format: setup ## ruff's fixes and formatting
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

test: setup ## all but what starts engines of its own or takes long: 10 to 20 minutes on 2 cores
	$(PYTEST) -m "not full" tests/integration tests/unit tests/fuzz $(ARGS)

test-all: setup .cache/integrations/made ## the whole test suite: 30 to 50 minutes on 2 cores
	$(PYTEST) tests/integration tests/unit tests/fuzz $(ARGS)

faults: setup ## runs whose processes are killed or hang, and disks that fill: what is said, left and resumed, 45 minutes
	$(PYTEST) tests/faults $(ARGS)

# Its short profile is in `make test`. ARGS="--only math http" for some targets, --json FILE for the counts.
FUZZ_SECONDS ?= 600
fuzz: setup ## random input for graders, readers, recipes and the retriever: FUZZ_SECONDS (600)
	$(BIN)/python -m tests.fuzz --seconds $(FUZZ_SECONDS) $(ARGS)

test-unit: setup ## what needs neither Ray nor vLLM
	$(PYTEST) tests/unit $(ARGS)

test-integration: setup ## training runs, engines and servers on this machine: minutes
	$(PYTEST) tests/integration $(ARGS)

# No setup: .venv's Python where there is one, else python3, or PYTHON=...; STAGES="a b" for some of them.
STAGES ?=
test-gpu: ## the stages that one GPU can run, one line per stage; without a GPU each is skipped (docs/gpu.md)
	@bash tests/gpu.sh $(STAGES)

# ARGS=--short for three cases, ARGS="pipeline two" for some; tests/software_gpu/README.md.
test-software-gpu: setup ## the CUDA builds on a GPU made of software: an hour on 2 cores, and 11 GB once
	$(BIN)/python -m tests.software_gpu $(ARGS)

# A fresh folder each time; ARGS="--only growth kk_generator" for some of them.
bench: setup ## the ratios of docs/performance.md again, beside the committed ones: under 10 minutes
	$(BIN)/python lab/bench/run.py --out out/bench $(ARGS)

# Environments of their own in .cache, for packages that nobody else needs.
.cache/%/made: requirements/%.lock
	rm -rf $(@D)
	$(or $(SG_PYTHON),$(shell command -v python3.11 || command -v python3)) -m venv $(@D)
	$(@D)/bin/python -m pip install --quiet --no-deps --no-compile --disable-pip-version-check \
	  --require-hashes -r $<
	touch $@

docs: .cache/docs/made ## the site, from docs/ into site/; a dead link or anchor fails
	NO_MKDOCS_2_WARNING=1 .cache/docs/bin/mkdocs build --strict
	@echo "open site/index.html"

# ARGS="--service osv" asks OSV instead of PyPI.
audit: .cache/tools/made ## known vulnerabilities of the locks, and their CycloneDX bills in out/sbom/
	.cache/tools/bin/python scripts/audit.py $(ARGS)

upgrade: ## newer versions in every lock, installed here (docs/dependencies.md says what to run then)
	scripts/lock.sh --upgrade
	scripts/check_cuda_lock.sh
	scripts/bootstrap.sh
	$(BIN)/python docs/make_licences.py

dist: .cache/tools/made ## the wheel and the source archive in dist/, checked
	rm -rf dist build
	.cache/tools/bin/python -m build --no-isolation
	.cache/tools/bin/twine check --strict dist/*
	.cache/tools/bin/check-wheel-contents dist/*.whl

kk: ## train on Knights and Knaves from nothing to report
	bash examples/scripts/train_grpo_sg_kk.sh

math: ## train on mathematics (without a GPU: arithmetic)
	bash examples/scripts/train_grpo_sg_math.sh

search: ## train on question answering with a search engine
	bash examples/scripts/train_grpo_sg_search.sh
