# headrace: `make demo` trains an agent on this machine, `make test` checks the house. Both install what they need.

PYTHON  ?= python3
VENV    := .venv
BIN     := $(VENV)/bin
# Extra arguments for pip, for example the index that serves torch's CPU build:
#   make setup PIP_ARGS="--extra-index-url INDEX"
PIP_ARGS ?=
CONFIG  ?= deploy/demo.toml

DEBIAN := python3-venv qemu-system-x86 mmdebstrap cpio

.PHONY: help setup debian demo proof test test-all fuzz lint format docs clean

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

test: lint ## lint, then the default suite (real broker, real microVMs)
	$(BIN)/pytest

test-all: lint ## everything that can run on this machine
	$(BIN)/pytest -m "not gpu and not sglang"

fuzz: setup ## 10,000 corruptions of weight chunks, manifests and files: none is ever served
	HEADRACE_FUZZ=10000 $(BIN)/pytest tests/weights/test_fuzz.py

format: setup ## rewrite in the house's format
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

docs: setup ## the generated parts of docs/, from the code
	$(BIN)/headrace subjects > docs/subjects.md
	$(BIN)/python docs/modules.py

clean: ## forget caches, runs and the environment
	rm -rf $(VENV) .cache runs .mypy_cache .ruff_cache .pytest_cache
