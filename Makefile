# Two commands to begin with: `make demo` and `make test`.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin

.PHONY: demo test soak check format bench clean

demo: $(VENV)/.installed
	$(BIN)/shoal train --workers 2 --epochs 6 --name demo

# Two tests at a time: most of them wait for processes. Folders and files stay together (conftest.py).
test: $(VENV)/.installed-dev
	$(BIN)/python -m pytest -n 2 --no-loadscope-reorder

# Slow, and each time other examples: for finding what `make test` does not.
soak: $(VENV)/.installed-dev
	$(BIN)/python -m pytest --hypothesis-profile=soak --timeout=1200 tests/unit/wire tests/contract

check: $(VENV)/.installed-dev
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports

format: $(VENV)/.installed-dev
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

bench: $(VENV)/.installed-dev
	$(BIN)/python benchmarks/data_parallel/run.py
	$(BIN)/python benchmarks/wire/run.py
	$(BIN)/python benchmarks/pipeline/run.py
	$(BIN)/python benchmarks/boss/run.py
	$(BIN)/python benchmarks/launch/run.py

$(VENV)/bin/python:
	$(PYTHON) -m venv $(VENV)

$(VENV)/.installed: $(VENV)/bin/python pyproject.toml constraints.txt
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e .
	@touch $@

$(VENV)/.installed-dev: $(VENV)/bin/python pyproject.toml constraints.txt
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e ".[dev]"
	@touch $@ $(VENV)/.installed

clean:
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
