"""The verdict on a drill: each expectation with its measured value, each fault with its cost."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from fabric.audit.audit import Evidence
from fabric.audit.journal import lines_of
from fabric.audit.summary import RunSummary
from fabric.audit.verify import Verdict, judge
from fabric.drill.judge.disagreements import disagreements
from fabric.drill.judge.drill_record import WIPED, DrillRecord, InjectedFault
from fabric.drill.judge.expectations import DEFAULTS, MAY_LOSE, Expectation, MeasureUnit, parse_expectation
from fabric.drill.judge.headlines import untrue_headlines
from fabric.drill.judge.outside import OutsideTimes
from fabric.drill.judge.timelines import DrillTimes

Times = DrillTimes | OutsideTimes


@dataclass(frozen=True, slots=True)
class Outcome:
    """One expectation after the drill."""

    expectation: str
    holds: bool
    value: float | None  # None: the drill has no record from which to measure it
    shown: str  # the value for people
    why: str = ""  # the reason of a failure, or why there is no value, in one sentence


@dataclass(frozen=True, slots=True)
class DrillVerdict:
    """The whole result. ``mistakes``: faults that did nothing, or whose end the drill has not seen."""

    outcomes: tuple[Outcome, ...]
    faults: tuple[InjectedFault, ...]  # with their costs
    mistakes: tuple[str, ...]
    broken: tuple[str, ...]
    disagreements: tuple[str, ...]
    unseen: tuple[str, ...]  # what the judge could not see
    summary: RunSummary
    evidence: Evidence
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
        faults=tuple(_with_cost(fault, times) for fault in record.faults),
        mistakes=tuple(_mistakes(record)),
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

    def __init__(self, record: DrillRecord, verdict: Verdict, times: Times, differing: Sequence[str]) -> None:
        self._record, self._summary, self._times = record, verdict.summary, times
        self._evidence, self._broken, self._differing = verdict.evidence, verdict.broken, differing
        self._untrue = list(untrue_headlines(record, verdict.evidence, times.median_step_s))

    def outcome(self, wish: Expectation, *, is_asked: bool) -> Outcome:
        """Measure the value that ``wish`` bounds, and compare it."""
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


def _mistakes(record: DrillRecord) -> list[str]:
    """Return a sentence for each fault that the drill did not see happen, or did not see end."""
    mistakes = [
        f"{fault.title} was injected, and the drill saw no effect of it"
        for fault in record.faults
        if not fault.observed
    ]
    mistakes += [
        f"{fault.title} was to end, and the drill has not seen its end"
        for fault in record.faults
        if not fault.undone
    ]
    return mistakes


def _with_cost(fault: InjectedFault, times: Times) -> InjectedFault:
    rejoined = {name: times.rejoined_s(fault, name) for name in fault.targets}
    timeline = tuple(times.timeline(fault))
    return replace(fault, stall_s=times.stall_s(fault), rejoined_s=rejoined, timeline=timeline)


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
