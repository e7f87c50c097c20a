# On a fresh Debian or Ubuntu machine with git, make and Python >= 3.11 with venv, as root or not:
#     make demo      watch four ranks train, dense and sparse, then look at the page
#     make test      lint, format, types, spelling and the tests, on 1 and 3 ranks, those of communication on 8 too
#                    The CUDA kernels are compiled, GPU or not, by nvcc from PATH or NVRTC from the extra cuda-compile; with
#                    neither that is skipped. Where CI is set, set-up installs that extra and `examples`, and tests fail without.
# Each does its own set-up in .venv, once; again when setup.cfg or constraints.txt change.

# The interpreter that makes .venv; unset: the first of these that is new enough.
PYTHON ?=
PYTHONS = python3 python3.13 python3.12 python3.11
# An index with the CPU build of torch (200 MB; the default one may bring CUDA, 2.7 GB). Empty: pip's own configuration.
TORCH_INDEX ?=
PIP_ARGS ?=
TEST_ARGS ?=
DEMO_ARGS ?=
# bench-net: cuda for the GPUs of this machine; links of this rate (1gbit, with GPUs 10gbit); hosts (4, with GPUs 2) and ranks (one
# a host); where the JSON goes; further arguments of jobs.bench.
DEVICE ?=
RATE ?=
HOSTS ?=
RANKS ?=
JSON ?=
BENCH_ARGS ?=

VENV ?= .venv
# What is installed: mpi brings Open MPI, mpich MPICH; both in one environment would shadow each other.
EXTRAS ?= mpi,jobs,dev,docs
BIN := $(VENV)/bin
READY := $(VENV)/ready
PIP := $(BIN)/python -m pip --disable-pip-version-check
NEW_ENOUGH := import sys; sys.exit(sys.version_info < (3, 11))

.DEFAULT_GOAL := help
.PHONY: help setup demo test test-long test-slurm test-all test-mpich bench-net docs lint format clean

help:
	@echo "make demo     train VGG on digits with 4 ranks, dense and Ok-Topk, and compare them on a page (demo/)"
	@echo "              WIDTH=1.0 DATA=cifar10.h5 RANKS=4 DENSITY=0.02 or any DEMO_ARGS='...'"
	@echo "make test     lint, format, types, spelling and the tests; TEST_ARGS='--ranks 1,4 -k regions'"
	@echo "make test-all  all that, the long tests, 2, 4, 5, 6 and 8 ranks for the library, and Slurm"
	@echo "make test-long  of that only the long tests and the other numbers of ranks"
	@echo "make test-slurm  the batch scripts of jobs/ on a real Slurm, as root; installed by apt-get if need be"
	@echo "make test-mpich  the same tests on MPICH instead of Open MPI, in .venv-mpich"
	@echo "make bench-net  every method over TCP between hosts on links of RATE=1gbit; DEVICE=cuda HOSTS=2 RANKS=4 JSON=FILE BENCH_ARGS='...'"
	@echo "make docs     the pages and the reference as HTML, in docs/_build; a broken link or name is an error"
	@echo "make lint     the four checks alone"
	@echo "make format   rewrite the sources as the formatter wants them"
	@echo "make setup    only the virtual environment in .venv; PYTHON=python3.12 picks its interpreter"
	@echo "make clean    remove .venv and everything generated, except runs and prepared data"

setup: $(READY)

demo: $(READY)
	@$(BIN)/python -m jobs.demo $(if $(WIDTH),--width $(WIDTH)) $(if $(DATA),--data $(DATA)) \
		$(if $(RANKS),--ranks $(RANKS)) $(if $(DENSITY),--density $(DENSITY)) $(DEMO_ARGS)

test: $(READY)
	@$(BIN)/python -m tests.run $(TEST_ARGS)

test-all: $(READY)
	@$(BIN)/python -m tests.run --all $(TEST_ARGS)

test-long: $(READY)
	@$(BIN)/python -m tests.run --long $(TEST_ARGS)

test-slurm: $(READY)
	@$(BIN)/python -m tests.run --slurm $(TEST_ARGS)

# The script checks its arguments, says what is missing, and leaves nothing behind.
bench-net: $(READY)
	@jobs/bench/net.sh --python $(BIN)/python $(if $(DEVICE),--device $(DEVICE)) $(if $(HOSTS),--hosts $(HOSTS)) \
		$(if $(RANKS),--ranks $(RANKS)) $(if $(RATE),--rate $(RATE)) $(if $(JSON),--json $(JSON)) $(BENCH_ARGS)

test-mpich:
	@$(MAKE) --no-print-directory VENV=.venv-mpich EXTRAS=mpich,jobs,dev,docs test TEST_ARGS="--no-lint $(TEST_ARGS)"

lint: $(READY)
	@$(BIN)/python -m tests.run --no-single --no-ranks --no-host-cuda

# External links are not fetched.
docs: $(READY)
	@$(BIN)/python -m sphinx -W --keep-going -n -q docs docs/_build
	@echo "docs/_build/index.html"

format: $(READY)
	@$(BIN)/ruff check --select I --fix --quiet .
	@$(BIN)/ruff format .

clean:
	rm -rf $(VENV) build dist demo docs/_build *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# A .venv that no longer works (the checkout was moved, the system's Python was replaced) is made anew.
$(READY): setup.cfg pyproject.toml constraints.txt
	@python="$(PYTHON)"; \
	if [ -z "$$python" ]; then \
		for candidate in $(PYTHONS); do \
			if "$$candidate" -c '$(NEW_ENOUGH)' 2>/dev/null; then python=$$candidate; break; fi; \
		done; \
	fi; \
	if [ -z "$$python" ]; then \
		echo "No Python >= 3.11 among: $(PYTHONS)." >&2; \
		echo "Install one (apt-get install python3 python3-venv) or name it: make PYTHON=/path/to/python3.12" >&2; \
		exit 1; \
	fi; \
	if ! "$$python" -c '$(NEW_ENOUGH)' 2>/dev/null; then \
		echo "PYTHON=$$python is missing or older than 3.11: $$("$$python" --version 2>&1)" >&2; \
		exit 1; \
	fi; \
	if $(BIN)/python -c '$(NEW_ENOUGH)' 2>/dev/null && $(PIP) --version >/dev/null 2>&1; then exit 0; fi; \
	if ! "$$python" -c 'import ensurepip, venv' 2>/dev/null; then \
		echo "$$python cannot make virtual environments: its venv module is not installed." >&2; \
		echo "On Debian and Ubuntu: apt-get install python3-venv (or python3.N-venv, N as in $$python --version)" >&2; \
		exit 1; \
	fi; \
	echo "making $(VENV) with $$("$$python" --version)"; \
	"$$python" -m venv --clear $(VENV)
	@if [ -n "$(TORCH_INDEX)" ] && ! $(BIN)/python -c 'import torch' 2>/dev/null; then \
		$(PIP) install --no-deps --retries 0 --timeout 15 -c constraints.txt --index-url $(TORCH_INDEX) torch || \
		echo "no CPU build of torch from $(TORCH_INDEX): taking the default one, which may bring CUDA (2.7 GB)"; \
	fi
	$(PIP) install $(if $(CI),--quiet) $(PIP_ARGS) -c constraints.txt -e '.[$(EXTRAS)]'
	@if [ -n "$(CI)" ] && ! command -v nvcc >/dev/null; then \
		$(PIP) install --quiet $(PIP_ARGS) -e '.[cuda-compile]' || \
		echo "no nvcc on PATH and no NVRTC from the registry: the tests that compile the kernels will fail"; \
	fi
	@if [ -n "$(CI)" ]; then \
		$(PIP) install --quiet $(PIP_ARGS) -c constraints.txt -e '.[examples]' || \
		echo "the libraries of examples/ are not to be had from the registry: the tests of those examples will fail"; \
	fi
	$(BIN)/python -m oktopk.cpu
	@touch $(READY)
