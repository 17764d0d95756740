# The two commands are `make serve` and `make test`; everything else is for people who change Headgate.
#   make serve ARGS="--port 9000"       options for `headgate up`
#   make test ARGS="-k breaker"         options for pytest
#   CMAKE_ARGS="-DGGML_CUDA=ON" make serve      a llama.cpp backend (CUDA, HIP, VULKAN, ...); kept once it was built
.DEFAULT_GOAL := help
.PHONY: help serve test test-ray lint types cover bench-engine bench-gateway bench-outage bench-planner bench-router bench-estimates bench-switching bench-colocation bench-turns bench-replicas bench-fleet bench-speculation bench-kv bench-schema gpu-check chaos chaos-fleet fuzz soak resume-proof lock schema reference clean ready machine

# The first interpreter that is new enough; `make PYTHON=... serve` chooses another.
PYTHON ?= $(shell for p in .venv/bin/python python3 python3.13 python3.12 python3.11; do \
    $$p -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && echo $$p && break; done)
# Without bytecode files each of Headgate's many processes would compile its modules again.
unexport PYTHONDONTWRITEBYTECODE
VENV := .venv
RUN := $(VENV)/bin/python -m
ARGS ?=
# Tests that start processes mostly wait, so there are more jobs than cores; idle jobs take over waiting tests. On two
# cores six jobs take as long as four.
JOBS ?= 4
SPREAD := -n $(JOBS) --dist worksteal
# Branch coverage that the pure packages must reach, in percent.
CORE_COVERAGE ?= 100
PURE := .pytest_cache/pure_modules.coveragerc
# Measured in the tests that have to prove the cores only; tracing takes as much time again as what is traced.
MEASURE := -p tests.rigs.core_coverage --cov --cov-config=$(PURE) --cov-branch --cov-report=term-missing:skip-covered

help:
	@sed -n 's/^\([a-z-]*\):.*## /make \1\t/p' $(MAKEFILE_LIST) | expand -t 20

ready:
	@test -n "$(PYTHON)" || { echo "Headgate needs Python 3.11 or newer, and none was found:" \
	    "install one (Debian and Ubuntu: apt install python3.11 python3.11-venv; macOS: brew install python@3.13)," \
	    "or name it: make PYTHON=/path/to/python3.12" >&2; exit 2; }
	@$(PYTHON) -I headgate/bootstrap.py

machine: ready ## the CPU, its features and the cores that are used, as tests and benchmarks print them first
	@$(RUN) headgate.build

serve: ready ## start gateway and inference on the configured models; installs on the first run
	@exec $(RUN) headgate up $(ARGS)

test: machine ## lint, types, the whole test suite, and the coverage of the pure packages
	@$(MAKE) --no-print-directory lint
	@mkdir -p $(dir $(PURE)) && $(RUN) tests.rigs.pure_modules >$(PURE)
	@$(RUN) mypy >.types.log 2>&1 & types=$$!; trap "kill $$types" INT TERM; \
	    $(RUN) pytest $(SPREAD) $(MEASURE) $(if $(ARGS),,--cov-fail-under=$(CORE_COVERAGE)) $(ARGS); tests=$$?; \
	    wait $$types; types=$$?; cat .types.log; exit $$((tests + types))

test-ray: machine ## the tests on real Ray clusters, also the long one; installs ray
	@$(VENV)/bin/python -c 'import ray' 2>/dev/null || \
	    $(RUN) pip install --quiet --constraint requirements.lock --editable '.[ray]'
	@HEADGATE_TEST_RAY=1 $(RUN) pytest tests/unit/test_cli_ray.py tests/integration/test_ray_cluster.py \
	    tests/integration/test_ray_head.py $(ARGS)

lint: ready ## ruff (rules and formatting) and import-linter (which package may import which)
	@$(RUN) ruff check .
	@$(RUN) ruff format --check .
	@$(VENV)/bin/lint-imports --no-cache >.lint-imports.log || { cat .lint-imports.log; exit 1; }

types: ready ## mypy, strict where pyproject.toml says so
	@$(RUN) mypy

cover: machine ## a coverage report of everything, in htmlcov/
	@$(RUN) pytest $(SPREAD) --cov --cov-report=html $(ARGS)

bench-engine: machine ## the worker beside llama.cpp's servers: MODELS=15m,135m,1b; QUICK=1 for at most five minutes
	@exec $(RUN) benchmarks.engine

bench-gateway: machine ## what the gateway costs, beside a bare hop, LiteLLM and Portkey: PARTS=alone,crowds,clouds,...; QUICK=1
	@exec $(RUN) benchmarks.gateway

bench-outage: machine ## a minute without the inference service, and without a cloud: OUTAGE=60 SITUATIONS=gone,silent; QUICK=1
	@exec $(RUN) benchmarks.outage

bench-planner: machine ## how long one decision takes, 100 models on 8 devices and 1,000 on 64; QUICK=1 for fewer states
	@exec $(RUN) benchmarks.planner

bench-router: machine ## routing over nodes, simulated: NODES=1000 MODELS=10000 SEED=1, three gateways; QUICK=1 for 200 nodes
	@exec $(RUN) benchmarks.router_simulation

bench-estimates: machine ## predicted against allocated bytes, architectures x contexts x KV types x layers x parallel; QUICK=1
	@exec $(RUN) benchmarks.estimates

bench-switching: machine ## cold, warm and kept models to the first token: MODELS=135m,1b PLACES=cpu,sim,sim-resident ROUNDS=5; QUICK=1
	@exec $(RUN) benchmarks.switching

bench-colocation: machine ## what a busy neighbor costs a model's token gaps: MODELS=15m,135m PLACES=cpu,sim ROUNDS=5; QUICK=1
	@exec $(RUN) benchmarks.colocation

bench-turns: machine ## two models with memory for one, under load that never pauses: SWAPS=50 PLACES=cpu,sim KEPT=no,yes; QUICK=1
	@exec $(RUN) benchmarks.turns

bench-replicas: machine ## one and two replicas of a model on two paced devices: ROUNDS=5 PACE=0.06; QUICK=1
	@exec $(RUN) benchmarks.replicas

bench-fleet: machine ## one and four nodes, what shared state costs, prefixes over nodes: PARTS=throughput,shared,prefix; QUICK=1
	@exec $(RUN) benchmarks.fleet

bench-speculation: machine ## answers with and without proposed tokens: SOURCE=ngram|draft MODELS=135m STREAMS=1,8,32 THREADS=1
	@exec $(RUN) benchmarks.speculation

bench-kv: machine ## stored sequences: restores, alternating conversations, llama-server --cache-ram: MODELS=135m,1b PLACES=cpu,sim PARTS=paths,...; QUICK=1
	@exec $(RUN) benchmarks.kv

bench-schema: machine ## what of JSON Schema is enforced, by the public test suite; ARGS="-v" names the differences
	@exec $(RUN) benchmarks.schema_coverage $(ARGS)

gpu-check: machine ## on a real NVIDIA GPU, in ten minutes: PARTS=bytes,decode,growth,experts,warm,kv GPU_CHECK_SHAPE=1b; else it skips; QUICK=1
	@exec $(RUN) benchmarks.gpu_check

chaos: machine ## faults of every kind under load, and what must hold: EVENTS=1000 SEED=1 MINUTES=60 PLANTS=all|none
	@exec $(RUN) tests.chaos --events $(or $(EVENTS),1000) --seed $(or $(SEED),1) --gap $(or $(GAP),1.2) \
	    --minutes $(or $(MINUTES),60) --plants $(or $(PLANTS),all) $(ARGS)

chaos-fleet: machine ## faults of gateways, nodes, their links and the Redis server under load: EVENTS=500 SEED=1 PLANTS=all|none
	@exec $(RUN) tests.fleet --events $(or $(EVENTS),500) --seed $(or $(SEED),1) --gap $(or $(GAP),1.2) \
	    --minutes $(or $(MINUTES),60) --plants $(or $(PLANTS),all) $(ARGS)

fuzz: machine ## damaged model files and made-up requests, all of them: EXAMPLES=100 per operation
	@FUZZ_EXAMPLES=$(or $(EXAMPLES),100) $(RUN) pytest tests/fuzz $(ARGS)

soak: machine ## a long run under load, and what every process holds by then: MINUTES=20 or HOURS=24; QUICK=1
	@exec $(RUN) benchmarks.soak

resume-proof: machine ## greedy answers cut at every token, by the connection and by kill -9, against the uncut ones: QUESTIONS=20 EVERY=1 MODELS=demo WAYS=cut,kill TOKENS=32
	@exec $(RUN) benchmarks.resume_proof

lock: ready ## resolve pyproject.toml into requirements.lock, names and versions only: ARGS="--upgrade" for newer versions
	@$(RUN) pip install --quiet uv
	@$(RUN) uv pip compile --quiet --no-annotate --extra dev --python $(VENV)/bin/python \
	    --custom-compile-command "make lock" $(ARGS) pyproject.toml -o requirements.lock

schema: ready ## write the JSON schemas of the two configuration files
	@$(RUN) headgate config schema --write config

reference: ready ## write the help of every verb and the states of a model into docs/
	@$(RUN) headgate.cli.reference
	@$(RUN) inference.tools.state_diagrams

clean: ## remove .venv and what tools left behind
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache .hypothesis htmlcov .coverage .coverage.*
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
