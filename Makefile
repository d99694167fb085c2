SHELL := /bin/bash
.DEFAULT_GOAL := help
.PHONY: release test-wheel help setup setup-dev demo up down sbom test test-fast test-transformers test-jax-privacy test-tpu test-gpu test-ray test-presets mutants check audit format picture docs bench bench-opacus bench-real lock clean
# Without bytecode, every Airflow process compiles Airflow again.
unexport PYTHONDONTWRITEBYTECODE PYTHONHOME VIRTUAL_ENV
export TF_CPP_MIN_LOG_LEVEL ?= 2
export TF_USE_LEGACY_KERAS ?= 1
export PYTHONPATH := $(CURDIR)

task := .venv/task/bin
orchestrator := .venv/orchestrator/bin
environments := scripts/python3 scripts/environments.py

help: ## show this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## /{printf "  make %-22s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

setup: ## set up both environments from the hash-pinned locks, with TensorFlow for this machine's GPU or TPU
	@$(environments) ensure task orchestrator

setup-dev: ## the same, with what the checks and tests need
	@$(environments) ensure task-dev orchestrator-dev

demo: setup ## run the whole job on made-up notes through Airflow, and show what came out
	@./confide demo

up: setup ## serve the Airflow and MLflow pages on this machine, without Docker
	@./confide up

down: ## stop what `make up` started
	@./confide down

test: setup-dev ## run all tests, each half in its own environment
	@scripts/test

test-fast: setup-dev ## the tests that a change usually breaks, in less than a minute
	@scripts/test --fast

test-transformers: setup-dev ## model folders against real `transformers`, both ways, in an environment of its own
	@$(environments) ensure transformers
	$(task)/python -m pytest tests/dp_core/models/test_transformers.py tests/dp_core/vocabulary/test_tokenizer_files.py

test-jax-privacy: setup-dev ## correlated noise against real jax_privacy, in an environment of its own
	@$(environments) ensure jax-privacy
	$(task)/python -m pytest tests/dp_core/privacy/test_jax_privacy.py

test-tpu: setup-dev ## a job on a mocked TPU, with TensorFlow for TPUs, in an environment of its own
	@$(environments) ensure task-tpu
	$(task)/python -m pytest tests/e2e/test_accelerator_environments.py -k tpu

test-gpu: setup-dev ## a job on the processor, with TensorFlow for GPUs, in an environment of its own
	@$(environments) ensure task-gpu
	$(task)/python -m pytest tests/e2e/test_accelerator_environments.py -k gpu

test-wheel: ## the built package in a new environment: commands, names, and a private model of twenty strings
	@$(environments) ensure transformers
	@scripts/python3 scripts/check_wheel.py $(CURDIR)/.venv/transformers/bin/python

on_ray = $(shell grep -rlF pytest.mark.ray tests --include='test_*.py')

test-ray: setup-dev ## shards and hosts on Ray workers of this machine, which are killed
	$(task)/python -m pytest $(on_ray) -m ray

SHARE ?=
share := $(if $(SHARE),--share $(SHARE))

test-presets: setup-dev ## every experiment's tiny preset, run to its end; SHARE=today/3 for a third
	$(task)/python -m pytest tests/e2e/test_tiny_presets.py -m presets $(share)

mutants: setup-dev ## plant known bugs and see that tests fail; ONLY=a room or a part of a name, SHARE=today/12
	@$(task)/python scripts/mutants.py --only "$(ONLY)" $(share)

check: setup-dev ## lint, types, import contracts, known vulnerabilities of what is locked
	$(task)/ruff check .
	$(task)/ruff format --check .
	$(task)/mypy
	$(task)/lint-imports
	@$(environments) ensure audit
	@scripts/audit

audit: ## ask about known vulnerabilities; fails, too, where nobody can be asked
	@$(environments) ensure audit
	@scripts/audit --strict

sbom: ## bills of materials of the compose stack's images, into the folder sbom (needs the images)
	@docker/sbom-of-images sbom

release: ## sdist, wheel, their requirements and bill of materials, into the folder dist
	@scripts/python3 scripts/release.py dist

format: setup-dev ## format the sources
	$(task)/ruff check --fix .
	$(task)/ruff format .

picture: setup-dev ## draw the rooms and their imports into docs/architecture.md
	$(task)/python scripts/architecture.py

docs: setup ## build the documentation as a site in build/site, strict, with links checked and notebooks executed
	@$(environments) ensure docs
	$(task)/python scripts/reference_pages.py build/reference
	.venv/docs/bin/python scripts/notebooks.py build/notebooks
	NO_MKDOCS_2_WARNING=1 .venv/docs/bin/mkdocs build

bench: setup-dev ## measure, side by side in one run; results in benchmarks/results
	@for file in benchmarks/bench_*.py; do echo "$$file"; $(task)/python "$$file" || exit 1; done

bench-opacus: ## the same with Opacus beside it, in an environment of its own
	@$(environments) ensure bench
	@$(MAKE) --no-print-directory bench

bench-real: setup-dev ## private labels and private notes with a real public model, on the data of CONFIDE_DATA (OPTIONS="--minutes 60")
	@$(environments) ensure bench-real
	$(task)/python -m benchmarks.real_model $(OPTIONS)

lock: ## resolve the dependency groups of pyproject.toml into requirements/*.txt (OPTIONS=--upgrade for newer versions)
	@$(environments) lock $(OPTIONS)

clean: ## remove caches (not .venv, not .confide)
	rm -rf .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache build dist
	find . -name __pycache__ -not -path './.venv/*' -prune -exec rm -rf {} +
