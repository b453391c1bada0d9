"""The goodput ledger: every second of a job in one of four states, sums that only grow, and a fail-over."""

import json
import re
import time

import pytest
from in_process import lighthouse_on
from lighthouse_support import WireMember, close_all, eventually, headers, start_job
from memory_store import MemorySpace, MemoryStore
from msgspec.structs import replace
from test_recovery_records import beat_step

from fabric.errors import ProtocolError
from fabric.lighthouse.history.ledger import (
    DEGRADED,
    LEAST_STALL_S,
    RECOVERING,
    STALLED,
    STATES,
    TRAINING,
    UNKNOWN_STALL_S,
    GoodputLedger,
    JobSample,
)
from fabric.lighthouse.jobs.job_history import ledger_of
from fabric.store.base import Put


class Watch:
    """A job that the ledger looks at four times a second."""

    def __init__(self, ledger=None, now=100.0, step=0):
        self.ledger, self.now = ledger or GoodputLedger(), now
        self.look = JobSample(True, step=step, members=3, wanted=3)
        self.ledger.observe(self.look, self.now)
        self.begun = now

    def goes_on(self, seconds, step_s=None, **changes):
        """Let time pass, with a step every ``step_s`` if given."""
        self.look = replace(self.look, **changes)
        began, first = self.now, self.look.step
        while self.now < began + seconds:
            self.now += 0.25
            if step_s:
                self.look = replace(self.look, step=first + int((self.now - began) / step_s))
            before = dict(self.ledger.seconds)
            self.ledger.observe(self.look, self.now)
            assert all(self.ledger.seconds[name] >= before[name] for name in before)
        return self.ledger.seconds


def test_a_failure_is_recovering_until_a_step_and_degraded_until_all_are_back():
    watch = Watch()
    watch.goes_on(20, step_s=1)
    watch.goes_on(2, is_recovering=True, members=2)
    watch.goes_on(30, step_s=1, is_recovering=False)
    found = watch.goes_on(40, step_s=1, members=3)
    assert found[RECOVERING] == pytest.approx(2, abs=0.5)
    assert found[DEGRADED] == pytest.approx(30, abs=1.5)
    assert found[TRAINING] == pytest.approx(60, abs=2) and not found[STALLED]
    assert sum(found.values()) == pytest.approx(watch.now - watch.begun, abs=1.1), "every second is in one"
    assert watch.ledger.goodput == pytest.approx(60 / 92, abs=0.03)


def test_a_long_time_without_a_step_counts_as_a_stall_from_the_last_step_on():
    watch = Watch()
    watch.goes_on(20, step_s=0.5)
    assert watch.ledger.stall_s == LEAST_STALL_S
    assert not watch.goes_on(LEAST_STALL_S - 1)[STALLED]
    assert watch.goes_on(3)[STALLED] == pytest.approx(LEAST_STALL_S + 2, abs=0.6)
    found = watch.goes_on(10, step_s=0.5)
    assert found[STALLED] == pytest.approx(LEAST_STALL_S + 2, abs=1.1) and watch.ledger.state == TRAINING


def test_long_steps_are_no_stall_and_neither_is_the_first():
    assert not Watch().goes_on(UNKNOWN_STALL_S - 1)[STALLED]
    assert Watch().goes_on(UNKNOWN_STALL_S + 2)[STALLED] > UNKNOWN_STALL_S
    assert not Watch().goes_on(3 * 60, step_s=60)[STALLED]


def test_time_before_the_first_start_and_after_the_end_is_not_counted():
    ledger = GoodputLedger()
    for now in (0.0, 50.0):
        ledger.observe(JobSample(False), now)
    assert ledger.goodput is None and not sum(ledger.seconds.values())
    watch = Watch(ledger)
    watch.goes_on(10, step_s=1)
    before = sum(watch.goes_on(1, is_on=False).values())
    assert sum(watch.goes_on(100).values()) == before == pytest.approx(10, abs=1.1)


@pytest.mark.parametrize("steps, state", [(20, TRAINING), (0, STALLED)])
def test_the_next_leader_goes_on_from_the_stored_values(steps, state):
    first = Watch()
    first.goes_on(60, step_s=1)
    stored = json.loads(json.dumps(first.ledger.saved(wall=1000.0)))
    # the new leader has another clock and knows only an old step
    second = Watch(now=5.0, step=first.look.step)
    second.ledger.restore(stored, second.now, wall=1030.0)
    second.look = replace(second.look, step=second.look.step + steps)
    second.ledger._usual.extend([1.0] * 3)
    found = second.goes_on(12, step_s=1 if steps else None)
    assert found[TRAINING if steps else STALLED] == pytest.approx((60 if steps else 0) + 30 + 12, abs=2)
    assert sum(found.values()) == pytest.approx(60 + 30 + 12, abs=2), "the time between is in it"
    assert second.ledger.state == state


@pytest.mark.parametrize("steps", [0, 1, 40])
def test_a_standstill_across_a_fail_over_counts_as_stalled(steps):
    """The new leader first hears no member, then old steps, none of which was committed during the
    fail-over.
    """
    first = Watch()
    first.goes_on(60, step_s=1)
    stored = json.loads(json.dumps(first.ledger.saved(wall=1000.0)))
    second = Watch(now=5.0, step=-1)
    second.ledger.restore(stored, second.now, wall=1040.0)
    assert not second.goes_on(2)[STALLED], "nobody has told of a step"
    second.goes_on(3, step=stored["step"] + steps - 1)  # the first member that returns is one step behind
    found = second.goes_on(3, step=stored["step"] + steps)
    # One step in 40 s counts as stalled, because one step per second is usual.
    expected = TRAINING if steps == 40 else STALLED
    assert found[expected] == pytest.approx((60 if steps == 40 else 0) + 45, abs=4)
    assert sum(found.values()) <= 60 + 48 + 0.5


def test_a_cold_start_across_a_fail_over_is_not_measured_by_its_older_step():
    first = Watch()
    first.goes_on(60, step_s=1, generation=1)
    stored = first.ledger.saved(wall=1000.0)
    second = Watch(now=5.0, step=-1)
    second.ledger.observe(replace(second.look, generation=2), 5.0)
    second.ledger.restore(stored, second.now, wall=1003.0)
    found = second.goes_on(20, step_s=1, step=10, generation=2)
    assert found[TRAINING] == pytest.approx(60 + 3 + 20, abs=2) and not found[STALLED]


async def test_a_new_leader_that_has_heard_no_member_counts_no_step(http):
    """Members are at step 56 before and after, but the record says only where the generation began."""
    space = MemorySpace()
    async with lighthouse_on(MemoryStore(space)) as first:
        await eventually(leading(first), "the first to lead")
        members = await start_job(http, first.url)
        for member in members:
            await beat_step(member, 2, 56)
        ledger = first.jobs.by_name["job"].look_at_ledger()
        assert ledger.saved(1.0)["step"] == 56
        saved = {**ledger.saved(time.time() - 1000.0), "usual_s": 0.5}
        await close_all(members)
    store = MemoryStore(space)
    await store.connect()
    await store.commit([], [Put(ledger_of("ns", "job"), json.dumps(saved).encode())])
    async with lighthouse_on(MemoryStore(space)) as second:

        async def restored() -> bool:
            return second.jobs.loaded.is_set() and second.jobs.by_name["job"].history.ledger_is_known

        await eventually(restored, "the ledger to be read")
        job = second.jobs.by_name["job"]
        assert not job.look_at_ledger().seconds[STALLED], "nobody has been heard"
        back = await WireMember(http, second.url, "r0", generation=1, step=56).open()
        await back.epoch(1)
        ledger = job.look_at_ledger()
        assert ledger.state == STALLED and ledger.seconds[STALLED] >= 1000.0
        assert ledger.seconds[TRAINING] < 100.0
        await back.close()


def test_a_stored_value_that_is_not_a_ledger_is_refused():
    good = GoodputLedger().saved(1.0)
    for wrong in (None, [], {}, {**good, "t": 0}, {**good, "state": "fine"}, {**good, "seconds": {}}):
        with pytest.raises(ProtocolError):
            GoodputLedger().restore(wrong, 0.0, 1.0)


async def test_a_lighthouse_reads_the_ledger_and_shows_it_everywhere(http):
    space = MemorySpace()
    async with lighthouse_on(MemoryStore(space)) as first:
        await eventually(leading(first), "the first to lead")
        await close_all(await start_job(http, first.url))
    saved = {
        **GoodputLedger().saved(1.0),
        "state": "",
        "seconds": {**dict.fromkeys(STATES, 0.0), TRAINING: 1000.0},
    }
    store = MemoryStore(space)
    await store.connect()
    await store.commit([], [Put(ledger_of("ns", "job"), json.dumps(saved).encode())])
    async with lighthouse_on(MemoryStore(space)) as second:

        async def restored() -> bool:
            jobs = second.jobs
            return jobs.loaded.is_set() and jobs.by_name["job"].history.ledger.seconds[TRAINING] >= 1000

        await eventually(restored, "the ledger to be read")
        async with http.get(f"{second.url}/v1/jobs/job", headers=headers()) as answer:
            assert (await answer.json())["ledger"][TRAINING] >= 1000
        async with http.get(f"{second.url}/metrics") as answer:
            text = await answer.text()
        counted = re.search(r'fabric_lighthouse_job_seconds_total{job="job",state="training"} (\S+)', text)
        assert counted is not None and float(counted[1]) >= 1000
        assert 'fabric_lighthouse_heartbeat_age_seconds{job="job"}' in text


def leading(process):
    async def leads() -> bool:
        return process.parts.leads and process.jobs.loaded.is_set()

    return leads
