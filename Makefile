# A newcomer needs `make train` and `make test`; each target sets up what it needs.
PYTHON ?= python3
BIN := .venv/bin
STAMP := .venv/.installed
KLAMP := $(BIN)/klamp

.PHONY: setup browser train train-contrast experiments test test-slow check lint types format bench clean

setup: $(STAMP)

$(STAMP): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e ".[train,test,dev]"
	touch $(STAMP)

# The built-in default; options of `klamp train` go into TRAIN (make train TRAIN="--threads 2").
train: setup
	$(KLAMP) train $(TRAIN)

# The same run with and without the KL, overlaid in one report.
train-contrast: setup
	$(BIN)/python -m experiments.contrast

# Many seeds of every scenario: hours. One of them: make experiments ONLY="outliers difficulty".
experiments: setup
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e ".[experiments]"
	OMP_NUM_THREADS=1 $(BIN)/python -m experiments.run $(ONLY)

# The report's tests want a browser: Debian's, where this user may install it; else they are skipped.
browser:
	@command -v chromium >/dev/null || command -v google-chrome >/dev/null || \
	if [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null; then \
	  timeout 600 sh -c '(apt-get -qq install -y chromium || \
	    (apt-get -qq update && apt-get -qq install -y chromium)) >/dev/null 2>&1' || true; fi

test: setup browser
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q

test-slow: setup
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -m slow

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: setup
	$(BIN)/basedpyright

check: lint types test

format: setup
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# Peers from the package index come with the extra. One subject alone: make bench ONLY="gae head".
bench: setup
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e ".[bench]"
	OMP_NUM_THREADS=1 $(BIN)/python -m benchmarks.run $(ONLY)

clean:
	rm -rf .venv .pytest_cache .ruff_cache .hypothesis
