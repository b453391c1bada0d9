"""The log of a job's events: growing ids, the newest kept, followers."""

import asyncio

import pytest

from fabric.lighthouse.jobs.job_history import EventLog


class TestEventLog:
    async def test_ids_grow_even_when_the_clock_does_not(self):
        log = EventLog(clock=lambda: 5.0, steady=lambda: 1.0)
        ids = [log.add("k", 1, "", "").id for _ in range(3)]
        assert ids == [5_000_000, 5_000_001, 5_000_002]

    async def test_the_newest_events_are_kept(self):
        log = EventLog(capacity=3)
        added = [log.add("k", i, "", "") for i in range(5)]
        assert log.after(0) == added[2:]
        assert log.after(added[3].id) == added[4:]
        assert log.after(added[4].id) == []

    async def test_a_follower_gets_old_events_new_ones_and_the_end(self):
        log = EventLog()
        first = log.add("a", 1, "", "")
        follower = log.follow(0)
        assert await anext(follower) == [first]
        waiting = asyncio.ensure_future(anext(follower))
        await asyncio.sleep(0)
        assert not waiting.done()
        second = log.add("b", 1, "", "")
        assert await waiting == [second]
        third = log.add("c", 1, "", "")
        log.end_followers()
        assert await anext(follower) == [third]
        with pytest.raises(StopAsyncIteration):
            await anext(follower)

    async def test_reasons_of_events_are_cut_to_a_bounded_length(self):
        assert len(EventLog().add("k", 1, "", "x" * 10_000).why) == 2000
