"""Recovery records have the cost of a failure by phase, over real sessions and over a fail-over."""

import json
import random
from itertools import count
from typing import Any

import pytest
from in_process import lighthouse_on
from lighthouse_support import WireMember, WireStatus, close_all, eventually, headers, start_job
from memory_store import MemorySpace, MemoryStore
from protocol.test_leader import runs, started

from fabric.errors import ProtocolError
from fabric.lighthouse.diagnosis.verdict import Diagnosis
from fabric.lighthouse.history.recovery import (
    CAPACITY,
    NAMED,
    Recoveries,
    RecoveryRecord,
    ReplicaReturn,
)
from fabric.lighthouse.jobs.job_history import folder_of
from fabric.model import DataPlan, Policy
from fabric.protocol.leader.core import LeaderConfig, LeaderCore
from fabric.protocol.messages import leader_events as io
from fabric.protocol.messages import network as m
from fabric.protocol.messages.wire import decode_value
from fabric.store.base import MAX_VALUE_BYTES

PHASES = ("detected", "epoch_committed", "links_up", "step_committed")


async def recoveries(http, url: str, job: str) -> list[dict[str, Any]]:
    async with http.get(f"{url}/v1/jobs/{job}/recoveries", headers=headers()) as answer:
        assert answer.status == 200 and answer.content_type == "application/x-ndjson"
        return [json.loads(line) for line in (await answer.text()).splitlines()]


async def beat_step(member: WireMember, number: int, step: int) -> None:
    record = member.newest
    await member.say(m.Heartbeat(number, record.epoch, record.generation, step, phase="run"))
    await member.next(m.HeartbeatAck)


async def test_a_death_is_timed_from_detection_to_the_return(lighthouse, http, job):
    members = await start_job(http, lighthouse.url, job=job)
    for member in members:
        await beat_step(member, 2, 7)
    status = await WireStatus(http, lighthouse.url, "r1", job).open()
    await status.beat()
    assert await recoveries(http, lighthouse.url, job) == []
    members[1].cut()
    await status.beat("gone")
    survivors = [members[0], members[2]]
    for member in survivors:
        await member.epoch(2)
    (record,) = await recoveries(http, lighthouse.url, job)
    assert (record["kind"], record["epoch"], record["step"]) == ("death", 2, 7)
    assert list(record["lost"]) == ["r1"] and "gone" in record["why"]
    assert record["epoch_committed"] >= record["detected"] > 0 and not record["links_up"]
    for member in survivors:
        fence = member.newest.fence
        await member.say(m.Report(fence, 1, 7, "", 0, 0, (), False, "", (), DataPlan(4)))
    for member in survivors:
        await member.next(m.Resume)
        await member.say(m.Running(member.newest.fence, 7))
        await beat_step(member, 3, 7)
    (record,) = await recoveries(http, lighthouse.url, job)
    assert record["links_up"] and not record["step_committed"]
    await beat_step(members[0], 4, 8)
    again = await WireMember(http, lighthouse.url, "r1", job=job, incarnation=2).open()

    async def started() -> bool:
        (found,) = await recoveries(http, lighthouse.url, job)
        return bool(found["lost"]["r1"]["started"])

    await eventually(started, "the new process to be seen")
    (record,) = await recoveries(http, lighthouse.url, job)
    assert not record["lost"]["r1"]["has_state"]
    assert [record[phase] for phase in PHASES] == sorted(record[phase] for phase in PHASES)
    assert record["steps_lost"] == record["micro_batches_lost"] == 0
    # The recovery record has the id of the event that began it.
    async with http.get(f"{lighthouse.url}/v1/jobs/{job}/events", headers=headers()) as answer:
        incident_id = next(e for e in await answer.json() if e["id"] == record["id"])
    assert (incident_id["kind"], incident_id["about"]) == ("evicting", "r1")
    async with http.get(f"{lighthouse.url}/metrics") as answer:
        text = await answer.text()
    name = "fabric_lighthouse_recovery_seconds_count"
    assert f'{name}{{job="{job}",phase="step_committed"}} 1.0' in text
    await close_all([*survivors, again])


async def test_a_process_that_is_lost_is_back_only_when_it_knows_that_it_was_out(lighthouse, http, job):
    """The checkpoint server reports the loss, but the session stays open in the same generation."""
    members = await start_job(http, lighthouse.url, job=job)
    for member in members:
        await beat_step(member, 2, 7)
    status = await WireStatus(http, lighthouse.url, "r1", job).open()
    await status.beat("stopped")
    survivors = [members[0], members[2]]
    for member in survivors:
        await member.epoch(2)
    # This message was sent before the signal and arrives late.
    before = members[1].newest.epoch
    assert before == 1
    await beat_step(members[1], 3, 7)
    (record,) = await recoveries(http, lighthouse.url, job)
    back = record["lost"]["r1"]
    assert (back["started"], back["has_state"], back["joined"]) == (0.0, 0.0, 0.0)
    assert back["host"] == "127.0.0.1" and "stopped" in back["why"]
    assert record["incarnations"] == {"r1": 1}
    async with http.get(f"{lighthouse.url}/v1/jobs/{job}", headers=headers()) as answer:
        (joiner,) = (await answer.json())["joiners"]
    assert "its trainer has been stopped for" in joiner["verdict"]
    for member in survivors:
        await member.say(m.Report(member.newest.fence, 1, 9, "", 0, 0, (), False, "", (), DataPlan(4)))
    for member in survivors:
        await member.next(m.Resume)
        await member.say(m.Running(member.newest.fence, 9))
        await beat_step(member, 3, 9)
    await status.beat("running")
    await members[1].epoch(2)
    await beat_step(members[1], 4, 7)
    (record,) = await recoveries(http, lighthouse.url, job)
    assert record["lost"]["r1"]["started"] and not record["lost"]["r1"]["has_state"], "two steps behind"
    await beat_step(members[1], 5, 9)
    (record,) = await recoveries(http, lighthouse.url, job)
    assert record["lost"]["r1"]["has_state"]
    await close_all(members)


async def test_a_leader_that_has_just_begun_learns_the_step_and_counts_only_the_next_one(http):
    space = MemorySpace()

    async def led_by(lighthouse):
        async def leads() -> bool:
            return lighthouse.parts.leads and lighthouse.jobs.loaded.is_set()

        await eventually(leads, "it to lead")

    async with lighthouse_on(MemoryStore(space)) as first:
        await led_by(first)
        members = await start_job(http, first.url)
        for member in members:
            await beat_step(member, 2, 56)
        await close_all(members)
    async with lighthouse_on(MemoryStore(space)) as second:
        await led_by(second)
        status = await WireStatus(http, second.url, "r1").open()
        await status.beat("gone")

        async def answered() -> bool:
            found = await recoveries(http, second.url, "job")
            return bool(found and found[0]["epoch_committed"])

        await eventually(answered, "the epoch without it, before anybody has a session")
        survivors = [WireMember(http, second.url, x, generation=1, step=56) for x in ("r0", "r2")]
        for member in survivors:
            await member.open()
            await member.epoch(2)
            await beat_step(member, 3, 56)
        (record,) = await recoveries(http, second.url, "job")
        assert not record["step_committed"], "what they tell of was committed before"
        for member in survivors:
            await member.say(m.Report(member.newest.fence, 1, 56, "", 0, 0, (), False, "", (), DataPlan(4)))
        for member in survivors:
            await member.next(m.Resume)
            await member.say(m.Running(member.newest.fence, 56))
            await beat_step(member, 4, 56)
        (record,) = await recoveries(http, second.url, "job")
        assert (record["step"], record["step_committed"]) == (56, 0.0)
        await beat_step(survivors[0], 5, 57)
        (record,) = await recoveries(http, second.url, "job")
        assert (record["step"], record["steps_lost"]) == (56, 0) and record["step_committed"]
        await close_all(survivors)


async def test_records_outlive_the_lighthouse_that_wrote_them(http):
    space = MemorySpace()
    async with lighthouse_on(MemoryStore(space)) as first:

        async def leads() -> bool:
            return first.parts.leads and first.jobs.loaded.is_set()

        await eventually(leads, "the first to lead")
        members = await start_job(http, first.url)
        await members[0].say(m.CannotContinue(members[0].newest.fence, "its gradient got lost"))
        await members[1].epoch(2)

        async def kept() -> bool:
            return bool(space.find(folder_of("ns", "recoveries", "job"))[0])

        await eventually(kept, "the record to be in the store")
        before = await recoveries(http, first.url, "job")
        await close_all(members)
    async with lighthouse_on(MemoryStore(space)) as second:

        async def shown() -> bool:
            return second.jobs.loaded.is_set() and bool(second.jobs.by_name["job"].history.recoveries.kept)

        await eventually(shown, "the next leader to have read it")
        (record,) = await recoveries(http, second.url, "job")
        assert record["id"] == before[0]["id"] and list(record["lost"]) == ["r0"]
        assert "its gradient got lost" in record["why"]


def test_a_death_that_a_peer_noticed_first_names_the_dead_first():
    config = LeaderConfig(policy=Policy(start_replicas=3))
    core, log, numbers = LeaderCore("job", config, random.Random(1), 0.0), Recoveries(), count(1)

    def feed(event: io.Event, now: float) -> None:
        for effect in core.handle(event, now):
            if isinstance(effect, io.WriteRecord):
                core.handle(io.RecordWritten(effect.record.nonce), now)
        log.observe(core, next(numbers), now)

    feed(io.Elected("store", None), 0.0)
    for name in ("r0", "r1", "r2"):
        feed(io.SessionOpened(m.OpenSession(name, 1, 0, 0, "", 0, "h:1", "http://h:2", 6)), 1.0)
    fence = core.state.record.fence
    for name in ("r0", "r1", "r2"):
        report = m.Report(fence, 1, 0, "", 0, 0, (), False, "", (), DataPlan(4))
        feed(io.FromMember(name, 1, report), 1.0)
    for name in ("r0", "r1", "r2"):
        feed(io.FromMember(name, 1, m.Running(fence, 0)), 1.0)
    assert log.kept == []
    feed(io.FromMember("r0", 1, m.Aborted(fence, 0, "no link to r2 within 5 s", "r2")), 1.1)
    assert [(r.kind, r.why) for r in log.kept] == [("abort", "r0: no link to r2 within 5 s")]
    feed(io.TrainerStatusSeen(m.TrainerStatus("r2", 1, "gone", 1)), 1.11)
    feed(io.LeaderTick(), 1.2)
    [record] = log.kept
    assert record.kind == "death" and list(record.lost) == ["r2"]
    assert record.why.startswith("r2 evicted: ") and record.why.endswith("(r0: no link to r2 within 5 s)")


def test_only_the_newest_are_kept_and_a_loss_is_waited_for_once():
    log = Recoveries()
    log.restore(
        [RecoveryRecord(i, "death", "", 1, 1.0, lost={"r0": ReplicaReturn()}) for i in range(CAPACITY + 5)]
    )
    assert len(log.kept) == CAPACITY and log.kept[0].id == 5
    log._supersede(started("r0").record.roster[0], log.kept[-1], "killed")
    assert [r.id for r in log.kept if "r0" in r.lost] == [CAPACITY + 4]


def test_members_that_stop_because_more_are_wanted_have_not_failed():
    job, log = started(), Recoveries()
    log.record = job.record
    for least in (3, 2):
        before = job.record
        job.do(io.Operator("scale", "", "ann", "a test", least, None))
        assert job.record.is_forced and job.record.min_replicas == least and job.record != before
        assert log.observe(job.core, 1, 1.0) == [] and not log.is_recovering
        runs(job, "a b", 5)
    job.status("b", "gone")
    job.wait(0.1)
    assert [r.kind for r in log.observe(job.core, 2, 2.0)] == ["death"] and log.is_recovering


def restored(body):
    return decode_value(RecoveryRecord, json.dumps(body).encode(), "record")


def test_a_record_with_thousands_lost_names_some_and_counts_the_rest():
    """So the record fits into a store, and a later leader goes on with the named replicas."""
    names = [f"replica-{i:05d}" for i in range(30_000)]
    recovery = RecoveryRecord(
        5, "death", "x" * 1000, 3, 1.5, incarnations=dict.fromkeys(names, 1763717000000)
    )
    recovery.lost = {
        x: ReplicaReturn(1763717000.1, 1763717000.2, 1763717000.3 * (i % 2)) for i, x in enumerate(names)
    }
    body = recovery.to_json()
    assert len(json.dumps(body)) < 64 * 1024 < MAX_VALUE_BYTES
    assert list(body["lost"]) == names[:NAMED] == list(body["incarnations"])
    assert body["unnamed"] == {"lost": 30_000 - NAMED, "joined": (30_000 - NAMED) // 2}
    known = restored(body)
    assert known.to_json() == body, "what was counted stays counted"
    diagnosis = Diagnosis("unknown", tuple(names), "why").to_json()
    assert len(json.dumps(diagnosis)) < 8 * 1024


async def test_a_failure_that_cost_thousands_is_in_the_store(http):
    space = MemorySpace()
    async with lighthouse_on(MemoryStore(space)) as lighthouse:

        async def leads() -> bool:
            return lighthouse.parts.serves

        await eventually(leads, "it to lead")
        members = await start_job(http, lighthouse.url)
        job = lighthouse.jobs.by_name["job"]
        lost = {f"replica-{i:05d}": ReplicaReturn() for i in range(10_000)}
        job.history.keep(RecoveryRecord(1, "death", "a rack", 1, 1.0, lost=lost))

        async def kept() -> bool:
            return bool(space.find(folder_of("ns", "recoveries", "job"))[0])

        await eventually(kept, "the record to be in the store")
        (entry,) = space.find(folder_of("ns", "recoveries", "job"))[0]
        found = decode_value(RecoveryRecord, entry.value, "record")
        assert len(found.lost) == NAMED and found.unnamed == {"lost": 10_000 - NAMED, "joined": 0}
        await close_all(members)


def test_a_recovery_record_is_read_as_it_was_stored_and_other_values_are_refused():
    recovery = RecoveryRecord(
        5, "death", "why", 3, 1.5, lost={"r1": ReplicaReturn(2.0, 3.0, 0.0)}, incarnations={"r1": 7}
    )
    assert restored(recovery.to_json()) == recovery
    assert restored({**recovery.to_json(), "of_a_later_release": 1}) == recovery
    older = {name: value for name, value in recovery.to_json().items() if name != "incarnations"}
    assert not restored(older).incarnations
    for wrong in ({"incarnations": 1}, {"incarnations": {"r": "x"}}):
        with pytest.raises(ProtocolError):
            restored({**recovery.to_json(), **wrong})
    for wrong in ({}, [], {"lost": 1}, {"lost": {"r": {"x": 1}}}, {**recovery.to_json(), "id": "x"}):
        with pytest.raises(ProtocolError):
            restored(wrong)
