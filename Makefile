# Everything a newcomer needs is `make test`; each target sets up what it needs.
PYTHON ?= python3
BIN := .venv/bin
STAMP := .venv/.installed
export OMP_NUM_THREADS ?= 1

.PHONY: setup test test-slow check lint types format bench clean

setup: $(STAMP)

$(STAMP): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e ".[test,dev]"
	touch $(STAMP)

test: setup
	$(BIN)/python -m pytest -q

test-slow: setup
	$(BIN)/python -m pytest -q -m slow

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: setup
	$(BIN)/basedpyright

check: lint types test

format: setup
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# A training process keeps its memory; without these, page faults of fresh outputs are measured.
bench: setup
	MALLOC_TRIM_THRESHOLD_=4294967296 MALLOC_MMAP_THRESHOLD_=4294967296 \
	$(BIN)/python -m benchmarks.run

clean:
	rm -rf .venv .pytest_cache .ruff_cache .hypothesis
