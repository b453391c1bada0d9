"""Finds slow replicas of a job, and slow links between them, from the times in the members' heartbeats.

Times count only while the job runs undisturbed: not from a joining member or a spare, not while another
member joins, and not from the first step of an epoch. A member that may have failed is not compared.
"""

import heapq
import math
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from fabric.health.alarm import Damping
from fabric.health.detector import KEPT_STEPS, MOST_BEHIND, JobDetector, RankHistory, ReplicaSpeed
from fabric.health.link_detector import LinkDetector
from fabric.health.localise import Scope, Slowdown, Unit
from fabric.health.work import WorkAmount, is_time
from fabric.lighthouse.diagnosis.remedies import RemedyAdvisor
from fabric.lighthouse.diagnosis.speed_checks import CONFIRMED, SpeedChecks, SpeedVerdict
from fabric.lighthouse.history.slowdowns import VERDICT
from fabric.model import Member, Record, StepTimes, Value
from fabric.protocol.leader.adaptations import OFF
from fabric.protocol.leader.core import LeaderCore
from fabric.protocol.messages.network import Heartbeat

WHOLE_JOB = ""  # the name that stands for all replicas
# A replica that makes a step longer by less than this is not reported: a shared host's other work costs more.
FLOOR_S = 0.02
NEWS_S = 0.05  # seconds between two looks while an alarm changes
MOST_EARLIER = 64  # of the earlier steps in heartbeats, so many count per round of all members' heartbeats
# Above this number of members no times are compared: one report costs 0.05 ms, on the loop of all heartbeats.
MOST_MEMBERS = 1000
MOST_ROWS = 64  # rows of the table of speeds by step; a larger job shows the slowest
_Steps = Sequence[tuple[int, float]]


class SlownessEvent(Value):
    """A change that people should see in the job's events."""

    kind: str
    about: str
    why: str


class SlownessWatch:
    """``hear`` every heartbeat with times; ``look`` when ``is_due``, as it visits all replicas."""

    def __init__(self, count: Callable[[str, int, float], None] = lambda *_: None) -> None:
        """``count`` hears what a step of a slow replica costs: its name, the step, and seconds."""
        self._count = count
        self._detector = JobDetector(floor_s=FLOOR_S, most_ranks=MOST_MEMBERS)
        self._links = LinkDetector()
        self._damping, self._job_damping = Damping(), Damping()
        self._looked_at = -math.inf
        self._has_news = False  # whether an alarm has changed since the last look
        self._newest_step = 0  # the newest step whose times were used
        self._epochs: dict[str, int] = {}  # replica -> the epoch of its newest times
        self._record: Record | None = None
        # Members that have not been seen to know every step; None: the members cannot be compared.
        self._joining: list[Member] | None = None
        self._slow: dict[str, Slowdown] = {}
        self.remedies = RemedyAdvisor()
        self._notes: set[str] = set()
        self.checks = SpeedChecks(int(time.time()))  # the micro-benchmarks of slow replicas

    @property
    def slow(self) -> Mapping[str, Slowdown]:
        """The present slowdowns by replica; WHOLE_JOB where the whole job is slow."""
        return self._slow

    @staticmethod
    def mode(core: LeaderCore) -> str:
        """The mode of the job, as an operator or else its most senior member sets it."""
        return core.adaptations.mode or OFF

    def hear(self, core: LeaderCore, replica: str, incarnation: int, beat: Heartbeat) -> None:
        """Take the times of this beat, if they count."""
        record, times = core.state.record, beat.times
        if record is None or times is None or not self._counts(core, record, replica, incarnation):
            self._epochs.pop(replica, None)
            return
        newest, self._epochs[replica] = self._epochs.get(replica), beat.epoch
        if newest != beat.epoch or beat.busy:
            return
        if not self._newest_step - MOST_BEHIND < beat.step <= self._newest_step:
            self._newest_step = beat.step  # a much lower step shows that the job has begun again
        self._count_cost(record, replica, beat.step, times)
        for past in beat.earlier[-(MOST_EARLIER // len(record.roster)) or len(beat.earlier) :]:
            amount = WorkAmount(past.tokens, past.squares, past.samples, past.micro_batches)
            self._detector.observe(replica, incarnation, past.step, amount, past.compute_s)
        tokens = sum(times.work.values())
        work = WorkAmount(tokens, times.squares, times.samples, times.micro_batches)
        slow = self._computing_slowly()
        is_well = not slow.keys() & {replica, WHOLE_JOB}
        self._detector.observe(
            replica, incarnation, beat.step, work, times.compute_s, times.ranks, is_well=is_well
        )
        self._links.observe(replica, times)
        self._has_news |= self._detector.is_alarmed(replica) != (replica in slow)

    def _counts(self, core: LeaderCore, record: Record, replica: str, incarnation: int) -> bool:
        if record is not self._record:
            self._record = record
            compares = len(record.roster) <= MOST_MEMBERS and not any(x.leaving for x in record.roster)
            self._joining = [member for member in record.roster if member.joining] if compares else None
            self._detector.keep(record.roster)
            self._links.keep([member.process for member in record.roster])
        if self._joining:
            # The record lists a newcomer as joining until the next epoch, long after the join has ended.
            self._joining = [member for member in self._joining if not core.state.knows(member)]
        return self._joining == [] and record.lists(replica, incarnation)

    def _count_cost(self, record: Record, replica: str, step: int, times: StepTimes) -> None:
        name = replica if replica in self._slow else WHOLE_JOB
        slowdown = self._slow.get(name)
        if slowdown is None or not (name or replica == record.roster[0].replica):
            return
        seconds = times.compute_s
        if slowdown.is_between_replicas:
            seconds = times.sending_s.get(slowdown.units[1].replica, 0.0)
        if is_time(seconds):
            self._count(name, step, seconds * (1.0 - 1.0 / slowdown.factor))

    def _computing_slowly(self) -> dict[str, Slowdown]:
        """The present slowdowns without slow links between replicas, against which no remedy helps."""
        return {name: x for name, x in self._slow.items() if not x.is_between_replicas}

    def parts(self) -> dict[str, tuple[Slowdown, list[int]]]:
        """The present slowdowns with their slow ranks, by replica."""
        return {name: (x, self._detector.numbers(x)) for name, x in self._slow.items()}

    @property
    def slowest_speed(self) -> float:
        """The speed of the slowest of the slow replicas relative to its equals; 1 where none is slow."""
        return min((1.0 / x.factor for x in self._computing_slowly().values()), default=1.0)

    def is_due(self, now: float) -> bool:
        """Whether to ``look`` again: after news 20 times a second, else four, with 1,000 replicas once."""
        quiet_s = now - self._looked_at
        return quiet_s >= (NEWS_S if self._has_news else 0.25) and quiet_s >= len(self._epochs) / 1000

    def look(self, core: LeaderCore, now: float) -> list[SlownessEvent]:
        """Judge all replicas again, and begin or end a check of one; return the new events."""
        events, record = self._look_at_times(core, now), core.state.record
        ranks = {name: ranks for name, (_, ranks) in self.parts().items()}
        verdicts = self.checks.look(self._slow, ranks, record.names if record is not None else (), now)
        return events + [self.take_verdict(verdict) for verdict in verdicts]

    def take_verdict(self, verdict: SpeedVerdict) -> SlownessEvent:
        """Note a replica whose device is slow; a slow link says nothing about the device of its sender."""
        if verdict.verdict == CONFIRMED and not verdict.is_about_link:
            self.remedies.confirmed.add(verdict.replica)
        return SlownessEvent(f"{VERDICT}{verdict.verdict}", verdict.replica, verdict.why)

    def _look_at_times(self, core: LeaderCore, now: float) -> list[SlownessEvent]:
        record, self._looked_at, self._has_news = core.state.record, now, False
        if record is None or record.complete or self.mode(core) == OFF or len(record.roster) > MOST_MEMBERS:
            self._slow = {}
            self.remedies.forget()
            return []
        failed = {m.replica for m in record.roster if core.state.liveness.failure_reason(m, now)}
        # A replica that computes slowly also makes others wait, so it comes first.
        accused = self._detector.slowdowns(failed) or self._links.slowdowns(failed)
        before, slowdowns = self._slow, {x.replica: x for x in accused}
        # A short slowdown of the whole job must not delay the report of a slow replica.
        lasting = self._damping.admit(slowdowns.keys() - {WHOLE_JOB}, self._newest_step)
        lasting |= self._job_damping.admit(slowdowns.keys() & {WHOLE_JOB}, self._newest_step)
        self._slow = {name: slowdown for name, slowdown in slowdowns.items() if name in lasting}
        begun = self._slow.keys() - before.keys()
        events = [SlownessEvent("slow", name, x.evidence) for name, x in self._slow.items() if name in begun]
        events += [
            SlownessEvent("no longer slow", name, f"{name or 'the job'} takes as long as predicted again")
            for name in before
            if name not in self._slow
        ]
        events += [
            SlownessEvent("slow part", name, x.evidence)
            for name, x in self._slow.items()
            if name in before
            and x.scope in (Scope.RANK, Scope.STAGE, Scope.LINK)
            and (x.scope, x.units) != (before[name].scope, before[name].units)
        ]
        advice = self.remedies.advise(
            core, self._computing_slowly(), self._detector, failed, self._newest_step
        )
        events += [SlownessEvent("advice", about, why) for about, why in advice]
        # Report once for each replica that its declared work does not predict its times.
        fresh = [x for x in self._detector.speeds() if x.note and x.replica not in self._notes]
        self._notes.update(x.replica for x in fresh)
        return events + [SlownessEvent("work ignored", x.replica, x.note) for x in fresh]

    def to_json(self, core: LeaderCore) -> dict[str, Any]:
        """The detector's knowledge, for people."""
        replicas = {x.replica: _speed_view(x) for x in self._detector.speeds()}
        speeds = {name: shown["speed"] for name, shown in replicas.items()}
        return {
            "mode": self.mode(core),
            "slow": [
                {
                    "scope": str(x.scope),
                    "replica": x.replica,
                    "ranks": ranks,
                    "factor": round(x.factor, 3),
                    "evidence": x.evidence,
                }
                for x, ranks in self.parts().values()
            ],
            "replicas": replicas,
            "links": self._links.states(MOST_ROWS),
            "by_step": speeds_by_step(self._detector.ranks(), self._detector.relative_times(), speeds),
            **self.remedies.to_json(core),
        }


def _speed_view(speed: ReplicaSpeed) -> dict[str, Any]:
    return {
        "seconds": round(speed.seconds, 6),
        "predicted_s": None if speed.predicted_s is None else round(speed.predicted_s, 6),
        "ratio": None if speed.ratio is None else round(speed.ratio, 3),
        "speed": None if speed.relative is None else round(speed.speed, 3),
        "note": speed.note,
    }


def speeds_by_step(
    ranks: Sequence[tuple[Unit, RankHistory]],
    replicas: Mapping[str, _Steps],
    speeds: Mapping[str, float | None],
) -> dict[str, Any]:
    """The speed of each rank in the newest steps, and over several steps.

    ``replicas``: times of replicas over their equals'. ``speeds``: speeds of replicas over several steps.
    """
    rows: list[tuple[dict[str, Any], _Steps]] = []
    for unit, rank in ranks:
        own, time = rank.detector, rank.detector.relative_time
        row = _row(unit.replica, rank.number, unit.stage, None if time is None else 1.0 / time)
        row["seconds"] = round(own.seconds, 6)
        row["predicted_s"] = None if own.predicted_s is None else round(own.predicted_s, 6)
        rows.append((row, own.relative))
    watched = {row["replica"] for row, _ in rows}
    rows += [
        (_row(name, 0, 0, speeds.get(name)), times)
        for name, times in replicas.items()
        if times and name not in watched
    ]
    shown = rows
    if len(rows) > MOST_ROWS:  # the slowest ones by the newest step
        shown = heapq.nsmallest(MOST_ROWS, rows, key=lambda x: 1.0 / x[1][-1][1] if x[1] else 1.0)
    steps = sorted({step for _, times in shown for step, _ in times})[-KEPT_STEPS:]
    for row, times in shown:
        by_step = {step: round(1.0 / value, 3) for step, value in times}
        row["speeds"] = [by_step.get(step) for step in steps]
    return {
        "steps": steps,
        "rows": sorted((row for row, _ in shown), key=lambda x: (x["replica"], x["rank"])),
        "left_out": len(rows) - len(shown),
    }


def _row(replica: str, rank: int, stage: int, speed: float | None) -> dict[str, Any]:
    """A rank's line of the table of speeds. ``speed``: over several steps; None: not known yet."""
    speed = None if speed is None else round(speed, 3)
    return {"replica": replica, "rank": rank, "stage": stage, "speed": speed}
