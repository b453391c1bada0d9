"""Compares the three sources of a drill: journals, recovery records, and the drill's own observations."""

from collections.abc import Iterator

from fabric.audit.audit import Evidence
from fabric.audit.journal import lines_of
from fabric.audit.summary import RunSummary
from fabric.drill.judge.drill_record import WIPED, DrillRecord, RecoveryFacts

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
