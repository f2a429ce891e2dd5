# Two commands do everything on a fresh machine with Python 3.11 or newer: `make demo`, `make test`.
# Each sets up .venv first where that is needed. `PYTHON=python3.12 make test` picks another Python.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
VERSION := $(shell $(PYTHON) -c 'import sys; print("%d.%d" % sys.version_info[:2])')
STAMP := $(VENV)/.installed-$(VERSION)

.PHONY: help setup demo test test-vllm check format docs bench-table hooks clean

help:  ## Show this list
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 14

setup: $(STAMP)  ## Make .venv with the locked versions and hotset itself, editable

# Rebuilt from nothing only for another Python; otherwise pip changes what the lock changed.
$(STAMP): requirements.lock pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	  echo "hotset needs Python 3.11 or newer, \`$(PYTHON)\` is $(VERSION);" \
	       "name another one: PYTHON=python3.12 make ..." >&2; exit 1; }
	test -x $(BIN)/python$(VERSION) || $(PYTHON) -m venv --clear $(VENV)
	$(BIN)/python -m pip install --requirement requirements.lock
	$(BIN)/python -m pip install --no-deps --no-build-isolation --editable .
	touch $@

demo: $(STAMP)  ## Generate text with the embedded model on the CPU
	$(BIN)/hotset generate pocket --device cpu --max-tokens 80 --temperature 0.7 --top-p 0.9 --seed 1 \
	  "The history of the city begins"

# Two processes of one thread each: tensors of tests are too small to share among threads.
test: $(STAMP)  ## Run the tests; ARGS="-k plan" is handed to pytest
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest --numprocesses 2 $(ARGS)

# An environment of its own, as vLLM and hotset ask for versions that exclude each other.
VLLM := .venv-vllm
VLLM_STAMP := $(VLLM)/.installed-$(VERSION)

$(VLLM_STAMP): requirements-vllm.txt pyproject.toml
	test -x $(VLLM)/bin/python$(VERSION) || $(PYTHON) -m venv --clear $(VLLM)
	$(VLLM)/bin/python -m pip install --no-deps --requirement requirements-vllm.txt
	$(VLLM)/bin/python -m pip install --no-deps --no-build-isolation --editable .
	touch $@

test-vllm: $(VLLM_STAMP)  ## Run the tests of the vLLM plugin inside vLLM, on a CPU (a quarter of an hour)
	$(VLLM)/bin/python -m pytest tests/integrations $(ARGS)

check: $(STAMP)  ## Lint, formatting, types, import direction, freshness of generated pages
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy
	$(BIN)/python scripts/docs.py --check
	$(BIN)/python scripts/bench_table.py --check
	$(BIN)/python -m pytest tests/unit/test_imports.py tests/unit/test_repository.py

format: $(STAMP)  ## Let ruff fix and format what it can
	$(BIN)/ruff check --fix
	$(BIN)/ruff format

docs: $(STAMP)  ## Write docs/reference/ anew from the code
	$(BIN)/python scripts/docs.py

bench-table: $(STAMP)  ## Write the tables of benchmarks/README.md and README.md from the rows
	$(BIN)/python scripts/bench_table.py

hooks: $(STAMP)  ## Check before every commit
	$(BIN)/pre-commit install

clean:  ## Remove .venv and caches
	rm -rf $(VENV) $(VLLM) .mypy_cache .ruff_cache .pytest_cache .hypothesis build
