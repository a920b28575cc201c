# Every target sets up what it needs in .venv (about four minutes and 4.5 GB the first time, nothing afterwards).
.PHONY: setup demo parity test test-more lint unit trust floors pythons packaging licences dist matrix bench calibration server save-queue clean
# Not PYTHON: make would hand its own to scripts/setup.sh in place of the one that the user chose.
VENV_PYTHON := .venv/bin/python
# Two processes; a file's tests share one, and with it the servers that its fixtures start.
PYTEST := $(VENV_PYTHON) -m pytest -n 2 --dist loadfile --no-loadscope-reorder --durations=15 -rs
SHELL := /bin/bash
# `scripts/pythons.sh` runs it on 3.12, if that is here.
ON_3_12 = $(if $(shell scripts/python.sh python3.12 2>/dev/null),--deselect tests/server/test_alike.py::test_tts_answers_alike_on_the_event_driven_loop)

setup:
	@bash scripts/setup.sh

demo: setup ## what the package is for: a node on light engines, stock and fastpath, side by side; five minutes
	@$(VENV_PYTHON) -W ignore -m benchmarks.demo $(ARGS)

parity: setup ## the same answers: requests of every kind to real stage engines, stock and fastpath, byte by byte; ten minutes
	@$(VENV_PYTHON) -W ignore -m benchmarks.trust.parity $(ARGS)

test: setup lint ## before each commit, five minutes: no vLLM, each patch on the real upstream, one pair of servers
	$(PYTEST) -m "not more" --traced

test-more: setup ## what `make test` leaves out: other servers, real runners, faults, packaging, other Pythons and releases; 25 minutes
	@bash scripts/pythons.sh $(PYTEST) -m more --traced $(ON_3_12)
	@$(VENV_PYTHON) -W ignore -m benchmarks.micro --benchmark-disable
	@$(MAKE) --no-print-directory matrix

lint: setup
	@! git grep -nE "^(<<<<<<<|>>>>>>>) " -- . || (echo "a merge left its marks"; false)
	$(VENV_PYTHON) -m ruff check .
	$(VENV_PYTHON) -m ruff format --check .
	$(VENV_PYTHON) -m mypy

unit: setup ## the tests that need no vLLM
	$(PYTEST) -m "not more and not server and not upstream"

trust: setup ## 5,000 random schedules of the orchestrator and 5,000 of the save queue against a model and stock, and inputs of each kind; twenty minutes
	$(VENV_PYTHON) -m pytest -s -o timeout=0 --hypothesis-profile long tests/schedules tests/test_fuzz.py

floors: ## the machinery on the oldest dependencies that pyproject.toml allows, and on Python 3.10 if it is here, without vLLM; a minute
	@bash scripts/without_vllm.sh $${PYTHON:-$$(scripts/python.sh python3.10 || echo python3.11)} floors

pythons: ## floors, on 3.13 the tests that need no vLLM, on 3.12 the patches and a pair of servers; five minutes
	@bash scripts/pythons.sh

packaging: setup ## wheel, source distribution, entry points, what an installation requires
	$(PYTEST) tests/test_packaging.py

licences: setup ## what an installation brings with it, with versions and licences
	@$(VENV_PYTHON) scripts/licences.py

dist: setup ## a wheel and a source distribution in dist/, to be installed by file
	@rm -rf dist && $(VENV_PYTHON) -m hatchling build -d dist

matrix: setup ## our built wheel on the other releases that are served; RELEASE=0.28.0 for one
	@$(VENV_PYTHON) -W ignore -m tests.matrix $(RELEASE) $(ARGS)

calibration: setup ## stock's server on the simulated H100 against public tables; an hour, ARGS="--short" half of it
	@$(VENV_PYTHON) -W ignore -m benchmarks.calibration $(ARGS)

server: setup ## the whole server on light engines: layouts, loads, arms, parts, capacity (ARGS="--help")
	@$(VENV_PYTHON) -W ignore -m benchmarks.server $(ARGS)

bench: setup ## what each seam costs, stock and fastpath; four minutes. ARGS are pytest's: ARGS="--benchmark-save base", ARGS="-k dispatch"
	@$(VENV_PYTHON) -W ignore -m benchmarks.micro $(ARGS)

save-queue: setup ## slow receivers and what they cost the others; a quarter of an hour
	@$(VENV_PYTHON) -W ignore -m benchmarks.save_queue $(ARGS)

clean:
	rm -rf .venv .cache results .mypy_cache .pytest_cache .ruff_cache
