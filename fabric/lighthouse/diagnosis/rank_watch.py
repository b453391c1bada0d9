"""The speeds of the ranks of a job, and which rank of a slow replica is slow.

The work per heartbeat grows with the ranks of one replica, so a job of many ranks is not watched by rank.
"""

import heapq
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from fabric.health.detector import ReplicaSpeed
from fabric.health.localise import Scope, Slowdown, Unit
from fabric.health.rank_detector import KEPT_STEPS, RankDetector, RankHistory, RankSample
from fabric.health.work import WorkAmount
from fabric.model import Member, RankTimes

MOST_ROWS = 64  # rows of the table of speeds by step; a larger job shows the slowest
_Steps = Sequence[tuple[int, float]]


@dataclass(frozen=True, slots=True)
class RankReport:
    """The times of all ranks of one replica in one step."""

    replica: str
    incarnation: int
    step: int
    work: WorkAmount  # work of rank 0
    ranks: Sequence[RankTimes]

    def samples(self) -> list[RankSample]:
        """One sample per rank; impossible times and work stay in them, and do not count later."""
        samples, seen = [], dict[int, int]()
        for number, times in enumerate(self.ranks):
            place = seen[times.stage] = seen.get(times.stage, -1) + 1
            work = replace(self.work, tokens=times.tokens, squares=times.squares)
            unit = Unit(self.replica, times.stage, place)
            samples.append(RankSample(unit, number, work, times.compute_s, times.waited_s))
        return samples


class RankWatch:
    """Watches at most ``most`` ranks together; a job of more is compared by replicas alone."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._detector = RankDetector()
        self._sizes: dict[str, int] = {}  # ranks of the watched replicas

    def keep(self, roster: Sequence[Member]) -> None:
        """Forget replicas outside ``roster``, and all where the roster has too many ranks."""
        sizes = {member.replica: 1 + len(member.ranks) for member in roster}
        self._sizes = sizes if sum(sizes.values()) <= self._most else {}
        self._detector.keep(self._sizes)

    def observe(self, report: RankReport, is_well: bool) -> None:
        """Take one report. ``is_well``: whether the replica is not slow at present."""
        if self._sizes.get(report.replica) == len(report.ranks):
            self._detector.observe(report.incarnation, report.step, report.samples(), is_well)

    def locate(self, slowdowns: Sequence[Slowdown], speeds: Sequence[ReplicaSpeed]) -> list[Slowdown]:
        """The same slowdowns, with the slow rank, stage or link where the ranks' times tell it."""
        if not slowdowns:
            return []
        seconds = {x.replica: x.seconds for x in speeds}
        alone = speeds[0].replica if len(speeds) == 1 else ""
        located = []
        for slowdown in slowdowns:
            asked = slowdown
            if slowdown.scope is Scope.JOB and alone:
                asked = replace(slowdown, scope=Scope.REPLICA, units=(Unit(alone),))
            extra_s = seconds.get(asked.replica, 0.0) * (1.0 - 1.0 / slowdown.factor)
            part = self._detector.locate(asked, extra_s)
            located.append(slowdown if part is asked else replace(part, factor=slowdown.factor))
        return located

    def numbers(self, slowdown: Slowdown) -> list[int]:
        """The slow ranks of the replica; empty where the replica as a whole is slow."""
        if slowdown.scope not in (Scope.RANK, Scope.STAGE, Scope.LINK):
            return []
        histories = dict(self._detector.histories_of(slowdown.replica))
        return sorted(histories[unit].number for unit in slowdown.units if unit in histories)

    def speeds_of(self, slowdown: Slowdown) -> dict[int, float]:
        """Each slow rank's speed relative to its own past; empty where the replica as a whole is slow."""
        if slowdown.scope not in (Scope.RANK, Scope.STAGE):
            return {}
        histories = dict(self._detector.histories_of(slowdown.replica))
        ranks = [histories[unit] for unit in slowdown.units if unit in histories]
        return {rank.number: 1.0 / rank.ratio for rank in ranks if rank.ratio is not None}

    def stages_of(self, replica: str) -> tuple[int, ...]:
        """The pipeline stage of each rank; empty where the ranks are not watched."""
        stages = {rank.number: unit.stage for unit, rank in self._detector.histories_of(replica)}
        return tuple(stages[number] for number in sorted(stages))

    def by_step(self, replicas: Mapping[str, _Steps], speeds: Mapping[str, float | None]) -> dict[str, Any]:
        """The speed of each rank in the newest steps, and over several steps.

        ``replicas``: times of replicas over their equals'. ``speeds``: speeds of replicas over several steps.
        """
        ranked = list(self._detector.histories())
        watched = {unit.replica for unit, _ in ranked}
        rows = [
            _Row(unit.replica, rank.number, unit.stage, rank.speed, rank.relative, rank)
            for unit, rank in ranked
        ]
        rows += [
            _Row(name, 0, 0, speeds.get(name), times)
            for name, times in replicas.items()
            if times and name not in watched
        ]
        shown = rows if len(rows) <= MOST_ROWS else heapq.nsmallest(MOST_ROWS, rows, key=lambda x: x.newest)
        steps = sorted({step for row in shown for step, _ in row.times})[-KEPT_STEPS:]
        return {
            "steps": steps,
            "rows": [row.to_json(steps) for row in sorted(shown, key=lambda x: (x.replica, x.rank))],
            "left_out": len(rows) - len(shown),
        }


@dataclass(frozen=True, slots=True)
class _Row:
    """One rank's line of the table."""

    replica: str
    rank: int
    stage: int
    speed: float | None  # over several steps; None: not known yet
    times: _Steps  # times over the equals' times, by step
    history: RankHistory | None = None

    @property
    def newest(self) -> float:
        """The speed in the newest step."""
        return 1.0 / self.times[-1][1] if self.times else 1.0

    def to_json(self, steps: Sequence[int]) -> dict[str, Any]:
        """The row as plain values; ``steps``: the columns."""
        speeds = {step: round(1.0 / value, 3) for step, value in self.times}
        row: dict[str, Any] = {"replica": self.replica, "rank": self.rank, "stage": self.stage}
        row["speed"] = None if self.speed is None else round(self.speed, 3)
        if self.history is not None:
            predicted_s = self.history.predicted_s
            row["seconds"] = round(self.history.seconds, 6)
            row["predicted_s"] = None if predicted_s is None else round(predicted_s, 6)
        return {**row, "speeds": [speeds.get(step) for step in steps]}
