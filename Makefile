# The two commands of the README, and what developers use besides. Everything stays inside the checkout.
VENV := .venv
PY := $(VENV)/bin/python
TORCH := torch==2.13.0
STAMP := $(VENV)/.installed
# Some virtual machines announce AMX and then kill whoever uses it (bf16 matrix products end in SIGILL).
export ONEDNN_MAX_CPU_ISA ?= AVX512_CORE_FP16
# Where the environment forbids Python to keep what it has compiled, every process would compile torch again, for seconds.
export PYTHONDONTWRITEBYTECODE :=

.DEFAULT_GOAL := help
.PHONY: help train test test-full test-programs test-clients test-swift test-gpu test-hosts test-slurm test-ray test-object-store deepspeed-suite lint types format clean bench-env bench-carry readme-tables models-page errors-page architectures soak

help:  ## show this list
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 16

# torch first and exact: a range would let pip choose a build with gigabytes of CUDA packages. Without byte-compiling:
# Python does it for the modules that are imported, a fraction of all.
$(STAMP): pyproject.toml requirements/test.txt
	@test -x $(PY) || python3 -m venv $(VENV)
	$(PY) -m pip install --quiet --disable-pip-version-check --no-compile $(TORCH)
	$(PY) -m pip install --quiet --disable-pip-version-check --no-compile -r requirements/test.txt
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

train: $(STAMP)  ## set up, then train a small GPT on two processes under zero3 (ARGS="--steps 1400" and the like)
	@$(PY) -m shardwise train $(ARGS)

# Three at a time on two cores: many tests are one process, or wait for others.
test: lint types  ## set up, then lint, types and the test suite
	$(PY) -m pytest -n 3 --dist worksteal

test-full: lint types  ## the same with every matrix in full (long)
	$(PY) -m pip install --quiet --disable-pip-version-check -r requirements/full.txt
	$(PY) -m pytest -m "not gpu" --timeout 1800

test-programs: $(STAMP)  ## whole programs, started, stopped and killed as users do (minutes)
	$(PY) -m pytest -m programs

test-clients: $(STAMP)  ## programs that use DeepSpeed: Trainer, Accelerate, PEFT, TRL, Lightning (long)
	$(PY) -m pip install --quiet --disable-pip-version-check -r requirements/clients.txt
	$(PY) -m pytest tests/clients -m ""

# With the torch that sees the GPU: GPU_PYTHON=python3 for one that is installed already.
GPU_PYTHON := $(PY)
GPU_TESTS = PYTHONPATH=$(CURDIR)/src:$(CURDIR)/tests$${PYTHONPATH:+:$$PYTHONPATH} $(GPU_PYTHON) -m pytest -o addopts= -v -m "gpu and not full" --timeout 300
test-gpu:  ## the tests that need a CUDA device, twelve at a time; clients file by file (ARGS="-m gpu": every matrix in full)
	$(GPU_TESTS) -n 12 --dist worksteal $(wildcard tests/test_*gpu.py tests/*/test_*gpu.py) $(ARGS)
	$(GPU_TESTS) -n 3 --dist loadfile tests/clients $(ARGS)

SWIFT := .swift-env
test-swift: $(SWIFT)/.installed  ## the same for ms-swift, in an environment of its own (long)
	PYTHONPATH=src $(SWIFT)/bin/python -m pytest -m swift tests/clients/test_swift.py

$(SWIFT)/.installed: requirements/swift.txt
	@test -x $(SWIFT)/bin/python || python3 -m venv $(SWIFT)
	$(SWIFT)/bin/python -m pip install --quiet --disable-pip-version-check $(TORCH)
	$(SWIFT)/bin/python -m pip install --quiet --disable-pip-version-check --no-deps -r requirements/swift.txt
	@touch $@

# These start real hosts, clusters and links on this machine, print what they did, and remove them again.
test-hosts: $(STAMP)  ## lost and slow hosts, elastic torchrun, between network namespaces (root, iproute2; minutes)
	$(PY) -m pytest -rs -m hosts tests/hosts

test-slurm: $(STAMP)  ## srun, sbatch and a requeue in a cluster of two nodes (root, Debian's slurm-wlm and munge; minutes)
	$(PY) -m pytest -rs -m slurm tests/slurm

RAY := .ray-env
test-ray: $(RAY)/.installed  ## Ray Train, in an environment of its own (minutes)
	PYTHONPATH=src $(RAY)/bin/python -m pytest -rs -m ray tests/clients/test_ray.py

$(RAY)/.installed: requirements/ray.txt
	@test -x $(RAY)/bin/python || python3 -m venv $(RAY)
	$(RAY)/bin/python -m pip install --quiet --disable-pip-version-check $(TORCH)
	$(RAY)/bin/python -m pip install --quiet --disable-pip-version-check --no-deps -r requirements/ray.txt
	@touch $@

OBJECTS := .objects-env
test-object-store: $(OBJECTS)/.installed  ## checkpoints in an S3 server of their own (moto), in an environment of its own
	PYTHONPATH=src:tests $(OBJECTS)/bin/python tests/support/with_s3.py -m pytest -n 0 tests/test_object_store.py $(ARGS)

$(OBJECTS)/.installed: requirements/object_store.txt $(STAMP)
	@test -x $(OBJECTS)/bin/python || python3 -m venv $(OBJECTS)
	$(PY) -c "import sysconfig; print('import site; site.addsitedir(%r)' % sysconfig.get_paths()['purelib'])" \
	  > $$($(OBJECTS)/bin/python -c "import sysconfig; print(sysconfig.get_paths()['purelib'])")/ours.pth
	$(OBJECTS)/bin/python -m pip install --quiet --disable-pip-version-check --no-deps -r requirements/object_store.txt
	@touch $@

SUITE := ../shared/deepspeed_suite
deepspeed-suite: $(STAMP)  ## DeepSpeed's own unit tests against `import deepspeed` (SUITE=folder; long)
	$(PY) tests/clients/deepspeed_suite.py $(SUITE) $(ARGS)

# Beside ours and on top of it: the same torch to the byte, so that ratios compare systems and not builds.
BENCH := .bench-env
bench-env: $(BENCH)/.installed  ## .bench-env with DeepSpeed, for `shardwise compare --peers deepspeed`

$(BENCH)/.installed: requirements/bench.txt $(STAMP)
	@test -x $(BENCH)/bin/python || python3 -m venv $(BENCH)
	$(PY) -c "import sysconfig; print('import site; site.addsitedir(%r)' % sysconfig.get_paths()['purelib'])" \
	  > $$($(BENCH)/bin/python -c "import sysconfig; print(sysconfig.get_paths()['purelib'])")/ours.pth
	DS_BUILD_OPS=0 DS_ACCELERATOR=cpu $(BENCH)/bin/python -m pip install --quiet --disable-pip-version-check -r requirements/bench.txt
	DS_ACCELERATOR=cpu $(BENCH)/bin/python -c "import deepspeed, shardwise"
	@touch $@

# Use it with PYTHONPATH=src:.bench-carry.
CARRY := .bench-carry
bench-carry: bench-env  ## .bench-carry: what Python 3.12 with torch needs for comparisons, unpacked
	rm -rf $(CARRY)
	DS_BUILD_OPS=0 DS_ACCELERATOR=cpu $(BENCH)/bin/python -m pip wheel --quiet --disable-pip-version-check --no-deps \
	  -w $(CARRY)/wheels $$(grep ^deepspeed requirements/bench.txt)
	$(PY) -m pip install --quiet --disable-pip-version-check --target $(CARRY) --no-compile --no-deps --python-version 3.12 \
	  --platform manylinux_2_28_x86_64 --platform manylinux2014_x86_64 --only-binary=:all: \
	  -r requirements/carry.txt $(CARRY)/wheels/deepspeed-*.whl
	rm -rf $(CARRY)/wheels $(CARRY)/bin
	@du -sh $(CARRY)

readme-tables: $(STAMP)  ## write the measured tables of README.md and docs/measured.md from benchmarks/results
	for page in README.md docs/measured.md; do $(PY) benchmarks/readme_tables.py $$page || exit 1; done

errors-page: $(STAMP)  ## write docs/errors.md from the errors that the code raises
	PYTHONPATH=src:tests $(PY) -c "from support import errors_page; errors_page.write()"

models-page: $(STAMP)  ## write the tables of docs/models.md and docs/parallelism.md
	PYTHONPATH=src:tests $(PY) -c "from support import page; page.write()"

architectures: $(STAMP)  ## train real architectures on two processes, write the result and its table
	$(PY) -m pip install --quiet --disable-pip-version-check -r requirements/full.txt
	PYTHONPATH=src:tests $(PY) benchmarks/architectures.py

# Not a part of `make test`. On one GPU: ARGS="--backend nccl --faults 50 --minutes 30".
soak: $(STAMP)  ## 20 minutes of faults, one after the other, and a dated result (ARGS="--minutes 5 --seed 7")
	PYTHONPATH=src:tests $(PY) benchmarks/soak.py $(ARGS)

clean:  ## remove what the set-up and the tests made
	rm -rf $(VENV) $(BENCH) $(CARRY) $(SWIFT) $(RAY) $(OBJECTS) .pytest_cache .mypy_cache .ruff_cache .hypothesis build dist
