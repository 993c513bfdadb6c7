# Two commands, each enough by itself on a fresh clone: `make demo` and `make test`.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed
export OMP_NUM_THREADS ?= 1
export PIP_DISABLE_PIP_VERSION_CHECK := 1

# The IR is read on the oldest and the newest supported Triton too, each in a virtual environment of its own; 3.9 needs Python 3.11.
OLDEST_TRITON := 3.6.0
NEWEST_TRITON := 3.9.0
NEWER_PYTHON ?= $(shell for p in $(PYTHON) python3.14 python3.13 python3.12 python3.11; do \
	$$p -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && echo $$p && break; done)

.PHONY: demo demo-model test lint types licences pytest tritons oldest newest clean

# Offline: the compiler derives, the gate proves. A key in the environment changes nothing.
demo: $(INSTALLED)
	$(BIN)/kernel-agent --file-path examples/layernorm.py --backend compiler --topk 4
	$(BIN)/kernel-agent --file-path examples/attention.py --backend compiler --topk 4

# The same forwards as a model wrote their backwards: recorded replies through the real gate.
demo-model: $(INSTALLED)
	$(BIN)/kernel-agent --file-path examples/layernorm.py --backend replay
	$(BIN)/kernel-agent --file-path examples/attention.py --backend replay

test: lint types licences pytest tritons

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

tritons: oldest newest

oldest: .venv-triton-$(OLDEST_TRITON)/.installed
	.venv-triton-$(OLDEST_TRITON)/bin/python -m pytest -n 2 --dist loadfile test/ir test/corpus

ifeq ($(NEWER_PYTHON),)
newest:
	@echo 'Triton $(NEWEST_TRITON) needs Python 3.11 or newer, and none is on the PATH: the IR tests do not run on it here.'
else
newest: .venv-triton-$(NEWEST_TRITON)/.installed
	.venv-triton-$(NEWEST_TRITON)/bin/python -m pytest -n 2 --dist loadfile test/ir test/corpus
endif

.venv-triton-$(OLDEST_TRITON)/.installed: PY = $(PYTHON)
.venv-triton-$(NEWEST_TRITON)/.installed: PY = $(NEWER_PYTHON)
# torch's CPU wheel does not ask for a Triton, so any of them goes beside it.
.venv-triton-%/.installed: constraints.txt
	$(PY) -m venv $(@D)
	grep -v '^triton' constraints.txt > $(@D)/constraints.txt
	$(@D)/bin/python -m pip install --quiet -c $(@D)/constraints.txt torch==2.13.0
	$(@D)/bin/python -m pip install --quiet --no-deps triton==$*
	$(@D)/bin/python -m pip install --quiet -c $(@D)/constraints.txt numpy pydantic psutil pytest pytest-timeout pytest-xdist
	@touch $@

clean:
	rm -rf $(VENV) .venv-triton-* generated build dist
