"""The replicas that a job misses, and the sentence about them.

Status, page, metrics and alerts all read ``absences``, so that they agree.
"""

import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace

from fabric.lighthouse.diagnosis.rank_probe import PeerAddresses
from fabric.lighthouse.diagnosis.status_text import outside_because
from fabric.lighthouse.history.recovery import DOWN, LEFT, OUTSIDE, Absence, Recoveries
from fabric.model import counted, first_of
from fabric.protocol.leader.core import LeaderCore
from fabric.protocol.leader.evidence import host_of
from fabric.protocol.leader.liveness import Peer, as_member
from fabric.protocol.nodes import ReplicaNodes

# The end of a reason such as "its trainer has been stopped for 0.16 s", which was true at the eviction alone.
_DURATION = re.compile(r" (?:for )?\d+\.\d+ s\b(?: ago)?")
_NAMED = 8  # the headline names this many replicas and counts the others


def absences(
    core: LeaderCore,
    recoveries: Recoveries,
    now: float,
    addresses: PeerAddresses | None = None,
    nodes: Mapping[str, ReplicaNodes] = {},
) -> list[Absence]:
    """Return the replicas that a job misses, by name: failed, lost, drained, or never seen.

    ``nodes`` has the hosts of each replica of several hosts.
    """
    refused_at = addresses.refused_at if addresses is not None else lambda _: 0.0
    absent = _without_hosts(core, _absences(core, recoveries, now), nodes, now)
    return [
        replace(x, why=f"{x.why}; a wrong token for this job has come from its address")
        if x.state == DOWN and refused_at(x.replica) > x.since
        else x
        for x in absent
    ]


def _absences(core: LeaderCore, recoveries: Recoveries, now: float) -> list[Absence]:
    record = core.state.record
    if record is None:
        return _launched(core, recoveries, {}, now)
    if record.complete or record.failed:
        return []
    by_name = {}
    for member in record.roster:
        liveness, pending = core.state.liveness, core.state.epoch.pending_evictions
        if why := pending.get(member.replica) or liveness.failure_reason(member, now):
            since = time.time() - (now - liveness.last_contact(member, now))
            lasting = _DURATION.sub("", why)
            by_name[member.replica] = Absence(member.replica, DOWN, lasting, since, host_of(member), True)
    for recovery in recoveries.kept:
        for name, back in recovery.lost.items():
            if not (back.joined or back.replaced_by) and record.member(name) is None:
                why = back.why or recovery.why
                by_name[name] = _outside(core, name, why, recovery.detected, back.host, now)
    by_name = {**{x: gone for x, gone in recoveries.left.items() if record.member(x) is None}, **by_name}
    lacked = core.state.config.policy.start_replicas - len(record.roster)
    lacked -= sum(not x.is_member for x in by_name.values())
    for name in sorted(record.strangers(core.state.liveness.peers.keys()) - by_name.keys()):
        # No record of its loss is left, as the store was away.
        peer = _living(core, name, now)
        if lacked > 0 and peer is not None and not peer.session.spare:
            since, host = time.time() - (now - peer.opened), host_of(as_member(peer.session))
            by_name[name], lacked = _outside(core, name, "", since, host, now), lacked - 1
    return _launched(core, recoveries, by_name, now)


def _launched(
    core: LeaderCore, recoveries: Recoveries, by_name: dict[str, Absence], now: float
) -> list[Absence]:
    """Add the launchers' reports: the reason of an absence, and replicas whose processes never attach."""
    absent = dict(by_name)
    for name, report in recoveries.launches.newest.items():
        before, record = by_name.get(name), core.state.record
        if _living(core, name, now) is not None:
            continue
        if before is not None:
            if report.is_refused and report.at < before.since:
                continue  # another process of its name was refused while it trained
            why = "; ".join(filter(None, ("" if report.is_refused else before.why, report.sentence)))
            host, state = before.host or report.host, DOWN if report.is_refused else before.state
            absent[name] = replace(before, state=state, why=why, host=host, last_line=report.last_line)
        elif (
            record is not None
            and not report.host
            and len(record.roster) >= core.state.config.policy.start_replicas
        ):
            continue  # a refused stranger may be meant for another job of this name
        elif not report.is_spare and (record is None or record.member(name) is None):
            why, last = report.sentence, report.last_line
            absent[name] = Absence(name, DOWN, why, report.at, report.host, False, last)
    return [absent[name] for name in sorted(absent)]


def _without_hosts(
    core: LeaderCore, absent: list[Absence], nodes: Mapping[str, ReplicaNodes], now: float
) -> list[Absence]:
    """Say which hosts an absent replica of several hosts lacks; add those that have never attached."""
    record, by_name = core.state.record, {x.replica: x for x in absent}
    if not nodes or (record is not None and (record.complete or record.failed)):
        return absent
    lacks = record is None or len(record.roster) < core.state.config.policy.start_replicas
    for name, of_replica in nodes.items():
        gone = [host for host in of_replica.rows(now) if host.state == "missing"]
        before = by_name.get(name)
        if not gone or _living(core, name, now) is not None or not (before or lacks or of_replica.attempt[0]):
            continue
        if before is None:
            before = Absence(name, DOWN, "", time.time() - max(host.for_s for host in gone), "", False)
        which = first_of([host.why for host in gone])
        why = "; ".join(filter(None, (before.why, f"it waits for a host: {which}")))
        hosts = first_of([host.host for host in gone if host.host])
        by_name[name] = replace(before, why=why, host=hosts or before.host)
    return [by_name[name] for name in sorted(by_name)]


def _outside(core: LeaderCore, name: str, why: str, since: float, host: str, now: float) -> Absence:
    """Describe a lost replica by its new process, if it has one."""
    peer = _living(core, name, now)
    if peer is None:
        return Absence(name, DOWN, _DURATION.sub("", why), since, host, False)
    return Absence(name, OUTSIDE, outside_because(core, peer, now), since, host, False)


def _living(core: LeaderCore, name: str, now: float) -> Peer | None:
    """Return the replica's process that has a session; None without one, and while it seems to be dead."""
    peer = core.state.liveness.peers.get(name)
    is_dead = peer is None or not peer.connected or core.state.liveness.suspicion(peer.session, now)
    return None if is_dead else peer


def left_by(core: LeaderCore, recoveries: Recoveries, now: float, before: int) -> int:
    """Return the signal that has ended the launcher of every replica that trained the newest step; else 0.

    Such a job is left, and does not stand still. It stays left, as ``before`` says, until somebody tries to
    train again: a session, or a launcher that starts its replica again.
    """
    record, reports = core.state.record, recoveries.launches.newest
    if core.state.is_complete or any(_living(core, name, now) for name in core.state.liveness.peers):
        return 0
    trained = set(record.names) if record is not None else {x for x in reports if reports[x].host}
    for recovery in recoveries.kept:
        if not recovery.step_committed:
            trained |= {x for x, back in recovery.lost.items() if not (back.joined or back.replaced_by)}
    signals = [reports[name].stopped_by if name in reports else 0 for name in trained]
    if signals and all(signals):
        return max(signals)
    return 0 if any(report.host and not report.gave_up for report in reports.values()) else before


def counts(core: LeaderCore, absent: Sequence[Absence]) -> tuple[int, int]:
    """Return how many replicas train, and how many the job wants.

    The job wants as many as it starts with, and those it lost, up to the maximum that is in force.
    """
    record = core.state.record
    if record is None:
        able = len(core.starts.candidates())
        return able, max(core.state.config.policy.start_replicas, able + len(absent))
    training = len(record.roster) - sum(absence.is_member for absence in absent)
    lost = sum(absence.state != LEFT for absence in absent)
    wanted = min(core.limits.most, max(core.state.config.policy.start_replicas, training + lost))
    return training, max(training, wanted)


def headline(core: LeaderCore, absent: Sequence[Absence]) -> str:
    """Say how many replicas train, and name each missing one with its time, reason and host."""
    record = core.state.record
    if record is not None and record.complete:
        return f"complete: {record.reason}"
    if record is not None and record.failed:
        return f"failed: {record.failed}"
    training, wanted = counts(core, absent)
    text = f"{training} of {counted(wanted, 'replica')}"
    named = [absence for absence in absent if absence.state != LEFT or training < wanted]
    text += "".join(f"; {absence.sentence}" for absence in named[:_NAMED])
    if len(named) > _NAMED:
        return f"{text}; and {len(named) - _NAMED} more"
    if record is not None and (unknown := wanted - training - len(named)) > 0:
        text += f"; {counted(unknown, 'replica')} not seen since this lighthouse leads"
    return text
