# headrace: `make demo` trains an agent on this machine, `make test` checks the house. Both install what they need.

PYTHON  ?= python3
VENV    := .venv
BIN     := $(VENV)/bin
# Extra arguments for pip, for example the index that serves torch's CPU build:
#   make setup PIP_ARGS="--extra-index-url INDEX"
PIP_ARGS ?=
CONFIG  ?= deploy/demo.toml

DEBIAN := python3-venv qemu-system-x86 mmdebstrap cpio

# The CPU environment of the SGLang server: 3 GB, made by `make test-sglang`.
SGLANG  := .cache/sglang

# Torch and Triton twice, for the kernels in Triton's interpreter. Triton 3.6's fails with a numpy from 2.4 on.
KERNELS := .cache/kernels

.PHONY: help setup debian demo proof test test-all test-sglang test-kernels fuzz chaos-weights lint format docs clean

help: ## what there is
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 12

setup: debian $(VENV)/.installed ## Debian packages and the virtual environment

debian:
	@missing=""; for p in $(DEBIAN); do dpkg-query -W -f '$${Status}' $$p 2>/dev/null | grep -q 'ok installed' || missing="$$missing $$p"; done; \
	if [ -n "$$missing" ]; then \
		if [ "$$(id -u)" != 0 ]; then echo "These Debian packages are missing, install them as root:$$missing" >&2; exit 1; fi; \
		echo "installing$$missing"; \
		apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends $$missing >/dev/null; \
	fi

$(VENV)/.installed: pyproject.toml constraints.txt
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/pip install -q --disable-pip-version-check -c constraints.txt $(PIP_ARGS) torch==2.13.0
	$(BIN)/pip install -q --disable-pip-version-check -c constraints.txt $(PIP_ARGS) -e '.[dev]'
	@touch $@

demo: setup ## train a tiny policy in real microVMs and write a report (minutes)
	$(BIN)/headrace up $(CONFIG)

proof: setup ## the demo's recipe on three seeds, 500 held-out tasks each, one VM per sandbox (up to 90 minutes)
	$(BIN)/python -m benchmarks.proof

lint: setup ## ruff and mypy --strict
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

# Two at once: much of a test is waiting for real processes.
PYTEST := $(BIN)/pytest -n 2 --dist loadfile --no-loadscope-reorder

test: lint ## lint, then the default suite (real broker, real microVMs)
	$(PYTEST)

test-all: lint ## everything that can run on this machine
	$(PYTEST) -m "not gpu and not sglang"

test-sglang: setup $(SGLANG)/.installed ## the real SGLang server on this CPU (3 GB of packages at first, then minutes)
	HEADRACE_SGLANG=$(SGLANG)/bin/python $(BIN)/pytest -m sglang --timeout 900 tests/engines

$(SGLANG)/.installed: $(wildcard deploy/sglang/*.txt deploy/sglang/shims/* deploy/sglang/shims/*/*.py)
	@test -x $(SGLANG)/bin/python || $(PYTHON) -m venv $(SGLANG)
	$(SGLANG)/bin/pip install -q --disable-pip-version-check $(PIP_ARGS) -r deploy/sglang/requirements.txt
	$(SGLANG)/bin/pip install -q --disable-pip-version-check --no-deps -r deploy/sglang/requirements-without-dependencies.txt
	@rm -rf $(SGLANG)/shims && cp -r deploy/sglang/shims $(SGLANG)/shims
	$(SGLANG)/bin/pip install -q --disable-pip-version-check --no-deps --force-reinstall $(SGLANG)/shims
	@touch $@

test-kernels: $(KERNELS)/pinned/.installed $(KERNELS)/older/.installed ## Triton kernels, interpreted, on torch 2.13 and 2.11 (2 GB at first, 8 with torch's CUDA builds)
	@for e in pinned older; do TRITON_INTERPRET=1 OMP_NUM_THREADS=1 $(KERNELS)/$$e/bin/python -m tests.kernels.interpreted || exit 1; done

$(KERNELS)/pinned/.installed: WANTED := torch==2.13.0 triton==3.7.1 numpy==2.4.6
$(KERNELS)/older/.installed: WANTED := torch==2.11.0 triton==3.6.0 numpy==2.3.5
$(KERNELS)/%/.installed:
	@test -x $(@D)/bin/python || $(PYTHON) -m venv $(@D)
	$(@D)/bin/pip install -q --disable-pip-version-check $(PIP_ARGS) $(WANTED)
	@touch $@

fuzz: setup ## 10,000 corruptions of weight chunks, manifests, heads and files: none is ever served
	HEADRACE_FUZZ=10000 $(BIN)/pytest -rP --timeout 3600 tests/weights/test_fuzz.py

ROUNDS ?= 200
chaos-weights: setup ## SIGKILL and SIGSTOP for sender, receiver and broker at every stage of a version, 200 times
	$(BIN)/python -m benchmarks.weight_chaos --rounds $(ROUNDS)

format: setup ## rewrite in the house's format
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

docs: setup ## the generated parts of docs/, from the code
	$(BIN)/headrace subjects > docs/subjects.md
	$(BIN)/python docs/modules.py

clean: ## forget caches, runs and the environment
	rm -rf $(VENV) .cache runs .mypy_cache .ruff_cache .pytest_cache
