# Two commands for people: `make demo` and `make test`. Each does all its own set-up.
#
# torch: a plain `pip install torch` on Linux brings gigabytes of CUDA packages. Without a GPU, run
#   make demo TORCH_INDEX=https://download.pytorch.org/whl/cpu
# to take the CPU build of the pinned version instead.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
TORCH_INDEX ?=
STAMP := $(VENV)/.installed
READY := $(VENV)/.compiled
DEMO_STAMP := $(VENV)/.installed-demo
# pip compiles it into the folder of its source.
COMPILED := fabric/ftar/host/piece_moves.c
DEMO_ARGS ?=
SOAK_ARGS ?= --random "1 every 20s for 1h"
PYTEST := $(BIN)/pytest
PURE := tests/protocol tests/sim tests/mutants
# The second of the two lanes of jobs begins with these. All that fork from a parent with frameworks come first, so that
# one lane needs this parent.
JOBS := $(wildcard tests/integration/test_*.py) tests/lighthouse/test_node_meeting.py
LATE_JOBS := $(patsubst %,tests/integration/test_%.py,\
	accelerate adopted_frameworks adopted_scripts job_log lightning transformers act another_store collectives demo drill \
	hosts launched_jobs layouts namespaces outer_steps scraped_job slow_links slow_replica torchft_scripts unequal)
EARLY_JOBS := $(filter-out $(LATE_JOBS),$(JOBS))
# The second of the two lanes of parts begins with these.
LATE_PARTS := tests/conformance tests/ckpt_server tests/lighthouse
EARLY_PARTS := $(filter-out $(PURE) $(LATE_PARTS) tests/integration,$(patsubst %/,%,$(sort $(dir $(wildcard tests/*/test_*.py))))) \
	$(wildcard tests/test_*.py)
# `make test` leaves out the tests with the mark `long`, each of which names a cheaper test that stays.
SHORT := -m 'not long'

.PHONY: demo soak docs dist quick test long conformance torchtitan torch-releases lint setup etcd chromium prometheus slurm helm clean
.DELETE_ON_ERROR:

setup: $(READY)

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(0 if sys.version_info >= (3, 11) else "fabric needs Python 3.11 or newer; this is %s: run make PYTHON=python3.11" % sys.version.split()[0])'
	$(PYTHON) -m venv $(VENV)

# pip would compile all 17,000 files, of which most are never imported. So the first import compiles, here for most of
# what the tests need, whatever the shell says about writing what is compiled.
IMPORTED := pytest, hypothesis, torch._dynamo, torch.distributed.fsdp, torch.distributed.tensor.parallel, \
	torch.distributed.pipelining, torch.utils.tensorboard, accelerate, pytorch_lightning, transformers.trainer, \
	transformers.models.llama.modeling_llama, fabric.cli.run, fabric.client.attach
COMPILE := $(BIN)/python -c 'import $(IMPORTED)'

$(READY): export PYTHONDONTWRITEBYTECODE :=
$(READY): $(STAMP)
	$(COMPILE)
	@touch $@

# Older releases of pip take twice the time to choose among the releases of an index.
$(STAMP): pyproject.toml setup.py $(COMPILED) constraints.txt | $(BIN)/python
	$(BIN)/python -m pip install -q 'pip>=25'
ifneq ($(TORCH_INDEX),)
	$(BIN)/python -m pip install -q --no-compile "$$(grep -i '^torch==' constraints.txt)" --index-url $(TORCH_INDEX)
endif
	$(BIN)/python -m pip install -q --no-compile -c constraints.txt -e '.[test]'
	@touch $@ $(DEMO_STAMP)

# The demo needs no packages of the tests. Each file must have a hash of demo-requirements.txt, except what torch brings
# from a TORCH_INDEX that you name.
$(DEMO_STAMP): pyproject.toml setup.py $(COMPILED) demo-requirements.txt | $(BIN)/python
ifneq ($(TORCH_INDEX),)
	$(BIN)/python -m pip install -q "$$(grep -i '^torch==' constraints.txt)" --index-url $(TORCH_INDEX)
endif
	awk '/^(torch|triton|nvidia-|cuda-)/ {skip = "$(TORCH_INDEX)" != ""} !skip {print} !/\\$$/ {skip = 0}' \
		demo-requirements.txt > $(VENV)/demo-requirements.txt
	$(BIN)/python -m pip install -q --require-hashes --no-deps -r $(VENV)/demo-requirements.txt
	$(BIN)/python -m pip install -q --no-deps --no-build-isolation -e .
	@touch $@

demo: $(DEMO_STAMP)
	$(BIN)/fabric demo $(DEMO_ARGS)

# An hour of drawn faults. Another seed: make soak SOAK_ARGS="--random '2 every 20s for 1h'"
soak: export EXAMPLE_STEPS := 900000
soak: export EXAMPLE_PAUSE_S := 0.02
soak: setup etcd
	$(BIN)/fabric drill --replicas 4 --lighthouses 2 --store-members 3 --out soak-out $(SOAK_ARGS) \
		-- $(BIN)/python examples/clipping.py

LINT := $(BIN)/ruff check . && $(BIN)/ruff format --check . && $(BIN)/mypy && $(BIN)/lint-imports

lint: setup
	$(LINT)

# The documentation as a site in build/docs, with search and without any file from a network. A dead link is an error.
docs: setup
	$(BIN)/mkdocs build --strict --quiet
	@echo "read it: $(BIN)/python -m http.server --bind 127.0.0.1 --directory build/docs 8000"

# A source archive in dist/, and the wheel that is built from it.
dist: setup
	$(BIN)/python -m build --no-isolation --outdir dist

# "Is my change good so far?", in 71 s on two quiet cores: the linters, the rules of text, the protocol's units, one
# world of each kind, a few parts, and one job in which a replica dies.
QUICK_CORES := tests/protocol --ignore=tests/protocol/test_leader_two_processes.py \
	tests/sim/test_worlds.py::test_a_failure_in_worlds_of_any_kind_replays_from_the_printed_line \
	tests/sim/test_worlds.py::test_a_seed_replays_exactly
QUICK_PARTS := $(filter-out tests/test_bench% tests/test_pack% tests/test_parse%,$(wildcard tests/test_*.py)) \
	$(patsubst %,tests/%.py,ckpt_server/test_state_encoding client/test_calls_of_steps cli/test_restart_policy \
		ftar/test_buckets health/test_detector lighthouse/test_message_bounds runtime/test_config) \
	'tests/integration/test_failures.py::test_two_members_die_at_once_and_one_survives'

quick: export PYTHONDONTWRITEBYTECODE :=
quick: setup
	@$(PYTEST) -q --durations=3 -p no:cacheprovider --hypothesis-profile=quick $(QUICK_CORES) > .cores.log 2>&1 & cores=$$!; \
	($(LINT)) > .lint.log 2>&1 & lint=$$!; \
	trap "kill $$cores $$lint" INT TERM; failed=; \
	$(PYTEST) -q --durations=3 -p no:cacheprovider --hypothesis-profile=quick $(QUICK_PARTS) || failed=1; \
	for run in $$lint $$cores; do wait $$run || failed=1; done; \
	for log in .cores.log .lint.log; do echo "=== $$log ==="; cat $$log; rm -f $$log; done; \
	test -z "$$failed"

# Five runs side by side. Tests of whole jobs (two lanes) wait much of their time, those of the parts (two lanes) some of
# it, and the simulator's worlds, at a low priority, only need a processor. A lane that has done its own files helps
# another. Worlds and linters need no compiled frameworks, so they begin while a fresh environment compiles these.
# Thousands of processes are started, so what is compiled is kept, whatever the shell says.
SHARED := $(PYTEST) $(SHORT) --share $$begun

test: export PYTHONDONTWRITEBYTECODE :=
test: $(STAMP) etcd chromium prometheus helm
	@begun=$$(mktemp -d); failed=; \
	nice -n 10 $(PYTEST) -p no:cacheprovider $(PURE) > .worlds.log 2>&1 & worlds=$$!; \
	($(LINT)) > .lint.log 2>&1 & lint=$$!; \
	trap "kill $$worlds $$lint; exit 1" INT TERM; \
	test $(READY) -nt $(STAMP) || { $(COMPILE) && touch $(READY); } || failed=1; \
	$(SHARED) -p no:cacheprovider $(EARLY_PARTS) $(LATE_PARTS) > .parts.log 2>&1 & parts=$$!; \
	$(SHARED) -p no:cacheprovider $(LATE_PARTS) $(JOBS) > .late-parts.log 2>&1 & late_parts=$$!; \
	$(SHARED) -p no:cacheprovider $(LATE_JOBS) $(EARLY_JOBS) > .late.log 2>&1 & late=$$!; \
	trap "kill $$worlds $$lint $$parts $$late_parts $$late" INT TERM; \
	$(SHARED) $(EARLY_JOBS) $(LATE_JOBS) || failed=1; \
	for lane in $$lint $$late $$late_parts $$parts $$worlds; do wait $$lane || failed=1; done; rm -r $$begun; \
	for log in .late.log .late-parts.log .parts.log .worlds.log .lint.log; do \
		echo "=== $$log ==="; cat $$log; rm -f $$log; \
	done; \
	test -z "$$failed"

# The tests with the mark `long`: jobs under a real Ray and a real Slurm, drills of running jobs, and further cases of
# jobs that `make test` has one case of; every recipe of the conformance suite; and all seeds of the simulated worlds.
long: setup etcd slurm conformance
	$(PYTEST) -m long tests
	$(PYTEST) tests/sim --hunt

# Every recipe of docs/conformance.md, each in four ways: the same training with fabric as without it.
conformance: setup
	$(BIN)/python -m pip install -q -c constraints.txt -e '.[conformance]'
	$(PYTEST) tests/conformance tests/integrations/test_trl_arguments.py --all-recipes

# torchtitan's packages take over a gigabyte and need older releases than other tests, so they have an environment.
torchtitan: PYTHONDONTWRITEBYTECODE :=
torchtitan:
	test -x $(VENV)-torchtitan/bin/python || $(PYTHON) -m venv $(VENV)-torchtitan
	$(VENV)-torchtitan/bin/python -m pip install -q "$$(grep -i '^torch==' constraints.txt)" $(if $(TORCH_INDEX),--index-url $(TORCH_INDEX))
	$(VENV)-torchtitan/bin/python -m pip install -q pytest pytest-asyncio hypothesis triton -e '.[torchtitan]'
	$(VENV)-torchtitan/bin/python -m pytest tests/integration/test_torchtitan.py

# The parts and whole jobs that depend on torch, with another release of torch in an environment of its own:
#   make torch-releases TORCH=2.15.0 PYTHON=python3.12
# Without TORCH_INDEX we take the release's wheel from PyPI, without its packages of CUDA (ops/dev/torch_without_cuda.py).
# torch 2.11 needs an older setuptools than constraints.txt has.
TORCH ?= 2.11.0
RELEASE_VENV ?= $(VENV)-torch-$(TORCH)
RELEASE_PYTHON = $(RELEASE_VENV)/bin/python
RELEASE_PARTS := $(patsubst %,tests/%,runtime transport collectives health ckpt_server ftar client integrations)
RELEASE_JOBS := $(patsubst %,tests/integration/test_%.py,\
	accelerate adopted_frameworks adopted_scripts collectives data_policies device_jobs diagnose durable failures \
	layouts lightning local_state mistakes nan outer_steps planes ranks torchft_scripts transformers unequal)

torch-releases: PYTHONDONTWRITEBYTECODE :=
torch-releases: etcd
	test -x $(RELEASE_PYTHON) || $(PYTHON) -m venv $(RELEASE_VENV)
	$(RELEASE_PYTHON) $(if $(TORCH_INDEX),-m pip install -q --index-url $(TORCH_INDEX) torch==,ops/dev/torch_without_cuda.py )$(TORCH)
	grep -v -i -E '^(torch|setuptools)==' constraints.txt > $(RELEASE_VENV)/constraints.txt
	$(RELEASE_PYTHON) -m pip install -q -c $(RELEASE_VENV)/constraints.txt -e '.[test]'
	$(RELEASE_PYTHON) -m pytest -p no:cacheprovider tests/protocol
	$(RELEASE_PYTHON) -m pytest -p no:cacheprovider $(RELEASE_PARTS)
	$(RELEASE_PYTHON) -m pytest -p no:cacheprovider $(RELEASE_JOBS)

# The tests want a real etcd. On Debian as root we install it; elsewhere the etcd tests skip and say how.
etcd:
	@ops/dev/ensure-etcd.sh

# And a real Prometheus, which scrapes a job and tests the alert rules, likewise.
prometheus:
	@ops/dev/ensure-prometheus.sh

# And a real Slurm, likewise.
slurm:
	@ops/dev/ensure-slurm.sh

# And helm, which is unpacked into the virtual environment.
helm: $(STAMP)
	@ops/dev/ensure-helm.sh $(VENV)

# And a real browser for the lighthouse's page, likewise.
chromium:
	@ops/dev/ensure-chromium.sh

clean:
	rm -rf $(VENV) $(VENV)-torchtitan build dist demo-out *.egg-info fabric/ftar/host/*.so
