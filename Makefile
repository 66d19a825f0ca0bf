# make demo: sets up, then takes the example checkpoint through every command and ends in a summary table.
# make test: sets up, then lint, types and tests.

PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready

.PHONY: setup demo test lint types unit clean

setup: $(READY)

# PyTorch comes first and pinned: a plain dependency would resolve to the newest CUDA build, several gigabytes.
# tensorrt-stubs asks for TensorRT itself, which only a GPU machine needs: it is installed without dependencies.
$(READY): pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet torch==2.13.0
	$(BIN)/pip install --quiet --editable '.[test]'
	$(BIN)/pip install --quiet --no-deps tensorrt-stubs==10.13.0.35.1
	touch $@

demo: setup
	$(BIN)/python examples/demo.py

test: lint types unit

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: setup
	$(BIN)/mypy

unit: setup
	$(BIN)/pytest -n 2

clean:
	rm -rf $(VENV) demo-output
