"""A tenant's processes that are gone leave a bounded trace in the lighthouse's memory."""

import pytest
from in_process import TroubledStore, lighthouse_on
from lighthouse_support import WireMember, WireStatus, close_all, eventually, start_job
from memory_store import MemorySpace

from fabric.model import Death, SnapshotRef
from fabric.protocol.leader import liveness

MOST = 4


@pytest.mark.parametrize("way", ["sessions", "statuses", "ranks", "evidence"])
async def test_processes_that_come_and_go_under_new_names_are_forgotten(way, http, monkeypatch):
    """Each new name of a session, and each rank of a status, stayed in memory until the leader's end."""
    monkeypatch.setattr(liveness, "MOST_GONE", MOST)
    async with lighthouse_on(TroubledStore(MemorySpace()), lease_s=60) as instance:

        async def leads() -> bool:
            return instance.jobs.loaded.is_set()

        await eventually(leads, "it to lead")
        members = await start_job(http, instance.url)
        found = instance.jobs.by_name["job"].core.state.liveness
        for number in range(3 * MOST):
            if way == "sessions":
                late = WireMember(http, instance.url, f"x{number}", incarnation=number + 1)
                await (await late.open()).close()
                continue
            name, rank = ("r0", number + 1) if way == "ranks" else (f"x{number}", 0)
            server = await WireStatus(http, instance.url, name).open()
            more = (
                {"deaths": (Death(1, 1, 1),), "durable": (SnapshotRef(1, 1, "d"),)}
                if way == "evidence"
                else {}
            )
            await server.beat(rank=rank, **more)
            await server.socket.close()

        async def are_few() -> bool:
            statuses = sum(len(found.statuses(rank)) for rank in tuple(found.servers.counting))
            return max(len(found.peers) - 3, statuses) <= MOST

        await eventually(are_few, "them to be forgotten")
        assert {"r0", "r1", "r2"} <= set(found.peers)
        await close_all(members)
