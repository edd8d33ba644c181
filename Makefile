# Everything is installed into $(VENV); all that must be there before is Python 3.11 or later.
VENV ?= .venv
# The first Python that is new enough; evaluated only where a virtual environment is made.
NEW_ENOUGH = import sys; sys.exit(sys.version_info < (3, 11))
PYTHON ?= $(shell for name in python3.11 python3.12 python3.13 python3; do \
	$$name -c '$(NEW_ENOUGH)' 2>/dev/null && { echo $$name; break; }; done)
CASES ?= cases/*.yaml
TRITON ?= 3.9.0

BIN := $(VENV)/bin
INSTALL = $(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt

.PHONY: verify test lint golden megablocks clean
.DELETE_ON_ERROR:

verify: $(VENV)/installed ## Verify all cases
	$(BIN)/moeverify run $(CASES)

test: $(VENV)/installed-test ## Run the tests, and the cases as tests
	$(BIN)/python -m pytest tests cases -n 2 --dist loadfile --durations 12

lint: $(VENV)/installed-lint ## Check style, types and the rules of the house
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/python -m pytest --quiet tests/arch

golden: $(VENV)/installed ## Record what is missing in golden/, refresh what has changed
	$(BIN)/moeverify golden $(CASES)

megablocks: $(VENV)/installed-megablocks ## Install megablocks beside a current torch, in spite of its pins

clean: ## Remove what can be made again, and no golden
	rm -rf $(VENV) build dist runs *.egg-info .pytest_cache .mypy_cache .ruff_cache

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
