"""The verdict on a drill: each expectation with its measured value, each fault with its cost."""

import math
import re
import statistics
from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from itertools import pairwise

from msgspec.structs import replace

from fabric.audit.audit import Evidence, finished
from fabric.audit.journal import JournalLine, RecoveryFacts, lines_of
from fabric.audit.summary import RunSummary, Verdict, judge
from fabric.drill.judge.drill_record import WIPED, DrillRecord, HeadlineSighting, InjectedFault
from fabric.drill.judge.expectations import DEFAULTS, MAY_LOSE, Expectation, MeasureUnit, parse_expectation
from fabric.model import Value

# Times of commits, by replica and for the whole job, from which the judge measures waits.
#
# ``DrillTimes`` reads journals. ``OutsideTimes`` has only the lighthouse's records and status.


# A process may write its last line shortly before the time at which the drill dates its fault.
_SLACK_S = 1.0
# The events of a journal that a fault's timeline shows, and the most lines of a timeline.
_NOTED = ("start", "abort", "epoch", "resume", "outside", "join", "joined", "finish", "stop")
MAX_NOTES = 60


class CommitGap(Value):
    """The time between two live commits of one process, or from its last commit to the drill's end."""

    replica: str
    start: float
    seconds: float
    is_open: bool = False  # no commit ended this gap

    @property
    def end(self) -> float:
        return self.start + self.seconds


class JobTimes:
    """The times at which the whole job went on: ``went_on``, in order."""

    early_s = 0.0  # a fault or a recovery may have begun so much earlier than its date
    median_step_s = 0.0

    def __init__(self, record: DrillRecord, went_on: Sequence[float]) -> None:
        self.record, self._went_on = record, went_on

    def stall_s(self, fault: InjectedFault | None = None) -> float | None:
        """Return the longest stall of a survivor, in all or in one fault's time; None where none was."""
        return None

    def timeline(self, fault: InjectedFault) -> list[str]:
        """Return what the replicas noted from the fault to their next commits, in seconds after it."""
        return []

    def standstills(self) -> list[CommitGap]:
        """Return the times in which the job did not go on, up to the drill's end."""
        times = [t for t in self._went_on if t >= self.record.began]
        if times and not self.record.is_over:
            times.append(max(self.record.ended, times[-1]))
        return [CommitGap("", before, after - before) for before, after in pairwise(times)]

    def unexplained_s(self) -> float | None:
        """Return the longest standstill, each without the time of faults and recoveries."""
        times = [(fault.began, fault.ended) for fault in self.record.faults]
        times += [(x.detected, x.step_committed or self.record.ended) for x in self.record.recoveries or ()]
        spans = sorted((began - self.early_s, self._next(ended)) for began, ended in times)
        longest: float | None = None
        for gap in sorted(self.standstills(), key=lambda gap: gap.seconds, reverse=True):
            if longest is not None and gap.seconds <= longest:
                break
            longest = max(longest or 0.0, gap.seconds - covered(gap, spans))
        return longest

    def _next(self, t: float) -> float:
        """Return when the job went on after ``t``."""
        place = bisect_left(self._went_on, t)
        return self._went_on[place] if place < len(self._went_on) else self.record.ended


class DrillTimes(JobTimes):
    """The times of one drill. ``evidence`` is of ``record.evidence()``."""

    def __init__(self, record: DrillRecord, evidence: Evidence) -> None:
        super().__init__(record, sorted(line.t for lines in evidence.commits.values() for line in lines))
        self._evidence = evidence
        gaps = [gap for gap in self._all_gaps() if gap.start >= record.began]
        self.gaps = sorted(gaps, key=lambda gap: gap.start)
        closed = [gap.seconds for gap in self.gaps if not gap.is_open]
        self.median_step_s = statistics.median(closed) if closed else 0.0
        # The gaps of processes that no fault hit meanwhile, by their starts.
        self._calm = [gap for gap in self.gaps if not any(hits(fault, gap) for fault in record.faults)]
        self._starts = [gap.start for gap in self._calm]
        self._longest_s = max((gap.seconds for gap in self._calm), default=0.0)
        self._rejoined = {
            (number, name): self._next_commit_s(fault, name)
            for number, fault in enumerate(record.faults)
            for name in fault.targets
        }

    def stall_s(self, fault: InjectedFault | None = None) -> float | None:
        """As in the base class."""
        gaps = self._calm
        if fault is not None:
            first = bisect_left(self._starts, fault.began - self._longest_s)
            last = bisect_right(self._starts, fault.ended)
            gaps = [gap for gap in gaps[first:last] if gap.end >= fault.began]
        return max((max(0.0, gap.seconds - self.median_step_s) for gap in gaps), default=None)

    def rejoined_s(self, fault: InjectedFault, replica: str) -> float:
        """Return the seconds from the fault's end to the replica's next live commit; infinity: none came."""
        return self._rejoined[self.record.faults.index(fault), replica]

    def _next_commit_s(self, fault: InjectedFault, replica: str) -> float:
        journal = self._evidence.run.journals.get(replica)
        killed = fault.pids.get(replica)
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
        """As in the base class."""
        notes: list[tuple[float, str]] = []
        waits = [self.rejoined_s(fault, name) for name in fault.targets]
        backs = [self.record.ended if math.isinf(wait) else fault.ended + wait for wait in waits]
        until = max(self._next(fault.ended), *backs, 0.0)
        for name, journal in self._evidence.run.journals.items():
            notes += [
                (line.t - fault.began, f"{name}: {_note(line)}")
                for line in lines_of(journal.lines, *_NOTED)
                if fault.began <= line.t <= until
            ]
        return [f"{seconds:.3f} s {text}" for seconds, text in sorted(notes)[:MAX_NOTES]]

    def _explains(self, fault: InjectedFault, lines: Sequence[JournalLine]) -> bool:
        """Whether the fault may have ended the process that wrote these lines."""
        replica, last = lines[0].replica, lines[-1].t
        if replica not in fault.targets:
            return False
        if fault.pids and fault.pids.get(replica) == lines[0].fields.get("pid"):
            return True
        back = fault.ended + self.rejoined_s(fault, replica)
        return fault.began - _SLACK_S <= last <= back

    def _all_gaps(self) -> Iterator[CommitGap]:
        for lines in self._evidence.lives():
            for before, after in pairwise(lines_of(lines, "commit", "join", "outside")):
                if before.is_live_commit and after.is_live_commit:
                    yield CommitGap(before.replica, before.t, after.mono - before.mono)
        for journal in self._evidence.run.journals.values() if not self.record.is_over else ():
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
_OUTSIDE_LATE_S = 60.0


class OutsideTimes(JobTimes):
    """The measures of a drill without journals; the status was asked about once a second."""

    early_s = 1.0

    def __init__(self, record: DrillRecord) -> None:
        self._recoveries = [x for x in record.recoveries or () if x.detected >= record.began]
        self._grown: list[tuple[float, int]] = []  # when the job's step grew, and to which step
        for sighting in sorted(record.sightings, key=lambda sighting: sighting.t):
            if not self._grown or sighting.step > self._grown[-1][1]:
                self._grown.append((sighting.t, sighting.step))
        super().__init__(record, [t for t, _ in self._grown])

    def value(self, measure: str) -> float | None:
        """Return the measured value, or None where only journals could give it."""
        if measure == "steps" and self._grown:
            return float(self._grown[-1][1] - self._grown[0][1])
        if self.record.recoveries is None:
            return None
        if measure == "steps_lost":
            return float(sum(recovery.steps_lost for recovery in self._recoveries))
        if measure == "restarts":
            return float(len(self.unexplained_ends()))
        return None

    def rejoined_s(self, fault: InjectedFault, replica: str) -> float:
        """Return the seconds from the fault's end until the lighthouse saw the replica at a newer step."""
        before = max((step for t, step in self._grown if t <= fault.ended), default=-1)
        for sighting in self.record.sightings:
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
                and recovery.detected <= fault.ended + _OUTSIDE_LATE_S
                for fault in self.record.faults
            )
        ]


class Outcome(Value):
    """One expectation after the drill."""

    expectation: str
    holds: bool
    value: float | None  # None: the drill has no record from which to measure it
    shown: str  # the value for people
    why: str = ""  # the reason of a failure, or why there is no value, in one sentence


class DrillVerdict(Verdict):
    """The whole result. ``mistakes``: faults that did nothing, or whose end the drill has not seen."""

    outcomes: tuple[Outcome, ...]
    faults: tuple[InjectedFault, ...]  # with their costs
    mistakes: tuple[str, ...]
    disagreements: tuple[str, ...]
    unseen: tuple[str, ...]  # what the judge could not see
    median_step_s: float

    @property
    def holds(self) -> bool:
        """Whether the job met every expectation and the drill did all that it should do."""
        return not self.mistakes and all(outcome.holds for outcome in self.outcomes)


def judge_drill(record: DrillRecord, expectations: Sequence[str] = ()) -> DrillVerdict:
    """Judge a drill by ``expectations``, or by the default ones. Raises ConfigError for an unreadable one.

    The checker of the journals is that of ``fabric demo verify``. An expectation that was asked for and that
    no record measures has failed; a default one is passed over.
    """
    wanted = [parse_expectation(text) for text in expectations or _defaults(record)]
    verdict = judge(record.evidence(), is_over=record.is_over)
    has_journals = bool(record.run.journals)
    times = DrillTimes(record, verdict.evidence) if has_journals else OutsideTimes(record)
    differing = disagreements(record, verdict.evidence, verdict.summary) if has_journals else []
    measures = _Measures(record, verdict, times, differing)
    return DrillVerdict(
        outcomes=tuple(measures.outcome(wish, is_asked=bool(expectations)) for wish in wanted),
        faults=tuple(
            replace(
                fault,
                stall_s=times.stall_s(fault),
                rejoined_s={name: times.rejoined_s(fault, name) for name in fault.targets},
                timeline=tuple(times.timeline(fault)),
            )
            for fault in record.faults
        ),
        mistakes=(
            *(
                f"{x.title} was injected, and the drill saw no effect of it"
                for x in record.faults
                if not x.observed
            ),
            *(
                f"{x.title} was to end, and the drill has not seen its end"
                for x in record.faults
                if not x.undone
            ),
        ),
        broken=verdict.broken if has_journals else (),
        disagreements=tuple(differing),
        unseen=tuple(_unseen(record)),
        summary=verdict.summary,
        evidence=verdict.evidence,
        median_step_s=times.median_step_s,
    )


def _defaults(record: DrillRecord) -> list[str]:
    """Return the defaults. A death of all trainers may cost the steps since the newest snapshot, as may a
    wiped store."""
    names = set(record.run.journals) or {sighting.replica for sighting in record.sightings}
    begins_again = any(
        fault.name == WIPED or (fault.kills and names and names <= set(fault.targets))
        for fault in record.faults
    )
    return [text for text in DEFAULTS if not (begins_again and text == MAY_LOSE)]


class _Measures:
    """The measured values of one drill, with the reason of each bad value."""

    def __init__(
        self,
        record: DrillRecord,
        verdict: Verdict,
        times: DrillTimes | OutsideTimes,
        differing: Sequence[str],
    ) -> None:
        self._record, self._summary, self._times = record, verdict.summary, times
        self._evidence, self._broken, self._differing = verdict.evidence, verdict.broken, differing
        self._untrue = list(untrue_headlines(record, verdict.evidence, times.median_step_s))

    def outcome(self, wish: Expectation, *, is_asked: bool) -> Outcome:
        value = self._value(wish.measure)
        if value is None:
            why = f"nothing in the records of this drill measures {wish.measure}"
            return Outcome(wish.text, not is_asked, None, "not measured", why)
        holds = wish.holds(value)
        return Outcome(
            wish.text, holds, value, _shown(value, wish.unit), "" if holds else self._why(wish, value)
        )

    def _value(self, measure: str) -> float | None:
        summary, times, record = self._summary, self._times, self._record
        if record.run.journals and not self._evidence.commits:
            # A run without a commit kept no sample, but it cannot show that it counts samples right.
            return 0.0 if measure == "steps" else None
        if measure == "standstill":
            return max((gap.seconds for gap in times.standstills()), default=None)
        if measure == "unexplained_wait":
            return times.unexplained_s()
        if measure == "stall":
            return times.stall_s()
        if measure == "rejoined":
            is_seen = record.run.journals or record.sightings
            waits = [times.rejoined_s(f, name) for f in record.faults for name in f.targets]
            return max(waits, default=None) if is_seen else None
        if isinstance(times, OutsideTimes):
            return times.value(measure)
        if measure.startswith("samples") and self._evidence.order() is None:
            return None
        if measure == "sources_agree" and record.recoveries is None and not record.sightings:
            return None
        if measure == "status_true" and not record.headlines:
            return None
        values = {
            "promises_kept": not self._broken,
            "digests_equal": summary.digests_equal,
            "samples_exactly_once": not summary.samples_skipped and not summary.samples_repeated,
            "sources_agree": not self._differing,
            "status_true": not self._untrue,
            "steps": summary.steps,
            "steps_lost": summary.steps_lost,
            "samples_skipped": summary.samples_skipped,
            "samples_repeated": summary.samples_repeated,
            "restarts": len(times.unexplained_ends()),
        }
        return float(values[measure])

    def _why(self, wish: Expectation, value: float) -> str:
        summary = self._summary
        if wish.measure == "promises_kept":
            return self._broken[0]
        if wish.measure == "sources_agree":
            return self._differing[0]
        if wish.measure == "status_true":
            return self._untrue[0]
        if wish.measure == "samples_exactly_once":
            return f"{summary.samples_skipped} samples are skipped and {summary.samples_repeated} repeated"
        if wish.measure == "restarts" and value:
            return self._times.unexplained_ends()[0]
        if wish.measure == "rejoined" and math.isinf(value):
            return self._missing(wish)
        return f"{wish.measure} is {_shown(value, wish.unit)}, and {wish.text} was expected"

    def _missing(self, wish: Expectation) -> str:
        faults = self._record.faults
        name, fault = next(
            (name, f) for f in faults for name in f.targets if math.isinf(self._times.rejoined_s(f, name))
        )
        journals = self._record.run.journals.values()
        finishes = [line for journal in journals for line in lines_of(journal.lines, "finish")]
        after_s = max((line.t for line in finishes), default=math.inf) - fault.ended
        if after_s < wish.bound:
            return (
                f"the job ended {after_s:.0f} s after {fault.title}, before {name} was back: give the job "
                "more steps, or the fault an earlier time"
            )
        return f"{name} never returned after {fault.title}"


def _shown(value: float, unit: MeasureUnit) -> str:
    if unit is MeasureUnit.TRUTH:
        return "yes" if value else "no"
    if unit is MeasureUnit.COUNT:
        return str(int(value))
    return "never" if math.isinf(value) else f"{value:.3f} s"


def _unseen(record: DrillRecord) -> list[str]:
    """Return a sentence for each source that the judge had not."""
    unseen = []
    names = set(record.run.journals)
    missing = sorted(({x.replica for x in record.sightings} | set(record.targets())) - names)
    if not names:
        unseen.append(
            "no journal was read: promises, digests, samples and stalls are not known; give --journals"
        )
    elif missing:
        unseen.append(f"no journal of {', '.join(missing)} was read: its promises and samples are not known")
    if record.recoveries is None:
        unseen.append("the lighthouse gave no recovery records: lost steps and losses are not compared")
    if not record.sightings:
        unseen.append("the lighthouse gave no status: the return of replicas is not known from it")
    return unseen


# The lighthouse learns of events later than a replica, by heartbeats and leader sessions.
_LATE_S = 30.0
# The clocks of two hosts may differ by this many seconds.
_CLOCK_S = 2.0


def disagreements(record: DrillRecord, evidence: Evidence, summary: RunSummary) -> list[str]:
    """Return one sentence per fact on which two sources differ."""
    return [
        *_deaths_without_record(record, evidence, summary),
        *_records_without_trace(record, evidence),
        *_steps_lost(record, summary),
        *_sightings(record, evidence),
    ]


def _deaths_without_record(record: DrillRecord, evidence: Evidence, summary: RunSummary) -> Iterator[str]:
    """Find the deaths that the journals show and no recovery record names.

    A process that dies before it commits belongs to the loss of its predecessor: the lighthouse may never
    have heard of that process.
    """
    if record.recoveries is None:
        return
    for death in summary.failure_list:
        if not record.is_over and death.t > record.ended - _LATE_S:
            continue
        lines = evidence.run.journals[death.replica].lines if death.replica in evidence.run.journals else ()
        commits = [x.t for x in lines if x.is_live_commit and x.t <= death.t]
        earliest = min(death.t, max(commits, default=death.t)) - _CLOCK_S
        if not any(
            death.replica in recovery.lost and earliest <= recovery.detected <= death.t + _LATE_S
            for recovery in record.recoveries
        ):
            yield (
                f"the journals show the death of {death.replica} at step {death.step}, and no recovery "
                "record of the lighthouse names it"
            )


def _records_without_trace(record: DrillRecord, evidence: Evidence) -> Iterator[str]:
    """Find the recovery records whose lost replicas show no sign of a loss in their journals."""
    for recovery in record.recoveries or ():
        for replica in recovery.lost:
            if replica in evidence.run.journals and not _shows_loss(evidence, recovery, replica):
                yield (
                    f"a recovery record ({recovery.incident_id or recovery.kind}) names {replica} as lost, "
                    f"and the journal of {replica} shows neither an end nor a return"
                )


def _shows_loss(evidence: Evidence, recovery: RecoveryFacts, replica: str) -> bool:
    groups = evidence.run.journals[replica].incarnations()
    early, late = recovery.detected - _LATE_S, recovery.detected + _LATE_S
    if any(lines_of(group, "outside") for group in groups):
        return True
    if any(early <= group[-1].t <= late for group in groups):
        return True
    return any(recovery.detected - _CLOCK_S <= group[0].t for group in groups)


def _steps_lost(record: DrillRecord, summary: RunSummary) -> Iterator[str]:
    if record.recoveries is None:
        return
    counted = sum(recovery.steps_lost for recovery in record.recoveries)
    # A lighthouse hears of steps by heartbeats, so it may know fewer of the steps that a cold start undid.
    was_cold = any(recovery.kind == "cold start" for recovery in record.recoveries)
    # In a wiped store the lighthouse does not find the step that the job had reached.
    may_know_fewer = was_cold or any(fault.name == WIPED for fault in record.faults)
    if counted > summary.steps_lost or (counted < summary.steps_lost and not may_know_fewer):
        yield (f"the recovery records count {counted} lost steps, and the journals {summary.steps_lost}")


def _sightings(record: DrillRecord, evidence: Evidence) -> Iterator[str]:
    """Find the first step of each replica that the lighthouse's status named before any journal had it."""
    commits: dict[int, float] = {}
    names = set(evidence.run.journals)
    # Processes that die all together may have committed a step that none of them wrote down.
    ends = [fault.began for fault in record.faults if fault.kills and names <= set(fault.targets)]
    for (_, step), lines in evidence.commits.items():
        first = min(line.t for line in lines)
        commits[step] = min(first, commits.get(step, first))
    reported: set[str] = set()
    for sighting in record.sightings:
        if sighting.step <= 0 or sighting.replica in reported or sighting.t > record.ended:
            continue
        committed = commits.get(sighting.step - 1)
        is_late = committed is None or committed > sighting.t + _CLOCK_S
        if is_late and not any(abs(sighting.t - end) <= _LATE_S for end in ends):
            reported.add(sighting.replica)
            yield (
                f"the lighthouse saw {sighting.replica} at step {sighting.step}, and no journal had "
                "committed that step"
            )


# A first line may be late by this time and four steps. The leader knows every epoch before its members step.
_HEADLINE_LATE_S = 2.0
_STEPS = 4
_FORM = re.compile(r"(\d+) of (\d+) replicas?(.*)", re.DOTALL)


class TrainingReplicas:
    """The replicas that commit live steps around a time, by their journals."""

    def __init__(self, record: DrillRecord, evidence: Evidence, median_step_s: float) -> None:
        self.late_s = _HEADLINE_LATE_S + _STEPS * median_step_s
        self._faults = record.faults
        journals = evidence.run.journals
        self._commits = {
            name: [line for line in journal.lines if line.is_live_commit]
            for name, journal in journals.items()
        }
        self._times = {name: [line.t for line in lines] for name, lines in self._commits.items()}
        # A replica that joins counts from its first epoch on, before its first live commit.
        self._signs = {
            name: [line.t for line in lines_of(journal.lines, "commit", "join", "epoch", "joined")]
            for name, journal in journals.items()
        }
        self._finished = {name for name, x in journals.items() if x.lines and finished(x.incarnations()[-1])}

    def steps_go_on(self, t: float) -> bool:
        """Whether the job committed two steps between the start and the end of the time before ``t``."""
        quarter_s = self.late_s / 4
        first = self._steps(t - self.late_s, t - 3 * quarter_s)
        last = self._steps(t - quarter_s, t)
        return bool(first and last) and max(last) >= max(first) + 2

    def most(self, t: float) -> set[str]:
        """Return the replicas that committed or joined within the time before ``t``, or at once after it."""
        begin, end = t - self.late_s, t + self.late_s / 4
        return {name for name, x in self._signs.items() if bisect_left(x, begin) < bisect_right(x, end)}

    def least(self, t: float) -> set[str]:
        """Return the replicas that committed without a pause before ``t`` and after it, hit by no fault."""
        hit = {name for x in self._faults if x.began <= t <= x.ended + 2 * self.late_s for name in x.targets}
        steady = set()
        for name in self._commits:
            marks = [t - self.late_s, *(line.t for line in self._within(name, t - self.late_s, t)), t]
            pause_s = max(after - before for before, after in pairwise(marks))
            if pause_s < self.late_s / 2 and self._times[name][-1:] > [t]:
                steady.add(name)
        return steady - hit

    def away(self, t: float) -> set[str]:
        """Return the replicas that have trained before ``t``, and do not train at ``t``."""
        seen = {name for name, times in self._times.items() if times and times[0] < t}
        return seen - self.most(t) - self._finished

    def _steps(self, begin: float, end: float) -> list[int]:
        return [line.integer("step") for name in self._commits for line in self._within(name, begin, end)]

    def _within(self, name: str, begin: float, end: float) -> Sequence[JournalLine]:
        times = self._times[name]
        return self._commits[name][bisect_left(times, begin) : bisect_right(times, end)]


def untrue_headlines(record: DrillRecord, evidence: Evidence, median_step_s: float) -> Iterator[str]:
    """Return a sentence for each first line that the journals contradict."""
    trained = TrainingReplicas(record, evidence, median_step_s)
    wanted = 0
    for seen in sorted(record.headlines, key=lambda seen: seen.t):
        form = _FORM.fullmatch(seen.text)
        if form is None or seen.t > record.ended:
            continue
        wanted = wanted or int(form[2])
        if trained.steps_go_on(seen.t) and (why := _contradiction(seen, trained, wanted)):
            at = datetime.fromtimestamp(seen.t, UTC).strftime("%H:%M:%S UTC")
            yield f'at {at} the first line of the status said "{seen.text[:120]}", and {why}'


def _contradiction(seen: HeadlineSighting, trained: TrainingReplicas, wanted: int) -> str:
    """Return how the journals contradict this first line, or an empty string."""
    form = _FORM.fullmatch(seen.text)
    assert form is not None
    training, of, named = int(form[1]), int(form[2]), form[3]
    most, least, away = trained.most(seen.t), trained.least(seen.t), trained.away(seen.t)
    if training > len(most):
        return f"the journals show {len(most)} that train"
    if training < len(least):
        return f"the journals show that {', '.join(sorted(least))} trained all the time"
    if of < wanted:
        return f"the job began with {wanted} replicas"
    if training < of and away and "not seen since" not in named and not any(x in named for x in away):
        return f"it does not name {', '.join(sorted(away))}, which is away"
    return ""
