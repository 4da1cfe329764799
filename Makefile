# Sets up a virtual environment from the pinned lock, then trains or tests in it. What is set up is not set up again.
#
#   make train                             learn CodeExec-v0 on this machine
#   make train ARGS="--model tiny"         any words that `molt-gym train ENV` takes
#   make engines                           add vLLM and Ray; then also ARGS="--engine vllm"
#   make test                              lint and all tests, engines included, JOBS at a time; TESTS=tests/envs for some
#   make test-slow                         train with every algorithm, and from pictures, with 3 seeds, JOBS at a time, some
#                                          25 minutes of two cores; tables and curves go to benchmarks/results
#
# On a machine with GPUs, make an environment of your own with the torch build that fits its driver and
# `pip install -e .` instead: the lock is for CPUs. slurm/gpu.lock has what was tried with CUDA 13.0.
# Tests of slurm/launch.sh need slurm-wlm and munge, and are left out where these are not installed.

SHELL := /bin/bash
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help train test test-slow lint setup engines sandbox clean

VENV := .venv
ENV := CodeExec-v0
ARGS :=
TESTS :=
JOBS := 2
# The first Python >= 3.11 that can make virtual environments; the pins were tried with 3.11.
PYTHON := $(shell for python in python3.11 python3.12 python3.13 python3; do \
	$$python -c 'import ensurepip, sys, venv; sys.exit(sys.version_info < (3, 11))' 2>/dev/null \
	&& echo $$python && break; done)
BIN := $(VENV)/bin
PIP := $(BIN)/pip install -qq --disable-pip-version-check --no-compile

help:
	@sed -n 's/^#   //p' Makefile

train: setup sandbox
	$(BIN)/molt-gym train $(ENV) $(ARGS)

test: lint engines sandbox
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(JOBS) --dist loadfile --no-loadscope-reorder $(TESTS)

# Runs of other code than this prove nothing, so they begin anew; `python benchmarks/algorithms.py` goes on with them.
LEARNING := runs/algorithms
test-slow: setup sandbox
	rm -rf $(LEARNING)
	$(BIN)/python benchmarks/algorithms.py --jobs $(JOBS) --out $(LEARNING) --result algorithms-cpu$(JOBS)
	OMP_NUM_THREADS=1 $(BIN)/python benchmarks/vision.py --jobs $(JOBS) --out $(LEARNING) --result vision-cpu$(JOBS)
	MOLT_GYM_LEARNING=$(LEARNING) OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m learning

lint: setup
	$(BIN)/ruff check .

setup: $(VENV)/.ready

engines: setup $(VENV)/.engines

# The code is left uncompiled: that saves more time here than the first imports cost later, if they may keep what they
# compile; else each process would compile all of it again, which takes as long as all else that it does at its start.
unexport PYTHONDONTWRITEBYTECODE
$(VENV)/.locked: cpu.lock
	@test -n "$(PYTHON)" || { echo "Python >= 3.11 with venv is needed; on Debian: apt-get install python3-venv"; exit 1; }
	@echo "Setting up $(VENV) with $(PYTHON): some 350 MB to fetch, 1.5 GB on disk"
	@rm -rf $(VENV)
	@$(PYTHON) -m venv $(VENV)
	@$(PIP) --no-deps -r cpu.lock
	@$(BIN)/python -c 'import torch' 2>/dev/null || { \
		echo "This torch is a CUDA build: fetching the libraries that it loads, 2.5 GB more"; \
		$(PIP) -c cpu.lock torch; }
	@touch $@

$(VENV)/.engines: $(VENV)/.locked cpu-engines.lock
	@echo "Adding vLLM and Ray to $(VENV): some 370 MB to fetch, 1.2 GB on disk"
	@$(PIP) --no-deps -r cpu-engines.lock
	@touch $@

$(VENV)/.ready: $(VENV)/.locked pyproject.toml
	@$(PIP) --no-deps --no-build-isolation -e .
	@touch $@

sandbox:
	@command -v bwrap >/dev/null || { \
		as_root=$$([ $$(id -u) = 0 ] || echo "sudo -n"); \
		echo "Installing bubblewrap, the sandbox for code that models write"; \
		{ $$as_root apt-get update -qq && $$as_root apt-get install -y -qq bubblewrap; } >/dev/null 2>&1; } || { \
		echo "bubblewrap could not be installed. Install it with your system's package manager (Debian and Ubuntu:"; \
		echo "apt-get install bubblewrap, Fedora: dnf install bubblewrap, Arch: pacman -S bubblewrap), or read what"; \
		echo "the lesser choice --env-kwargs.sandbox subprocess does not protect."; }

clean:
	rm -rf $(VENV) build *.egg-info .pytest_cache .ruff_cache .hypothesis
