# Every target sets up what it needs in .venv (about four minutes and 4.5 GB the first time, nothing afterwards).
.PHONY: setup demo parity test test-serving test-rest lint unit fleets floors pythons matrix matrix-ci dispatch processing front-end ab server replay save-queue forward-gate memory micro clean
# Not PYTHON: make would hand its own to scripts/setup.sh in place of the one that the user chose.
VENV_PYTHON := .venv/bin/python
# About half of the time that all tests take, and whatever starts servers or puts chunks into shared memory: a server
# that has ended is tidied up after, by what is new in /dev/shm and open nowhere.
SERVING := tests/server tests/simulated_device tests/fleets $(wildcard $(addprefix tests/patches/test_,\
	save_queue_*.py forward_gate.py gate_and_queue_on_releases.py seams_called.py two_engines.py))
SHELL := /bin/bash

setup:
	@bash scripts/setup.sh

demo: setup ## what the package is for: a server on light engines, stock and fastpath, side by side; under ten minutes
	@$(VENV_PYTHON) -W ignore -m benchmarks.demo $(ARGS)

parity: setup ## the same answers: a server with real stage engines, stock and fastpath, byte by byte; some seven minutes
	@$(VENV_PYTHON) -m benchmarks.parity $(ARGS)

test: setup lint floors ## everything that CI runs; the tests in two processes, each of which speaks when it is done
	@$(MAKE) --no-print-directory --jobs=2 --output-sync=target test-serving test-rest
	@$(MAKE) --no-print-directory matrix-ci

test-serving: setup
	$(VENV_PYTHON) -m pytest $(SERVING)

test-rest: setup
	$(VENV_PYTHON) -m pytest tests $(addprefix --ignore=,$(SERVING))

lint: setup
	$(VENV_PYTHON) -m ruff check .
	$(VENV_PYTHON) -m ruff format --check .
	$(VENV_PYTHON) -m mypy

unit: setup ## the tests that start no server
	$(VENV_PYTHON) -m pytest -m "not server"

floors: ## the machinery on the oldest dependencies that pyproject.toml allows, without vLLM; a minute
	@bash scripts/floors.sh

pythons: ## the same with the newest dependencies, on every Python that pyproject.toml declares and this machine has
	@bash scripts/pythons.sh

matrix: setup ## our built wheel on every release; half an hour, RELEASE="0.22.0 0.30.0" for some
	@$(VENV_PYTHON) -W ignore -m tests.matrix $(RELEASE) $(ARGS)

matrix-ci: setup ## the oldest release, the newest and what is in preview; the last part of `make test`
	@$(VENV_PYTHON) -W ignore -m tests.matrix --ci

fleets: setup ## 1,000 random fleets of the orchestrator and 1,000 of a stage against stock; half an hour
	$(VENV_PYTHON) -W ignore -m tests.fleets_dispatch --seeds 1000
	$(VENV_PYTHON) -W ignore -m tests.fleets.stage --seeds 1000 --jobs 2

dispatch: setup ## what the dispatch of a raw output costs, its latency at low load, and a backlog
	@for part in dispatch latency backlog; do $(VENV_PYTHON) -W ignore -m benchmarks.$$part || exit 1; done

processing: setup ## what an output costs the orchestrator, by the length of its request; three minutes
	@$(VENV_PYTHON) -W ignore -m benchmarks.processing $(ARGS)

front-end: setup ## what a request's end costs the front end
	@$(VENV_PYTHON) -W ignore -m benchmarks.front_end $(ARGS)

ab: setup ## `omni-fastpath ab` against what is known; eight minutes each, ARGS="same", "talker" or "code2wav"
	@$(VENV_PYTHON) -W ignore -m benchmarks.ab $(ARGS)

server: setup ## the whole server on light engines, stock and fastpath
	@$(VENV_PYTHON) -W ignore -m benchmarks.server $(ARGS)

replay: setup ## queueing at a set utilisation; some two hours, ARGS="--cells dear-0.95 ..." for less
	@$(VENV_PYTHON) -W ignore -m benchmarks.replay $(ARGS)

save-queue: setup ## slow receivers, and nobody slow; half an hour
	@for part in component overhead receiver text prompt server; do $(VENV_PYTHON) -W ignore -m benchmarks.save_queue $$part || exit 1; done

forward-gate: setup ## what a stage sends twice, on 0.30 and on 0.22; six minutes
	@$(VENV_PYTHON) -W ignore -m benchmarks.forward_gate $(ARGS)

memory: setup ## the API process's memory over an hour with hardly a quiet moment, stock and gc_pacing
	@$(VENV_PYTHON) -W ignore -m benchmarks.memory $(ARGS)

micro: setup ## pytest-benchmark: single operations
	$(VENV_PYTHON) -m pytest benchmarks/micro --benchmark-only -q

clean:
	rm -rf .venv .cache results .mypy_cache .pytest_cache .ruff_cache
