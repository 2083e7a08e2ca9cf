# Every target sets itself up: the stamp .venv/.installed is remade when a dependency list changes.
# python3.11 is what constraints.txt was made for; asking it to run skips version-manager shims that exist but fail.
PYTHON ?= $(shell python3.11 -c 'import sys; print(sys.executable)' 2>/dev/null || command -v python3)
BIN := .venv/bin
STAMP := .venv/.installed

.PHONY: train test lint types setup clean

train: $(STAMP)
	$(BIN)/lsg demo

# One thread a worker: two workers that each take every core slow each other down.
test: $(STAMP)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(STAMP)
	$(BIN)/mypy

setup: $(STAMP)

# torch first and alone, so that its build is settled by the constraint before anything that depends on it is resolved.
$(STAMP): pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install -c constraints.txt torch
	$(BIN)/python -m pip install -c constraints.txt -e '.[all,dev]'
	touch $@

# Leaves runs/ (results) and .venv (minutes to rebuild; remove it by hand).
clean:
	rm -rf build dist .pytest_cache .ruff_cache .mypy_cache .hypothesis
	find . -path ./.venv -prune -o -type d \( -name __pycache__ -o -name '*.egg-info' \) -prune -exec rm -rf {} +
