# `make help` lists what there is. Every target sets up what it needs: a virtual environment in .venv, filled once from
# constraints.txt and again only when that file or pyproject.toml changes.

PYTHON ?= python3
# An index that has torch wheels without CUDA, for example https://download.pytorch.org/whl/cpu; empty: pip's own setting.
TORCH_INDEX ?=
# Processes of the test run, and threads of each.
WORKERS ?= 2
THREADS ?= 1
# Further arguments: make test ARGS="tests/contract -k momentum"
ARGS ?=

VENV := .venv
BIN = $(VENV)/bin
STAMP := $(VENV)/.installed
# Trainers and loggers have an environment of their own: they bring a hundred packages that nothing else here needs.
STAMP_INTEGRATIONS := .venv-integrations/.installed
# -qq: a repeated install, or a package mirror, fills the screen with warnings otherwise; errors still show.
PIP = $(BIN)/python -m pip install -qq --disable-pip-version-check
PYTEST = OMP_NUM_THREADS=$(THREADS) $(BIN)/python -m pytest -q -n $(WORKERS)

.DEFAULT_GOAL := help
.PHONY: help install demo test test-all test-machines test-integrations mutations check lint format type layering docs counts bench dist clean

help: ## Show this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-17s %s\n", $$1, $$2}' $(firstword $(MAKEFILE_LIST))
	@echo "Variables: PYTHON=$(PYTHON) WORKERS=$(WORKERS) THREADS=$(THREADS) ARGS='...' TORCH_INDEX=https://download.pytorch.org/whl/cpu (torch without CUDA)"

install: $(STAMP) ## Set up .venv with everything the other targets need (quiet, again in a moment)
	@:

# torch goes first and alone, so that a CPU index never has to serve anything else; then the pinned list exactly as it
# stands, without a resolver that could replace torch or bring torchvision; then this package, editable, built with the
# pinned setuptools rather than in an isolated environment that reads no constraints.
PINS := constraints.txt
$(STAMP_INTEGRATIONS): constraints-integrations.txt
$(STAMP_INTEGRATIONS): PINS += constraints-integrations.txt
$(STAMP_INTEGRATIONS) test-integrations: VENV := .venv-integrations
$(STAMP) $(STAMP_INTEGRATIONS): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' \
		|| { echo "secondorder needs Python 3.10 or newer; choose one with: make PYTHON=python3.11 $(MAKECMDGOALS)"; exit 1; }
	@echo "Setting up $(VENV) (some minutes the first time) ..."
	@$(BIN)/python -m pip --version >/dev/null 2>&1 || $(PYTHON) -m venv --clear $(VENV) \
		|| { echo "$(PYTHON) has no working venv module; on Debian and Ubuntu: apt install python3-venv"; exit 1; }
ifneq ($(TORCH_INDEX),)
	@$(PIP) --no-deps --index-url $(TORCH_INDEX) -c constraints.txt torch
endif
	@$(PIP) -c constraints.txt torch
	@$(PIP) --no-deps --only-binary :all: $(PINS:%=-r %)
	@$(PIP) --no-deps --no-build-isolation -e .
	@test ! -x $(BIN)/pyright || $(BIN)/pyright --version >/dev/null  # fetches its program now, not during the tests
	@touch $@

demo: $(STAMP) ## Train on handwritten digits with SGD, AdamW and every method; table and plot (under 2 minutes)
	@$(BIN)/python -m benchmarks study demo $(ARGS)

test: $(STAMP) ## Run the test suite in parallel, without the slow tests
	@$(PYTEST) $(ARGS)

test-all: $(STAMP) ## Run the test suite with the slow tests
	@$(PYTEST) -m "" $(ARGS)

test-machines: $(STAMP) ## Run the test suite once per kind of processor, number of threads and hash seed
	@.ci/machines

test-integrations: $(STAMP_INTEGRATIONS) ## Run the tests that drive real trainers and loggers; ARGS="-m ''": slow ones too
	@$(PYTEST) tests/integrations $(ARGS)

mutations: $(STAMP) ## Put faults into copies of the package, one by one; a test must catch each (ARGS="--only 'kl-*'")
	@$(BIN)/python -m tests.support.mutations --jobs $(WORKERS) $(ARGS)

check: lint type layering docs counts ## Everything but the tests: lint, types, layering, documentation, counts of steps

lint: $(STAMP) ## Check style and format (ruff)
	@$(BIN)/ruff check -q .
	@$(BIN)/ruff format -q --diff .

format: $(STAMP) ## Bring the tree into the form that `make lint` wants
	@$(BIN)/ruff check -q --fix . ; $(BIN)/ruff format -q .

type: $(STAMP) ## Check types (mypy --strict)
	@$(BIN)/mypy --no-error-summary

layering: $(STAMP) ## Check which folder imports which, and the sizes of classes and modules
	@$(BIN)/python -m pytest -q -p no:cacheprovider tests/test_layering.py tests/test_architecture.py

docs: $(STAMP) ## Build the site into site/; broken links, undocumented names and some habits of language fail
	@NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict >docs.log 2>&1 \
		|| { grep -v '^INFO' docs.log; exit 1; }  # the variable silences an advertisement for a successor
	@rm -f docs.log

counts: $(STAMP) ## Count what steps do, and compare with benchmarks/baseline.json (ARGS=--update: write it anew)
	@$(BIN)/python -m benchmarks regress $(ARGS) >/dev/null

bench: $(STAMP) ## Time a step of each method against SGD and AdamW
	@$(BIN)/python -m benchmarks measure step-time $(ARGS)

# Without isolation: an isolated build would fetch another setuptools than the pinned one. The wheel is built from the
# source distribution, which so proves to be complete.
dist: $(STAMP) ## Build sdist and wheel into dist/ and test the wheel outside the repository (ARGS=--public: for upload)
	@rm -rf dist build secondorder.egg-info
	@$(BIN)/python -m build --no-isolation --outdir dist . >dist.log 2>&1 || { cat dist.log; exit 1; }
	@rm -rf dist.log secondorder.egg-info
	@$(BIN)/python .ci/check_dist.py dist -n $(WORKERS) $(ARGS)

clean: ## Remove what the other targets wrote; environments stay (rm -rf .venv .venv-integrations starts afresh)
	rm -rf build dist site demo-output bench-output .mypy_cache .ruff_cache .pytest_cache .hypothesis *.egg-info
	find . -path './.venv*' -prune -o -name __pycache__ -type d -prune -exec rm -rf {} +
