# Each target makes and fills .venv itself. Needs Python 3.11 or newer with venv; another interpreter:
#   make test PYTHON=python3.12
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# The JAX build for the CUDA version of the driver, when there is one: cuda12 or cuda13.
CUDA ?= $(shell nvidia-smi 2>/dev/null | sed -n 's/.*CUDA Version: *\([0-9]*\).*/cuda\1/p')
# Two test processes: most of the time goes to compiling, one program at a time.
PYTEST_WORKERS ?= 2
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check

.PHONY: quickstart test lint format clean help

help:
	@echo "make quickstart   train, evaluate, resume and sample a small model on local text"
	@echo "make test         run the test suite     (PYTEST_ARGS='tests/data -k merge' for a part)"
	@echo "make lint         style, format and type checks"
	@echo "make format       format the code"
	@echo "make clean        remove .venv and caches"

quickstart: $(VENV)/.installed
	$(BIN)/python -m jaxtron.quickstart $(QUICKSTART_ARGS)

test: $(VENV)/.installed-test
	$(BIN)/python -m pytest -n $(PYTEST_WORKERS) $(PYTEST_ARGS)

lint: $(VENV)/.installed-test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(VENV)/.installed-test
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:
	rm -rf $(VENV) .cache

$(VENV)/.installed: pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "jaxtron needs Python 3.11 or newer, $(PYTHON) is older: make PYTHON=..." >&2; exit 1; }
	$(PYTHON) -m venv $(VENV)
	$(PIP) --editable '.$(CUDA:%=[%])'
	touch $@

$(VENV)/.installed-test: $(VENV)/.installed
	$(PIP) --editable '.[test$(CUDA:%=,%)]'
	touch $@
