"""Elections: which lighthouse leads, when it stops leading, and that a deposed leader changes no record."""

import asyncio
import sqlite3
import threading
import time
from contextlib import asynccontextmanager, suppress

import pytest
from aiohttp import WSMsgType
from in_process import Clock, TroubledStore, lighthouse_on
from lighthouse_support import close_all, eventually, get, start_job
from memory_store import MemorySpace, MemoryStore

from fabric.errors import StoreError, StoreIndefinite, StoreUnavailable
from fabric.lighthouse.connections.connection import NOT_THE_LEADER, MemberConnection
from fabric.lighthouse.jobs.job_history import record_key
from fabric.protocol.messages import leader_events as io
from fabric.protocol.messages import network as m
from fabric.protocol.messages import wire
from fabric.runtime.system_calls import seconds_since_boot
from fabric.store import open_store
from fabric.store.base import Delete, Put

ELECTION = "/fabric/ns/election/"


def leads(instance):
    async def check() -> bool:
        return instance.parts.serves

    return check


async def test_one_of_several_leads_and_the_others_know_it():
    space = MemorySpace()
    async with (
        lighthouse_on(MemoryStore(space)) as a,
        lighthouse_on(MemoryStore(space)) as b,
        lighthouse_on(MemoryStore(space)) as c,
    ):

        async def settled() -> bool:
            return all(x.parts.leads or x.election.other for x in (a, b, c))

        await eventually(settled, "everybody to know the leader")
        leader = next(x for x in (a, b, c) if x.parts.leads)
        others = [x for x in (a, b, c) if x is not leader]
        assert not any(x.parts.leads for x in others)
        assert {x.election.other.url for x in others} == {leader.url}


async def test_a_clean_end_hands_over_without_waiting_for_the_lease():
    space = MemorySpace()
    async with lighthouse_on(MemoryStore(space), lease_s=3600) as b_holder:
        await eventually(leads(b_holder), "the first to lead")
        second = lighthouse_on(MemoryStore(space), lease_s=3600)
        b = await second.__aenter__()
    await eventually(leads(b), "the second to lead, an hour before the lease ends")
    await second.__aexit__(None, None, None)


def follows(instance, leader) -> bool:
    other = instance.election.other
    return other is not None and other.url == leader.url


async def test_candidates_lead_in_the_order_of_their_coming_without_a_write():
    """The successor already has its key and lease, so one message of the store makes it the leader."""

    class Counting(MemoryStore):
        writes = 0

        async def commit(self, compares, operations):
            self.writes += 1
            return await super().commit(compares, operations)

    space = MemorySpace()
    stores = [Counting(space) for _ in range(3)]
    running = []
    for index, store in enumerate(stores):
        context = lighthouse_on(store, lease_s=3600)
        running.append((context, await context.__aenter__()))

        async def stands(count=index + 1) -> bool:
            return len(space.find(ELECTION)[0]) == count

        await eventually(stands, "the newest to be in the line")
    before = [store.writes for store in stores]
    for index, (context, instance) in enumerate(running):
        await eventually(leads(instance), "its turn")
        assert [later.parts.leads for _, later in running[index + 1 :]] == [False] * (2 - index)
        if index < 2:
            successor = running[index + 1][1]

            async def known(successor=successor, instance=instance) -> bool:
                return follows(successor, instance)

            await eventually(known, "the next in line to know the leader")
        await context.__aexit__(None, None, None)
    # The first call of stores[0] wrote the store's id; the election itself wrote nothing more.
    assert [store.writes for store in stores] == before


async def test_a_candidate_that_lost_its_place_goes_to_the_end_of_the_line():
    space = MemorySpace()
    async with (
        lighthouse_on(MemoryStore(space), lease_s=3600) as first,
        lighthouse_on(MemoryStore(space), lease_s=3600) as second,
    ):
        await eventually(leads(first), "the first to lead")
        mine = [kv for kv in space.find(ELECTION)[0] if kv.key != first.election.term.key]
        assert len(mine) == 1
        space.commit([], [Delete(mine[0].key)])

        async def back() -> bool:
            others = [kv.key for kv in space.find(ELECTION)[0] if kv.key != first.election.term.key]
            return bool(others) and others != [mine[0].key] and follows(second, first)

        await eventually(back, "a new place in the line, and the leader known again")


async def test_a_leader_with_a_wrong_clock_is_fenced_by_the_store(http):
    """The leader's own clock stands still, so the leader takes its lease for valid. The store has elected
    another lighthouse, but the message about it has not arrived.
    """

    asked = []

    class NoNews(MemoryStore):
        async def get(self, key):
            asked.extend([key] if key.startswith(ELECTION) else [])
            if asked.count(key) == 2:  # the leader's first look whether its key is still there
                await asyncio.Event().wait()
            return await super().get(key)

    store_clock = Clock()
    space = MemorySpace(clock=store_clock)
    async with lighthouse_on(NoNews(space), lease_s=3600, clock=Clock()) as old:
        await eventually(leads(old), "the first to lead")
        members = await start_job(http, old.url)
        store_clock.now += 4000.0
        async with lighthouse_on(MemoryStore(space), lease_s=3600) as new:
            await eventually(leads(new), "the second to lead")
            assert old.parts.leads, "the test wants two that believe to lead"
            before = await space_record(space)
            await members[0].say(
                m.CannotContinue(members[0].newest.fence, "it must not be evicted by the old one")
            )
            code, reason = await members[1].close_reason()
            assert (code, "elected" in reason) == (NOT_THE_LEADER, True)
            assert await space_record(space) == before
            assert not old.parts.leads and new.parts.leads
            text = old.parts.metrics.render().decode()
            assert 'fabric_lighthouse_record_writes_total{job="job",outcome="refused"} 1.0' in text

            async def follows() -> bool:
                return (await get(http, f"{old.url}/v1/jobs"))[0] == 307

            await eventually(follows, "the deposed one to follow")
            await close_all(members)


async def space_record(space: MemorySpace):
    return wire.decode_record(space.get(record_key("ns", "job")).value)


async def test_a_leader_stops_by_its_own_clock_before_the_lease_ends(http):
    """The store sends no message, and the lease in the store still holds, but the leader's clock says that it
    ends.
    """
    clock = Clock()
    space = MemorySpace()
    store = TroubledStore(space)
    async with lighthouse_on(store, lease_s=10, clock=clock) as instance:
        await eventually(leads(instance), "it to lead")
        members = await start_job(http, instance.url)
        clock.now += 8.9
        assert instance.parts.leads
        clock.now += 0.2  # one second (the margin) before the lease's end
        assert not instance.parts.leads
        assert space.find(ELECTION)[0]
        status, _ = await get(http, f"{instance.url}/v1/jobs")
        assert status == 503
        await members[0].say(m.CannotContinue(members[0].newest.fence, "nothing may be written any more"))
        code, _ = await members[0].close_reason()
        assert code == NOT_THE_LEADER
        assert (await space_record(space)).epoch == 1
        await close_all(members)


async def test_a_leader_stuck_past_its_lease_answers_no_heartbeat(http):
    """Otherwise members would count their autonomy from heartbeats that they sent after the next leader's
    election.
    """
    clock, space = Clock(), MemorySpace()
    async with lighthouse_on(MemoryStore(space), lease_s=3600, clock=clock) as instance:
        await eventually(leads(instance), "it to lead")
        members = await start_job(http, instance.url)
        job = instance.jobs.by_name["job"]
        clock.now += 4000.0  # the event loop has not turned since, so no timer has reported the lease's end
        answered = []
        job.connections.pacer.send = lambda connection, frame: answered.append(frame)
        for number in range(3):
            await members[0].say(m.Heartbeat(number + 7, 1, 1, 0))
        code, reason = await members[0].close_reason()
        assert code == NOT_THE_LEADER, reason
        assert not answered, "nothing is said by who may have been followed"
        code, _ = await members[1].close_reason()
        assert code == NOT_THE_LEADER
        await close_all(members)


async def test_a_tick_after_the_end_of_the_lease_sends_nothing(http):
    clock = Clock()
    async with lighthouse_on(MemoryStore(MemorySpace()), lease_s=3600, clock=clock) as instance:
        await eventually(leads(instance), "it to lead")
        members = await start_job(http, instance.url)
        job = instance.jobs.by_name["job"]
        sent = []
        job.connections.pacer.send = lambda connection, frame: sent.append(frame)
        clock.now += 4000.0
        job._perform(io.SendMember("r0", 1, m.HeartbeatAck(1)))
        assert not sent and not instance.parts.leads and not job.is_running
        await close_all(members)


async def test_a_leader_loses_the_lead_while_its_store_is_unreachable_and_regains_it_after(http):
    space = MemorySpace()
    store = TroubledStore(space)
    async with lighthouse_on(store, lease_s=2) as instance:
        await eventually(leads(instance), "it to lead")
        members = await start_job(http, instance.url)
        store.down = StoreUnavailable("the test has unplugged the store")
        code, reason = await members[0].close_reason()
        assert code == NOT_THE_LEADER and "lease" in reason
        _, health = await get(http, f"{instance.url}/healthz")
        assert not health["ok"] and not health["store_reachable"] and health["leader"] is None
        status, body = await get(http, f"{instance.url}/v1/jobs")
        assert status == 503 and "because the store etcd://s1:2379 does not answer" in body["error"]
        store.down = None
        await eventually(leads(instance), "it to lead again")
        _, body = await get(http, f"{instance.url}/v1/jobs/job")
        assert body["epoch"] == 1
        assert (await get(http, f"{instance.url}/v1/jobs/job/events"))[1], "history is kept"
        await close_all(members)


async def test_a_renewed_lease_goes_on():
    space = MemorySpace()
    async with lighthouse_on(MemoryStore(space), lease_s=3) as instance:
        await eventually(leads(instance), "it to lead")
        term = instance.election.term
        first = term.ends

        async def renewed_twice() -> bool:
            return term.ends > first + 1.5

        await eventually(renewed_twice, "two renewals")
        assert instance.election.term is term and not instance.lost


async def test_a_record_written_by_another_lighthouse_ends_the_term(http):
    space = MemorySpace()
    async with lighthouse_on(MemoryStore(space), lease_s=3600) as instance:
        await eventually(leads(instance), "it to lead")
        members = await start_job(http, instance.url)
        key = record_key("ns", "job")
        body = space.get(key).value.replace(b'"epoch":1', b'"epoch":7').replace(b'"nonce":"', b'"nonce":"f')
        space.commit([], [Put(key, body)])
        await members[0].say(m.CannotContinue(members[0].newest.fence, "to make it write"))
        assert (await members[1].close_reason())[0] == NOT_THE_LEADER
        assert "another lighthouse has written" in instance.lost[0]
        await eventually(leads(instance), "it to be elected again")
        assert (await get(http, f"{instance.url}/v1/jobs/job"))[1]["epoch"] == 7
        await close_all(members)


@pytest.mark.parametrize(
    "value",
    [b"", b"\xff", b"[]", b'{"id": 1, "url": "http://x"}', b'{"id": "a", "url": "ftp://x"}', b"1" * 5000],
)
async def test_a_candidate_waits_for_the_end_of_an_election_key_that_no_lighthouse_wrote(http, value):
    space = MemorySpace()
    store = MemoryStore(space)
    space.commit([], [Put(ELECTION + "0", value)])
    async with lighthouse_on(store) as instance:

        async def answers() -> bool:
            return (await get(http, f"{instance.url}/v1/jobs"))[0] == 503

        await eventually(answers, "an answer")
        assert instance.election.other is None
        space.commit([], [Delete(ELECTION + "0")])
        await eventually(leads(instance), "it to lead once the key has gone")


async def test_a_candidate_reads_the_store_after_a_claim_with_a_lost_answer():
    """The store applied the claim but the answer was lost: the candidate finds its own key, and leads."""

    class LostClaim(MemoryStore):
        async def commit(self, compares, operations):
            revision = await super().commit(compares, operations)
            if operations[0].key.startswith(ELECTION) and not self.lost:
                self.lost = True
                raise StoreIndefinite("the answer got lost")
            return revision

        lost = False

    store = LostClaim(MemorySpace())
    async with lighthouse_on(store) as instance:
        await eventually(leads(instance), "it to lead")
        assert store.lost and not instance.lost
        text = instance.parts.metrics.render().decode()
        assert 'fabric_lighthouse_store_writes_total{outcome="indefinite",what="election"} 1.0' in text


async def test_the_jobs_are_read_again_until_the_store_answers(http):
    class SlowList(MemoryStore):
        failures = 3

        async def list(self, prefix):
            if prefix.endswith("/jobs/") and self.failures:
                self.failures -= 1
                raise StoreError("not now")
            return await super().list(prefix)

    async with lighthouse_on(SlowList(MemorySpace())) as instance:
        await eventually(leads(instance), "the records to be read")
        assert instance.store.failures == 0


async def test_a_new_leader_is_not_ok_until_it_has_read_the_records(http):
    """A client that waits for ``ok`` and then asks must not get 503."""
    may_read = asyncio.Event()

    class SlowList(MemoryStore):
        async def list(self, prefix):
            if prefix.endswith("/jobs/"):
                await may_read.wait()
            return await super().list(prefix)

    async with lighthouse_on(SlowList(MemorySpace()), lease_s=3600) as instance:

        async def healthy() -> bool:
            _, health = await get(http, f"{instance.url}/healthz")
            return health["ok"]

        async def elected() -> bool:
            return instance.parts.leads

        await eventually(elected, "it to be elected")
        _, health = await get(http, f"{instance.url}/healthz")
        assert (health["is_leader"], health["ok"], health["store_reachable"]) == (True, False, True)
        status, body = await get(http, f"{instance.url}/v1/jobs")
        assert status == 503 and "just been elected" in body["error"]
        may_read.set()
        await eventually(healthy, "it to be ready")
        assert (await get(http, f"{instance.url}/v1/jobs"))[0] == 200


async def test_a_stopped_task_gives_the_lease_back():
    space = MemorySpace()
    async with lighthouse_on(MemoryStore(space), lease_s=3600) as instance:
        await eventually(leads(instance), "it to lead")
        assert space.find(ELECTION)[0]
    assert not space.find(ELECTION)[0]


async def test_the_lease_is_given_back_before_many_sessions_are_closed(herd_http, monkeypatch):
    """Closing thousands of sessions takes seconds, in which no lighthouse would lead."""
    closed, closed_before = [], []

    class Noting(MemoryStore):
        async def revoke(self, lease_id):
            closed_before.append(len(closed))
            await super().revoke(lease_id)

    end = MemberConnection.end
    monkeypatch.setattr(MemberConnection, "end", lambda me, *why: (closed.append(me), end(me, *why))[1])
    async with lighthouse_on(Noting(MemorySpace()), lease_s=3600) as instance:
        await eventually(leads(instance), "it to lead")
        members = await start_job(herd_http, instance.url, 100)
    assert closed_before[0] <= 20 and len(set(closed)) == 100
    await close_all(members)


@asynccontextmanager
async def leader_on_a_file(tmp_path, **settings):
    """A leader on a SQLite file, whose lease a thread renews, as in the service."""
    url = f"sqlite://{tmp_path}/store.db"
    async with lighthouse_on(open_store(url), lease_store=open_store(url), **settings) as instance:
        await eventually(leads(instance), "it to lead")
        yield instance


def block_until(condition, what):
    """Block the event loop, as thousands of returning sessions do."""
    deadline = time.monotonic() + 60.0
    while not condition():
        assert time.monotonic() < deadline, f"waited for {what}"
        time.sleep(0.02)


async def test_a_leader_whose_event_loop_is_busy_for_longer_than_the_lease_keeps_the_lead(tmp_path):
    async with leader_on_a_file(tmp_path, lease_s=6) as instance:
        term = instance.election.term
        first = term.ends
        block_until(lambda: term.ends > first + 3.0, "two renewals of the lease")
        # When the event loop turns again, the lighthouse must still lead.
        await eventually(leads(instance), "it to answer")
        assert instance.election.term is term and not instance.lost


async def test_a_leader_whose_event_loop_hangs_for_ever_loses_the_lead(tmp_path):
    """If a thread renewed the lease for ever, no other lighthouse could take over."""
    async with leader_on_a_file(tmp_path, lease_s=1) as instance:
        term, space = instance.election.term, sqlite3.connect(tmp_path / "store.db")

        def lease_ended() -> bool:
            (deadline_s,) = space.execute("SELECT MAX(deadline_s) FROM leases").fetchone()
            return deadline_s is None or deadline_s < time.monotonic()

        block_until(lease_ended, "the lease to end")
        space.close()
        assert not term.in_force()

        async def another_term() -> bool:
            return instance.parts.leads and instance.election.term is not term

        await eventually(another_term, "it to stand again once it turns")
        assert len(instance.lost) == 1


async def test_messages_that_arrived_while_the_event_loop_hung_get_no_answer(http, tmp_path):
    """After the hang the event loop handles its sockets before the timer of the lease's end."""
    async with leader_on_a_file(tmp_path, lease_s=1) as instance:
        members = await start_job(http, instance.url)
        await members[0].say(m.Heartbeat(1, 1, 1, 0))
        while (await members[0].next(m.HeartbeatAck)).number != 1:
            pass
        term = instance.election.term
        await members[0].say(
            m.Heartbeat(2, 1, 1, 0)
        )  # the request lies in the socket; after this line the event loop does not turn
        block_until(lambda: not term.in_force(), "the lease to end")
        answered = []
        while (frame := await members[0].socket.receive()).type is WSMsgType.TEXT:
            answered.append(wire.decode(frame.data))
        assert members[0].socket.close_code == NOT_THE_LEADER
        assert not [x for x in answered if isinstance(x, m.HeartbeatAck)]
        await close_all(members)


async def test_renewals_end_with_their_term():
    """After a long stop, renewals of an old term once went on for ever, because a cancellation was lost when
    all timeouts ended together.
    """

    class Deaf(MemoryStore):
        async def keep_alive(self, lease_id):
            asked.set()
            with suppress(asyncio.CancelledError):
                await asyncio.sleep(3600)
            raise StoreUnavailable("no answer")

    asked = asyncio.Event()
    async with lighthouse_on(Deaf(MemorySpace()), lease_s=2) as instance:
        await eventually(leads(instance), "it to lead")
        await asked.wait()
        instance.election.term.resign("to see")
        before = {x for x in asyncio.all_tasks() if "Election._renew" in repr(x)}
        assert before

        async def ended() -> bool:
            return all(x.done() for x in before)

        await eventually(ended, "the renewals of the old term to end")


def test_the_clock_goes_on_while_the_machine_sleeps():
    assert seconds_since_boot() >= time.monotonic() - 1


async def test_the_handle_that_renews_the_lease_connects_before_the_first_renewal(tmp_path, monkeypatch):
    """At the first renewal sessions may have taken all descriptors, and a failed connection would end the
    leadership.
    """
    url = f"sqlite://{tmp_path}/store.db"
    handle, connected = open_store(url), threading.Event()
    connect = handle.connect

    async def watched() -> str:
        store_id = await connect()
        connected.set()
        return store_id

    monkeypatch.setattr(handle, "connect", watched)
    async with lighthouse_on(open_store(url), lease_store=handle, lease_s=3600) as instance:
        await eventually(leads(instance), "it to lead")
        assert await asyncio.to_thread(connected.wait, 60.0), "the first renewal is due in 20 minutes"
