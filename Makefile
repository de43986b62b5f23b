# `make` lists the targets. They work from any folder (make -C path test, make -f path/Makefile test) and with
# spaces in the path: called from elsewhere, make starts itself again in the folder of this file.
ROOT := $(shell f='$(MAKEFILE_LIST)'; cd "$$(dirname -- "$${f# }")" && pwd -P)
TARGETS := help demo test test-all test-torch mutants lint format docs docs-check pictures bench clean
.PHONY: $(TARGETS)
.DEFAULT_GOAL := help

ifneq ($(CURDIR),$(ROOT))

$(TARGETS):
	@$(MAKE) --no-print-directory -C "$(ROOT)" $@

else

SHELL := /bin/sh
.NOTPARALLEL:
.DELETE_ON_ERROR:

PYTHON ?=            # the interpreter for .venv; empty: the first of python3, python3.11, ... that is 3.11 or newer
JOBS ?= auto         # test processes
ARGS ?=              # more arguments for pytest, the mutants, the demo or the benchmark
PYTHON := $(strip $(PYTHON))
JOBS := $(strip $(JOBS))

PY := .venv/bin/python
RECENT := import sys; sys.exit(sys.version_info < (3, 11))

help:  ## list the targets
	@sed -n 's/^\([a-z-]*\): .*## /\1: /p' Makefile | awk -F': ' '{ printf "  make %-10s %s\n", $$1, $$2 }'
	@echo "  variables: PYTHON (interpreter for .venv), JOBS (test processes), TORCH (a version), ARGS (passed on)"

# one learning rate for all: with the paper's the two Adams, which are one algorithm on St(1, 2), would differ tenfold
demo: .venv/.installed-lab  ## the pendulum in about a minute (four optimizers, one learning rate, 5 seeds), and its page
	@$(PY) -m ghor_lab run pendulum --lr 1e-2 --epochs 40 --seeds 0-4 --out runs/demo $(ARGS)
	@$(PY) -m ghor_lab report runs/demo --brief
	@echo; echo "Your own model is six lines away (lab/six_lines.py):"; echo; sed -n '3,$$s/^/    /p' lab/six_lines.py

# one thread a process: the processes already fill the cores
PYTEST := OMP_NUM_THREADS=1 $(PY) -m pytest -n $(JOBS) --dist worksteal

test: .venv/.installed-dev  ## run the tests of the library and of the lab
	@$(PYTEST) $(ARGS)

test-all: .venv/.installed-dev .venv/.installed-trainers .venv/.installed-ray  ## run the slow tests, too, and those with trainers, peft and ray
	@$(PYTEST) -m "" $(ARGS)

# in an environment of its own, of which torch is the only thing that changes; ghor is taken from src/
test-torch: .venv/.created  ## run the tests of the core against another torch: make test-torch TORCH=2.9.1 (or TORCH=newest)
	@test -n "$(TORCH)" || { echo "which torch? make test-torch TORCH=2.9.1" >&2; exit 1; }
	@set -e; env=.venv/torch-$(TORCH); $(PY) -m venv $$env; grep -v '^torch==' constraints.txt > $$env/constraints.txt; \
	$$env/bin/python -m pip install -qq --disable-pip-version-check -c $$env/constraints.txt $(if $(filter newest,$(TORCH)),--upgrade torch,"torch==$(TORCH)") numpy scipy matplotlib rich jinja2 filelock pytest \
	  pytest-xdist pytest-timeout hypothesis mpmath expecttest lion-pytorch pytorch_optimizer ruff; \
	PYTHONPATH=src:lab/src OMP_NUM_THREADS=1 $$env/bin/python -m pytest -n $(JOBS) --dist worksteal tests/_torch tests/baselines tests/constraints tests/laws tests/lifting tests/optim tests/pytorch tests/spaces \
	  tests/solve $(ARGS)

mutants: .venv/.installed-dev  ## leave things out of the library, one by one, and name what no test misses (ARGS="--since main")
	@OMP_NUM_THREADS=1 $(PY) tests/mutants.py $(ARGS)

lint: .venv/.installed-dev  ## check style, format and types
	@$(PY) -m ruff check .
	@$(PY) -m ruff format --check .
	@$(PY) -m mypy

format: .venv/.installed-dev  ## apply the format and the safe fixes
	@$(PY) -m ruff check --fix .
	@$(PY) -m ruff format .

docs: .venv/.installed-docs  ## build the documentation into site/ (needs npm, for KaTeX)
	@NO_MKDOCS_2_WARNING=1 $(PY) -m mkdocs build --strict  # not --quiet: --strict would not see any warning
	@echo "documentation: site/index.html"

docs-check: docs  ## build the documentation, and look at every page in a browser: does all fit?
	@$(PY) docs/build/layout.py

pictures: .venv/.installed-lab  ## draw the pictures again: examples, spaces, and what is recorded in lab/results/
	@$(PY) examples/pictures.py $(ARGS)
	@$(PY) docs/build/solving.py
	@$(PY) docs/build/spaces.py
	@$(PY) docs/build/records.py
	@$(PY) -m ghor_lab report $(addprefix lab/results/,mnist caught fashion-mnist pendulum) --out runs/report --brief
	@$(PY) -m ghor_lab report lab/results/text --out runs/report-text --brief
	@for name in mnist-loss mnist-drift fashion-mnist-loss pendulum-error-as-run; do cp runs/report/figures/$$name.svg docs/pictures/; done
	@for name in text-curves text-rates; do cp runs/report-text/figures/$$name.svg docs/pictures/; done

bench: .venv/.installed-bench  ## time one optimizer step against other libraries
	@$(PY) benchmarks/measure.py time --only "^336" --seconds 60 $(ARGS)

clean:  ## remove the environment, caches and builds
	@rm -rf .venv .pytest_cache .mypy_cache .ruff_cache .hypothesis build dist site
	@find . -name __pycache__ -type d -prune -exec rm -rf {} +

.venv/.created:
	@set -e; chosen='$(PYTHON)'; \
	if [ -z "$$chosen" ]; then \
	  for p in python3 python3.11 python3.12 python3.13 python3.14; do \
	    if "$$p" -c '$(RECENT)' >/dev/null 2>&1; then chosen=$$p; break; fi; \
	  done; \
	fi; \
	if [ -z "$$chosen" ] || ! "$$chosen" -c '$(RECENT)' >/dev/null 2>&1; then \
	  echo "ghor needs Python 3.11 or newer$${chosen:+, which $$chosen is not}; name one: make PYTHON=/path/to/python3" >&2; exit 1; \
	fi; \
	echo "creating .venv with $$("$$chosen" --version)"; \
	"$$chosen" -m venv --clear .venv && touch $@

# The library and the lab, with the extras of either. Again only when the requirements of a project changed.
.venv/.installed-%: pyproject.toml lab/pyproject.toml constraints.txt .venv/.created
	@echo "installing ghor and ghor-lab for $* into .venv (the first time torch comes with it: minutes)"
	@$(PY) -m pip install -qq --disable-pip-version-check -c constraints.txt \
	  -e ".$(addprefix [,$(addsuffix ],$(filter-out lab ray,$*)))" \
	  -e "./lab$(addprefix [,$(addsuffix ],$(filter ray,$*)))"
	@touch $@

endif
