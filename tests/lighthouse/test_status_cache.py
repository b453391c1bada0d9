"""The lighthouse computes a job's status once for all its viewers."""

import asyncio
import json
from contextlib import AsyncExitStack

import pytest
from in_process import Clock, lighthouse_on
from lighthouse_support import close_all, eventually, start_job
from memory_store import MemorySpace, MemoryStore

from fabric.lighthouse.http import job_status, routes

VIEWERS = 6


async def first_view(answer) -> dict:
    """The first view of the job that this stream sends."""
    async for line in answer.content:
        if line.startswith(b"event: job"):
            return json.loads((await answer.content.readline()).removeprefix(b"data: "))
    pytest.fail("the stream ended without a view of the job")


async def test_many_viewers_cost_one_computation_per_change(http, monkeypatch):
    clock, computed = Clock(), []
    view = job_status.job_text

    async def counted(job):
        computed.append(job.name)
        return await view(job)

    monkeypatch.setattr(job_status, "job_text", counted)
    monkeypatch.setattr(routes, "StatusCache", lambda: job_status.StatusCache(clock))
    async with lighthouse_on(MemoryStore(MemorySpace()), lease_s=3600) as instance, AsyncExitStack() as stack:

        async def leads() -> bool:
            return instance.parts.serves

        await eventually(leads, "it to lead")
        members = await start_job(http, instance.url)
        url = f"{instance.url}/v1/jobs/job/live"
        answers = [await stack.enter_async_context(http.get(url)) for _ in range(VIEWERS)]
        for number in range(1, 4):
            views = await asyncio.gather(*(first_view(answer) for answer in answers))
            assert len(computed) == number, "one computation for all viewers"
            assert all(each == views[0] and each["job"] == "job" for each in views)
            clock.now += 1.0
        await close_all(members)
