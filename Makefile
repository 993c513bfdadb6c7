# Two commands, each enough by itself on a fresh clone: `make demo` and `make test`.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed
export OMP_NUM_THREADS ?= 1
export PIP_DISABLE_PIP_VERSION_CHECK := 1

.PHONY: demo test lint types licences pytest clean

demo: $(INSTALLED)
	$(BIN)/kernel-agent --file-path examples/layernorm.py --topk 4

test: lint types licences pytest

$(INSTALLED): pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10) and "kernel-agent needs Python 3.10 or newer; set PYTHON=python3.x")'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet -c constraints.txt torch==2.13.0
	$(BIN)/python -m pip install --quiet -c constraints.txt -e '.[dev]'
	@touch $@

lint: $(INSTALLED)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(INSTALLED)
	$(BIN)/mypy

licences: $(INSTALLED)
	$(BIN)/python bench/third_party_licenses.py --check

pytest: $(INSTALLED)
	$(BIN)/pytest -n 2 --dist loadfile

clean:
	rm -rf $(VENV) generated build dist
