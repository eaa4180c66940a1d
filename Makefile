# `make` lists what can be done. Everything runs from .venv, which is made when it is needed.
SHELL := bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
BIN := .venv/bin
# One worker for each core; the lab's tests share one lab and go one after the other.
PARALLEL := --numprocesses logical
# On labs of their own, without ranks and without a clock that matters: two at a time. The others want the cores alone.
APART := $(foreach name,tuning encryption isolated isolated_rpm units driver driver_debian driver_bundle driver_bundle_rpm store gateway,tests/lab/test_$(name).py)
export PYTHON
# Hundreds of processes import this checkout in a run of the tests: byte code is kept, whatever the environment says.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: help demo test test-all unit sim browser-test lab-test faults faults-stand-in soak lint format bench-apply bench-gateway bench-balance bench-weights weights-faults venv constraints clean distclean

help: ## List the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-15s %s\n", $$1, $$2 }' Makefile

demo: .venv/.made ## Serve a tiny model on two hosts of the lab, and read a completion (root; Debian or Ubuntu)
	@scripts/bootstrap.sh system
	@$(BIN)/ppdeploy demo

test: LAB := -m "not long" ## What a change must pass: lint, unit and golden tests, the page in a browser, the lab's (root)
test test-all: lint
	@scripts/bootstrap.sh system
	@scripts/bootstrap.sh browser
	@scripts/bootstrap.sh rpm
	@$(BIN)/pytest $(PARALLEL) tests/unit tests/sim tests/golden
	@$(BIN)/pytest ppdeploy_handoff/tests
	@$(BIN)/pytest tests/browser
	@$(BIN)/pytest $(LAB) --numprocesses 2 --dist loadfile $(APART)
	@$(BIN)/pytest $(LAB) tests/lab $(addprefix --ignore=,$(APART))

test-all: ## The same with the tests marked `long` (root; some twenty minutes more)

unit: .venv/.made ## The tests that need no root and no network
	@$(BIN)/pytest $(PARALLEL) tests/unit tests/sim tests/golden
	@$(BIN)/pytest ppdeploy_handoff/tests

sim: .venv/.made ## 5,000 stories of gangs under faults (about 20 minutes of a core); the tests tell 80
	@PPDEPLOY_SIM_RUNS=5000 $(BIN)/pytest tests/sim/test_faults.py

browser-test: .venv/.made ## The plan's page in Chromium, on a phone and on a desk (Debian: installs chromium, root)
	@scripts/bootstrap.sh browser
	@$(BIN)/pytest tests/browser

lab-test: .venv/.made ## The tests on real hosts of the lab (root)
	@scripts/bootstrap.sh system
	@scripts/bootstrap.sh rpm
	@$(BIN)/pytest --numprocesses 2 --dist loadfile $(APART)
	@$(BIN)/pytest tests/lab $(addprefix --ignore=,$(APART))

faults: .venv/.made ## Every fault of docs/gang.md against real vLLM ranks, and the baseline (root; about 50 minutes)
	@scripts/bootstrap.sh faults
	@PPDEPLOY_FAULTS=vllm $(BIN)/pytest -s tests/faults

faults-stand-in: .venv/.made ## The same against stand-ins that fail as vLLM does (root; about 12 minutes)
	@scripts/bootstrap.sh faults
	@$(BIN)/pytest -s tests/faults

soak: .venv/.made ## Half an hour of a random fault each minute under load, with real vLLM ranks (root)
	@scripts/bootstrap.sh system
	@$(BIN)/python -m tests.faults.soak

lint: .venv/.made ## ruff, mypy, yamllint, shellcheck, ansible-lint
	@scripts/lint.sh

format: .venv/.made ## Lay out the Python code
	@$(BIN)/ruff check --quiet --fix --select I .
	@$(BIN)/ruff format --quiet .

bench-apply: .venv/.made ## Time of an apply that changes nothing, against Ansible's own setup module, on the lab
	@$(BIN)/python scripts/bench_apply.py

bench-gateway: .venv/.made ## 5,000 streams of 200 clients through the gateway, beside as many without it (root; 3 minutes)
	@scripts/bootstrap.sh system
	@$(BIN)/python -m tests.lab.bench_gateway

bench-balance: .venv/.made ## What a gateway's way to balance is worth to the prefix cache, with real ranks (root; 6 minutes)
	@scripts/bootstrap.sh system
	@$(BIN)/python -m tests.lab.bench_balance

bench-weights: .venv/.made ## Time of 2 GB of weights to three hosts over 1 Gbit/s, against scp (root; needs idle cores)
	@scripts/bootstrap.sh system
	@$(BIN)/python -m tests.lab.bench_weights

weights-faults: .venv/.made ## A transfer of weights killed and cut at twenty random points (root; about 15 minutes)
	@scripts/bootstrap.sh system
	@PPDEPLOY_WEIGHTS_POINTS=20 $(BIN)/pytest tests/lab/test_store.py

venv: .venv/.made ## Make or refresh .venv

.venv/.made: pyproject.toml constraints.txt hatch_build.py
	@scripts/bootstrap.sh venv

constraints: .venv/.made ## Resolve constraints.txt anew, to the newest releases
	@$(BIN)/uv pip compile pyproject.toml --quiet --upgrade --extra test --universal --python-version 3.11 \
	  --no-header --no-annotate --no-emit-index-url --no-emit-find-links --output-file constraints.txt

clean: ## Take the lab down; remove build results and the tools' caches (.venv and the download cache stay)
	@if [ -x $(BIN)/ppdeploy ] && [ "$$(id -u)" -eq 0 ]; then $(BIN)/ppdeploy lab down; \
	  elif [ -d inventory/lab ]; then echo "error: a lab may be up, and taking it down needs root: sudo make clean" >&2; exit 1; fi
	@rm -rf build dist .ansible .hypothesis .mypy_cache .pytest_cache .ruff_cache
	@find . -name __pycache__ -not -path './.venv/*' -prune -exec rm -rf {} +

distclean: clean ## As clean, and remove .venv
	@rm -rf .venv
