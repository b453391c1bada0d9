"""The queue admits a few connections at a time, and tells thousands of returning members when to try
again.
"""

import asyncio
import itertools
import signal
from functools import partial

import aiohttp
import pytest
from aiohttp import web
from in_process import Clock, lighthouse_on
from lighthouse_support import LighthouseProcess, WireMember, close_all, eventually, start_job
from memory_store import MemorySpace, MemoryStore
from protocol.makers import record_of

from fabric.client.control.lighthouse_link import LighthouseLink
from fabric.lighthouse.connections.connection import MOST_WAITING, AdmissionQueue, notice_of
from fabric.lighthouse.jobs.job_history import TermContext
from fabric.protocol.messages import network as m
from fabric.runtime.config import Settings
from fabric.runtime.http.lighthouse_client import come_back_s
from fabric.store import open_store


async def test_connections_are_admitted_in_order_with_turns_for_others_between():
    queue, entered, between = AdmissionQueue(), [], []

    async def knock(number: int) -> None:
        assert await queue.admit() == 0
        entered.append(number)

    async def beats() -> None:
        while len(entered) < 100:
            between.append(len(entered))
            await asyncio.sleep(0)

    await asyncio.gather(*(knock(i) for i in range(100)), beats())
    assert entered == list(range(100))
    steps = [b - a for a, b in itertools.pairwise(between)]
    assert max(steps) <= 50, "never more at once than is bearable for those inside"
    assert min(steps) <= 8, "few, where a turn takes no time"


async def test_a_long_turn_of_the_loop_admits_more_connections(monkeypatch):
    queue, loop, entered = AdmissionQueue(per_s=640), asyncio.get_running_loop(), []

    async def knock() -> None:
        assert await queue.admit() == 0
        entered.append(loop.time())

    # Begin at a whole second, so that all times of the test are exact in binary.
    began, turns = float(int(loop.time())), itertools.count()
    monkeypatch.setattr(loop, "time", lambda: began + next_turn[0] / 32)
    next_turn = [0]
    waiting = [asyncio.ensure_future(knock()) for _ in range(100)]
    while len(entered) < 100:
        next_turn[0] = next(turns)
        await asyncio.sleep(0)
    assert max(entered.count(x) for x in set(entered)) == 20, "640 a second"
    await asyncio.gather(*waiting)


async def test_a_connection_that_went_away_takes_no_turn():
    queue = AdmissionQueue()
    waiting = [asyncio.ensure_future(queue.admit()) for _ in range(20)]
    await asyncio.sleep(0)  # let all members enter the queue
    for task in waiting[:19]:
        task.cancel()
    assert await waiting[19] == 0
    assert await queue.admit() == 0


async def test_a_full_queue_refuses_and_names_a_time_that_grows_with_the_refusals():
    queue = AdmissionQueue()
    waiting = [asyncio.ensure_future(queue.admit()) for _ in range(MOST_WAITING)]
    await asyncio.sleep(0)  # let all members enter the queue
    times = [await queue.admit() for _ in range(9000)]
    assert times[0] >= 1 and times == sorted(times)
    assert times[-1] >= 2 * times[0] and times[-1] <= 30
    assert await asyncio.gather(*waiting) == [0] * MOST_WAITING
    assert await queue.admit() == 0, "the line is empty again"


async def test_a_refused_member_gets_the_time_to_come_back(http):
    crowded = AdmissionQueue(most_waiting=0)
    async with lighthouse_on(MemoryStore(MemorySpace()), admissions=crowded) as instance:

        async def leads() -> bool:
            return instance.parts.serves

        await eventually(leads, "it to lead")
        with pytest.raises(aiohttp.WSServerHandshakeError) as refused:
            await WireMember(http, instance.url, "r0").open()
        assert refused.value.status == 429 and come_back_s(refused.value.headers) >= 1
        assert instance.jobs.by_name == {}, "nothing was begun for it"


async def test_a_refused_trainer_comes_back_to_the_same_lighthouse(monkeypatch):
    """A refusal by the queue counts as a contact, so the trainer goes on trying the same lighthouse."""
    # On a loaded machine a slow connection must not count as a missing lighthouse.
    monkeypatch.setattr("fabric.client.control.lighthouse_link._CONNECT_S", 30.0)
    asked = []

    async def session(request: web.Request) -> web.StreamResponse:
        asked.append(request.path)
        if len(asked) == 1:
            return web.json_response({"error": "later"}, status=429, headers={"Retry-After": "0"})
        return web.json_response({"error": "no such job"}, status=404)

    app = web.Application()
    app.router.add_get("/v1/jobs/{job}/session", session)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    url = f"http://127.0.0.1:{runner.addresses[0][1]}"
    refused: list[str] = []
    link = LighthouseLink(Settings(job="job", replica="r0", lighthouse=(url,), autonomy_s=0.0))
    async with asyncio.timeout(60):
        await link.run(lambda _: None, refused.append)
    await runner.cleanup()
    assert len(asked) == 2 and len(refused) == 1 and "is not a lighthouse" in refused[0]


@pytest.mark.parametrize(
    ("text", "seconds"), [("7", 7.0), ("0", 0.0), ("1000000", 60.0), ("", 1.0), ("-3", 1.0), ("soon", 1.0)]
)
def test_a_client_obeys_a_retry_after_within_bounds(text, seconds):
    assert come_back_s({"Retry-After": text}) == seconds


def _notice(replicas: int, servers: int) -> m.EpochNotice:
    notice = notice_of(record_of(" ".join(f"r{i}" for i in range(replicas))), servers)
    assert isinstance(notice, m.EpochNotice)
    return notice


def test_checkpoint_servers_of_a_large_job_send_their_status_less_often():
    assert _notice(3, 3).every_s < 0.05
    assert _notice(5000, 0).every_s == 1.0  # after a fail-over they are not back yet
    assert _notice(12, 12_288).every_s == 1.0  # few replicas of many hosts


async def test_an_overload_is_reported_with_its_duration():
    told = []
    queue = AdmissionQueue(most_waiting=20, on_overload=told.append, per_s=10)
    assert await queue.admit() == 0 and told == [], "one alone is no crowd"
    waiting = [asyncio.ensure_future(queue.admit()) for _ in range(20)]
    await asyncio.sleep(0)  # let all members enter the queue
    seconds = [await queue.admit() for _ in range(100)]
    assert max(told) > seconds[-1] > seconds[0], "as long as the last one stays away, and then stands in line"
    assert len(told) <= 12, "not for each of them"
    assert await asyncio.gather(*waiting) == [0] * 20


HERD = 100


async def test_a_new_leader_evicts_no_member_of_a_crowd_that_comes_back(herd_http, tmp_path, monkeypatch):
    """100 real sessions, and a leader that is killed. The next leader has a short queue, so it refuses most
    members at first. Some members give up before their admission, and are away for longer than a session may
    be.
    """
    url, clock = f"sqlite://{tmp_path}/store.db", Clock()
    monkeypatch.setattr("fabric.lighthouse.jobs.jobs.TermContext", partial(TermContext, clock=clock))
    arguments = ("--namespace", "ns", "--limit", "lease-s=2", "--limit", "max-replicas=1000")
    with LighthouseProcess(tmp_path, url, "first", arguments) as first:
        members = await start_job(herd_http, first.url, HERD)
        nonce = members[0].newest.nonce
        async with lighthouse_on(open_store(url), admissions=AdmissionQueue(most_waiting=8)) as second:
            first.end(signal.SIGKILL)

            async def leads() -> bool:
                return second.parts.serves

            await eventually(leads, "the other one to lead")
            back = [WireMember(herd_http, second.url, x.replica, generation=1, step=1) for x in members]
            away_s = await asyncio.gather(*map(knock, back))
            inside = [x for x, seconds in zip(back, away_s, strict=True) if not seconds]
            assert 4 < len(inside) < HERD / 2, "a herd"
            job = second.jobs.by_name["job"]
            for member in inside[:4]:
                member.cut()

            async def seen() -> bool:
                return len(job.connections.sessions) == len(inside) - 4

            await eventually(seen, "that they have gone to be seen")
            clock.now += 4.0
            while outside := [x for x in back if x not in inside[4:]]:
                # sooner than the lighthouse asked, so that the queue refuses some members again
                await asyncio.sleep(0.2)
                away_s = await asyncio.gather(*map(knock, outside))
                inside += [x for x, seconds in zip(outside, away_s, strict=True) if not seconds]
            record, kinds = job.core.state.record, [x.kind for x in job.events.after(0)]
            assert (len(job.connections.sessions), len(record.roster), record.nonce) == (HERD, HERD, nonce)
            assert "evicting" not in kinds and "epoch" not in kinds
            await close_all(inside)


async def knock(member: WireMember) -> float:
    """Return 0 if the member got its session and the epoch, otherwise the delay that the queue named."""
    try:
        await member.open()
    except aiohttp.WSServerHandshakeError as error:
        assert error.status == 429
        return come_back_s(error.headers or {})
    await member.epoch(1)
    return 0.0
