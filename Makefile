# Every target sets up what it needs in .venv (about four minutes and 4.5 GB the first time, nothing afterwards).
.PHONY: setup demo test lint unit bench replay concurrency save-queue forward-gate micro clean
PYTHON := .venv/bin/python
SHELL := /bin/bash

setup:
	@bash scripts/setup.sh

demo: setup ## the real server, stock and fastpath, side by side
	@$(PYTHON) -m benchmarks.demo

test: setup lint ## everything that CI runs
	$(PYTHON) -m pytest

lint: setup
	$(PYTHON) -m ruff check .
	$(PYTHON) -m ruff format --check .
	$(PYTHON) -m mypy

unit: setup ## the tests that start no server
	$(PYTHON) -m pytest -m "not server"

bench: setup ## the figures of the README
	@$(PYTHON) -W ignore -m benchmarks.dispatch
	@$(PYTHON) -W ignore -m benchmarks.latency
	@$(PYTHON) -W ignore -m benchmarks.backlog

replay: setup ## queueing at a set utilisation; some two hours, ARGS="--cells dear-0.95 ..." for less
	@$(PYTHON) -W ignore -m benchmarks.replay $(ARGS)

concurrency: setup ## the whole server at concurrency 1 to 32
	@$(PYTHON) -W ignore -m benchmarks.concurrency

save-queue: setup ## slow receivers, and nobody slow; half an hour
	@for part in component overhead receiver text prompt server; do $(PYTHON) -W ignore -m benchmarks.save_queue $$part || exit 1; done

forward-gate: setup ## what a stage sends twice, on 0.30 and on 0.22; six minutes
	@$(PYTHON) -W ignore -m benchmarks.forward_gate $(ARGS)

micro: setup ## pytest-benchmark: single operations
	$(PYTHON) -m pytest benchmarks/micro --benchmark-only -q

clean:
	rm -rf .venv .cache results .mypy_cache .pytest_cache .ruff_cache
