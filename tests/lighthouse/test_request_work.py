"""No HTTP request holds the loop of all jobs for long: the largest answer of every route.

The job is at its limits. The work of its members is measured with few members, and extended to the most that
a lighthouse allows.
"""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
from in_process import Instance, TroubledStore, lighthouse_on
from lighthouse_support import TOKEN, WireStatus, close_all, eventually, headers, start_job
from memory_store import MemorySpace
from test_message_work import STATE
from turn_work import MOST_BYTECODES, counted, json_counted

from fabric.lighthouse.connections import validation as v
from fabric.lighthouse.history.recovery import CAPACITY, NAMED, RecoveryRecord, ReplicaReturn
from fabric.lighthouse.history.slowdowns import MOST_ACTIONS, SlowdownAction, SlowdownRecord
from fabric.lighthouse.http import job_status
from fabric.lighthouse.http.routes import make_app
from fabric.lighthouse.http.tokens import Tokens
from fabric.lighthouse.jobs import drills, job_history
from fabric.lighthouse.jobs.drills import InjectorRequest
from fabric.lighthouse.jobs.job import Job
from fabric.model import StepTimes
from fabric.protocol.messages import network as m

# More members than one turn describes.
FEW, MORE = 18, 34
LONG = "w" * 300
ORDER = {"who": LONG, "why": LONG}
REPORTS = {str(number): {"observed": "o" * 40} for number in range(1, 1000)}
JOB = "/v1/jobs/{job}"
# A host of a replica; tests/protocol/test_nodes.py has the work of very many.
CODES = {str(rank): 1 for rank in range(64)}
NODE: dict[str, Any] = {"id": "i" * 128, "host": "h" * 128, "number": 1, "nodes": 2, "shape": LONG}
NODE |= {"address": "a" * 128, "run": "r" * 64, "attempt": 1, "node": 1}
NODE |= {"end": {"codes": CODES, "first": list(range(64)), "lost": [LONG] * 8}}
# The bodies of requests, and None for GET. The last ones end the drill and the job.
REQUESTS: dict[tuple[str, str], dict[str, Any] | None] = {
    **{("GET", path): None for path in ("/livez", "/readyz", "/healthz", "/metrics", "/v1/jobs", JOB)},
    **{("GET", path): None for path in ("/", "/dashboard.js", "/speeds.js", "/dashboard.css")},
    **{("GET", f"{JOB}/{x}"): None for x in ("events", "recoveries", "slowdowns", "hosts", "live", "drill")},
    ("POST", "/login"): {"token": "t" * 4096},
    ("POST", f"{JOB}/launcher"): {"replica": "x" * 64, "host": LONG, "why": LONG},
    ("POST", f"{JOB}/nodes"): {"replica": "x" * 64, "says": NODE},
    ("POST", f"{JOB}/drain"): {**ORDER, "replica": "r1"},
    ("POST", f"{JOB}/evict"): {**ORDER, "replica": "r2"},
    ("POST", f"{JOB}/pause"): ORDER,
    ("POST", f"{JOB}/resume"): ORDER,
    ("POST", f"{JOB}/scale"): {**ORDER, "min": 1, "max": v.MAX_REPLICAS},
    ("POST", f"{JOB}/admit"): {**ORDER, "about": "r1"},
    ("POST", f"{JOB}/retry"): ORDER,
    ("POST", f"{JOB}/adapt"): {**ORDER, "mode": "advise", "veto": "r1", "allow": "r0"},
    ("POST", f"{JOB}/drill"): ORDER,
    ("POST", f"{JOB}/drill/renew"): {"drill": "D"},
    ("POST", f"{JOB}/drill/fault"): {"drill": "D", "fault": "kill", "replica": "r0", "point": LONG},
    ("POST", f"{JOB}/injector"): {
        "replica": "r0",
        "id": "i",
        "pid": 1,
        "host": LONG,
        "restarts": True,
        "drill": "D",
        "reports": REPORTS,
    },
    ("POST", f"{JOB}/drill/end"): {"drill": "D"},
    ("POST", f"{JOB}/end"): ORDER,
}
# tests/lighthouse/test_message_work.py has the messages of these.
SOCKETS = {("GET", f"{JOB}/session"), ("GET", f"{JOB}/trainer-status")}
REFUSED = {("POST", "/login"), ("POST", f"{JOB}/drill"), ("POST", f"{JOB}/admit"), ("POST", f"{JOB}/retry")}
REFUSED |= {("POST", f"{JOB}/drill/fault"), ("POST", f"{JOB}/end")}


@asynccontextmanager
async def instance() -> AsyncIterator[Instance]:
    tokens = Tokens(TOKEN, drill="the right to drill")
    async with lighthouse_on(TroubledStore(MemorySpace()), lease_s=60, tokens=tokens) as found:

        async def leads() -> bool:
            return found.jobs.loaded.is_set()

        await eventually(leads, "it to lead")
        yield found


async def test_the_table_has_every_route():
    async with instance() as found_instance:
        routes = list(make_app(found_instance.parts, None).router.routes())
    found = {(x.method, x.resource.canonical) for x in routes if x.method != "HEAD"}
    assert found == {*REQUESTS, *SOCKETS}


def recovery_of(number: int) -> RecoveryRecord:
    """Return a recovery of which five replicas never came back: 1,000 replicas over all recoveries."""
    back = ReplicaReturn(1.0, 2.0, 3.0, why="y" * 200, host="h" * 60)
    lost = {f"r{x}": back for x in range(NAMED - 5)}
    lost |= {f"gone{number}-{x}": ReplicaReturn(why="y" * 200, host="h" * 60) for x in range(5)}
    past = dict.fromkeys(lost, 1)
    return RecoveryRecord(
        number, "death", "w" * 1000, 5, 1.0, lost=lost, incarnations=past, step_committed=1.0
    )


def fill(job: Job) -> str:
    """Fill all that a job keeps for people; return the id of its drill."""
    job.history.recoveries.kept = [recovery_of(number) for number in range(CAPACITY)]
    actions = [SlowdownAction(1.0, "advice", "y" * 1000)] * MOST_ACTIONS
    slow = SlowdownRecord(1, "r0", "replica", 1.0, 5, cause="c" * 1000, actions=actions, ended=2.0)
    job.history.slowdowns.kept = [slow] * CAPACITY
    for number in range(drills._MOST_INJECTORS):
        job.drills.ask(InjectorRequest(f"r{number}", "i", 1, "h" * 300, True))
    drill = job.drills.begin(LONG, LONG, 3, may_lose=True)
    for _ in range(drills._MOST_FAULTS):
        job.drills.inject(drill.id, "stop", "r0", 60.0)
    for _ in range(job_history.MOST_EVENTS):
        job.events.add("kind", 1, "r" * 64, LONG)
    return drill.id


async def large_job(
    http: aiohttp.ClientSession, instance: Instance, name: str, count: int
) -> tuple[list, str]:
    """Start a job whose members and checkpoint servers have sent their largest messages."""
    members = await start_job(http, instance.url, count, job=name)
    waits = {f"{number:04}": 0.5 for number in range(3000)}
    times = StepTimes(work=dict.fromkeys(range(9000), 0.125), waiting_s=waits, sending_s=waits)
    beat = m.Heartbeat(7, 1, 1, 1, "", "run", tuple(f"{x:0300}" for x in range(200)), times=times)
    for member in members:
        await member.say(beat)
        await member.next(m.HeartbeatAck)
        server = await WireStatus(http, instance.url, member.replica, job=name).open()
        await server.beat(snapshots=(STATE,) * v.MAX_SNAPSHOTS)
    return members, fill(instance.jobs.by_name[name])


async def ask(http: aiohttp.ClientSession, url: str, request: tuple[str, str], job: str, drill: str) -> int:
    """Send a request of the table, and read its whole answer; of an endless one its first part."""
    (method, path), body = request, REQUESTS[request]
    if body is not None and "drill" in body:
        body = {**body, "drill": drill}
    shown = headers("the right to drill" if "/drill" in path else TOKEN)
    async with http.request(method, url + path.replace("{job}", job), json=body, headers=shown) as answer:
        await (answer.content.readany() if path.endswith("/live") else answer.read())
        return answer.status


async def test_the_largest_answer_of_every_route_is_a_short_turn_of_the_loop(http, monkeypatch):
    """All events of a job took 145 ms in one turn."""
    found: dict[tuple[str, str], list[int]] = {}
    for size in (FEW, MORE):
        async with instance() as lighthouse:
            members, drill = await large_job(http, lighthouse, "job", size)
            for request in REQUESTS:
                with counted() as count, json_counted(monkeypatch, count):
                    status = await ask(http, lighthouse.url, request, "job", drill)
                assert status in (200, 202) or request in REFUSED, (request, status)
                assert count.most > 0
                found.setdefault(request, []).append(count.most)
            await close_all(members)
    largest = {
        request: few + max(0, more - few) / (MORE - FEW) * (v.MAX_REPLICAS - FEW)
        for request, (few, more) in found.items()
    }
    assert not {request: work for request, work in largest.items() if work >= MOST_BYTECODES}


async def test_the_end_of_a_term_describes_its_members_later_and_a_few_per_turn(http, monkeypatch):
    """The lease is given back, and the members leave, in the turns in which the last picture is made."""
    described = 0
    describe = job_status._member_view

    def counting(*args: Any) -> dict[str, Any]:
        nonlocal described
        described += 1
        return describe(*args)

    monkeypatch.setattr(job_status, "_member_view", counting)
    async with instance() as lighthouse:
        members = await start_job(http, lighthouse.url, FEW)
        lighthouse.jobs.end("a test")
        most, turns = described, 0
        while described < FEW:
            before, turns = described, turns + 1
            await asyncio.sleep(0)
            most = max(most, described - before)
            assert turns < 10_000, "the members are never described"
        await close_all(members)
    assert most == job_status._ROWS < FEW
