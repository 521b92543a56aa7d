# The two commands of the README, and what developers use besides. Everything stays inside the checkout.
VENV := .venv
PY := $(VENV)/bin/python
TORCH := torch==2.13.0
STAMP := $(VENV)/.installed
# Some virtual machines announce AMX and then kill whoever uses it (bf16 matrix products end in SIGILL).
export ONEDNN_MAX_CPU_ISA ?= AVX512_CORE_FP16

.DEFAULT_GOAL := help
.PHONY: help train test test-full lint types format clean

help:  ## show this list
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 14

# torch first and exact: a range would let pip choose a build with gigabytes of CUDA packages.
$(STAMP): pyproject.toml requirements/test.txt
	@test -x $(PY) || python3 -m venv $(VENV)
	$(PY) -m pip install --quiet --disable-pip-version-check $(TORCH)
	$(PY) -m pip install --quiet --disable-pip-version-check -r requirements/test.txt
	$(PY) -m pip install --quiet --disable-pip-version-check --no-build-isolation --no-deps -e .
	@touch $@

lint: $(STAMP)  ## ruff: lint and format
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .

types: $(STAMP)  ## mypy, strict on the pure core
	$(PY) -m mypy

format: $(STAMP)  ## let ruff rewrite what it can
	$(PY) -m ruff check --fix .
	$(PY) -m ruff format .

test: lint types  ## set up, then lint, types and the test suite
	$(PY) -m pytest

test-full: lint types  ## the same with every matrix in full (long)
	$(PY) -m pytest -m "not gpu" --timeout 1800

clean:  ## remove what the set-up and the tests made
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache .hypothesis build dist
