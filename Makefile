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
DEMO_ARGS ?=
PURE := tests/protocol tests/sim

.PHONY: demo test lint setup etcd chromium clean
.DELETE_ON_ERROR:

setup: $(STAMP)

$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(0 if sys.version_info >= (3, 11) else "fabric needs Python 3.11 or newer; this is %s: run make PYTHON=python3.11" % sys.version.split()[0])'
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install -q "$$(grep -i '^torch==' constraints.txt)" $(if $(TORCH_INDEX),--index-url $(TORCH_INDEX))
	$(BIN)/python -m pip install -q -c constraints.txt -e '.[test]'
	@touch $@

demo: setup
	$(BIN)/fabric demo $(DEMO_ARGS)

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

# The simulator's worlds need a processor and nothing else; the tests with real processes wait most of their time. Side
# by side, the worlds at the lowest priority, they take little longer than the latter alone.
test: setup etcd chromium lint
	@nice -n 19 $(BIN)/pytest -p no:cacheprovider $(PURE) > .worlds.log 2>&1 & worlds=$$!; trap "kill $$worlds" INT TERM; \
	$(BIN)/pytest $(PURE:%=--ignore=%); rest=$$?; \
	wait $$worlds; pure=$$?; echo "=== $(PURE) ==="; cat .worlds.log; rm -f .worlds.log; \
	test $$rest -eq 0 && test $$pure -eq 0

# The tests want a real etcd. On Debian as root we install it; elsewhere the etcd tests skip and say how.
etcd:
	@ops/dev/ensure-etcd.sh

# And a real browser for the lighthouse's page, likewise.
chromium:
	@ops/dev/ensure-chromium.sh

clean:
	rm -rf $(VENV) build dist demo-out *.egg-info
