"""Times of commits, by replica and for the whole job, from which the judge measures waits.

``DrillTimes`` reads journals. ``OutsideTimes`` has only the lighthouse's records and status.
"""

import math
import statistics
from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

from fabric.audit.audit import Evidence, finished
from fabric.audit.journal import JournalLine, lines_of
from fabric.drill.judge.drill_record import DrillRecord, InjectedFault

# A process may write its last line shortly before the time at which the drill dates its fault.
_SLACK_S = 1.0
# The events of a journal that a fault's timeline shows, and the most lines of a timeline.
_NOTED = ("start", "abort", "epoch", "resume", "outside", "join", "joined", "finish", "stop")
MAX_NOTES = 60


@dataclass(frozen=True, slots=True)
class CommitGap:
    """The time between two live commits of one process, or from its last commit to the drill's end."""

    replica: str
    start: float
    seconds: float
    is_open: bool = False  # no commit ended this gap

    @property
    def end(self) -> float:
        return self.start + self.seconds


class DrillTimes:
    """The times of one drill. ``evidence`` is of ``record.evidence()``."""

    def __init__(self, record: DrillRecord, evidence: Evidence) -> None:
        self.record, self._evidence = record, evidence
        gaps = [gap for gap in (*self._closed_gaps(), *self._open_gaps()) if gap.start >= record.began]
        self.gaps = sorted(gaps, key=lambda gap: gap.start)
        closed = [gap.seconds for gap in self.gaps if not gap.is_open]
        self.median_step_s = statistics.median(closed) if closed else 0.0
        # The gaps of processes that no fault hit meanwhile, by their starts.
        self._calm = [gap for gap in self.gaps if not any(hits(fault, gap) for fault in record.faults)]
        self._starts = [gap.start for gap in self._calm]
        self._longest_s = max((gap.seconds for gap in self._calm), default=0.0)
        self._commits = sorted(line.t for lines in evidence.commits.values() for line in lines)
        self._rejoined = {
            (number, name): self._next_commit_s(fault, name)
            for number, fault in enumerate(record.faults)
            for name in fault.targets
        }

    def stall_s(self, fault: InjectedFault | None = None) -> float | None:
        """Return the longest stall of a survivor, in all or in one fault's time; None where none was."""
        gaps = self._calm
        if fault is not None:
            first = bisect_left(self._starts, fault.began - self._longest_s)
            last = bisect_right(self._starts, fault.ended)
            gaps = [gap for gap in gaps[first:last] if gap.end >= fault.began]
        return max((max(0.0, gap.seconds - self.median_step_s) for gap in gaps), default=None)

    def standstills(self) -> list[CommitGap]:
        """Return the times between two commits of the whole job, up to the drill's end."""
        times = [t for t in self._commits if t >= self.record.began]
        if not times:
            return []
        if not self.record.is_over:
            times.append(max(self.record.ended, times[-1]))
        return [CommitGap("", before, after - before) for before, after in pairwise(times)]

    def unexplained_s(self) -> float | None:
        """Return the longest standstill, each without the time of faults and recoveries."""
        spans = [(fault.began, max(fault.ended, self._recovered(fault))) for fault in self.record.faults]
        spans += [
            (recovery.detected, recovery.step_committed or self.record.ended)
            for recovery in self.record.recoveries or ()
        ]
        spans.sort()
        longest: float | None = None
        for gap in sorted(self.standstills(), key=lambda gap: gap.seconds, reverse=True):
            if longest is not None and gap.seconds <= longest:
                break
            longest = max(longest or 0.0, gap.seconds - covered(gap, spans))
        return longest

    def rejoined_s(self, fault: InjectedFault, replica: str) -> float:
        """Return the seconds from the fault's end to the replica's next live commit; infinity: none came."""
        return self._rejoined[self.record.faults.index(fault), replica]

    def _next_commit_s(self, fault: InjectedFault, replica: str) -> float:
        journal = self._evidence.run.journals.get(replica)
        killed = fault.pids.get(replica) if fault.kills else None
        pid: object = None
        for line in journal.lines if journal is not None else ():
            if line.event == "start":
                pid = line.fields.get("pid")
            # A killed process may write a line that its journal dates after its death.
            elif not line.is_live_commit or pid == (killed or -1):
                continue
            elif line.t >= fault.ended:
                return max(0.0, line.t - fault.ended)
        return math.inf

    def unexplained_ends(self) -> list[str]:
        """Return a sentence for each process that ended although no fault hit its replica."""
        sentences = []
        for name, journal in self._evidence.run.journals.items():
            groups = journal.incarnations()
            for number, lines in enumerate(groups):
                is_last = number == len(groups) - 1
                if finished(lines) or (is_last and not self.record.is_over):
                    continue
                if lines[-1].t < self.record.began:
                    continue
                if not any(self._explains(fault, lines) for fault in self.record.faults):
                    pid = lines[0].fields.get("pid")
                    sentences.append(f"process {pid} of {name} ended, and no fault of the drill had hit it")
        return sentences

    def timeline(self, fault: InjectedFault) -> list[str]:
        """Return what the replicas noted from the fault to their next commits, in seconds after it."""
        notes: list[tuple[float, str]] = []
        until = max(self._recovered(fault), *(self._back(fault, name) for name in fault.targets), 0.0)
        for name, journal in self._evidence.run.journals.items():
            notes += [
                (line.t - fault.began, f"{name}: {_note(line)}")
                for line in lines_of(journal.lines, *_NOTED)
                if fault.began <= line.t <= until
            ]
        return [f"{seconds:.3f} s {text}" for seconds, text in sorted(notes)[:MAX_NOTES]]

    def _back(self, fault: InjectedFault, replica: str) -> float:
        seconds = self.rejoined_s(fault, replica)
        return self.record.ended if math.isinf(seconds) else fault.ended + seconds

    def _explains(self, fault: InjectedFault, lines: Sequence[JournalLine]) -> bool:
        """Whether the fault may have ended the process that wrote these lines."""
        replica, last = lines[0].replica, lines[-1].t
        if replica not in fault.targets:
            return False
        if fault.kills and fault.pids.get(replica) == lines[0].fields.get("pid"):
            return True
        back = fault.ended + self.rejoined_s(fault, replica)
        return fault.began - _SLACK_S <= last <= back

    def _recovered(self, fault: InjectedFault) -> float:
        """Return when the job committed again after the fault's end."""
        place = bisect_left(self._commits, fault.ended)
        return self._commits[place] if place < len(self._commits) else self.record.ended

    def _closed_gaps(self) -> Iterator[CommitGap]:
        for lines in self._evidence.lives():
            for before, after in pairwise(lines_of(lines, "commit", "join", "outside")):
                if before.is_live_commit and after.is_live_commit:
                    yield CommitGap(before.replica, before.t, after.mono - before.mono)

    def _open_gaps(self) -> Iterator[CommitGap]:
        if self.record.is_over:
            return
        for journal in self._evidence.run.journals.values():
            groups = journal.incarnations()
            last = lines_of(groups[-1], "commit") if groups else []
            if last and not finished(groups[-1]):
                yield CommitGap(journal.replica, last[-1].t, max(0.0, self.record.ended - last[-1].t), True)


def hits(fault: InjectedFault, gap: CommitGap) -> bool:
    """Whether the fault hit the replica of this gap during the gap."""
    return gap.replica in fault.targets and gap.end >= fault.began and gap.start <= fault.ended


def covered(gap: CommitGap, spans: Sequence[tuple[float, float]]) -> float:
    """Return the seconds of the gap that lie in one of the spans, which are in order of their starts."""
    covered, until = 0.0, gap.start
    for first, last in spans:
        start, end = max(first, until), min(last, gap.end)
        if end > start:
            covered += end - start
            until = end
    return covered


def _note(line: JournalLine) -> str:
    """Describe one line of a journal in a few words."""
    if line.event == "epoch":
        kind = "forced" if line.flag("forced") else "planned"
        return f"{kind} epoch {line.integer('epoch')} with {', '.join(line.fields['roster'])}"
    place = f" at step {line.integer('step')}" if "step" in line.fields else ""
    why = str(line.fields.get("why") or line.fields.get("reason") or "")[:120]
    return f"{line.event}{place}{': ' + why if why else ''}"


# The lighthouse dates a loss later than the fault, and the drill's clock may differ from the lighthouse's.
_LATE_S, _CLOCK_S = 60.0, 2.0


class OutsideTimes:
    """The measures of a drill without journals; the status was asked about once a second.

    It has the methods of ``DrillTimes``; what only journals tell is missing.
    """

    median_step_s = 0.0

    def __init__(self, record: DrillRecord) -> None:
        self._record = record
        self._recoveries = [x for x in record.recoveries or () if x.detected >= record.began]
        self._grown: list[tuple[float, int]] = []  # when the job's step grew, and to which step
        for sighting in sorted(record.sightings, key=lambda sighting: sighting.t):
            if not self._grown or sighting.step > self._grown[-1][1]:
                self._grown.append((sighting.t, sighting.step))

    def value(self, measure: str) -> float | None:
        """Return the measured value, or None where only journals could give it."""
        if measure == "steps" and self._grown:
            return float(self._grown[-1][1] - self._grown[0][1])
        if self._record.recoveries is None:
            return None
        if measure == "steps_lost":
            return float(sum(recovery.steps_lost for recovery in self._recoveries))
        if measure == "restarts":
            return float(len(self.unexplained_ends()))
        return None

    def stall_s(self, fault: InjectedFault | None = None) -> float | None:
        """Return None: the status tells no replica's own commits."""
        return None

    def timeline(self, fault: InjectedFault) -> list[str]:
        """Return no notes: they are in journals."""
        return []

    def unexplained_s(self) -> float | None:
        """Return the longest standstill, each without the time of faults and recoveries."""
        spans = self._spans()
        return max((gap.seconds - covered(gap, spans) for gap in self.standstills()), default=None)

    def rejoined_s(self, fault: InjectedFault, replica: str) -> float:
        """Return the seconds from the fault's end until the lighthouse saw the replica at a newer step."""
        before = max((step for t, step in self._grown if t <= fault.ended), default=-1)
        for sighting in self._record.sightings:
            if sighting.replica == replica and sighting.t >= fault.ended and sighting.step > before:
                return sighting.t - fault.ended
        return math.inf

    def unexplained_ends(self) -> list[str]:
        """Return a sentence for each loss that the lighthouse has recorded and no fault explains."""
        return [
            f"the lighthouse lost {name} ({recovery.incident_id or recovery.kind}), and no fault had hit it"
            for recovery in self._recoveries
            for name in recovery.lost
            if not any(
                name in fault.targets
                and recovery.detected - fault.began >= -_CLOCK_S
                and recovery.detected <= fault.ended + _LATE_S
                for fault in self._record.faults
            )
        ]

    def standstills(self) -> list[CommitGap]:
        """Return the times between two growths of the job's step, up to the drill's end."""
        times = [t for t, _ in self._grown]
        if times:
            times.append(max(self._record.ended, times[-1]))
        return [CommitGap("", before, after - before) for before, after in pairwise(times)]

    def _spans(self) -> list[tuple[float, float]]:
        """Return the times that faults and recoveries explain, each to the next growth of the step."""
        spans = [(fault.began - 1.0, self._next(fault.ended)) for fault in self._record.faults]
        for recovery in self._recoveries:
            until = recovery.step_committed or self._record.ended
            spans.append((recovery.detected - 1.0, self._next(until)))
        return sorted(spans)

    def _next(self, t: float) -> float:
        return next((grown for grown, _ in self._grown if grown >= t), self._record.ended)
