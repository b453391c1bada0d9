"""One job's shell with a failing store, and with a defect in its core."""

import json
import statistics
import sys
from pathlib import Path

import pytest
from aiohttp import web
from in_process import TroubledStore, lighthouse_on
from lighthouse_support import WireMember, WireStatus, close_all, eventually, get, start_job
from memory_store import MemorySpace
from test_fast_frames import frame

import fabric
from fabric.errors import StoreError, StoreIndefinite, StoreUnavailable
from fabric.lighthouse.connections.connection import DEFECT, MALFORMED, FrameCache, MemberConnection
from fabric.lighthouse.http.job_status import job_text
from fabric.model import MemberSpeed, SnapshotRef
from fabric.protocol.leader.core import MANY
from fabric.protocol.leader.liveness import LivenessConfig
from fabric.protocol.messages import network as m
from fabric.protocol.messages import wire
from fabric.protocol.messages.leader_events import SharesAdvised

OURS = str(Path(fabric.__file__).parent)
MOST_CALLS = 120  # of a heartbeat in a job of many, and the median of several members


@pytest.fixture
async def instance():
    async with lighthouse_on(TroubledStore(MemorySpace()), lease_s=60) as found:

        async def leads() -> bool:
            return found.jobs.loaded.is_set()

        await eventually(leads, "it to lead")
        yield found


def outcomes(instance, outcome: str) -> float:
    lines = instance.parts.metrics.render().decode().splitlines()
    start = f'fabric_lighthouse_record_writes_total{{job="job",outcome="{outcome}"}} '
    return next((float(line.removeprefix(start)) for line in lines if line.startswith(start)), 0.0)


async def test_a_write_that_was_applied_and_whose_answer_got_lost_is_recognised(instance, http):
    instance.store.lost_after.append(StoreIndefinite("the answer got lost"))
    members = await start_job(http, instance.url)
    assert members[0].newest.epoch == 1
    assert (outcomes(instance, "indefinite"), outcomes(instance, "written")) == (1, 0)
    await members[0].say(m.CannotContinue(members[0].newest.fence, "so that it writes again"))
    assert (await members[1].epoch(2)).names == ("r1", "r2")
    assert instance.parts.leads
    await close_all(members)


async def test_a_write_that_got_lost_before_it_was_applied_is_made_again(instance, http):
    instance.store.lost_before.append(StoreIndefinite("the answer got lost"))
    members = await start_job(http, instance.url)
    assert members[0].newest.epoch == 1
    assert (outcomes(instance, "indefinite"), outcomes(instance, "written")) == (1, 1)
    await close_all(members)


async def test_errors_of_the_store_are_waited_out(instance, http):
    instance.store.lost_before += [StoreError("disk full"), StoreUnavailable("no leader"), StoreError("no")]
    instance.store.unreadable += [StoreUnavailable("no leader")] * 2
    members = await start_job(http, instance.url)
    assert members[0].newest.epoch == 1 and instance.parts.leads
    assert outcomes(instance, "failed") == 3
    _, events = await get(http, f"{instance.url}/v1/jobs/job/events")
    told = [e["why"] for e in events if e["kind"] == "write failed"]
    assert len(told) == 3 and "disk full" in told[0]
    await close_all(members)


async def test_while_the_store_is_away_nothing_is_announced(instance, http):
    members = await start_job(http, instance.url)
    instance.store.down = StoreUnavailable("unplugged")
    await members[0].say(m.CannotContinue(members[0].newest.fence, "so that it wants to write"))

    async def wants() -> bool:
        _, body = await get(http, f"{instance.url}/v1/jobs/job")
        return "the store" in body["waiting_for"]

    await eventually(wants, "the leader to wait for the store")
    await members[1].say(m.Heartbeat(77, 1, 1, 0))
    while (await members[1].next(m.HeartbeatAck)).number != 77:
        pass
    assert members[1].newest.epoch == 1
    instance.store.down = None
    assert (await members[1].epoch(2)).names == ("r1", "r2")
    await close_all(members)


async def test_a_defect_in_one_core_costs_the_other_jobs_nothing(instance, http):
    broken = await start_job(http, instance.url, job="broken")
    fine = await start_job(http, instance.url, job="fine")

    def defect(event, now):
        raise RuntimeError("a defect that the test has put in")

    instance.jobs.by_name["broken"].core.handle = defect
    await broken[0].say(m.Heartbeat(5, 1, 1, 0))
    for member in broken:
        assert (await member.close_reason())[0] == DEFECT
    await fine[0].say(m.Heartbeat(55, 1, 1, 0))
    while (await fine[0].next(m.HeartbeatAck)).number != 55:
        pass

    async def is_back() -> bool:
        return instance.jobs.by_name["broken"].is_running

    await eventually(is_back, "the core to be made anew")
    again = await WireMember(http, instance.url, "r0", job="broken", generation=1).open()
    assert (await again.epoch(1)).names == ("r0", "r1", "r2")
    _, events = await get(http, f"{instance.url}/v1/jobs/broken/events")
    assert [e["why"] for e in events if e["kind"] == "defect"] == [
        "RuntimeError: a defect that the test has put in"
    ]
    await close_all([*broken, *fine, again])


async def test_a_member_that_does_not_read_is_cut_and_not_waited_for(instance, http, monkeypatch):
    monkeypatch.setattr("fabric.lighthouse.connections.connection.MAX_QUEUED_BYTES", 1 << 20)
    members = await start_job(http, instance.url, count=2)
    deaf = members[1].socket._response.connection.transport
    deaf.pause_reading()
    job = instance.jobs.by_name["job"]
    connection = job.connections.sessions["r1"]
    reply = FrameCache().of(m.Rejected("x" * 100_000), accepts_compression=False)
    # Send more than the sockets' buffers hold, as fast as the core would, without waiting.
    for _ in range(400):
        connection.send(reply)
    assert connection.is_ending

    async def is_away() -> bool:
        return "r1" not in job.connections.sessions

    await eventually(is_away, "the deaf one to be cut")
    await members[0].say(m.Heartbeat(9, 1, 1, 0))
    assert (await members[0].next(m.HeartbeatAck)).number == 9
    await members[0].close()


async def test_a_silent_member_is_evicted_after_the_configured_silence(http):
    """Only the timer notices an open connection that stays silent and has no status."""
    impatient = LivenessConfig(silence_s=1.0, grace_s=0.1)
    async with lighthouse_on(TroubledStore(MemorySpace()), liveness=impatient) as found:

        async def leads() -> bool:
            return found.jobs.loaded.is_set()

        await eventually(leads, "it to lead")
        members = await start_job(http, found.url, count=2)

        async def beat() -> bool:
            await members[0].say(m.Heartbeat(3, 1, 1, 0))
            await members[0].next(m.HeartbeatAck)
            return members[0].newest.epoch > 1

        await eventually(beat, "the silent one to be evicted")
        assert members[0].newest.names == ("r0",) and "silent" in members[0].newest.reason
        await close_all(members)


async def test_the_core_gets_an_unchanged_status_less_often(instance, http):
    member = await WireMember(http, instance.url, "r0").open()
    await member.say(m.Heartbeat(1, 0, 0, 0))
    await member.next(m.HeartbeatAck)
    job = instance.jobs.by_name["job"]
    told = []
    handle = job.core.handle
    job.core.handle = lambda event, now: told.append(event) or handle(event, now)
    connection, held = job.connections.sessions["r0"], SnapshotRef(1, 5, "d")
    for number in range(100):
        ages = {"snapshots": (held,), "ages_s": (number / 20,)}
        job.trainer_statuses(connection, [m.TrainerStatus("r0", 1, "running", number, **ages)])
    job.trainer_statuses(connection, [m.TrainerStatus("r0", 1, "stopped", 100)])
    beats = [event.status for event in told if hasattr(event, "status")]
    assert beats[0].number == 0 and beats[-1].trainer == "stopped" and len(beats) < 20
    await member.close()


async def test_the_server_of_a_refused_second_process_does_not_hide_the_first(instance, http):
    """Both servers send statuses; the second server stops some time after the refusal of its trainer."""
    member = await WireMember(http, instance.url, "r0").open()
    await member.say(m.Heartbeat(1, 0, 0, 0))
    await member.next(m.HeartbeatAck)
    second = await WireMember(http, instance.url, "r0", incarnation=2).open()
    await second.next(m.Rejected)
    job = instance.jobs.by_name["job"]
    own, others, again = (MemberConnection(web.WebSocketResponse(), None) for _ in range(3))
    job.trainer_statuses(own, [m.TrainerStatus("r0", 1, "running", 1, "http://own")])
    for number, trainer in enumerate(("running", "gone", "gone")):
        job.trainer_statuses(others, [m.TrainerStatus("r0", 2, trainer, number, "http://others")])
    job.server_closed(others)
    job.trainer_statuses(again, [m.TrainerStatus("r0", 1, "running", 1, "http://own")])
    job.server_closed(own)  # the server's first connection ends after its second has begun
    [server] = (await described(job))["checkpoint_servers"]
    assert (server["ckpt"], server["trainer"], server["connected"]) == ("http://own", "running", True)
    [joiner] = (await described(job))["joiners"]
    assert joiner["trainer_status"]["trainer"] == "running"
    job.server_closed(again)
    assert not (await described(job))["checkpoint_servers"][0]["connected"]
    await member.close()


async def described(job) -> dict:
    return json.loads(await job_text(job))


async def test_a_complete_job_lists_no_server_that_has_ended(instance, http):
    members = await start_job(http, instance.url, count=2)
    job = instance.jobs.by_name["job"]
    statuses = [await WireStatus(http, instance.url, member.replica).open() for member in members]
    for status in statuses:
        await status.beat()

    async def listed(*names: str) -> bool:
        return [server["replica"] for server in (await described(job))["checkpoint_servers"]] == list(names)

    await eventually(lambda: listed("r0", "r1"), "both to be heard")
    for member in members:
        await member.say(m.Finished(member.newest.fence, 40))
    for member in members:
        await member.next(m.Complete)
    await statuses[0].socket.close()
    await eventually(lambda: listed("r1"), "only the one that still answers to be listed")
    ended, there = (await described(job))["members"]
    assert (ended["ckpt"], ended["trainer_status"]) == ("", None)
    assert there["ckpt"] and there["trainer_status"]["connected"]
    assert (ended["step"], there["step"]) == (40, 40), "and no beat of before the end"
    await close_all(members)


def calls_of_a_heartbeat(connection: MemberConnection, record) -> int:
    """Count the calls of our functions, and those that they make, from the bytes to the acknowledgement."""
    beat = wire.encode(m.Heartbeat(1, record.epoch, record.generation, 1, phase="run"))
    receive = connection._transport.get_protocol().data_received
    data, counted = frame(beat), 0

    def count(caller, kind, _):
        nonlocal counted
        counted += kind in ("call", "c_call") and OURS in caller.f_code.co_filename

    sys.setprofile(count)
    try:
        receive(data)
    finally:
        sys.setprofile(None)
    return counted


async def test_a_job_of_many_decides_a_death_and_answers_heartbeats_meanwhile(instance, herd_http):
    """With so many members, messages and answers take several turns, and none may get lost."""
    members = await start_job(herd_http, instance.url, MANY + 4, micro_batches=MANY)
    lost = members.pop(7)
    lost.cut()
    for member in members:
        assert lost.replica not in (await member.epoch(2)).names
        await member.report()
    for member in members:
        await member.next(m.Resume)
        await member.run()
    job = instance.jobs.by_name["job"]

    async def all_run() -> bool:
        return len(job.core.state.epoch.running) == len(members)

    await eventually(all_run, "what all said to be heard")
    counts = [calls_of_a_heartbeat(job.connections.sessions[x.replica], x.newest) for x in members[:21]]
    assert 0 < statistics.median(counts) <= MOST_CALLS, counts
    assert job.core.state.record.epoch == 2 and len(job.connections.sessions) == len(members)
    lines = [x for x in job.events.after(0) if x.kind == "evicting"]
    assert [x.about for x in lines] == [lost.replica]
    await members[3].socket.send_str('{"kind":"Report","version":3}')
    code, reason = await members[3].close_reason()
    assert code == MALFORMED and "Report" in reason, "what had to wait for its turn is checked as well"
    await close_all(members)


async def test_the_leader_gets_the_shares_that_the_detector_orders(instance, http, monkeypatch):
    members = await start_job(http, instance.url, adapt="act", micro_batches=12)
    job = instance.jobs.find("job")
    slow = members[1].session
    speeds = (MemberSpeed(slow.replica, slow.incarnation, 500),)
    orders = [SharesAdvised(1, speeds, 0.6, 0.0, "r1 computes at half the speed")]
    monkeypatch.setattr(job.slowness, "is_due", lambda now: True)
    monkeypatch.setattr(job.slowness.remedies, "take_order", lambda: orders.pop() if orders else None)
    await members[0].say(m.Heartbeat(1, 1, 1, 0))
    record = await members[0].epoch(2)
    assert {x.replica: x.shares for x in record.roster} == {"r0": 1000, "r1": 500, "r2": 1000}
    _, events = await get(http, f"{instance.url}/v1/jobs/job/events")
    assert [x["about"] for x in events if x["kind"] == "shares"] == ["r1"]
    await close_all(members)


async def test_a_rank_that_a_server_has_dropped_counts_as_closed_and_the_others_go_on(instance, http):
    member = await WireMember(http, instance.url, "r0").open()
    await member.say(m.Heartbeat(1, 0, 0, 0))
    await member.next(m.HeartbeatAck)
    job = instance.jobs.by_name["job"]
    connection = MemberConnection(web.WebSocketResponse(), None)
    url, held = "http://own:1", SnapshotRef(1, 5, "d")
    ranks = [
        m.TrainerStatus("r0", 1, "running", 1, f"{url}/ranks/{k}#{k}" if k else url, (held,), rank=k)
        for k in range(3)
    ]
    servers = job.core.state.liveness.servers
    job.trainer_statuses(connection, ranks)
    assert servers.held() == {held: {x.ckpt for x in ranks}}
    job.trainer_statuses(connection, ranks[:2])
    assert servers.held() == {held: {x.ckpt for x in ranks[:2]}}
    job.trainer_statuses(connection, ranks)
    assert servers.held() == {held: {x.ckpt for x in ranks}}
    job.server_closed(connection)
    assert servers.held() == {}
    await member.close()
