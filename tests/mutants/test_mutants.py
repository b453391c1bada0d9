"""Each deliberate bug in a rule or a shell is noticed by a unit test, or by a simulated world."""

import json
import multiprocessing
import os
import sys
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import pytest
from _pytest.runner import runtestprotocol
from mutants.mutant import Mutant
from mutants.protocol_rules import RULES
from mutants.shells import SHELLS
from sim.noticing import NOTICED, met_without_a_bug
from sim.run import KINDS

TESTS = Path(__file__).parents[1]
MUTANTS = {x.name: x for x in (*RULES, *SHELLS)}
# Errors of a mutant that makes no sense, and so proves nothing.
NONSENSE = ("NameError", "ImportError", "SyntaxError", "UnboundLocalError")


class Failures:
    """A plugin that keeps the types of the errors that failed a test."""

    def __init__(self) -> None:
        self.kinds: list[str] = []

    def pytest_exception_interact(self, call: pytest.CallInfo) -> None:
        self.kinds.append(call.excinfo.typename)


class InForks:
    """A plugin that runs each test once per mutant, in a fork: a test that a bug breaks off leaves threads
    and sockets behind. The tests are collected once."""

    def __init__(self, names: Sequence[str]) -> None:
        self.kinds: dict[str, list[str]] = {}  # mutant -> the errors of the first test that failed
        self._left = list(names)

    def pytest_runtest_protocol(self, item: pytest.Item) -> bool:
        for name in [x for x in self._left if notices(item.nodeid, MUTANTS[x])]:
            self.kinds[name] = _in_fork(item, MUTANTS[name])
            if self.kinds[name]:
                self._left.remove(name)
        return True


def notices(nodeid: str, mutant: Mutant) -> bool:
    """Whether this test is the one that notices the mutant, with any parameters."""
    return nodeid.partition("[")[0].endswith(mutant.noticed_by)


def _in_fork(item: pytest.Item, mutant: Mutant) -> list[str]:
    """Run a mutant and the test in a fork of this process; return the types of the errors that fail it."""
    reader, writer = os.pipe()
    with pytest.MonkeyPatch.context() as patch:
        mutant.apply(patch)
        if not (pid := os.fork()):
            try:
                failures = Failures()
                item.config.pluginmanager.register(failures)
                runtestprotocol(item, log=False, nextitem=None)
                os.write(writer, json.dumps(failures.kinds).encode())
            finally:
                os._exit(0)
    os.close(writer)
    os.waitpid(pid, 0)
    os.set_blocking(reader, False)  # the broken test may have left processes that hold the other end open
    with os.fdopen(reader, "rb") as answer:
        said = answer.read()
    assert said, f"the process of a mutant died: {mutant.name}"
    return json.loads(said)


def failures_of(names: Sequence[str]) -> dict[str, list[str]]:
    """Run mutants, each with the test that notices it; return the types of the errors that fail the tests."""
    forks = InForks(names)
    without = ("-p", "no:cacheprovider", "-p", "no:unraisableexception", "--assert=plain", "--no-summary")
    tests = dict.fromkeys(str(TESTS / MUTANTS[name].noticed_by) for name in names)
    code = pytest.main(["-q", *without, *tests], plugins=[forks])
    assert code == pytest.ExitCode.OK, f"they cannot be run: {code}"
    return forks.kinds


def in_world(mutant: Mutant) -> tuple[str, str]:
    """Return the kind and the seed of the world that notices the mutant; no kind where a test does."""
    kind, _, seed = mutant.noticed_by.rpartition(" ")
    return (kind, seed) if kind in KINDS else ("", "")


@pytest.fixture(scope="module")
def processes():
    """A process for the mutants that tests notice."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["mutants.test_mutants", "mutants.warm"])
    with pytest.MonkeyPatch.context() as patch:
        # Python 3.11 does not tell the forking server where to import from, and each run would import torch.
        patch.setenv("PYTHONPATH", os.pathsep.join(filter(None, sys.path)))
        with ProcessPoolExecutor(1, mp_context=context, max_tasks_per_child=1) as pool:
            yield pool


@pytest.fixture(scope="module")
def failures(processes, request) -> dict[str, list[str]]:
    """For each mutant of this session that a test notices, the types of the errors that fail the test."""
    chosen = [x.callspec.params["name"] for x in request.session.items if "failures" in x.fixturenames]
    names = [name for name in chosen if not in_world(MUTANTS[name])[0]]
    return processes.submit(failures_of, names).result() if names else {}


def is_imported(name: str) -> bool:
    return name in sys.modules


def test_the_process_of_a_mutant_is_forked_with_all_imports(processes):
    assert processes.submit(is_imported, "mutants.warm").result()


@pytest.mark.parametrize("name", sorted(MUTANTS))
def test_a_deliberate_bug_is_noticed(name, failures):
    mutant = MUTANTS[name]
    kind, seed = in_world(mutant)
    if kind:
        with pytest.MonkeyPatch.context() as patch, pytest.raises(NOTICED):
            mutant.apply(patch)
            KINDS[kind](int(seed)).run()
        met_without_a_bug(kind, int(seed))
        return
    kinds = failures.get(name)
    assert kinds, f"{mutant.noticed_by} passes: {name}"
    assert not set(kinds) & set(NONSENSE), kinds


def test_each_bug_has_a_name_of_its_own():
    assert len(MUTANTS) == len(RULES) + len(SHELLS) > 60


def test_a_mutant_of_changed_source_fails_instead_of_passing():
    mutant = Mutant("gone", failures_of, "no such source", "", "")
    with pytest.raises(AssertionError, match="write the mutant again"):
        mutant.code()
