# Two commands do everything, set-up included, on a fresh machine: `make demo` and `make test`.
#   make demo               train four GNNs on real data: eager, torch.compile, gnncompile; one table, one plot
#   make test               lint, format, types, all tests with fewer variants, and a quick run of the demo
#   make quick              lint, types, and unit tests that need a minute: while you work
#   make test-all           all variants as well: before a release, and after a change of many rooms
#   make test-core          the tests of what depends on torch's internals, a part of all (`python -m tests.matrix`
#                           runs them under the oldest, the pinned and the newest torch)
#   make lint | format | clean
# Variables:
#   TORCH=2.12.1            another torch, in a virtual environment of its own (.venv-2.12.1)
#   LOWEST=1                with TORCH: the lowest version of everything else that gnncompile needs
#   PYTHON=python3.12       the interpreter that makes the virtual environment (default: the first supported one)
#   PIP_ARGS="..."          passed to every pip install (for example an index that offers CPU builds of torch)
#   DEMO_ARGS="--quick"     passed to the demo;  PYTEST_ARGS="-k gat" to pytest;  WORKERS=2 test processes

SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:

TORCH ?=
LOWEST ?=
PIP_ARGS ?=
DEMO_ARGS ?=
PYTEST_ARGS ?=
WORKERS ?= 2

# Kept apart from the recipe so that `make help` and `make clean` do not need a Python.
find_python = for p in python3 python3.13 python3.12 python3.11 python3.10; do \
	$$p -c 'import sys; sys.exit(not (3, 10) <= sys.version_info[:2] < (3, 14))' 2>/dev/null && echo $$p && break; done

VENV := .venv$(if $(TORCH),-$(TORCH))$(if $(LOWEST),-lowest)
PY := $(VENV)/bin/python

# The environment is built again when any of these changes, or when the checkout has moved.
HASH := $(shell { cat pyproject.toml constraints.txt; echo '$(TORCH)|$(LOWEST)|$(PIP_ARGS)|$(PYTHON)|$(CURDIR)'; } | cksum | tr ' ' '-')
STAMP := $(VENV)/.installed-$(HASH)

# Types are checked with the pinned torch only: the stubs of others differ.
ifeq ($(TORCH),)
CHECK_TYPES = $(PY) -m mypy
else
CHECK_TYPES = @echo 'mypy: skipped, types are checked with the pinned torch'
endif

# Without a GPU every Triton kernel is tested under Triton's interpreter.
NO_GPU := $(shell nvidia-smi -L >/dev/null 2>&1 || echo 1)
test quick test-all test-core: export TRITON_INTERPRET := $(if $(NO_GPU),1,$(TRITON_INTERPRET))
# Several test processes share the cores: threads that wait must not spin.
test quick test-all test-core: export OMP_WAIT_POLICY ?= PASSIVE

.PHONY: help setup demo test quick test-all test-core lint format clean

help:
	@sed -n '1,/^$$/s/^# \{0,1\}//p' $(firstword $(MAKEFILE_LIST))

setup: $(STAMP)

$(STAMP): pyproject.toml constraints.txt
	@python=$${PYTHON:-$$($(find_python))}; \
	if [ -z "$$python" ]; then echo "No Python 3.10 to 3.13 found: install one, or name it with PYTHON=..." >&2; exit 1; fi; \
	if ! [ -x $(PY) ]; then \
		echo "== $$($$python --version), virtual environment $(VENV)"; \
		$$python -m venv $(VENV) || { echo "No venv module: install your system's python3-venv package" >&2; exit 1; }; \
	fi
	@rm -f $(VENV)/.installed-*
	@if [ -n "$(TORCH)" ]; then \
		grep -vE '^(torch|triton|setuptools)==' constraints.txt > $(VENV)/constraints.txt; \
		case "$(TORCH)" in 2.11.*) \
			grep -v '^numpy==' $(VENV)/constraints.txt > $(VENV)/numpy.txt; \
			mv $(VENV)/numpy.txt $(VENV)/constraints.txt; \
			echo 'numpy<2.4  # the interpreter of triton 3.6, which torch 2.11 pins, fails with 2.4' >> $(VENV)/constraints.txt;; \
		esac; \
		echo 'torch==$(TORCH)' >> $(VENV)/constraints.txt; \
		if [ -n "$(LOWEST)" ]; then \
			$(PY) -m tests.matrix --lowest | sed 's/^torch==.*/torch==$(TORCH)/' > $(VENV)/constraints.txt; \
		fi; \
	else cp constraints.txt $(VENV)/constraints.txt; fi
	@echo "== installing into $(VENV) (minutes on a fresh machine, seconds afterwards)"
	$(PY) -m pip install --quiet --disable-pip-version-check $(PIP_ARGS) -c $(VENV)/constraints.txt -e '.[test,dev,bench,examples]'
	@touch $@

demo: $(STAMP)
	$(PY) examples/demo.py $(DEMO_ARGS)

test: lint
	$(PY) -m pytest -n $(WORKERS) --dist worksteal -m "not slow" $(PYTEST_ARGS)
	$(PY) examples/demo.py --quick

test-all: lint
	$(PY) -m pytest -n $(WORKERS) --dist worksteal $(PYTEST_ARGS)
	$(PY) examples/demo.py --quick

QUICK := cache_folder compat debug_dir edge_rows exc fuse_gemm_pairs gemm_epilogue inductor_region ir layout merge_linears \
	ops packaging padding_edges passes patches rematerialize reorder rooms self_loop_transforms testing transforms

quick: lint
	$(PY) -m pytest -q -n $(WORKERS) $(QUICK:%=tests/unit/test_%.py) tests/kernels/test_golden.py $(PYTEST_ARGS)

CORE := unit/test_compat unit/test_packaging e2e/test_end_to_end e2e/test_compiled_module e2e/test_inputs \
	unit/test_errors e2e/test_bad_input unit/test_caches unit/test_cache_folder unit/test_structure_cache \
	unit/test_layout kernels/test_cpp_kernels kernels/test_triton_kernels kernels/test_triton_hubs \
	kernels/test_triton_launch kernels/test_vjp e2e/test_double_backward kernels/test_dropout \
	e2e/test_dropout_layers e2e/test_recording e2e/test_train_step kernels/test_repeatable e2e/test_odd_layers \
	e2e/test_selections e2e/test_no_guard e2e/test_support

test-core: $(STAMP)
	$(PY) -m pytest -n $(WORKERS) $(CORE:%=tests/%.py) $(PYTEST_ARGS)

lint: $(STAMP)
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	$(CHECK_TYPES)

format: $(STAMP)
	$(PY) -m ruff check --fix .
	$(PY) -m ruff format .

clean:
	rm -rf .venv .venv-* out build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
