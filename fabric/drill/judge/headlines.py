"""Compares the first line of the job's status with the replicas that train by their journals."""

import re
from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from itertools import pairwise

from fabric.audit.audit import Evidence, finished
from fabric.audit.journal import JournalLine, lines_of
from fabric.drill.judge.drill_record import DrillRecord, HeadlineSighting

# A first line may be late by this time and four steps. The leader knows every epoch before its members step.
_LATE_S = 2.0
_STEPS = 4
_FORM = re.compile(r"(\d+) of (\d+) replicas?(.*)", re.DOTALL)


class TrainingReplicas:
    """The replicas that commit live steps around a time, by their journals."""

    def __init__(self, record: DrillRecord, evidence: Evidence, median_step_s: float) -> None:
        self.late_s = _LATE_S + _STEPS * median_step_s
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
        return {name for name in self._commits if self._is_steady(name, t)} - hit

    def away(self, t: float) -> set[str]:
        """Return the replicas that have trained before ``t``, and do not train at ``t``."""
        seen = {name for name, times in self._times.items() if times and times[0] < t}
        return seen - self.most(t) - self._finished

    def _is_steady(self, name: str, t: float) -> bool:
        marks = [t - self.late_s, *(line.t for line in self._within(name, t - self.late_s, t)), t]
        pause_s = max(after - before for before, after in pairwise(marks))
        return pause_s < self.late_s / 2 and self._times[name][-1:] > [t]

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
