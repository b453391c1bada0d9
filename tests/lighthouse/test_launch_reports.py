"""`fabric launch` tells the lighthouse of attempts that failed, so that people see who never attaches."""

import json
import os
import random
import re
import signal
import sys
import time

import pytest
from forked_processes import ForkedProcess, start_supervisor
from lighthouse_support import (
    DEADLINE_S,
    WireMember,
    close_all,
    get,
    headers,
    post,
    start_job,
    wait_for,
)
from protocol.test_leader import runs, started
from test_absences import Watched

from fabric.lighthouse.diagnosis.status_text import absences, headline
from fabric.lighthouse.history.recovery import LaunchReport, LaunchReports, Recoveries
from fabric.model import Policy
from fabric.protocol.leader.core import LeaderConfig, LeaderCore
from fabric.protocol.messages import leader_events as io


def launch(lighthouse, job: str, script) -> ForkedProcess:
    """Start a launcher, whose output goes to a file beside ``script``."""
    plain = {name: value for name, value in os.environ.items() if not name.startswith("FABRIC_")}
    named = ["--job", job, "--replica", "r3", "--lighthouse", lighthouse.url]
    command = ["launch", *named, "--token-file", str(lighthouse.token_file), "--no-python", sys.executable]
    with script.with_suffix(".log").open("wb") as log:
        return start_supervisor(*command, str(script), log=log, environment=plain)


async def look(http, lighthouse, job: str) -> dict:
    return (await get(http, f"{lighthouse.url}/v1/jobs/{job}"))[1]


async def until_said(http, lighthouse, job: str, words: str) -> dict:
    """Wait until the first line has ``words``; return the status."""
    seen = {}

    async def says() -> bool:
        seen.update(await look(http, lighthouse, job))
        return words in seen["headline"]

    deadline = time.monotonic() + DEADLINE_S
    while not await says():
        assert time.monotonic() < deadline, seen["headline"]
    return seen


@pytest.fixture
def script(tmp_path):
    return tmp_path / "trainer.py"


@pytest.fixture
async def members(lighthouse, http, job):
    """The members of a job that trains with three replicas."""
    opened = await start_job(http, lighthouse.url, job=job)
    yield opened
    await close_all(opened)


async def test_a_replica_that_dies_before_it_attaches_is_named(lighthouse, http, job, script, members):
    script.write_text("import os, signal; os.kill(os.getpid(), signal.SIGKILL)\n")
    launcher = launch(lighthouse, job, script)
    try:
        body = await until_said(http, lighthouse, job, "r3 down")
    finally:
        launcher.send_signal(signal.SIGTERM)
        launcher.wait(DEADLINE_S)
    assert re.fullmatch(
        r"3 of 4 replicas; r3 down since \d\d:\d\d:\d\d UTC "
        r"\(rank 0 was killed by SIGKILL; its launcher starts it again, \S+\)",
        body["headline"],
    )
    _, events = await get(http, f"{lighthouse.url}/v1/jobs/{job}/events")
    said = [event["why"] for event in events if (event["kind"], event["about"]) == ("launch failed", "r3")]
    assert re.match(r"attempt \d+ on ", said[0])
    async with http.get(f"{lighthouse.url}/metrics", headers=headers()) as answer:
        assert f'fabric_lighthouse_replicas_missing{{job="{job}"}} 1.0' in await answer.text()
    await WireMember(http, lighthouse.url, "r3", job=job, replicas="3").open()
    assert "starts it again" not in (await look(http, lighthouse, job))["headline"]


async def test_the_counter_of_failed_starts_begins_at_zero_for_the_alert(lighthouse, http, job, members):
    async with http.get(f"{lighthouse.url}/metrics", headers=headers()) as answer:
        text = await answer.text()
    assert f'fabric_lighthouse_events_total{{job="{job}",kind="launch failed"}} 0.0' in text


async def test_a_launcher_that_gives_up_says_so_before_it_ends(lighthouse, http, job, script, members):
    script.write_text("raise SystemExit(1)\n")
    launcher = launch(lighthouse, job, script)
    assert launcher.wait(DEADLINE_S) == 1
    (absent,) = (await look(http, lighthouse, job))["absent"]
    assert (absent["replica"], absent["state"]) == ("r3", "down")
    assert absent["why"].endswith("its launcher gave up") and "rank 0 ended with 1" in absent["why"]


async def test_a_report_that_cannot_be_read_is_refused_and_changes_nothing(lighthouse, http, job, members):
    good = {"replica": "r3", "host": "h", "attempt": 1, "why": "it died", "gave_up": False, "spare": False}
    url = f"{lighthouse.url}/v1/jobs/{job}/launcher"
    for name, value in (
        ("replica", "a/b"),
        ("host", ""),
        ("why", "x\ny"),
        ("why", "x" * 301),
        ("attempt", -1),
        ("attempt", 1e999),
        ("attempt", 10**400),
        ("gave_up", "yes"),
        ("spare", [1]),
        ("stopped", "no"),
        ("last_line", "x\ny"),
        ("last_line", ["x"]),
    ):
        body = json.dumps({**good, name: value}).encode()
        for path in (url, f"{lighthouse.url}/v1/jobs/{job}-unknown/launcher"):
            status, answer = await post(http, path, body)
            assert status == 400 and answer["error"], (name, value)
    listed = (await get(http, f"{lighthouse.url}/v1/jobs"))[1]
    assert f"{job}-unknown" not in {x["job"] for x in listed}, "nothing would ever end such a job"
    assert (await look(http, lighthouse, job))["absent"] == []
    assert (await post(http, url, good, token="wrong"))[0] == 401
    assert (await post(http, url, good))[0] == 200


def _report(name: str, **more) -> LaunchReport:
    given = {"host": "h9", "why": "rank 0 ended with 75", "gave_up": False, "is_spare": False, "at": 0.0}
    return LaunchReport(name, **{**given, **more})


def test_a_lost_member_is_shown_with_its_launchers_reason():
    watched = Watched(start_replicas=3)
    watched.evict("c")
    watched.log.launches.take(_report("c", gave_up=True))
    assert "rank 0 ended with 75; its launcher gave up" in watched.said
    watched.job.open("c", incarnation=2)
    assert "gave up" not in watched.said, "a process that has a session is not down"


def test_a_late_report_does_not_make_a_member_absent_and_a_spare_is_not_missing():
    watched = Watched(start_replicas=3)
    watched.log.launches.take(_report("c"))
    watched.log.launches.take(_report("s", is_spare=True))
    assert watched.said == "3 of 3 replicas"
    runs(watched.job, "a b c", 6)
    assert watched.said == "3 of 3 replicas"


def test_a_job_that_has_not_begun_names_the_replica_that_keeps_it_waiting():
    core, log = LeaderCore("job", LeaderConfig(policy=Policy(1, 4, 3)), random.Random(1), 0.0), Recoveries()
    core.handle(io.Elected("store", None), 0.0)
    log.launches.take(_report("d"))
    assert headline(core, absences(core, log, 0.0)).startswith("0 of 3 replicas; d down since")


async def test_the_last_line_of_a_failed_attempt_is_told(lighthouse, http, job, script, members):
    script.write_text("import sys; print('work'); sys.exit('\\x1b[31mValueError: no data\\x1b[0m')\n")
    launcher = launch(lighthouse, job, script)
    assert launcher.wait(DEADLINE_S) == 1
    body = await look(http, lighthouse, job)
    assert body["absent"][0]["last_line"] == "ValueError: no data"
    assert 'its launcher gave up, its last line: "ValueError: no data", ' in body["headline"]
    _, events = await get(http, f"{lighthouse.url}/v1/jobs/{job}/events")
    said = next(event["why"] for event in events if event["kind"] == "launch failed")
    assert said.endswith('; its last line: "ValueError: no data"')


async def test_a_launcher_that_a_signal_ends_is_seen(lighthouse, http, job, script, members):
    script.write_text("import signal; print('ready', flush=True); signal.pause()\n")
    launcher = launch(lighthouse, job, script)
    wait_for(lambda: "ready\n" in script.with_suffix(".log").read_text(), "the rank to run")
    launcher.send_signal(signal.SIGTERM)
    assert launcher.wait(DEADLINE_S) == 128 + signal.SIGTERM
    (absent,) = (await look(http, lighthouse, job))["absent"]
    assert (absent["replica"], absent["why"]) == ("r3", "SIGTERM ended its launcher")


async def test_a_job_whose_replicas_all_die_before_they_attach_is_listed(lighthouse, http, job, script):
    script.write_text("raise SystemExit(1)\n")
    assert launch(lighthouse, job, script).wait(DEADLINE_S) == 1
    listed = (await get(http, f"{lighthouse.url}/v1/jobs"))[1]
    (line,) = [x["headline"] for x in listed if x["job"] == job]
    assert line.startswith("0 of 1 replica; r3 down since") and "rank 0 ended with 1" in line
    async with http.get(f"{lighthouse.url}/metrics", headers=headers()) as answer:
        assert f'fabric_lighthouse_replicas_missing{{job="{job}"}} 1.0' in await answer.text()


async def test_attempts_that_die_before_they_attach_count_for_a_penalty(lighthouse, http, job, members):
    url, report = f"{lighthouse.url}/v1/jobs/{job}/launcher", {"host": "h9", "why": "rank 0 ended with 1"}
    session = WireMember(http, lighthouse.url, "r3", job=job, replicas="3")
    await session.open()
    await session.close()
    for attempt in range(4):
        assert (await post(http, url, {**report, "replica": "r3", "attempt": attempt}))[0] == 200
    penalties, deadline = [], time.monotonic() + DEADLINE_S
    while not penalties and time.monotonic() < deadline:
        penalties = (await look(http, lighthouse, job))["penalties"]
    found = {x["about"]: x["times"] for x in penalties}
    assert found["r3"] == 3, "the eviction counts the attempt that had attached"


def test_a_failure_without_an_epoch_counts_each_time():
    core = LeaderCore("job", LeaderConfig(policy=Policy(1, 4, 3)), random.Random(1), 0.0)
    for at in (1.0, 2.0, 3.0):
        assert core.evidence.penalties() == []
        core.handle(io.LaunchFailed("r3", "h9", "rank 0 ended with 1"), at)
    (penalty,) = core.evidence.penalties()
    assert (penalty.about, penalty.times, penalty.why) == ("r3", 3, "rank 0 ended with 1")


def test_replicas_of_one_host_that_fail_to_start_once_are_one_failure_of_the_host():
    """A host of eight replicas was kept out for half an hour when its storage was late once."""
    lighthouse = started("a b")
    for times in range(3):
        assert {x.kind for x in lighthouse.core.evidence.penalties()} == set(), times
        for name in ("r5", "r6", "r7"):
            lighthouse.now += 1.0
            lighthouse.do(io.LaunchFailed(name, "h9", "rank 0 ended with 1"))
    assert [(x.about, x.times) for x in lighthouse.core.evidence.penalties() if x.kind == "host"] == [
        ("h9", 3)
    ]


def test_old_reports_of_a_job_without_processes_are_forgotten():
    reports = LaunchReports()
    reports.take(_report("a", at=1.0))
    reports.take(_report("b", at=9.0))
    assert reports.forget_before(5.0) and list(reports.newest) == ["b"] and not reports.forget_before(5.0)


def test_reports_of_ever_new_names_do_not_fill_memory():
    watched = Watched()
    for i in range(300):
        watched.log.launches.take(_report(f"spot-{i}"))
    assert len(watched.log.launches.newest) == 100
