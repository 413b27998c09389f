# make run: set up, run the demo on this machine, write the report.   make test: the tests.   make faults-test: kills.
# make lint: ruff, mypy, snakefmt, Snakemake's lint, generated files.   make generate: schemas, tables and lists of the documents.
# make quick: ruff, and the tests of files that changed since the last commit (or BASE=main).   make docs: the documentation site.
# make experiments-test: the longer tests, of whole trainings, reports, commands and benchmarks.
# make docs-test: every block of the documents, in a checkout.
# make slurm-test: a SLURM of four nodes, brought up on this machine for the tests; installs no part of it.
# make run CONFIG=mine.yaml: the same with your own file over config/config.yaml (your corpus, your experiments).
# make setup PIP_ARGS="--index-url …" passes options to pip (a CPU build of torch, a mirror); PYTHON chooses Python.
# make setup installs the versions in locks/, by hash, where this platform and Python have a lock, else the newest in the ranges of
# pyproject.toml; torch is the release in locks/constraints.txt. NEWEST=1 installs the newest of all that pyproject.toml allows.
# make lock: write locks/ anew, with the newest versions that pyproject.toml allows.   make lock-test: does it come out again?
# make mutants: puts small mistakes into the most important functions, and counts what the tests find (MOST=20 a function).
# make long-test: checks that take long or need the package registry, run before an issue is closed; logs go to evidence/long-tests/.
# Of these, KILLS=300 kills at random moments go to evidence/faults/kills.jsonl.
PYTHON ?= python3
PIP_ARGS ?=
CONFIG ?=
KILLS ?= 300
NEWEST ?=
MOST ?= 20
SEED ?= 0
# what the user asked for, to be named in an error
GOAL ?= $(or $(firstword $(MAKECMDGOALS)),run)$(if $(CONFIG), CONFIG=$(CONFIG))
VENV := .venv
# the lists of dependencies by content: touching a file installs nothing
READY := $(VENV)/.ready-$(shell cat pyproject.toml $(wildcard packages/*/pyproject.toml locks/*.txt) | cksum | cut -d ' ' -f 1)
# every package but torch by version and hash, where this platform and Python have a lock
PLATFORM = $(shell $(PYTHON) -c 'import os, sys; print(f"{sys.platform}-{os.uname()[4]}-python3.{sys.version_info[1]}")' 2>/dev/null)
LOCK = $(if $(NEWEST),,$(wildcard locks/$(PLATFORM).txt))
PIP = $(VENV)/bin/python -m pip install --quiet --no-compile $(PIP_ARGS)
# setuptools goes first: what is built afterwards takes it from the lock, not what the index has at that moment. With it
# uv, which downloads many packages at once. It reads no settings of pip: where those name an index, or PIP_ARGS an index,
# a proxy or a certificate, pip does it, and also where uv cannot
BUILD_TOOLS = sed -n '/^\(setuptools\|uv\)==/,/[^\\]$$/p' $(LOCK)
LOCKED = --require-hashes --no-deps --no-build-isolation -r $(LOCK)
OWN_INDEX = $(filter -i% --index-url% --no-index --proxy% --cert%,$(PIP_ARGS))$(shell $(PYTHON) -m pip config list 2>/dev/null | sed -n '/[.]index-url=/p')
UV = $(if $(OWN_INDEX),,$(VENV)/bin/uv pip install --quiet --python $(VENV)/bin/python $(LOCKED) ||)
VERSIONS := $(if $(NEWEST),--upgrade --upgrade-strategy eager,--constraint locks/constraints.txt)
# Python 3's minor versions in pyproject.toml: from the first, below the second
MINORS := $(shell sed -n 's/^requires-python = ">=3\.\([0-9]*\),<3\.\([0-9]*\)"$$/\1 \2/p' pyproject.toml)
SUPPORTED := import sys; sys.exit(not (3, $(word 1,$(MINORS))) <= sys.version_info[:2] < (3, $(word 2,$(MINORS))))
SNAKEMAKE := $(VENV)/bin/snakemake
PYTEST := $(VENV)/bin/python -m pytest --quiet --numprocesses auto --dist loadfile --no-loadscope-reorder
DAILY := $(foreach folder,docs experiments faults golden long slurm,--ignore tests/$(folder)) src packages tests docs/generate.py
# a folder, and the files outside it with single cases that have its mark: pytest need not import the rest
marked = $(sort $(2) $(shell grep -rlE --include='test_*.py' 'mark\.$(1)\b' tests | grep -v '^$(2)/'))
YOURS := $(if $(CONFIG),--configfile $(CONFIG))

.PHONY: run quick docs generate test experiments-test docs-test faults-test slurm-test golden-test mutants long-test lock-test setup lock lint clean

# Of a dry run with nothing to do, that line is shown and what follows it: where the report lies, and what it says.
# Tokens first, the rest in a second call: a rebuilt manifest that is equal byte for byte then stops the wave of reruns.
run: $(READY)
	@if $(SNAKEMAKE) --dry-run $(YOURS) 2>&1 | sed -n '/Nothing to be done/,$$p' | grep .; then :; \
	else $(SNAKEMAKE) corpus tokens $(YOURS) && $(SNAKEMAKE) $(YOURS); fi

test: $(READY)
	$(PYTEST) -m "not experiment and not long" $(DAILY)
	@echo "left out: make lint, make experiments-test, make docs-test, make faults-test, make slurm-test, make long-test"

experiments-test: $(READY)
	$(PYTEST) -m "experiment and not long" $(call marked,experiment,tests/experiments)

# each group of documents is one test, the longest first
docs-test: $(READY) docs
	$(PYTEST) --dist worksteal -m "not long" tests/docs

docs: $(READY)
	$(VENV)/bin/python -m sphinx --fail-on-warning --keep-going --quiet -b html docs docs/_build/html
	@echo "site: docs/_build/html/index.html"

quick: $(READY)
	$(VENV)/bin/ruff check . && $(VENV)/bin/ruff format --check .
	$(VENV)/bin/python -m tests.quick $(BASE)

# what happens to runs that are killed, and to checkpoints that are damaged
faults-test: $(READY)
	$(PYTEST) -m "not long" tests/faults

# jobs on a SLURM whose daemons the tests start and end themselves; fails where it is not installed, and says what to install
slurm-test: $(READY)
	@$(VENV)/bin/python -m tests.slurm.missing
	$(PYTEST) --dist worksteal -m "not long" tests/slurm

# the date of each green test goes to evidence/long-tests/tests.txt; some of the tests need SLURM
long-test: $(READY)
	@$(VENV)/bin/python -m tests.slurm.missing
	GREEN_LONG_TESTS=evidence/long-tests/tests.txt $(PYTEST) -m long $(call marked,long,tests/long)
	$(VENV)/bin/python -m tests.long.wheels
	$(VENV)/bin/python -m tests.faults.campaign --kills $(KILLS)

mutants: $(READY)
	$(VENV)/bin/python -m tests.faults.mutants --most $(MOST) --seed $(SEED)

# the demo's losses, orders, stores and files, ids of all runs: equal to those recorded?
golden-test: run
	$(VENV)/bin/python -m pytest --quiet tests/golden

lint: $(READY)
	$(VENV)/bin/ruff check . && $(VENV)/bin/ruff format --check .
	$(VENV)/bin/mypy src/tokenscale packages/golden/src
	$(VENV)/bin/lint-imports --no-cache
	$(VENV)/bin/snakefmt --check workflow
	$(VENV)/bin/snakemake --lint
	$(VENV)/bin/python docs/generate.py --check

generate: $(READY)
	$(VENV)/bin/python docs/generate.py

setup:
	@rm -f $(VENV)/.ready-*
	@$(MAKE) --no-print-directory $(READY) GOAL=setup

$(READY):
	@$(PYTHON) -c '$(SUPPORTED)' 2>/dev/null || { \
	  next='install one (`uv python install 3.13`, or https://www.python.org/downloads), then  make $(GOAL) PYTHON=python3.13'; \
	  for python in python3.13 python3.12 python3.11 python3.14; do \
	    if $$python -c 'import ensurepip; $(SUPPORTED)' 2>/dev/null; then next="make $(GOAL) PYTHON=$$python"; break; fi; \
	  done; \
	  printf 'tokenscale: this Python is not supported.\n  found     %s\n  expected  Python 3.$(word 1,$(MINORS)) to 3.%s\n  next      %s\n' \
	    "$$($(PYTHON) --version 2>&1 | head -n 1)  ($(PYTHON))" $$(($(word 2,$(MINORS)) - 1)) "$$next" >&2; exit 2; }
	$(PYTHON) -m venv $(VENV)
	$(if $(LOCK),$(BUILD_TOOLS) | $(PIP) --require-hashes --no-deps -r /dev/stdin)
	$(if $(LOCK),$(UV) $(PIP) --use-pep517 $(LOCKED))
	$(if $(LOCK),$(PIP) -r locks/constraints.txt)
	$(if $(LOCK),$(PIP) --no-deps --no-build-isolation -e packages/golden -e .)
	$(if $(LOCK)$(NEWEST),,@echo "tokenscale: there is no lock for $(PLATFORM); pip takes the newest versions in the ranges of pyproject.toml")
	$(if $(LOCK),,$(PIP) $(VERSIONS) -e packages/golden -e ".[test]")
	@$(VENV)/bin/python -m compileall -qq -j 0 $(VENV)/lib || true  # on all cores; templates among the packages fail
	@touch $@

lock:
	$(PYTHON) -m tests.long.lock --write

# the lock from scratch: what the registry had on the lock's date
lock-test:
	$(PYTHON) -m tests.long.lock

clean:
	rm -rf $(VENV) .snakemake docs/_build
	find results -mindepth 1 ! -name README.md -delete 2>/dev/null || true
