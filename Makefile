# Each target does its own set-up in .venv; a stamp file there remembers what was installed.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin

.PHONY: quickstart test test-all test-files lint clean

quickstart: $(VENV)/installed-experiments
	$(BIN)/python -m experiments.train --config=configs/quickstart.py --workdir=runs/quickstart
	@echo "The same updates once more, from the same warm-up, with a naive sampler: this is what a gap looks like."
	$(BIN)/python -m experiments.train --config=configs/quickstart.py --workdir=runs/quickstart-naive \
	  --config.init_from=runs/quickstart --config.sft.steps=0 --config.sampler.engine=naive --config.plot_beside=runs/quickstart

test: lint test-files
	$(BIN)/python -m pytest -n 2 --dist loadgroup --no-loadscope-reorder

test-all: lint test-files
	$(BIN)/python -m pytest -n 2 --dist loadgroup --no-loadscope-reorder -m "not gpu" --optimized

# Files that some tests need and that are in no Python package: into the user's cache, or $MINITE_JAX_TEST_FILES. Without them
# those tests are skipped.
test-files: $(BIN)/python
	@$(BIN)/python tests/text/qwen3_files.py

lint: $(VENV)/installed-dev
	$(BIN)/ruff check .

clean:
	rm -rf $(VENV)

# A new setup.cfg or pyproject.toml makes the stamps old, and only then is anything installed again.
$(VENV)/installed-%: setup.cfg pyproject.toml | $(BIN)/python
	$(BIN)/python -m pip install --quiet --editable '.[$*]'
	@touch $@

$(BIN)/python:
	@command -v $(PYTHON) >/dev/null || { \
	  echo "minite_jax needs Python 3.11 or newer, but '$(PYTHON)' was not found: install it, or name another with PYTHON=..."; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	  echo "minite_jax needs Python 3.11 or newer, but '$(PYTHON)' is $$($(PYTHON) --version): name a newer one with PYTHON=..."; exit 1; }
	$(PYTHON) -m venv $(VENV)
