"""The replicas that a job misses, and the sentence about them.

Status, page, metrics and alerts all read ``absences``, so that they agree.
"""

import re
import time
from collections.abc import Sequence
from dataclasses import replace

from fabric.lighthouse.diagnosis.status_text import outside_because
from fabric.lighthouse.history.recovery import DOWN, LEFT, OUTSIDE, Absence, Recoveries
from fabric.model import counted
from fabric.protocol.leader.evidence import host_of
from fabric.protocol.leader.liveness import Peer
from fabric.protocol.leader.view import LeaderView

# The end of a reason such as "its trainer has been stopped for 0.16 s", which was true at the eviction alone.
_DURATION = re.compile(r" (?:for )?\d+\.\d+ s\b(?: ago)?")
_NAMED = 8  # the headline names this many replicas and counts the others


def absences(view: LeaderView, recoveries: Recoveries, now: float) -> list[Absence]:
    """Return the replicas that a job misses, by name: failed, lost, drained, or never seen."""
    record = view.record
    if record is None:
        return _launched(view, recoveries, {}, now)
    if record.complete or record.failed:
        return []
    by_name = {}
    for member in record.roster:
        liveness, pending = view.liveness, view.epoch.pending_evictions
        if why := pending.get(member.replica) or liveness.failure_reason(member, now):
            since = time.time() - (now - liveness.last_contact(member, now))
            lasting = _DURATION.sub("", why)
            by_name[member.replica] = Absence(member.replica, DOWN, lasting, since, host_of(member), True)
    for recovery in recoveries.kept:
        for name, back in recovery.lost.items():
            if not (back.joined or back.replaced_by) and record.member(name) is None:
                why = back.why or recovery.why
                by_name[name] = _outside(view, name, why, recovery.detected, back.host, now)
    by_name = {**{x: gone for x, gone in recoveries.left.items() if record.member(x) is None}, **by_name}
    return _launched(view, recoveries, by_name, now)


def _launched(
    view: LeaderView, recoveries: Recoveries, by_name: dict[str, Absence], now: float
) -> list[Absence]:
    """Add the launchers' reports: the reason of an absence, and replicas whose processes never attach."""
    absent = dict(by_name)
    for name, report in recoveries.launches.newest.items():
        before = by_name.get(name)
        if _living(view, name, now) is not None:
            continue
        if before is not None:
            why = "; ".join(filter(None, (before.why, report.sentence)))
            host = before.host or report.host
            absent[name] = replace(before, why=why, host=host, last_line=report.last_line)
        elif not report.is_spare and (view.record is None or view.record.member(name) is None):
            why, last = report.sentence, report.last_line
            absent[name] = Absence(name, DOWN, why, report.at, report.host, False, last)
    return [absent[name] for name in sorted(absent)]


def _outside(view: LeaderView, name: str, why: str, since: float, host: str, now: float) -> Absence:
    """Describe a lost replica by its new process, if it has one."""
    peer = _living(view, name, now)
    if peer is None:
        return Absence(name, DOWN, _DURATION.sub("", why), since, host, False)
    return Absence(name, OUTSIDE, outside_because(view, peer, now), since, host, False)


def _living(view: LeaderView, name: str, now: float) -> Peer | None:
    """Return the replica's process that has a session; None without one, and while it seems to be dead."""
    peer = view.peers.get(name)
    is_dead = peer is None or not peer.connected or view.liveness.suspicion(peer.session, now)
    return None if is_dead else peer


def counts(view: LeaderView, absent: Sequence[Absence]) -> tuple[int, int]:
    """Return how many replicas train, and how many the job wants.

    The job wants as many as it starts with, and those it lost, up to the maximum that is in force.
    """
    record = view.record
    if record is None:
        return view.startable(), max(view.policy.start_replicas, view.startable() + len(absent))
    training = len(record.roster) - sum(absence.is_member for absence in absent)
    lost = sum(absence.state != LEFT for absence in absent)
    wanted = min(view.max_members, max(view.policy.start_replicas, training + lost))
    return training, max(training, wanted)


def headline(view: LeaderView, absent: Sequence[Absence]) -> str:
    """Say how many replicas train, and name each missing one with its time, reason and host."""
    record = view.record
    if record is not None and record.complete:
        return f"complete: {record.reason}"
    if record is not None and record.failed:
        return f"failed: {record.failed}"
    training, wanted = counts(view, absent)
    text = f"{training} of {counted(wanted, 'replica')}"
    named = [absence for absence in absent if absence.state != LEFT or training < wanted]
    text += "".join(f"; {absence.sentence}" for absence in named[:_NAMED])
    if len(named) > _NAMED:
        return f"{text}; and {len(named) - _NAMED} more"
    if record is not None and (unknown := wanted - training - len(named)) > 0:
        text += f"; {counted(unknown, 'replica')} not seen since this lighthouse leads"
    return text
