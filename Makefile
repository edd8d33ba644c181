# Everything is installed into $(VENV); all that must be there before is Python 3.11 or later.
VENV ?= .venv
# The first Python that is new enough; evaluated only where a virtual environment is made.
NEW_ENOUGH = import sys; sys.exit(sys.version_info < (3, 11))
PYTHON ?= $(shell for name in python3.11 python3.12 python3.13 python3; do \
	$$name -c '$(NEW_ENOUGH)' 2>/dev/null && { echo $$name; break; }; done)
CASES ?= cases/*.yaml
TRITON ?= 3.9.0
# `no` leaves megablocks out: its cases are then skipped, and the report says so.
MEGABLOCKS ?= yes
# Of the tests: one more than two cores have, since many a test waits.
WORKERS ?= 3
# Cases among the tests: they use every recipe and every choice of a layout that some case uses. `make verify` runs all.
TESTED := fsdp-pp-cp fsdp-tp-ep fsdp-tp-ep-pp hsdp-cp-ep cp-ring cp-torch deepseek-v2-lite-tp deepseek-v3-cp-alltoall \
	ep-etp ep2-exchange ep2-graphs ep2-joined ep2-rebalance float8-fsdp2-ep float8-mixed-fsdp2 \
	fp32-pp fsdp1-grad-op fsdp2-reshard fused-attention gpt-ddp megablocks-ddp megablocks-fp32 \
	megablocks-local-balance megablocks-own-losses mixed-fsdp2-adamw mixed-fsdp2-ep mixtral-ep olmoe-tp \
	pp-tied-interleaved pp-tied-zbv pp-tied-zero-bubble tp-odd-vocabulary
TESTS ?= tests $(TESTED:%=cases/%.yaml)

# Python then compiles this package once, and not in each of the thousand processes that the tests start.
unexport PYTHONDONTWRITEBYTECODE

BIN := $(VENV)/bin
INSTALL = $(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt

.PHONY: verify verify-bf16 test test-fast lint docs golden samples stacks found faults hooks megablocks try-megablocks clean
.DELETE_ON_ERROR:
.NOTPARALLEL: # each set of packages goes into the same virtual environment

verify: $(VENV)/installed try-megablocks ## Verify all cases
	$(BIN)/moeverify run $(CASES)

verify-bf16: $(VENV)/installed try-megablocks ## Verify all cases in bfloat16, and print what each one decides
	$(BIN)/moeverify run $(CASES) --set recipe.precision=bfloat16 --allow-undecided

test: $(VENV)/installed-test try-megablocks ## Run the tests, and some of the cases as tests
	$(BIN)/python -m pytest $(TESTS) $(TEST_OPTIONS) -n $(WORKERS) --dist loadfile --durations 12

test-fast: $(VENV)/installed-test ## Run the short tests that start no processes: about a minute
	$(BIN)/python -m pytest tests --ignore=tests/arch -n 2 --dist loadfile -m 'not ranks and not slow and not gpu'

lint: $(VENV)/installed-lint ## Check style, spelling, types, the rules of the house, and links of the docs
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/codespell
	$(BIN)/mypy
	$(BIN)/python -m pytest --quiet tests/arch
	$(BIN)/mkdocs build --quiet

docs: $(VENV)/installed-lint ## Build the docs as a site in build/site; any broken link fails
	$(BIN)/mkdocs build

faults: $(VENV)/installed-test try-megablocks ## Inject every known bug in float64, and run the clean matrix: about 25 minutes
	$(BIN)/moeverify faults run
	$(BIN)/moeverify faults clean

hooks: $(VENV)/installed-lint ## Check style, spelling, types and sizes of files in every commit from now on
	$(BIN)/pre-commit install

samples: $(VENV)/installed try-megablocks ## Make the outputs and tables that README and docs show anew
	$(BIN)/python benchmarks/samples.py

stacks: $(VENV)/installed-test ## Verify stacks of others, and make docs/results/stacks.md anew: about 20 minutes; CHECKOUTS=DIR as for found
	$(BIN)/python benchmarks/stacks.py $(if $(CHECKOUTS),--checkouts $(CHECKOUTS))

found: $(VENV)/installed-test ## Run the bugs in examples/found again; CHECKOUTS=DIR has sources of projects without a package
	$(BIN)/python benchmarks/found.py $(if $(CHECKOUTS),--checkouts $(CHECKOUTS))

golden: $(VENV)/installed ## Record what is missing in golden/, refresh what has changed
	$(BIN)/moeverify golden $(CASES)

megablocks: $(VENV)/installed-megablocks ## Install megablocks beside a current torch, in spite of its pins

try-megablocks: $(VENV)/installed
ifneq ($(MEGABLOCKS),no)
	@$(MAKE) --no-print-directory megablocks || \
		echo "megablocks could not be installed; its cases will be skipped" >&2
endif

clean: ## Remove what can be made again, and no golden
	rm -rf $(VENV) .venv-stacks build dist runs *.egg-info .pytest_cache .mypy_cache .ruff_cache

$(BIN)/python:
	@python="$(PYTHON)"; test -n "$$python" && $$python -c '$(NEW_ENOUGH)' || \
		{ echo "moeverify needs Python 3.11 or later; install it, or give PYTHON=path" >&2; exit 2; }
	$(PYTHON) -m venv $(VENV)

# A stamp for each set of packages: nothing is done while pyproject.toml and constraints.txt are older.
$(VENV)/installed: pyproject.toml constraints.txt | $(BIN)/python
	$(INSTALL) -e .
	@touch $@

$(VENV)/installed-test: pyproject.toml constraints.txt | $(BIN)/python
	$(INSTALL) -e '.[test]'
	@touch $@ $(VENV)/installed

$(VENV)/installed-lint: pyproject.toml constraints.txt | $(BIN)/python
	$(INSTALL) -e '.[lint,test]'
	@touch $@ $(VENV)/installed $(VENV)/installed-test

# It pins torch and numpy of 2025 and asks for its build tools without isolation; neither is needed. Without CUDA
# it builds no extension, and moeverify has stand-ins. A torch for GPUs has brought its own Triton.
$(VENV)/installed-megablocks: $(VENV)/installed
	$(BIN)/python -c 'import triton' 2>/dev/null || $(INSTALL) triton==$(TRITON)
	$(INSTALL) 'setuptools>=77'
	$(INSTALL) --no-deps --no-build-isolation stanford-stk==0.7.1 megablocks==0.10.0
	@touch $@
