# make run: sets up, runs the demo on this machine, opens the way to the report.   make test: the tests.   make faults-test: kills.
# make experiments-test: the longer tests, of whole trainings, reports, commands and benchmarks.
# make slurm-test: a SLURM of four nodes, brought up on this machine for the tests; installs no part of it.
# make run CONFIG=mine.yaml: the same with your own file over config/config.yaml (your corpus, your experiments).
# make setup PIP_ARGS="--index-url …" passes options to pip (a CPU build of torch, a mirror); PYTHON chooses Python.
PYTHON ?= python3
PIP_ARGS ?=
CONFIG ?=
VENV := .venv
# the list of dependencies by content: touching a file installs nothing
READY := $(VENV)/.ready-$(shell cksum < pyproject.toml | cut -d ' ' -f 1)
SNAKEMAKE := $(VENV)/bin/snakemake --profile profiles/local
PYTEST := $(VENV)/bin/python -m pytest --quiet --numprocesses 2 --dist loadfile --no-loadscope-reorder
HERE := --ignore tests/faults --ignore tests/slurm
YOURS := $(if $(CONFIG),--configfile $(CONFIG))
REPORT := results/report/index.html

.PHONY: run test experiments-test faults-test slurm-test setup lint clean

# Tokens first, the rest in a second call: a rebuilt manifest that is equal byte for byte then stops the wave of reruns.
run: $(READY)
	@if $(SNAKEMAKE) --dry-run $(YOURS) 2>&1 | grep "Nothing to be done"; then :; \
	else $(SNAKEMAKE) corpus tokens $(YOURS) && $(SNAKEMAKE) $(YOURS); fi
	@echo "report: $(REPORT)"

test: $(READY)
	$(PYTEST) -m "not experiment" $(HERE)
	@echo "left out: make experiments-test, make faults-test, make slurm-test"
	@$(MAKE) --no-print-directory lint

experiments-test: $(READY)
	$(PYTEST) -m experiment $(HERE)

# what happens to runs that are killed, and to checkpoints that are damaged
faults-test: $(READY)
	$(PYTEST) tests/faults

# jobs on a SLURM whose daemons the tests start and end themselves; fails where it is not installed, and says what to install
slurm-test: $(READY)
	@$(VENV)/bin/python -m tests.slurm.missing
	$(PYTEST) tests/slurm

lint: $(READY)
	$(VENV)/bin/ruff check . && $(VENV)/bin/ruff format --check .
	$(VENV)/bin/snakefmt --check workflow
	$(VENV)/bin/snakemake --lint

setup:
	@rm -f $(VENV)/.ready-*
	@$(MAKE) --no-print-directory $(READY)

$(READY):
	@$(PYTHON) -c 'import sys; v = sys.version_info[:2]; sys.exit(None if (3, 11) <= v <= (3, 12) else \
	  f"tokenscale: Python {v[0]}.{v[1]} is not supported.\n  expected  3.11 or 3.12\n  next      make run PYTHON=python3.11")'
	$(PYTHON) -m venv $(VENV)
	$(VENV)/bin/python -m pip install --quiet $(PIP_ARGS) -e ".[test]"
	@touch $@

clean:
	rm -rf $(VENV) .snakemake results
