# `make` lists what can be done. Everything runs from .venv, which is made when it is needed.
SHELL := bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
BIN := .venv/bin
# One worker for each core; the lab's tests share one lab and go one after the other.
PARALLEL := --numprocesses logical
export PYTHON

.PHONY: help demo test unit sim browser-test lab-test faults faults-stand-in soak lint format bench-apply venv constraints clean distclean

help: ## List the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-15s %s\n", $$1, $$2 }' Makefile

demo: .venv/.made ## Serve a tiny model on two hosts of the lab, and read a completion (root; Debian or Ubuntu)
	@scripts/bootstrap.sh system
	@$(BIN)/ppdeploy demo

test: lint ## Everything: lint, unit and golden tests, the plan's page in a browser, and the lab's (root)
	@scripts/bootstrap.sh system
	@scripts/bootstrap.sh browser
	@$(BIN)/pytest $(PARALLEL) tests/unit tests/sim tests/golden
	@$(BIN)/pytest tests/browser
	@$(BIN)/pytest tests/lab

unit: .venv/.made ## The tests that need no root and no network
	@$(BIN)/pytest $(PARALLEL) tests/unit tests/sim tests/golden

sim: .venv/.made ## 5,000 stories of gangs under faults (about 20 minutes of a core); the tests tell 80
	@PPDEPLOY_SIM_RUNS=5000 $(BIN)/pytest tests/sim/test_faults.py

browser-test: .venv/.made ## The plan's page in Chromium, on a phone and on a desk (Debian: installs chromium, root)
	@scripts/bootstrap.sh browser
	@$(BIN)/pytest tests/browser

lab-test: .venv/.made ## The tests on real hosts of the lab (root)
	@scripts/bootstrap.sh system
	@$(BIN)/pytest tests/lab

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
