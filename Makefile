# Every target that runs something makes the environment (.venv) first, which takes no time once it is there.
# PYTHON names the Python to make it with; ARGS is passed on, e.g. make demo ARGS="--port 8001".

PYTHON ?= python3
ARGS ?=
BIN := .venv/bin

.DEFAULT_GOAL := help
.PHONY: help setup demo test test-full test-engine test-vllm033 soak test-gpu test-sanitize bench lint format clean kernels-aot

help: ## list the targets
	@grep -hE '^[a-z0-9-]+:.*## ' $(MAKEFILE_LIST) | awk -F ':.*## ' '{printf "  %-13s %s\n", $$1, $$2}'

setup: ## make the environment
	@command -v $(PYTHON) >/dev/null || { echo "error: no $(PYTHON) here: install Python 3.11 or later, or name one with PYTHON=" >&2; exit 1; }
	@$(PYTHON) scripts/setup_env.py

demo: setup ## serve a small model with the exact and the compressed cache, and compare
	$(BIN)/turboquant demo $(ARGS)

test: setup ## run the tests (fetches the demo model, which some of them serve)
	$(BIN)/python -m turboquant.demo.model
	$(BIN)/python -m pytest -m "not gpu" tests $(ARGS)

test-full: setup ## run the tests with the whole product of the Triton kernels' cases (an hour or more)
	$(BIN)/python -m turboquant.demo.model
	TURBOQUANT_FULL_TESTS=1 $(BIN)/python -m pytest -m "not gpu" tests $(ARGS)

test-engine: setup ## run the feature matrix on real engines and write docs/compatibility.md (half an hour)
	$(BIN)/python -m turboquant.demo.model
	@status=0; TURBOQUANT_ENGINE_TESTS=1 $(BIN)/python -m pytest -m "matrix and not gpu" tests --matrix out/matrix.json $(ARGS) || status=$$?; \
	$(BIN)/python scripts/compatibility.py out/matrix.json && exit $$status

test-vllm033: setup ## run the 0.33 hooks against the real vLLM 0.33.0 (downloads its wheel without what it depends on)
	$(BIN)/python scripts/unpack_vllm.py 0.33.0 out/vllm-0.33.0
	TURBOQUANT_VLLM033=$(CURDIR)/out/vllm-0.33.0 $(BIN)/python -m pytest tests/test_vllm033.py $(ARGS)

soak: setup ## random traffic against a real server, checked against a fresh engine: make soak ARGS="--minutes 20"
	PYTHONPATH=tests $(BIN)/python -m soak $(ARGS)

test-gpu: setup ## run the tests that need a CUDA device
	@$(BIN)/python -c 'import sys, torch; sys.exit(not torch.cuda.is_available())' || { echo "error: these tests need a CUDA device, and torch sees none" >&2; exit 1; }
	$(BIN)/python -m pytest -m gpu tests $(ARGS)

test-sanitize: setup ## run the CPU kernels' tests with address and undefined-behaviour sanitisers
	$(BIN)/python scripts/sanitize.py $(ARGS)

kernels-aot: setup ## compile the Triton kernels for every GPU and check registers, spills and shared memory (no GPU needed)
	$(BIN)/python -m turboquant.kernels.triton.report $(ARGS)

bench: setup ## run the benchmarks
	@ls benchmarks/*.py >/dev/null 2>&1 || { echo "error: there are no benchmarks yet: they will be benchmarks/*.py" >&2; exit 1; }
	@set -e; for file in benchmarks/*.py; do echo "==> $$file"; $(BIN)/python $$file $(ARGS); done

lint: setup ## check style
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

format: setup ## put style right
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean: ## remove the environment and what was built
	rm -rf .venv build dist out *.egg-info .pytest_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
