# Each target does its own set-up: `make train` or `make test` is all that a fresh clone needs.

BIN := .venv/bin
ARGS ?=
# Test processes side by side; a file's tests stay in one. For a debugger: make test WORKERS=0
WORKERS ?= 2

.PHONY: train test setup lint clean

train: setup
	$(BIN)/python examples/sort/prepare.py
	$(BIN)/ratchet train examples/sort/sort.yaml
	$(BIN)/python examples/sort/evaluate.py

# Spinning OpenMP threads starve each other on shared cores; nothing under test may call home.
test: export OMP_WAIT_POLICY = PASSIVE
test: export HF_HUB_OFFLINE = 1
test: export DO_NOT_TRACK = true
test: export MLFLOW_DISABLE_TELEMETRY = true
test: export PREFECT_SERVER_ANALYTICS_ENABLED = false
test: export RAY_USAGE_STATS_ENABLED = 0
test: setup
	$(BIN)/python -m pytest -n $(WORKERS) --dist loadfile $(ARGS)

setup:
	@scripts/setup.sh

lint: setup
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy

# Removes what set-up and tools made; runs/ holds work and stays.
clean:
	rm -rf .venv build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
