"""A job whose launchers all end by a signal is left by people: it does not stand still, and alerts nobody."""

import signal

import pytest
from in_process import lighthouse_on
from lighthouse_support import WireMember, close_all, eventually, get, headers, post, start_job
from memory_store import MemorySpace, MemoryStore
from protocol.test_leader_waits import resumed
from test_absences import Watched
from test_goodput_ledger import leading

from fabric.lighthouse.diagnosis.status_text import left_by
from fabric.lighthouse.history.recovery import LaunchReport

INT, TERM = signal.SIGINT, signal.SIGTERM
NAMES = "r0", "r1", "r2"


def ends(watched: Watched, by: int, *names: str) -> None:
    """Let a signal end these replicas' launchers; 0: their trainers end, and their launchers give up."""
    for name in names:
        watched.job.lose(name)
        watched.log.launches.take(LaunchReport(name, "h9", "it ended", True, False, 0.0, stopped_by=by))


def all_by_ctrl_c(watched: Watched) -> None:
    ends(watched, INT, "a", "b", "c")


def some_by_the_scheduler(watched: Watched) -> None:
    ends(watched, INT, "a", "b")
    ends(watched, TERM, "c")


def one_host_was_gone_before(watched: Watched) -> None:
    watched.evict("c")
    assert watched.said.startswith("2 of 3 replicas")
    resumed(watched.job)
    for name in "ab":
        watched.job.beat(name, 7)
    assert watched.said
    ends(watched, INT, "a", "b")


def one_was_evicted_first(watched: Watched) -> None:
    watched.evict("c")
    ends(watched, INT, "c", "a", "b")


def one_host_is_gone(watched: Watched) -> None:
    watched.evict("c")
    ends(watched, INT, "a", "b")


def one_gave_up(watched: Watched) -> None:
    ends(watched, INT, "a", "b")
    ends(watched, 0, "c")


def one_has_no_launcher(watched: Watched) -> None:
    ends(watched, INT, "a", "b")
    watched.job.lose("c")


def one_trains(watched: Watched) -> None:
    ends(watched, INT, "a", "b")


def one_is_back(watched: Watched) -> None:
    all_by_ctrl_c(watched)
    watched.job.open("a", incarnation=2)
    watched.log.launches.attached("a")


def nobody_is_there(watched: Watched) -> None:
    for name in "abc":
        watched.job.lose(name)


def one_tries_again(watched: Watched) -> None:
    nobody_is_there(watched)
    watched.log.launches.take(LaunchReport("a", "h9", "rank 0 ended with 75", False, False, 0.0))


# How a job came to rest -> the signal that its people or its scheduler left it by; 0: it stands still.
ENDS = {
    all_by_ctrl_c: INT,
    some_by_the_scheduler: TERM,
    one_host_was_gone_before: INT,
    one_was_evicted_first: INT,
    one_host_is_gone: 0,
    one_gave_up: 0,
    one_has_no_launcher: 0,
    one_trains: 0,
    one_is_back: 0,
    nobody_is_there: 0,
}


@pytest.mark.parametrize("end", ENDS, ids=lambda x: x.__name__)
def test_a_job_is_left_when_a_signal_has_ended_the_launcher_of_each_replica_that_trained(end):
    watched = Watched(start_replicas=3)
    end(watched)
    assert watched.said
    assert left_by(watched.job.core, watched.log, watched.job.now, 0) == ENDS[end]


@pytest.mark.parametrize(("now", "kept"), [(nobody_is_there, INT), (one_tries_again, 0), (one_is_back, 0)])
def test_a_job_that_was_left_stays_so_until_somebody_tries_again(now, kept):
    watched = Watched(start_replicas=3)
    now(watched)
    assert left_by(watched.job.core, watched.log, watched.job.now, INT) == kept


async def gauge(http, url: str, name: str) -> str:
    async with http.get(f"{url}/metrics", headers=headers()) as answer:
        lines = (await answer.text()).splitlines()
    return next(x.rpartition(" ")[2] for x in lines if x.startswith(f'fabric_lighthouse_{name}{{job="job"'))


async def test_a_job_that_ctrl_c_ended_is_no_job_that_stands_still(http):
    """It alerted as critical until somebody said `fabric end`, and again under each later leader."""
    space = MemorySpace()
    async with lighthouse_on(MemoryStore(space)) as first:
        await eventually(leading(first), "the first to lead")
        await close_all(await start_job(http, first.url))

        async def closed() -> bool:
            return not first.jobs.by_name["job"].connections.sessions

        await eventually(closed, "the sessions to end")
        report = {
            "host": "h9",
            "attempt": 1,
            "why": "SIGINT ended its launcher",
            "gave_up": True,
            "stopped": 2,
        }
        for name in NAMES:
            assert await gauge(http, first.url, "left_by_signal") == "0.0"
            url = f"{first.url}/v1/jobs/job/launcher"
            assert (await post(http, url, {**report, "replica": name}))[0] == 200
        assert await gauge(http, first.url, "left_by_signal") == "2.0"
        assert await gauge(http, first.url, "replicas_missing") == "0.0"
        body = (await get(http, f"{first.url}/v1/jobs/job"))[1]
        assert body["waiting_for"].startswith("launchers: SIGINT has ended all of them; ")
        assert body["ledger"]["state"] == "", "its time counts as neither stalled nor recovering"
        kinds = [x["kind"] for x in (await get(http, f"{first.url}/v1/jobs/job/events"))[1]]
        assert kinds.count("launcher ended") == len(NAMES) and "launch failed" not in kinds
    async with lighthouse_on(MemoryStore(space)) as second:

        async def restored() -> bool:
            jobs = second.jobs
            return jobs.loaded.is_set() and jobs.by_name["job"].history.ledger_is_known

        await eventually(restored, "the ledger to be read")
        assert await gauge(http, second.url, "left_by_signal") == "2.0"
        back = await WireMember(http, second.url, "r0", generation=1).open()
        await eventually(lambda: begun(http, second.url), "the job to be left no more")
        await back.close()


async def begun(http, url: str) -> bool:
    return await gauge(http, url, "left_by_signal") == "0.0"


async def test_a_launcher_that_names_no_signal_is_refused(http, lighthouse, job):
    """A number without a name would have ended each later answer about this job with an error."""
    url = f"{lighthouse.url}/v1/jobs/{job}/launcher"
    body = {"replica": "r0", "host": "h", "attempt": 1, "why": "it died", "stopped": 1000}
    assert (await post(http, url, body))[0] == 400
