"""The fixtures of every suite."""

import gc
import os
from collections.abc import Iterator
from pathlib import Path

import etcd_process
import lighthouse  # noqa: F401  (some tests put benchmarks on the path, which have programs of these two names)
import protocol  # noqa: F401
import pytest
from hypothesis import HealthCheck, settings
from shared_files import begun_here

# OpenMP's threads spin while they wait for one another. On busy cores, for small tensors, that takes several
# times the processor time of one thread. torch reads this variable when it is imported.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# No deadline per example: on a loaded machine hypothesis may take half a minute for one example.
settings.register_profile("here", deadline=None, suppress_health_check=[HealthCheck.too_slow])
# `make quick` takes this one.
settings.register_profile("quick", parent=settings.get_profile("here"), max_examples=10)
settings.load_profile("here")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--rewrite-scenarios", action="store_true", help="write the golden scenarios again")
    parser.addoption(
        "--hunt", action="store_true", help="search again for seeds that notice the deliberate bugs"
    )
    parser.addoption(
        "--renew", action="store_true", help="search again for the seeds that no longer notice their bug"
    )
    parser.addoption("--all-recipes", action="store_true", help="run every recipe of the conformance suite")
    parser.addoption(
        "--share", metavar="FOLDER", help="leave out each file that another run with this folder has begun"
    )


def pytest_collection_finish() -> None:
    """Hide all imported and collected objects from the collector, and from each search of all living objects.

    There are very many, and every ``attach`` looks for schedulers among the living objects. A young object is
    collected later than usual, which saves a sixth of the processor time of the simulated worlds.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(20_000, 10, 10)


@pytest.hookimpl(tryfirst=True)
def pytest_runtestloop(session: pytest.Session) -> bool | None:
    """Share the files of tests with the other runs of ``--share``, so that all end at the same time."""
    folder = session.config.getoption("--share")
    if folder is None or session.testsfailed or session.config.option.collectonly:
        return None
    own = begun_here(session.items, Path(folder))
    item = next(own, None)
    while item is not None:
        following = next(own, None)
        item.config.hook.pytest_runtest_protocol(item=item, nextitem=following)
        if session.shouldstop:
            raise session.Interrupted(session.shouldstop)
        if session.shouldfail:
            raise session.Failed(session.shouldfail)
        item = following
    return True


@pytest.fixture(scope="session")
def etcd_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The URL of one real etcd, shared by the whole session: use keys of your own."""
    with etcd_process.running_etcd(tmp_path_factory.mktemp("etcd")) as etcd:
        yield etcd.url
