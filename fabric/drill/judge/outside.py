"""The measures of a job without its journals: from the lighthouse's records and status."""

import math
from itertools import pairwise

from fabric.drill.judge.drill_record import DrillRecord, InjectedFault
from fabric.drill.judge.timelines import CommitGap, covered

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
