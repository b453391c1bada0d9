"""The headline names each replica that a job misses; status, table and metrics agree with it."""

import inspect
import json
import random
import re
import time

import pytest
from lighthouse_support import WireMember, WireStatus, close_all, connect, eventually, headers, start_job
from msgspec.structs import replace
from protocol.test_leader import runs, started
from protocol.test_leader_orders import newcomer
from rich.console import Console

from fabric.cli.status import _job
from fabric.lighthouse.diagnosis.status_text import absences, headline
from fabric.lighthouse.history.recovery import DOWN, NAMED, Absence, LaunchReport, Recoveries, RecoveryRecord
from fabric.lighthouse.http.job_status import _member_view
from fabric.lighthouse.jobs.job import REFUSED as REFUSED_EVENT
from fabric.lighthouse.telemetry import JobGauges, LighthouseMetrics
from fabric.model import PROTOCOL_VERSION, Policy
from fabric.protocol.leader import admission
from fabric.protocol.leader.core import LeaderConfig, LeaderCore
from fabric.protocol.messages import leader_events as io
from fabric.protocol.messages import wire
from fabric.protocol.messages.wire import decode_value
from fabric.protocol.nodes import NodeSays, ReplicaNodes


async def view_of(http, url: str, job: str) -> dict:
    async with http.get(f"{url}/v1/jobs/{job}", headers=headers()) as answer:
        return await answer.json()


async def test_status_table_and_metrics_name_the_replica_that_is_down(lighthouse, http, job):
    members = await start_job(http, lighthouse.url, job=job)
    body = await view_of(http, lighthouse.url, job)
    assert (body["headline"], body["absent"]) == ("3 of 3 replicas", [])
    async with http.get(f"{lighthouse.url}/metrics", headers=headers()) as answer:
        assert f'fabric_lighthouse_evictions_total{{job="{job}"}} 0.0' in await answer.text()
    status = await WireStatus(http, lighthouse.url, "r1", job).open()
    await status.beat()
    members[1].cut()
    await status.beat("gone")
    await members[0].epoch(2)
    body = await view_of(http, lighthouse.url, job)
    (absent,) = body["absent"]
    assert (absent["replica"], absent["state"]) == ("r1", "down")
    said = r"2 of 3 replicas; r1 down since \d\d:\d\d:\d\d UTC \(.*gone.*\)"
    assert re.fullmatch(said, body["headline"])
    async with http.get(f"{lighthouse.url}/v1/jobs", headers=headers()) as answer:
        lines = {line["job"]: line["headline"] for line in await answer.json()}
    assert lines[job] == body["headline"]
    async with http.get(f"{lighthouse.url}/metrics", headers=headers()) as answer:
        metrics = await answer.text()
    assert f'fabric_lighthouse_replicas_missing{{job="{job}"}} 1.0' in metrics
    assert re.search(
        rf'fabric_lighthouse_replica_down{{host="[^"]*",job="{job}",replica="r1",why="[^"]*gone', metrics
    )
    assert f'fabric_lighthouse_evictions_total{{job="{job}"}} 1.0' in metrics
    console = Console(width=200, record=True)
    console.print(_job(body, 200))
    text = console.export_text()
    assert text.startswith("2 of 3 replicas; r1 down since")
    assert re.search(r"r1 +│ down +│", text), "the table has a row for a replica without a session"


class Watched:
    """A running job of ``names`` and its recovery records."""

    def __init__(self, names: str = "a b c", **policy: int) -> None:
        self.job, self.log = started(names, **policy), Recoveries()
        self.log.record = self.job.record
        runs(self.job, names, 5)

    @property
    def said(self) -> str:
        """The headline, without the time of day."""
        self.log.observe(self.job.core, 1, self.job.now)
        text = headline(self.job.core, absences(self.job.core, self.log, self.job.now))
        return re.sub(r"\d\d:\d\d:\d\d UTC", "TIME", text)

    def evict(self, name: str) -> None:
        self.job.status(name, "gone", incarnation=self.job.record.member(name).incarnation)
        self.job.wait(1.0)

    def join(self, name: str, step: int) -> None:
        """Let a replica of this name join."""
        newcomer(self.job, name)
        self.job.wait(0.1)
        assert self.said
        runs(self.job, " ".join(m.replica for m in self.job.record.roster if m.replica != name), step)


def test_a_job_that_has_not_started_counts_its_replicas():
    core = LeaderCore("job", LeaderConfig(policy=Policy(1, 4, 3)), random.Random(1), 0.0)
    core.handle(io.Elected("store", None), 0.0)
    assert headline(core, absences(core, Recoveries(), 0.0)) == "0 of 3 replicas"


def test_a_member_whose_trainer_is_gone_is_down_before_the_next_epoch():
    watched = Watched(start_replicas=3)
    assert watched.said == "3 of 3 replicas"
    watched.job.commits = False
    watched.job.status("c", "gone")
    assert watched.said.startswith("2 of 3 replicas; c down since TIME (")


def test_a_replica_that_waits_for_a_host_names_the_lost_host_and_not_the_head():
    watched = Watched(start_replicas=3)
    table = ReplicaNodes(lambda: "run")
    says = [NodeSays(f"id-{node}", f"host-{node}", node, 2, "alike", "a:1") for node in (0, 1)]
    now = watched.job.now
    for one in says:
        table.hear(one, now)
    said = [replace(one, run="run", attempt=1, node=one.number) for one in says]
    for one in (*said, replace(said[1], gone="SIGTERM ended its launcher")):
        table.hear(one, now)
    watched.evict("c")
    watched.log.observe(watched.job.core, 1, watched.job.now)
    absent = absences(watched.job.core, watched.log, watched.job.now, None, {"c": table})
    why = "it waits for a host: node 1 (host-1) has left: SIGTERM ended its launcher"
    assert absent[0].host == "host-1" and absent[0].why.endswith(f"; {why}")
    assert re.search(
        rf"^2 of 3 replicas; c down since .*{re.escape(why)}, host-1", headline(watched.job.core, absent)
    )
    # A replica that has never attached is named by its hosts alone.
    (never,) = [
        x
        for x in absences(watched.job.core, watched.log, watched.job.now, None, {"d": table})
        if x.replica == "d"
    ]
    assert (never.state, never.why, never.host) == (DOWN, why, "host-1")
    # A replica that trains is not absent, whatever its launchers say.
    assert absences(watched.job.core, watched.log, watched.job.now, None, {"a": table})[0].replica == "c"


def test_a_lost_replica_stays_in_the_headline_under_the_next_leader():
    watched = Watched(start_replicas=3)
    watched.evict("c")
    assert watched.said.startswith("2 of 3 replicas; c down since TIME (")
    reason = watched.log.kept[-1].lost["c"].why
    after = Recoveries()
    after.restore(
        [decode_value(RecoveryRecord, json.dumps(x.to_json()).encode(), "record") for x in watched.log.kept]
    )
    watched.log = after
    assert f"c down since TIME ({reason}" in watched.said


def test_a_stopped_replica_is_down_without_the_seconds_at_its_eviction():
    """Half a minute later the headline and the alert still said that it had been stopped for 0.16 s."""
    watched = Watched(start_replicas=3)
    number = watched.job.record.member("c").incarnation
    watched.job.status("c", "stopped", incarnation=number)
    watched.job.wait(0.3)
    watched.job.status("c", "stopped", incarnation=number)
    watched.job.wait(0.3)
    assert watched.job.record.member("c") is None
    assert watched.said.startswith("2 of 3 replicas; c down since TIME (its trainer has been stopped")
    assert not re.search(r"\d\.\d+ s", watched.said)


def test_a_lost_replica_that_is_back_stands_outside_until_it_joins():
    watched = Watched(start_replicas=3)
    watched.evict("c")
    assert "c down" in watched.said
    watched.job.open("c", incarnation=2)
    assert watched.said.startswith("2 of 3 replicas; c outside since TIME (")


def test_a_replica_outside_is_named_although_no_record_of_its_loss_is_left():
    """The store was away when it died, so the next leader said: 1 replica not seen since this one leads."""
    watched = Watched(start_replicas=3)
    watched.evict("c")
    watched.log = Recoveries()
    watched.log.record = watched.job.record
    assert watched.said == "2 of 3 replicas; 1 replica not seen since this lighthouse leads"
    watched.job.open("c", incarnation=2)
    watched.job.open("d", incarnation=2)
    watched.job.open("e", incarnation=2, spare=True)
    away = "outside since TIME (has no state of this generation yet, c)"
    assert watched.said == f"2 of 3 replicas; c {away}", "one is lacked, and d and e are more"


def test_a_lost_replica_that_another_name_replaces_is_missing_no_more():
    watched = Watched(start_replicas=3)
    watched.evict("c")
    watched.log.launches.take(LaunchReport("c", "h", "rank 0 ended with 1", True, False, 0.0))
    assert watched.said.startswith("2 of 3 replicas; c down since TIME (")
    watched.join("d", 6)
    assert watched.said == "3 of 3 replicas"
    after = Recoveries()
    after.restore(
        [decode_value(RecoveryRecord, json.dumps(x.to_json()).encode(), "record") for x in watched.log.kept]
    )
    watched.log = after
    after.record = watched.job.record
    assert watched.said == "3 of 3 replicas", "the next leader knows it too"
    watched.evict("d")
    assert watched.said.startswith("2 of 3 replicas; d down since TIME ("), "the newcomer is the missing one"


def test_a_replica_that_is_back_takes_no_other_lost_ones_place():
    """Of two that were lost at once the second had no name, as the first one's return counted as its own."""
    watched = Watched("a b c d", start_replicas=4)
    for name in "cd":
        watched.evict(name)
        assert f"{name} down" in watched.said
    watched.join("c", 6)
    assert watched.said.startswith("3 of 4 replicas; d down since TIME (")
    watched.join("d", 7)
    assert watched.said == "4 of 4 replicas"


def test_a_newcomer_replaces_one_lost_replica_and_no_more():
    watched = Watched("a b c d", start_replicas=4)
    watched.evict("c")
    assert "c down" in watched.said
    watched.evict("d")
    assert watched.said.startswith("2 of 4 replicas; c down since TIME (")
    watched.join("e", 6)
    assert watched.said.startswith("3 of 4 replicas; d down since TIME (")


def test_a_drained_replica_is_named_and_a_scaled_one_is_not_wanted():
    watched = Watched(start_replicas=3)
    watched.job.do(io.Operator("drain", "c", "me", "its host is hot"))
    assert watched.said == "3 of 3 replicas", "it trains until the next step boundary"
    runs(watched.job, "a b c", 6)
    assert watched.said.startswith("2 of 3 replicas; c left since TIME (c is being drained: drained by me")
    watched.job.do(io.Operator("scale", "", "me", "night", None, 2))
    assert watched.said == "2 of 2 replicas"


def test_replicas_that_left_under_ever_new_names_do_not_fill_memory():
    log, record = Recoveries(), started("a").record
    for i in range(2 * NAMED):
        leaving = replace(record.roster[0], replica=f"spot-{i}", leaving=True)
        log.record = replace(record, roster=(*record.roster, leaving))
        log._note_departures(record, float(i))
    assert list(log.left) == [f"spot-{i}" for i in range(NAMED, 2 * NAMED)]


def test_a_newcomer_is_a_member_as_soon_as_it_has_the_state():
    job = started("a")
    newcomer(job, "d")
    job.wait(0.1)
    runs(job, "a", 6)
    assert [(x["replica"], x["joining"]) for x in _members(job)] == [("a", False), ("d", True)]
    job.beat("d", 6)
    runs(job, "d", 6)
    assert job.record.member("d").joining, "the record is as before until the next epoch"
    assert [x["joining"] for x in _members(job)] == [False, False]


def _members(job) -> list[dict]:
    return [_member_view(job.core, member, job.now) for member in job.record.roster]


def test_a_scrape_names_a_bounded_number_of_replicas():
    """A scrape of a job that misses 1,000 replicas held the loop for 20 ms."""
    lost = [Absence(f"r{number:04}", DOWN, "gone", 1.0, "h7", False) for number in range(NAMED + 50)]
    metrics = LighthouseMetrics()
    metrics.observe(lambda: True, lambda: [JobGauges("gpt", replicas_missing=len(lost), absent=lost)])
    text = metrics.render().decode()
    assert text.count("fabric_lighthouse_replica_down{") == NAMED
    assert f'fabric_lighthouse_replicas_missing{{job="gpt"}} {NAMED + 50}.0' in text


# --- a replica whose new process is refused --------------------------------------------------------------


async def other_settings(http, url: str, job: str) -> None:
    await WireMember(http, url, "r2", job=job, incarnation=2, layout="other").open()


async def another_version(http, url: str, job: str) -> None:
    member = WireMember(http, url, "r2", job=job, incarnation=2)
    text = wire.encode(member.session).decode()
    now, old = (f'"version":{number},' for number in (PROTOCOL_VERSION, PROTOCOL_VERSION - 2))
    assert now in text
    socket = await connect(http, url, job, "session?replicas=3")
    await socket.send_str(text.replace(now, old))


async def an_unreadable_session(http, url: str, job: str) -> None:
    await WireMember(http, url, "r2", job=job, incarnation=2, autonomy_s=-1.0).open()


async def a_wrong_token(http, url: str, job: str) -> None:
    async with http.get(f"{url}/v1/jobs/{job}/session", headers=headers("wrong")) as answer:
        assert answer.status == 401


# What the new process of a lost replica does, and the end of the headline's reason.
REFUSED = {
    other_settings: "refused: r2 has other parameters (names, shapes, dtypes or their order) than r0",
    another_version: f"refused: protocol version {PROTOCOL_VERSION - 2} cannot talk to version ",
    an_unreadable_session: "refused: ",
    a_wrong_token: "its process is gone; a wrong token for this job has come from its address",
}


@pytest.mark.parametrize("attempt", REFUSED, ids=lambda x: x.__name__)
async def test_the_headline_says_why_a_lost_replica_is_refused(lighthouse, http, job, attempt):
    members = await start_job(http, lighthouse.url, job=job)
    status = await WireStatus(http, lighthouse.url, "r2", job).open()
    await status.beat("gone")
    members[2].cut()
    await members[0].epoch(2)
    before = await view_of(http, lighthouse.url, job)
    assert "r2 down" in before["headline"] and "refused" not in before["headline"]
    await attempt(http, lighthouse.url, job)

    async def says() -> bool:
        return REFUSED[attempt] in (await view_of(http, lighthouse.url, job))["headline"]

    await eventually(says, REFUSED[attempt])
    async with http.get(f"{lighthouse.url}/metrics", headers=headers()) as answer:
        assert f'replica="r2",why="{REFUSED[attempt]}' in await answer.text()
    await WireMember(http, lighthouse.url, "r2", job=job, incarnation=3).open()

    async def forgets() -> bool:
        return not await says()

    await eventually(forgets, "the refusal to be forgotten")
    await close_all(members)


def _launched(why: str = "rank 0 ended with 75", **more) -> LaunchReport:
    given = {"host": "h9", "gave_up": False, "is_spare": False, "at": 0.0, "last_line": "", **more}
    return LaunchReport("c", why=why, **given)


def gone(watched: Watched) -> None:
    watched.evict("c")


def stopped(watched: Watched) -> None:
    watched.job.status("c", "stopped", incarnation=watched.job.record.member("c").incarnation)
    watched.job.wait(0.3)


def silent(watched: Watched) -> None:
    watched.job.statuses.pop("c", None)
    for _ in range(8):
        watched.job.wait(1.0)
        for name in "ab":
            watched.job.beat(name, 5)


def started_again(watched: Watched) -> None:
    watched.evict("c")
    watched.log.launches.take(_launched())


def given_up(watched: Watched) -> None:
    watched.evict("c")
    watched.log.launches.take(_launched("rank 0 ended with 1", gave_up=True, last_line="no data"))


def ended_by_a_signal(watched: Watched) -> None:
    watched.evict("c")
    watched.log.launches.take(_launched("SIGTERM ended its launcher", stopped_by=15))


def refused(watched: Watched) -> None:
    watched.evict("c")
    assert watched.said
    watched.log.launches.refuse("c", "it has other settings", watched.job.now)


def refused_and_given_up(watched: Watched) -> None:
    refused(watched)
    at = watched.log.launches.since("c", 0.0)
    report = _launched("rank 0 ended with 1", gave_up=True, last_line="other settings", at=at)
    watched.log.launches.take(report)


def refused_before_another_end(watched: Watched) -> None:
    refused(watched)
    watched.log.launches.take(_launched("rank 0 ended with 75"))
    watched.log.launches.take(_launched("rank 0 was killed by SIGKILL"))


def refused_while_it_trained(watched: Watched) -> None:
    """A second process of its name was refused."""
    watched.log.launches.refuse("c", "it is taken", watched.job.now - 1.0)
    assert watched.said == "3 of 3 replicas"
    watched.evict("c")


def behind(watched: Watched) -> None:
    watched.evict("c")
    assert watched.said
    watched.job.open("c", incarnation=2)


def drained(watched: Watched) -> None:
    watched.job.do(io.Operator("drain", "c", "me", "its host is hot"))
    assert watched.said
    runs(watched.job, "a b c", 6)


def drained_and_refused(watched: Watched) -> None:
    drained(watched)
    watched.job.lose("c")
    watched.log.launches.refuse("c", "it has other settings", time.time() + 1.0)


# Why a replica is not there, and what the headline says of it.
AWAY = {
    gone: "down since TIME (its process is gone, c)",
    stopped: "down since TIME (its trainer has been stopped, c)",
    silent: "down since TIME (its host has been silent, c)",
    started_again: "down since TIME (its process is gone; rank 0 ended with 75; "
    "its launcher starts it again, c)",
    given_up: "down since TIME (its process is gone; rank 0 ended with 1; its launcher gave up, "
    'its last line: "no data", c)',
    ended_by_a_signal: "down since TIME (its process is gone; SIGTERM ended its launcher, c)",
    refused: "down since TIME (refused: it has other settings, c)",
    refused_and_given_up: "down since TIME (refused: it has other settings; its launcher gave up, c)",
    refused_before_another_end: "down since TIME (its process is gone; rank 0 was killed by SIGKILL; "
    "its launcher starts it again, c)",
    refused_while_it_trained: "down since TIME (its process is gone, c)",
    behind: "outside since TIME (has no state of this generation yet, c)",
    drained: "left since TIME (c is being drained: drained by me (its host is hot), c)",
    drained_and_refused: "down since TIME (refused: it has other settings, c)",
}


@pytest.mark.parametrize("cause", AWAY, ids=lambda x: x.__name__)
def test_the_headline_says_why_a_replica_is_away(cause):
    watched = Watched(start_replicas=3)
    cause(watched)
    assert watched.said == f"2 of 3 replicas; c {AWAY[cause]}"


def test_a_refused_stranger_is_named_while_the_job_lacks_a_replica():
    """It may be meant for another job, so a whole job does not miss it."""
    watched = Watched("a b", start_replicas=3)
    watched.log.launches.refuse("c", "it has other settings", watched.job.now)
    assert watched.said == "2 of 3 replicas; c down since TIME (refused: it has other settings)"
    whole = Watched("a b d", start_replicas=3)
    whole.log.launches.refuse("c", "it has other settings", whole.job.now)
    assert whole.said == "3 of 3 replicas"


# What keeps a session out: each reason reaches the headline as an event or as a row of the table.
REFUSALS = {"replaced", "taken", "unheard", "unlike"}


def test_every_refusal_of_a_session_becomes_an_event():
    refusing = {
        name
        for name, function in inspect.getmembers(admission, inspect.isfunction)
        if function.__module__ == admission.__name__ and inspect.signature(function).return_annotation is str
        if next(iter(inspect.signature(function).parameters)) == "session" and not name.startswith("_")
    }
    assert refusing == REFUSALS
    refusal = inspect.getsource(LeaderCore._refusal)
    assert all(f"admission.{name}(" in refusal for name in REFUSALS)
    assert f'record_event("{REFUSED_EVENT}"' in inspect.getsource(LeaderCore.on_opened)
