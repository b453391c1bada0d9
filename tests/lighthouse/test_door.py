"""Connections are let in a few at a time, and thousands that come back at once are told when to."""

import asyncio
import itertools

import aiohttp
import pytest
from aiohttp import web
from in_process import lighthouse_on
from lighthouse_support import WireMember, eventually
from protocol.makers import record_of

from fabric.client.leader_link import LeaderLink
from fabric.lighthouse.door import MOST_WAITING, Door
from fabric.lighthouse.job import _notice
from fabric.protocol import messages as m
from fabric.protocol import wire
from fabric.runtime.config import Settings
from fabric.runtime.web import come_back_s
from fabric.store.memory import MemorySpace, MemoryStore


async def test_who_knocks_is_let_in_in_order_and_others_have_their_turn_between():
    door, entered, between = Door(), [], []

    async def knock(number: int) -> None:
        assert await door.enter() == 0
        entered.append(number)

    async def beats() -> None:
        while len(entered) < 100:
            between.append(len(entered))
            await asyncio.sleep(0)

    await asyncio.gather(*(knock(i) for i in range(100)), beats())
    assert entered == list(range(100))
    steps = [b - a for a, b in itertools.pairwise(between)]
    assert max(steps) <= 8, "never more at once than is bearable for those inside"


async def test_who_has_gone_away_takes_nobodys_turn():
    door = Door()
    waiting = [asyncio.ensure_future(door.enter()) for _ in range(20)]
    await asyncio.sleep(0)  # all of them stand in line
    for task in waiting[:19]:
        task.cancel()
    assert await waiting[19] == 0
    assert await door.enter() == 0


async def test_who_would_wait_too_long_is_sent_away_and_the_more_the_longer():
    door = Door()
    waiting = [asyncio.ensure_future(door.enter()) for _ in range(MOST_WAITING)]
    await asyncio.sleep(0)  # all of them stand in line
    times = [await door.enter() for _ in range(9000)]
    assert times[0] >= 1 and times == sorted(times)
    assert times[-1] >= 2 * times[0] and times[-1] <= 30
    assert await asyncio.gather(*waiting) == [0] * MOST_WAITING
    assert await door.enter() == 0, "the line is empty again"


async def test_a_member_that_is_sent_away_is_told_when_to_come_back(http):
    crowded = Door(most_waiting=0)
    async with lighthouse_on(MemoryStore(MemorySpace()), door=crowded) as instance:

        async def leads() -> bool:
            return instance.parts.serves

        await eventually(leads, "it to lead")
        with pytest.raises(aiohttp.WSServerHandshakeError) as refused:
            await WireMember(http, instance.url, "r0").open()
        assert refused.value.status == 429 and come_back_s(refused.value.headers) >= 1
        assert instance.jobs.by_name == {}, "nothing was begun for it"


async def test_a_trainer_that_is_sent_away_comes_back_to_the_same_lighthouse():
    """It has found its lighthouse: this is not the contact that never comes."""
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
    link = LeaderLink(Settings(job="job", replica="r0", lighthouse=(url,), contact_s=0.0))
    async with asyncio.timeout(60):
        await link.run(lambda _: None, refused.append)
    await runner.cleanup()
    assert len(asked) == 2 and len(refused) == 1 and "is not a lighthouse" in refused[0]


@pytest.mark.parametrize(
    ("text", "seconds"), [("7", 7.0), ("0", 0.0), ("1000000", 60.0), ("", 1.0), ("-3", 1.0), ("soon", 1.0)]
)
def test_what_a_service_asks_for_is_believed_within_reason(text, seconds):
    assert come_back_s({"Retry-After": text}) == seconds


def test_a_large_job_is_pulsed_less_often():
    small, large = (wire.decode(_notice(record_of(" ".join(f"r{i}" for i in range(n))))) for n in (3, 5000))
    assert isinstance(small, m.Notice) and isinstance(large, m.Notice)
    assert small.every_s < 0.05 and large.every_s == 1.0
