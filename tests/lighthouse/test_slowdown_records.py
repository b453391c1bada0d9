"""A slowdown record has the slow replica, begin and end, evidence, remedies and cost."""

import json
from pathlib import Path

import pytest
from in_process import lighthouse_on
from lighthouse.test_slowness import BEFORE, Fleet
from lighthouse_support import WireMember, close_all, eventually, headers, start_job
from memory_store import MemorySpace, MemoryStore
from msgspec.structs import replace
from prometheus_client.parser import text_string_to_metric_families

from fabric.errors import ProtocolError
from fabric.health.localise import Scope, Slowdown, Unit
from fabric.lighthouse.history.recovery import CAPACITY
from fabric.lighthouse.history.slowdowns import (
    MOST_ACTIONS,
    SlowdownRecord,
    Slowdowns,
)
from fabric.lighthouse.jobs.job_history import folder_of
from fabric.lighthouse.telemetry import JobGauges, LighthouseMetrics
from fabric.model import StepTimes
from fabric.protocol.messages import network as m
from fabric.protocol.messages.wire import decode_value

R1 = Slowdown(Scope.REPLICA, (Unit("r1"),), 2.0, "replica r1 takes 2.00 times as long")
SLOW = {"r1": (R1, ())}


def test_a_slowdown_has_one_record_from_its_report_to_its_end():
    slowdowns = Slowdowns()
    (record,) = slowdowns.observe(SLOW, event=7, step=100, unix_s=1000.0)
    assert (record.id, record.replica, record.scope, record.step, record.detected) == (
        7,
        "r1",
        "replica",
        100,
        1000.0,
    )
    assert record.is_open and record.cause == R1.evidence
    for step in range(101, 111):
        slowdowns.count("r1", step, 0.5)
    assert slowdowns.observe(SLOW, 8, 110, 1010.0) == []
    assert slowdowns.observe({}, 9, 120, 1020.0) == [record]
    assert not record.is_open and (record.ended, record.ended_step) == (1020.0, 120)
    assert (record.steps, record.cost_s) == (10, 5.0)
    assert slowdowns.kept == [record] and slowdowns.total_s == 5.0


def test_a_slow_part_that_is_named_later_is_in_the_record():
    slowdowns = Slowdowns()
    slowdowns.observe(SLOW, 1, 1, 1.0)
    rank = replace(R1, scope=Scope.RANK, evidence="rank 2 of stage 0 of replica r1 takes")
    (record,) = slowdowns.observe({"r1": (rank, (2,))}, 2, 2, 2.0)
    assert (record.scope, record.ranks) == ("rank", [2]) and record.cause.startswith("rank 2")


def test_the_record_keeps_the_largest_factor_with_its_evidence():
    slowdowns = Slowdowns()
    (record,) = slowdowns.observe(SLOW, 1, 1, 1.0)
    slowdowns.observe({"r1": (replace(R1, factor=3.0, evidence="worse"), ())}, 2, 2, 2.0)
    slowdowns.observe({"r1": (replace(R1, factor=1.5, evidence="better"), ())}, 3, 3, 3.0)
    assert (record.factor, record.cause) == (3.0, "worse")


def test_two_slow_replicas_have_a_record_each_with_ids_that_grow():
    slowdowns = Slowdowns()
    first, second = slowdowns.observe(SLOW | {"r2": (replace(R1, units=(Unit("r2"),)), ())}, 7, 1, 1.0)
    assert (first.replica, second.replica) == ("r1", "r2") and first.id < second.id
    assert slowdowns.counts == {"replica": 2}


def test_events_about_a_slow_replica_are_its_actions():
    slowdowns = Slowdowns()
    (record,) = slowdowns.observe(SLOW, 1, 1, 1.0)
    assert not slowdowns.note("slow", "r1", "its own event", 2.0)
    assert not slowdowns.note("advice", "r0", "another replica", 2.0)
    assert not slowdowns.note("trainer stopped", "r1", "seen by its checkpoint server", 2.0)
    assert slowdowns.note("drain asked", "r1", "by ops: slow", 3.0) == [record]
    assert [(x.kind, x.t) for x in record.actions] == [("drain asked", 3.0)]
    for n in range(2 * MOST_ACTIONS):
        slowdowns.note("advice", "r1", "x" * 1000, float(n))
    assert len(record.actions) == MOST_ACTIONS and max(len(x.why) for x in record.actions) == 300
    slowdowns.observe({}, 2, 2, 4.0)
    assert not slowdowns.note("drained", "r1", "", 5.0)


def test_a_record_comes_back_from_the_store_as_it_was():
    slowdowns = Slowdowns()
    (record,) = slowdowns.observe({"r1": (R1, (1, 3))}, 1, 1, 1.0)
    slowdowns.note("advice", "r1", "fewer micro-batches", 2.0)
    slowdowns.note("slowness confirmed", "r1", "a matrix product takes 2 ms", 104.0)
    assert decode_value(SlowdownRecord, json.dumps(record.to_json()).encode(), "record") == record
    assert record.verdict == "confirmed"


def test_the_page_shows_every_field_of_a_record():
    page = (Path(__file__).parents[2] / "docs" / "http.md").read_text()
    shown = json.loads(page.split('/slowdowns"\n```\n\n```json\n')[1].split("```")[0])
    assert shown.keys() == SlowdownRecord(1, "r1", "rank", 1.0, 1).to_json().keys()
    assert decode_value(SlowdownRecord, json.dumps(shown).encode(), "record").to_json() == shown


@pytest.mark.parametrize("bad", [b"", b"{}", b"[1]", b'{"id": "x"}'])
def test_other_bytes_in_the_store_are_refused(bad):
    with pytest.raises(ProtocolError):
        decode_value(SlowdownRecord, bad, "record")


def test_a_new_leader_ends_what_an_earlier_one_left_open():
    stored = SlowdownRecord(5, "r1", "replica", 100.0, 50, steps=20)
    slowdowns = Slowdowns()
    assert slowdowns.restore([stored], 200.0) == [stored]
    assert (stored.ended, stored.ended_step) == (200.0, 70) and "another lighthouse" in stored.ended_why
    slowdowns.observe(SLOW, 6, 80, 300.0)
    assert [x.id for x in slowdowns.kept] == [5, 6]


def test_a_new_term_of_the_same_process_ends_its_open_records():
    slowdowns = Slowdowns()
    (record,) = slowdowns.observe(SLOW, 1, 1, 1.0)
    assert slowdowns.begin(9.0) == [record] and record.ended == 9.0
    slowdowns.observe(SLOW, 2, 2, 10.0)
    assert len(slowdowns.kept) == 2


def test_the_number_of_kept_records_is_bounded():
    slowdowns = Slowdowns()
    for n in range(CAPACITY + 50):
        slowdowns.observe(SLOW, 10 * n, n, float(n))
        slowdowns.observe({}, 10 * n, n, float(n))
    assert len(slowdowns.kept) == CAPACITY
    assert [x.id for x in slowdowns.kept] == sorted({x.id for x in slowdowns.kept})


# --- cost -------------------------------------------------------------------------------------------------


def test_the_cost_of_a_slow_replica_is_the_time_beyond_its_equals():
    fleet = Fleet()
    fleet.run(BEFORE)
    assert fleet.slowdowns.kept == [] and fleet.watch.slowest_speed == 1.0
    fleet.run(5, r1=2.0)
    (record,) = fleet.slowdowns.kept
    steps, cost_s = record.steps, record.cost_s
    fleet.run(40, r1=2.0)
    assert (record.replica, record.scope, record.ranks) == ("r1", "replica", [])
    assert record.steps - steps == 40
    usual = 12 / 3 * 8 * 1050 * 1e-5
    assert record.cost_s - cost_s == pytest.approx(40 * usual, rel=0.15)
    assert fleet.watch.slowest_speed == pytest.approx(0.5, rel=0.1)
    fleet.run(30)
    assert fleet.slowdowns.kept == [record] and not record.is_open


def test_steps_between_two_reports_cost_as_much_as_the_reported_step():
    fleet = Fleet()
    fleet.run(BEFORE)
    fleet.run(8, r1=2.0)
    (record,) = fleet.slowdowns.kept
    before = record.steps
    fleet.step += 9  # replicas report steps at most four times a second
    fleet.run(1, r1=2.0)
    assert record.steps - before == 10


def test_a_slow_job_costs_what_one_replica_loses():
    fleet = Fleet()
    fleet.run(BEFORE)
    fleet.run(30, r0=1.5, r1=1.5, r2=1.5)
    (record,) = fleet.slowdowns.kept
    assert (record.replica, record.scope) == ("", "job") and 20 < record.steps <= 30


@pytest.mark.parametrize("bad", [-1.0, 0.0])
def test_impossible_times_cost_nothing(bad):
    fleet = Fleet()
    fleet.run(BEFORE)
    fleet.run(8, r1=2.0)
    (record,) = fleet.slowdowns.kept
    before = record.to_json()
    fleet.step += 1
    fleet.watch.hear(fleet.core, "r1", 1, fleet.beat("r1", StepTimes(compute_s=bad, work={0: 1.0})))
    assert record.to_json() == before


# --- metrics, routes, the store ---------------------------------------------------------------------------


def test_slowdowns_are_metrics_of_few_labels():
    metrics = LighthouseMetrics()
    job = JobGauges(job="gpt", slowest_speed=0.5, slowdown_s=12.5, slowdowns={"rank": 2})
    metrics.observe(lambda: True, lambda: [job])
    families = {x.name: x.samples for x in text_string_to_metric_families(metrics.render().decode())}
    assert families["fabric_lighthouse_slowest_speed"][0].value == 0.5
    (cost,) = families["fabric_lighthouse_slowdown_seconds"]
    assert (cost.labels, cost.value) == ({"job": "gpt"}, 12.5)
    counts = {x.labels["scope"]: x.value for x in families["fabric_lighthouse_slowdowns"]}
    assert counts == {"rank": 2.0, "stage": 0.0, "link": 0.0, "replica": 0.0, "job": 0.0}


async def slowdowns_at(http, url: str, job: str) -> list[dict]:
    async with http.get(f"{url}/v1/jobs/{job}/slowdowns", headers=headers()) as answer:
        assert answer.status == 200 and answer.content_type == "application/x-ndjson"
        return [json.loads(line) for line in (await answer.text()).splitlines()]


async def report(member: WireMember, number: int, step: int, seconds: float) -> None:
    times = StepTimes(compute_s=seconds, work={0: 4.0}, samples=4.0, micro_batches=1)
    record = member.newest
    beat = m.Heartbeat(number, record.epoch, record.generation, step, phase="run", times=times)
    await member.say(beat)
    await member.next(m.HeartbeatAck)


async def test_a_slowdown_is_recorded_over_real_sessions_and_survives_the_lighthouse(http):
    space = MemorySpace()
    async with lighthouse_on(MemoryStore(space)) as lighthouse:

        async def leads() -> bool:
            return lighthouse.parts.leads and lighthouse.jobs.loaded.is_set()

        await eventually(leads, "the first to lead")
        members = await start_job(http, lighthouse.url, 2, adapt="advise")
        assert await slowdowns_at(http, lighthouse.url, "job") == []
        step = 0

        async def one_more(slow: float) -> list[dict]:
            nonlocal step
            step += 1
            for member, factor in zip(members, (1.0, slow), strict=True):
                await report(member, step + 10, step, 0.2 * factor)
            return await slowdowns_at(http, lighthouse.url, "job")

        for _ in range(BEFORE):
            assert await one_more(1.0) == []

        async def is_recorded() -> bool:
            return bool(await one_more(3.0))

        await eventually(is_recorded, "the slowdown to be recorded")
        (record,) = await slowdowns_at(http, lighthouse.url, "job")
        assert (record["replica"], record["scope"], record["ended"]) == ("r1", "replica", 0.0)
        assert record["factor"] == pytest.approx(3.0, rel=0.1)

        async def is_stored() -> bool:
            return bool(space.find(folder_of("ns", "slowdowns", "job"))[0])

        await eventually(is_stored, "the record to be stored")
        await close_all(members)
    async with lighthouse_on(MemoryStore(space)) as lighthouse:

        async def is_ended() -> bool:
            job = lighthouse.jobs.by_name.get("job")
            return job is not None and any(x.ended for x in job.history.slowdowns.kept)

        await eventually(is_ended, "the new leader to end the record")
        (again,) = await slowdowns_at(http, lighthouse.url, "job")
        assert (again["id"], again["replica"]) == (record["id"], "r1")
        assert "another lighthouse leads" in again["ended_why"]
