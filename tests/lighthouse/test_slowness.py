"""The lighthouse finds slow replicas from heartbeats, reports each once, and advises shares."""

import math
import random
import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from types import SimpleNamespace

import pytest
from msgspec.structs import replace
from prometheus_client.parser import text_string_to_metric_families

from fabric.cli.status import _slow
from fabric.lighthouse.diagnosis.slowness import FLOOR_S, SlownessWatch
from fabric.lighthouse.diagnosis.speed_checks import SpeedVerdict
from fabric.lighthouse.history.slowdowns import Slowdowns
from fabric.lighthouse.telemetry import JobGauges, LighthouseMetrics
from fabric.model import NOT_LAUNCHED, Base, EarlierStep, Member, OperatorOverrides, Record, StepTimes
from fabric.protocol.messages.network import Heartbeat
from fabric.protocol.rules.assignment import apportion

BEFORE = 80  # number of steps: the warm-up and some more
MICRO_BATCHES = 12


def member(name: str, **more) -> Member:
    return Member(replica=name, incarnation=1, link="", ckpt="", data_slot=int(name[1:]), **more)


@dataclass
class Fleet:
    """The parts of a leader core that the watch reads, and members whose times follow their work."""

    names: tuple[str, ...] = ("r0", "r1", "r2")
    adapt: str = "advise"
    rng: random.Random = field(default_factory=lambda: random.Random(1))
    step: int = 0
    failed: set[str] = field(default_factory=set)
    joining: set[str] = field(default_factory=set)
    incarnations: dict[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.slowdowns = Slowdowns()
        self.watch = SlownessWatch(self.slowdowns.count)
        roster = tuple(member(name) for name in self.names)
        self.record = Record(
            store_id="s", generation=1, cold=1, epoch=1, forced=1, nonce="n", roster=roster, base=Base(0, "")
        )
        session = SimpleNamespace(
            adapt=self.adapt, micro_batches=MICRO_BATCHES, launched=NOT_LAUNCHED, spare=False, ranks=()
        )
        state = SimpleNamespace(
            record=self.record,
            knows=lambda m: m.replica not in self.joining,
            liveness=SimpleNamespace(
                peers={
                    name: SimpleNamespace(
                        session=session, connected=True, micro_batches=session.micro_batches
                    )
                    for name in self.names
                },
                failure_reason=lambda m, _now: "silent" if m.replica in self.failed else "",
            ),
        )
        self.core = SimpleNamespace(
            state=state,
            limits=SimpleNamespace(overrides=OperatorOverrides()),
            adaptations=SimpleNamespace(mode=self.adapt, held="", recent_actions=lambda record: ()),
            relayouts=SimpleNamespace(held=""),
        )

    def times(self, name: str, factors: dict[str, float]) -> StepTimes:
        counts = apportion(MICRO_BATCHES, [member.shares for member in self.record.roster])
        count = counts[self.names.index(name)]
        lengths = [[self.rng.randrange(100, 2000) for _ in range(8)] for _ in range(count)]
        tokens = [float(sum(x)) for x in lengths]
        seconds = sum(1e-5 * t for t in tokens) * self.rng.gauss(1, 0.01) * factors.get(name, 1.0)
        squares = float(sum(x * x for documents in lengths for x in documents))
        return StepTimes(
            compute_s=seconds,
            work=dict(enumerate(tokens)),
            samples=2.0 * count,
            squares=squares,
            micro_batches=count,
        )

    def beat(self, name: str, times: StepTimes | None, **more) -> Heartbeat:
        epoch = self.core.state.record.epoch
        return Heartbeat(self.step, epoch, 1, self.step, times=times, **more)

    def run(self, steps: int, **factors: float) -> list[tuple[str, str]]:
        """Feed ``steps``; return the events as (kind, replica)."""
        events = []
        for _ in range(steps):
            self.step += 1
            for name in self.names:
                incarnation = self.incarnations.get(name, 1)
                self.watch.hear(self.core, name, incarnation, self.beat(name, self.times(name, factors)))
            events += [(x.kind, x.about) for x in self.watch.look(self.core, 0.0)]
            self.slowdowns.observe(self.watch.parts(), 1, self.step, 1.0)
        return events


def kinds(events: Iterable[tuple[str, str]]) -> list[str]:
    return [kind for kind, _ in events]


# --- finding ----------------------------------------------------------------------------------------------


def test_an_undisturbed_job_is_not_accused_in_five_hundred_steps():
    assert Fleet().run(500) == []


def test_a_slow_replica_is_announced_once_and_its_recovery_too():
    fleet = Fleet()
    assert fleet.run(BEFORE) == []
    assert fleet.run(5, r1=2.0) == [("slow", "r1")]
    assert fleet.run(5, r1=2.0) == [("advice", "r1")], "once the speed has settled"
    assert fleet.run(100, r1=2.0) == []
    assert list(fleet.watch.slow) == ["r1"]
    assert fleet.run(20) == [("no longer slow", "r1")]
    assert fleet.watch.slow == {} and fleet.watch.to_json(fleet.core)["advice"] is None


def test_the_advice_has_the_shares_by_speed_and_their_gain():
    fleet = Fleet()
    fleet.run(BEFORE)
    fleet.run(10, r2=2.0)
    shown = fleet.watch.to_json(fleet.core)
    assert shown["mode"] == "advise"
    (slow,) = shown["slow"]
    assert (slow["scope"], slow["replica"]) == ("replica", "r2")
    assert slow["factor"] == pytest.approx(2.0, rel=0.1)
    assert shown["advice"]["micro_batches"] == {"r0": 5, "r1": 5, "r2": 2}
    assert shown["advice"]["gain"] == pytest.approx(8 / 5 - 1, rel=0.05)
    assert "r2 computes at 0.5" in shown["advice"]["reason"]
    assert shown["replicas"]["r2"]["speed"] == pytest.approx(0.5, rel=0.1)
    (said, advice) = _slow(shown)
    assert said.startswith("slow: replica r2 takes") and "micro-batches: r0 5, r1 5, r2 2" in advice


def test_a_job_slow_as_a_whole_accuses_no_replica_and_gets_no_advice():
    fleet = Fleet()
    fleet.run(BEFORE)
    assert fleet.run(30, r0=1.5, r1=1.5, r2=1.5) == [("slow", "")]
    assert fleet.watch.to_json(fleet.core)["advice"] is None
    assert fleet.run(30) == [("no longer slow", "")]


def test_declared_work_that_does_not_explain_the_times_is_reported_once_per_replica():
    fleet = Fleet(("r0", "r1"))
    events = []
    for _ in range(BEFORE):
        fleet.step += 1
        for name in fleet.names:
            times = StepTimes(
                compute_s=0.1 * fleet.rng.gauss(1, 0.01),
                work={0: fleet.rng.uniform(1, 99)},
                samples=4.0,
                micro_batches=1,
            )
            fleet.watch.hear(fleet.core, name, 1, fleet.beat(name, times))
        events += fleet.watch.look(fleet.core, 0.0)
    assert [(x.kind, x.about) for x in events] == [("work ignored", "r0"), ("work ignored", "r1")]
    assert "the number of samples stands for it" in events[0].why


def test_every_step_between_two_heartbeats_counts():
    fleet = Fleet()

    def beats(count: int, factor: float) -> None:
        works = {name: [fleet.times(name, {"r1": factor}) for _ in range(count)] for name in fleet.names}
        for name, times in works.items():
            earlier = tuple(
                EarlierStep(
                    fleet.step + number,
                    x.compute_s,
                    sum(x.work.values()),
                    x.squares,
                    x.samples,
                    x.micro_batches,
                )
                for number, x in enumerate(times[:-1], 1)
            )
            beat = Heartbeat(1, 1, 1, fleet.step + count, times=times[-1], earlier=earlier)
            fleet.watch.hear(fleet.core, name, 1, beat)
        fleet.step += count

    beats(1, 1.0)
    for _ in range(BEFORE // 4):
        beats(4, 1.0)
        assert fleet.watch.look(fleet.core, 0.0) == []
    beats(4, 2.0)
    assert ("slow", "r1") in [(x.kind, x.about) for x in fleet.watch.look(fleet.core, 0.0)]


def test_in_a_large_job_only_the_newest_step_of_a_heartbeat_counts(monkeypatch):
    monkeypatch.setattr("fabric.lighthouse.diagnosis.slowness.MOST_EARLIER", 2)
    fleet = Fleet()
    fleet.run(2)
    past = EarlierStep(fleet.step, 1.0, 1.0, 1.0, 1.0, 1)
    seen = []
    monkeypatch.setattr(fleet.watch._detector, "observe", lambda *report, **_: seen.append(report[2]))
    fleet.step += 1
    beat = fleet.beat("r1", fleet.times("r1", {}), earlier=(past,))
    fleet.watch.hear(fleet.core, "r1", 1, beat)
    assert seen == [fleet.step]


def test_an_alarm_is_looked_at_without_waiting_for_a_quarter_of_a_second():
    fleet = Fleet()
    fleet.run(BEFORE)
    fleet.watch.look(fleet.core, 100.0)
    for _ in range(4):
        fleet.step += 1
        for name in fleet.names:
            times = fleet.times(name, {"r1": 2.0})
            fleet.watch.hear(fleet.core, name, 1, fleet.beat(name, times))
    assert not fleet.watch.is_due(100.04) and fleet.watch.is_due(100.06)
    assert [x.kind for x in fleet.watch.look(fleet.core, 100.06)] == ["slow"]
    assert not fleet.watch.is_due(100.2)


# --- slow links between replicas --------------------------------------------------------------------------


@dataclass
class LinkedFleet(Fleet):
    """A fleet over TCP: ``late_s`` seconds for which bytes from r1 to r2 are under way in each step."""

    late_s: float = 0.0

    def times(self, name: str, factors: dict[str, float]) -> StepTimes:
        at = self.names.index(name)
        following, previous = self.names[(at + 1) % len(self.names)], self.names[at - 1]
        late_s = self.late_s if name == "r1" else 0.0
        own = replace(super().times(name, factors), waiting_s={previous: 0.01 + self.late_s})
        return replace(own, sending_s={following: 0.01 + late_s})


def test_a_slow_link_between_replicas_is_named_and_gets_no_advice():
    fleet = LinkedFleet(adapt="act")
    assert fleet.run(BEFORE) == []
    fleet.late_s = 0.5
    assert fleet.run(60) == [("slow", "r1")]
    (slow,) = fleet.watch.to_json(fleet.core)["slow"]
    assert (slow["scope"], slow["replica"]) == ("link", "r1") and "the link from r1 to r2" in slow["evidence"]
    rows = {(x["from"], x["to"]): x for x in fleet.watch.to_json(fleet.core)["links"]}
    assert rows.keys() == {("r0", "r1"), ("r1", "r2"), ("r2", "r0")}
    row = rows["r1", "r2"]
    assert (
        row["late_s"] == 0.51 and row["usual_s"] == pytest.approx(0.01, abs=0.001) and row["steps"] > BEFORE
    )
    assert fleet.watch.remedies.take_order() is None and fleet.watch.slowest_speed == 1.0
    (record,) = fleet.slowdowns.kept
    assert record.scope == "link" and 20 < record.cost_s < 60 * 0.5, "the time of its bytes counts"
    assert not fleet.watch.is_due(0.1), "an alarm of no replica has changed"
    fleet.late_s = 0.0
    assert fleet.run(30) == [("no longer slow", "r1")]


def test_a_leap_of_the_clock_of_its_host_ends_no_check(monkeypatch):
    fleet = Fleet()
    fleet.run(BEFORE)
    assert ("slow", "r1") in fleet.run(5, r1=2.0)
    unix_s = time.time() + 3600.0
    monkeypatch.setattr(time, "time", lambda: unix_s)
    assert "slowness no answer" not in kinds(fleet.run(5, r1=2.0))


def test_a_confirmed_link_does_not_confirm_that_the_device_of_its_sender_is_slow():
    watch = SlownessWatch()
    watch.take_verdict(SpeedVerdict("r1", "confirmed", "the link from r1 to r2", is_about_link=True))
    watch.take_verdict(SpeedVerdict("r2", "refuted", "its device is not slow"))
    assert watch.remedies.confirmed == set()
    watch.take_verdict(SpeedVerdict("r3", "confirmed", "its device is slow"))
    assert watch.remedies.confirmed == {"r3"}


def test_a_replica_that_computes_slowly_is_accused_before_a_link():
    fleet = LinkedFleet()
    fleet.run(BEFORE)
    fleet.late_s = 0.5
    assert fleet.run(5, r0=3.0) == [("slow", "r0")]
    assert {x.scope for x in fleet.watch.slow.values()} == {"replica"}


# --- times that do not count ------------------------------------------------------------------------------


def slowly(fleet: Fleet, **more) -> list[tuple[str, str]]:
    """Play thirty steps in which r1 takes three times as long, under this condition."""
    events = []
    for _ in range(30):
        fleet.step += 1
        for name in fleet.names:
            fleet.watch.hear(fleet.core, name, 1, fleet.beat(name, fleet.times(name, {"r1": 3.0}), **more))
        events += [(x.kind, x.about) for x in fleet.watch.look(fleet.core, 0.0)]
    return events


def test_steps_with_announced_other_work_are_not_judged_for_slowness():
    fleet = Fleet()
    fleet.run(BEFORE)
    assert slowly(fleet, busy="evaluation, at most 60 s") == []


def test_steps_during_a_join_are_not_judged_for_slowness():
    fleet = Fleet()
    fleet.run(BEFORE)
    joining = tuple(replace(m, joining=m.replica == "r2") for m in fleet.record.roster)
    fleet.joining = {"r2"}
    fleet.core.state.record = replace(fleet.record, roster=joining)
    assert slowly(fleet) == []
    fleet.joining = set()
    assert slowly(fleet) == [("slow", "r1"), ("advice", "r1")], "the join is over, in the same record"


def test_the_first_step_of_an_epoch_is_not_judged_for_slowness():
    fleet = Fleet()
    fleet.run(BEFORE)
    for epoch in range(2, 30):
        fleet.core.state.record = replace(fleet.record, epoch=epoch)
        assert fleet.run(1, r1=3.0) == []


def test_a_replica_outside_the_roster_is_not_judged_for_slowness():
    fleet = Fleet()
    fleet.run(BEFORE)
    fleet.core.state.record = replace(fleet.record, roster=fleet.record.roster[:1])
    assert fleet.run(30, r1=3.0) == []
    assert list(fleet.watch.to_json(fleet.core)["replicas"]) == ["r0"]


def test_a_replica_that_may_have_failed_is_not_called_slow():
    fleet = Fleet()
    fleet.run(BEFORE)
    fleet.failed = {"r1"}
    assert fleet.run(30, r1=3.0) == []


def test_a_slowdown_of_milliseconds_is_not_announced():
    fleet = Fleet()
    times = StepTimes(compute_s=FLOOR_S / 4, work={0: 1.0}, samples=1.0, micro_batches=1)
    for step in range(200):
        for name in fleet.names:
            slow = replace(times, compute_s=times.compute_s * (3 if step > BEFORE and name == "r0" else 1))
            fleet.watch.hear(fleet.core, name, 1, Heartbeat(step, 1, 1, step, times=slow))
        assert fleet.watch.look(fleet.core, 0.0) == []


@pytest.mark.parametrize("bad", [-1.0, 0.0, math.nan, math.inf])
def test_impossible_times_change_nothing(bad):
    fleet = Fleet()
    fleet.run(BEFORE)
    before = fleet.watch.to_json(fleet.core)
    for _ in range(30):
        fleet.step += 1
        for times in (
            StepTimes(compute_s=bad, work={0: 1.0}),
            StepTimes(compute_s=1.0, work={0: -1.0}),
            StepTimes(),
        ):
            fleet.watch.hear(fleet.core, "r1", 1, fleet.beat("r1", times))
        fleet.watch.hear(fleet.core, "r1", 1, fleet.beat("r1", None))
        assert fleet.watch.look(fleet.core, 0.0) == []
    assert fleet.watch.to_json(fleet.core) == before


# --- modes and metrics ------------------------------------------------------------------------------------


@pytest.mark.parametrize("adapt", ["off", ""])
def test_a_job_that_has_switched_adaptation_off_gets_no_slowdowns_or_advice(adapt):
    fleet = Fleet(adapt=adapt)
    fleet.run(BEFORE)
    assert fleet.run(30, r1=3.0) == []
    shown = fleet.watch.to_json(fleet.core)
    assert (shown["mode"], shown["slow"], shown["advice"]) == ("off", [], None)
    assert _slow(shown) == [] and _slow(None) == []


def test_the_number_of_slow_replicas_is_a_metric():
    metrics = LighthouseMetrics()
    job = JobGauges(job="gpt", slow_replicas=2)
    metrics.observe(lambda: True, lambda: [job])
    families = {x.name: x for x in text_string_to_metric_families(metrics.render().decode())}
    (sample,) = families["fabric_lighthouse_slow_replicas"].samples
    assert (sample.labels, sample.value) == ({"job": "gpt"}, 2.0)


def test_a_job_of_more_members_than_are_compared_costs_no_time_and_accuses_none(monkeypatch):
    monkeypatch.setattr("fabric.lighthouse.diagnosis.slowness.MOST_MEMBERS", 2)
    fleet = Fleet()
    fleet.run(80)
    assert fleet.run(20, r1=2.0) == []
    assert fleet.watch.to_json(fleet.core)["replicas"] == {}


def test_replicas_are_judged_at_most_four_times_a_second():
    fleet = Fleet()
    assert fleet.watch.is_due(100.0)
    fleet.watch.look(fleet.core, 100.0)
    assert not fleet.watch.is_due(100.2) and fleet.watch.is_due(100.25)
