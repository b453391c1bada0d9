"""Each deliberate bug in a rule or a shell is noticed by a unit test, or by a simulated world."""

import multiprocessing
import os
import sys
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import pytest
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


def failures_of(name: str) -> list[str]:
    """Run a mutant and the test that notices it; return the types of the errors that fail the test."""
    mutant = MUTANTS[name]
    failures = Failures()
    without = ("-p", "no:cacheprovider", "-p", "no:unraisableexception", "--assert=plain", "--no-summary")
    with pytest.MonkeyPatch.context() as patch:
        mutant.apply(patch)
        code = pytest.main(["-x", "-q", *without, str(TESTS / mutant.noticed_by)], plugins=[failures])
    assert code in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED), (
        f"{mutant.noticed_by} cannot be run: {code}"
    )
    return failures.kinds


@pytest.fixture(scope="module")
def processes():
    """Start a process for each run: a test that a bug breaks off leaves threads and sockets behind."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["mutants.test_mutants", "mutants.warm"])
    with pytest.MonkeyPatch.context() as patch:
        # Python 3.11 does not tell the forking server where to import from, and each run would import torch.
        patch.setenv("PYTHONPATH", os.pathsep.join(filter(None, sys.path)))
        with ProcessPoolExecutor(1, mp_context=context, max_tasks_per_child=1) as pool:
            yield pool


def is_imported(name: str) -> bool:
    return name in sys.modules


def test_the_process_of_a_mutant_is_forked_with_all_imports(processes):
    assert processes.submit(is_imported, "mutants.warm").result()


@pytest.mark.parametrize("name", sorted(MUTANTS))
def test_a_deliberate_bug_is_noticed(name, processes):
    mutant = MUTANTS[name]
    kind, _, seed = mutant.noticed_by.rpartition(" ")
    if kind in KINDS:
        with pytest.MonkeyPatch.context() as patch, pytest.raises(NOTICED):
            mutant.apply(patch)
            KINDS[kind](int(seed)).run()
        met_without_a_bug(kind, int(seed))
        return
    kinds = processes.submit(failures_of, name).result()
    assert kinds, f"{mutant.noticed_by} passes: {name}"
    assert not set(kinds) & set(NONSENSE), kinds


def test_each_bug_has_a_name_of_its_own():
    assert len(MUTANTS) == len(RULES) + len(SHELLS) > 60


def test_a_mutant_of_changed_source_fails_instead_of_passing():
    mutant = Mutant("gone", failures_of, "no such source", "", "")
    with pytest.raises(AssertionError, match="write the mutant again"):
        mutant.code()
