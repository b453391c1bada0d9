"""Sentences on what a job waits for, on the replicas that it misses, and on faults of its checkpoint servers.

They say why, and until when as a time of day (UTC). Status, page, metrics and alerts all read ``absences``,
so that they agree.
"""

import math
import re
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from functools import partial
from itertools import chain
from signal import Signals

from msgspec import Struct, field
from msgspec.structs import asdict, replace

from fabric.lighthouse.diagnosis.rank_probe import PeerAddresses
from fabric.lighthouse.history.recovery import DOWN, LEFT, OUTSIDE, Absence, Recoveries
from fabric.model import Member, Policy, Record, SnapshotRef, counted, first_of
from fabric.protocol.leader.admission import Backoff
from fabric.protocol.leader.core import LeaderCore
from fabric.protocol.leader.evidence import host_of
from fabric.protocol.leader.liveness import Liveness, Peer, as_member
from fabric.protocol.messages import leader_events as io
from fabric.protocol.messages.network import Heartbeat, HeartbeatAck, LeaderMessage, TrainerStatus
from fabric.protocol.nodes import ReplicaNodes
from fabric.protocol.rules.assignment import lost_parts, readers_of, waits_for_data

# Faults of checkpoint servers: a server is silent although its trainer sends heartbeats, or durable
# checkpoints fail. An event says when a fault begins and when it ends.


# A server sends a status every quarter of a second, in large jobs every second.
SILENT_S = 5.0


class HeardStatus(Struct):
    """The newest status of one rank over one connection, and when the core heard it."""

    status: TrainerStatus
    fed_at: float


class CheckpointServers(Struct):
    """The checkpoint servers of one job. ``failing``: why a replica's last durable checkpoint was not
    written; cleared when a replica writes a checkpoint."""

    failing: dict[str, str] = field(default_factory=dict)
    silent: set[str] = field(default_factory=set)
    _newest: SnapshotRef | None = None
    _errors: dict[str, str] = field(default_factory=dict)

    def look(self, core: LeaderCore, now: float, note: Callable[[str, str, str], None]) -> None:
        """Look for changes, and ``note`` each as an event (kind, replica, why)."""
        record, live = core.state.record, core.state.liveness
        newest = max(live.durable(), key=lambda ref: (ref.generation, ref.step), default=None)
        statuses = live.statuses().items()
        errors = {name: status.durable_error for name, status in statuses if status.durable_error}
        failing = self.failing if newest == self._newest else {}
        failing |= {name: error for name, error in errors.items() if self._errors.get(name) != error}
        self.failing = {name: error for name, error in failing.items() if name in errors}
        self._newest, self._errors = newest, errors
        roster = record.roster if record is not None and not record.complete and not record.failed else ()
        silent = {x.replica: sentence for x in roster if (sentence := silence(live, x, now))}
        for replica, sentence in silent.items():
            if replica not in self.silent:
                note("server silent", replica, sentence)
        for replica in sorted(self.silent - silent.keys()):
            if any(member.replica == replica for member in roster):
                note("server heard", replica, "its checkpoint server answers again")
        self.silent = set(silent)


def silence(liveness: Liveness, member: Member, now: float) -> str:
    """Say that this member's checkpoint server is silent while its trainer beats, or return an empty text."""
    peer = liveness.peers.get(member.replica)
    if peer is None or not peer.connected or peer.incarnation != member.incarnation:
        return ""
    for rank in range(len(member.addresses)):
        status = liveness.statuses(rank).get(member.replica)
        if status is None or status.incarnation != member.incarnation:
            continue
        quiet_s = now - status.seen
        if quiet_s >= SILENT_S + liveness.late_s:
            whose = f"the checkpoint server of its rank {rank}" if rank else "its checkpoint server"
            return f"{whose} has not answered for {quiet_s:.0f} s"
    return ""


_NAMED = 8  # a sentence names this many replicas and counts the other replicas
_some = partial(first_of, most=_NAMED)
# Members wait for each other in every step; the status reports only waits longer than this.
_WORTH_S = 1.0
# After this many seconds without a commit the status reports every wait.
_LONG_S = 3.0
# Seconds between two computations of the members' sentence, because the leader must look at every member.
_LOOK_S = 1.0


def policy_kept(asked: Policy, kept: Policy) -> str:
    """Say how this replica's policy differs from the job's."""
    there, here = asdict(kept), asdict(asked)
    return "it asked for " + ", ".join(
        f"{name} {here[name]:g}, the job has {there[name]:g}" for name in here if here[name] != there[name]
    )


def numbers(asked: io.Operator) -> str:
    """Return the limits or the mode that an operator orders, as the end of a sentence."""
    values = (("min", asked.min_replicas), ("max", asked.max_replicas), ("mode", asked.mode or None))
    return "".join(f", {name} {value}" for name, value in values if value is not None)


def no_room(
    job: str, replica: str, sessions: Collection[str], record: Record | None, needed: int, allowed: int
) -> str:
    """Return why ``replica`` gets no session, or an empty string.

    Either others fill the ``allowed`` places, or the replica needs more than are ``allowed``. A member of a
    roster within the limit needs no count: thousands of sessions open within seconds, and most belong to
    members.
    """
    names, others = record.names if record is not None else (), 0
    is_member = record is not None and record.member(replica) is not None
    if len(sessions) + len(names) >= allowed and not (is_member and len(names) <= allowed):
        others = len({*sessions, *names} - {replica})
    if others >= allowed:
        return (
            f"{replica} is not taken: job {job} has {counted(others, 'replica')}, as many as this lighthouse "
            "allows; end another one first, or have --limit max-replicas raised"
        )
    if needed > allowed:
        return (
            f"{replica} is not taken: it asks for at least {counted(needed, 'replica')}, and this lighthouse "
            f"allows {allowed}; lower FABRIC_REPLICAS, or have --limit max-replicas raised"
        )
    return ""


def time_of_day(due: float, now: float) -> str:
    """Return the time of day at which the core's clock, now at ``now``, shows ``due``."""
    return datetime.fromtimestamp(time.time() + due - now, UTC).strftime("%H:%M:%S UTC")


def outside_because(core: LeaderCore, peer: Peer, now: float) -> str:
    """Say why the process of this session is not in the roster."""
    session = peer.session
    if core.state.record is None:
        return "waits for the first start"
    if session.replica in core.endings.finished:
        return f"has finished at step {core.endings.finished[session.replica]}"
    if core.state.record.complete:
        return "the job is complete"
    if why := core.state.liveness.suspicion(session, now) or core.admission.kept_out(peer):
        return why
    if now < (backoff := core.admission.readmission_backoff.get(peer.process, Backoff())).until:
        again, times = time_of_day(backoff.until, now), counted(backoff.times, "time")
        return f"is not admitted before {again}: evicted {times}, and waits longer every time"
    if peer.process in core.admission.evicted_in_user_code:
        return "was evicted for its user code, and is not admitted before it comes back from there"
    if peer.generation != core.state.record.generation:
        return "has no state of this generation yet"
    return f"catches up: {counted(max(0, core.state.top_step() - peer.step), 'step')} behind"


def waiting_for(core: LeaderCore, now: float, left_by: int = 0) -> str:
    """Say what the leader waits for before its next move. ``left_by``: a signal that ended all launchers."""
    record = core.state.record
    if left_by:
        ended = f"launchers: {Signals(left_by).name} has ended all of them"
        return f"{ended}; start them to train on, or say `fabric end` if the job is over"
    if core.writer.reading:
        return "the store, to read the record again after a write that was refused or got lost"
    if core.writer.writing is not None:
        return f"the store, to commit epoch {core.writer.writing.epoch}"
    if record is None:
        return _waiting_to_start(core, now)
    if record.complete:
        return f"nothing: the job is complete at step {record.base.step}"
    if record.failed and core.endings.restart_after_failure:
        return f"replicas to begin the failed job again: {_waiting_to_start(core, now)}"
    if record.failed:
        return f"a person, to mend what failed and say `fabric retry`: {record.failed}"
    waits = chain(_waits_of_epoch(core, record, now), _waits_of_rounds(core, record, now))
    return next(waits, "nothing: every member runs")


class WaitSentence:
    """The sentence on what a job waits for; members get it with each HeartbeatAck."""

    def __init__(self) -> None:
        self._text = ""
        self._looked = -math.inf

    def attach(self, message: LeaderMessage, core: LeaderCore, now: float) -> LeaderMessage:
        """Add the sentence where ``message`` is a HeartbeatAck and the job waits."""
        if not isinstance(message, HeartbeatAck):
            return message
        if now - self._looked >= _LOOK_S:
            text = waiting_for(core, now)
            self._text, self._looked = "" if text.startswith("nothing") else text, now
        return replace(message, waiting_for=self._text) if self._text else message


def _waiting_to_start(core: LeaderCore, now: float) -> str:
    policy, wait_s, able = core.state.config.policy, core.starts.start_wait_s, core.starts.candidates()
    there, count = sum(peer.connected for peer in core.state.liveness.peers.values()), len(able)
    doubted = f", and {there - count} more a session but no sign of life" if there > count else ""
    if count < core.limits.least:
        return f"replicas to start with: {count} of at least {core.limits.least} have a session{doubted}"
    is_first = core.state.record is None and count >= policy.start_replicas
    awaited = core.starts.awaited_own_state(able) if is_first else None
    if awaited is not None:
        session, until_s = awaited.session, core.starts.own_state_until(awaited)
        return (
            f"the checkpoint server of {session.replica}, to hold the state of step {session.step} that its "
            f"script begins at, until {time_of_day(until_s, now)} at most"
        )
    waited = now - core.starts.waiting_since if core.starts.waiting_since is not None else 0.0
    record, live = core.state.record, core.state.liveness
    servers = live.servers_to_hear(record.roster, now) if record is not None else {}
    if servers and (waited >= wait_s or count >= policy.start_replicas):
        urls = _some(sorted(filter(None, servers))) or "of replicas outside the roster"
        due = time_of_day(max(servers.values()), now)
        return f"what the checkpoint servers {urls} hold, which may be the newest state, until {due} at most"
    until = time_of_day(now + wait_s - waited, now)
    return (
        f"replicas to start with: {count} of {policy.start_replicas} have a session{doubted}, "
        f"after {wait_s:g} s (now {waited:.1f} s, at {until}) {core.limits.least} will do"
    )


def _waits_of_epoch(core: LeaderCore, record: Record, now: float) -> Iterator[str]:
    """Describe the conditions of an epoch that are not met, in order: later ones depend on earlier ones."""
    epoch, live = core.state.epoch, core.state.liveness
    if epoch.pending_evictions:
        yield _waiting_to_evict(core, record, now)
    if epoch.aborted:
        due = time_of_day(max(core.rebuilds.rebuild_due, now), now)
        if epoch.unreachable:
            links = [f"{name} to {other}" for name, to in sorted(epoch.unreachable.items()) for other in to]
            yield f"all complaints of missing links (so far {_some(links)}), to leave some out at {due}"
        who = _some(sorted(epoch.aborted))
        yield f"a death that explains why {who} aborted, before forming again at {due}"
    if record.is_forced and epoch.decision is None:
        silent = [x.replica for x in record.roster if x.replica not in epoch.reports]
        if not silent:
            yield "a decision of a person: the reports contradict each other, see the events"
        begun = max(epoch.since, live.elected)
        yield f"the report of {_some(silent)} on epoch {record.epoch}{_heard(core, silent, begun, now)}"
    if len(record.roster) < core.limits.least:
        text = f"replicas: {len(record.roster)} of at least {core.limits.least} are members"
        if record.overrides.paused:
            yield f"{text}; joins are paused {record.overrides.paused}"
        outside = [
            f"; {name} is outside: {why}"
            for name, why in sorted(core.admission.waiting_outside.items())
            if name in live.peers and not live.suspicion(live.peers[name].session, now)
        ]
        yield text + "".join(outside[:_NAMED])
    if waits_for_data(record.sharing, record.roster):
        shard = lost_parts(record.sharing, record.roster)[0]
        data_slots = ", ".join(map(str, readers_of(shard, record.sharing)))
        yield f"a replica that can read shard {shard}: none of the members can, data slots {data_slots} could"


def _waits_of_rounds(core: LeaderCore, record: Record, now: float) -> Iterator[str]:
    """Describe what the members' rounds wait for, in the same order."""
    epoch, finished = core.state.epoch, core.endings.finished
    if away := [x.replica for x in record.roster if x.replica not in epoch.running]:
        heard = _heard(core, away, None, now)
        yield f"{_some(away)} to enter the first round of epoch {record.epoch}{heard}"
    for joiner, serving in sorted(core.joins.serving.items()):
        late = [x for x in serving.asked if x not in serving.taken and x not in serving.missed]
        if not serving.has_sources and late:
            heard = _heard(core, late, None, now)
            yield f"{_some(sorted(late))} to take a snapshot at step {serving.step} for {joiner}{heard}"
    late = [x.replica for x in record.roster if x.replica not in finished and not x.leaving]
    if finished and late:  # the finished members wait for the others
        yield f"{_some(late)} to finish as {_some(sorted(finished))} did{_heard(core, late, None, now)}"
    beats, links_s = _beats(core, record), now - max(epoch.since, epoch.decided_at)
    linking = [name for name, beat in beats.items() if beat.is_linking]
    if linking and links_s >= _WORTH_S:  # they cannot contribute yet
        yield f"the links of {_some(linking)} in epoch {record.epoch}, for {links_s:.1f} s now"
    if text := _waiting_in_step(core, record, now):
        yield text
    steps, stalled_s = {beat.step for beat in beats.values()}, now - core.state.last_step_at
    are_in = len(beats) == len(record.roster) and all(beat.waits for beat in beats.values())
    if are_in and len(steps) == 1 and stalled_s >= _LONG_S:  # every member waits for bytes
        yield f"the exchange of step {steps.pop()}, in which every member is, for {stalled_s:.1f} s now"


def _waiting_to_evict(core: LeaderCore, record: Record, now: float) -> str:
    epoch = core.state.epoch
    left = [x for x in record.roster if x.replica not in epoch.pending_evictions]
    if any(not x.joining or x.replica in epoch.running for x in left):
        return f"further deaths within {core.state.config.coalesce_s:g} s, to evict them together"
    unsure = [x for x in record.roster if not core.state.liveness.proven_dead(x)]
    if not unsure:
        return f"replicas for a cold start: {_waiting_to_start(core, now)}"
    limit_s = core.state.out_of_sight_s
    until = max(core.state.liveness.last_contact(x, now) for x in unsure) + limit_s
    return (
        f"certainty before a cold start: {_some([x.replica for x in unsure])} must be seen to have "
        f"ended, or be out of contact for {limit_s:g} s, which is until {time_of_day(until, now)}; "
        "where a host never returns, `fabric evict --host-is-gone` says so"
    )


def _beats(core: LeaderCore, record: Record) -> dict[str, Heartbeat]:
    """Return the newest heartbeats of this epoch, by member."""
    beats = {}
    for member in record.roster:
        peer = core.state.liveness.peers.get(member.replica)
        if peer is not None and peer.connected and peer.incarnation == member.incarnation and peer.beat:
            beats[member.replica] = peer.beat
    return {name: beat for name, beat in beats.items() if beat.epoch == record.epoch}


def _waiting_in_step(core: LeaderCore, record: Record, now: float) -> str:
    """Describe a long wait in the exchange for a member that has not entered it."""
    awaited = []
    for name, (step, since) in core.evictions.stragglers.since.items():
        peer = core.state.liveness.peers.get(name)
        if peer is None or not peer.connected or not record.lists(name, peer.incarnation):
            continue
        if peer.step <= step and now - since >= _WORTH_S:
            awaited.append((since, name, step))
    if not awaited:
        return ""
    # A member that is still in user code explains the wait better than a slow link.
    beats = {name: core.state.liveness.peers[name].beat for _, name, _ in awaited}
    absent = [
        (since, name, step)
        for since, name, step in awaited
        if not ((beat := beats[name]) and beat.step == step and beat.waits and not beat.busy)
    ]
    if not absent:
        return _waiting_for_bytes(core, awaited, now)
    since, name, step = min(absent)
    beat = beats[name]
    busy = f"busy with {beat.busy}" if beat is not None and beat.busy else "in user code"
    others = f" (and {len(absent) - 1} more)" if len(absent) > 1 else ""
    last_heard = _heard(core, [name], since, now)
    member = record.member(name)
    if member is not None and (trouble := silence(core.state.liveness, member, now)):
        last_heard += f"; {trouble}"
    return f"{name}{others}, {busy} in step {step}, for {now - since:.1f} s now{last_heard}"


def _waiting_for_bytes(core: LeaderCore, stalls: list[tuple[float, str, int]], now: float) -> str:
    """Describe awaited members that have entered the exchange and wait, too: their bytes have not arrived."""
    since, _, step = min(stalls)
    missed = {name for _, name, _ in stalls}
    links = [
        f"{name} to {by}"
        for by, peer in sorted(core.state.liveness.peers.items())
        if peer.beat is not None and peer.beat.step == step
        for name in peer.beat.waiting_for
        if name in missed and name != by
    ] or sorted(missed)  # a newer heartbeat may name no member any more
    return (
        f"what was sent in step {step} from {_some(links)}, for {now - since:.1f} s now: all of these have "
        "come and wait, so the links between them may be slow or cut"
    )


def _heard(core: LeaderCore, names: list[str], since: float | None, now: float) -> str:
    """Say when the longest silent member of ``names`` was last heard, and how long the others wait for it.

    ``since``: when the wait began; None for a wait without a bound.
    """
    peers = [peer for name in names if (peer := core.state.liveness.peers.get(name)) is not None]
    if not peers:
        return ""
    text = f": last seen {now - min(peer.seen for peer in peers):.1f} s ago"
    if since is not None:
        until = since + max(core.state.patience_s(peer) for peer in peers)
        text += f", may take until {time_of_day(until, now)}"
    return text


# The end of a reason such as "its trainer has been stopped for 0.16 s", which was true at the eviction alone.
_DURATION = re.compile(r" (?:for )?\d+\.\d+ s\b(?: ago)?")


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
    record, by_name = core.state.record, dict[str, Absence]()
    if record is not None and (record.complete or record.failed):
        return []
    if record is not None:
        by_name = _lost(core, recoveries, record, now)
    _add_launched(core, recoveries, by_name, now)
    _add_hosts(core, by_name, nodes, now)
    for name, x in by_name.items():
        if x.state == DOWN and addresses is not None and addresses.refused_at(name) > x.since:
            by_name[name] = replace(x, why=f"{x.why}; a wrong token for this job has come from its address")
    return [by_name[name] for name in sorted(by_name)]


def _lost(core: LeaderCore, recoveries: Recoveries, record: Record, now: float) -> dict[str, Absence]:
    """Return the members that seem dead, and the replicas that the job has lost."""
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
    return by_name


def _add_launched(core: LeaderCore, recoveries: Recoveries, by_name: dict[str, Absence], now: float) -> None:
    """Add the launchers' reports: the reason of an absence, and replicas whose processes never attach."""
    for name, report in recoveries.launches.newest.items():
        before, record = by_name.get(name), core.state.record
        if _living(core, name, now) is not None:
            continue
        if before is not None:
            if report.is_refused and report.at < before.since:
                continue  # another process of its name was refused while it trained
            why = "; ".join(filter(None, ("" if report.is_refused else before.why, report.sentence)))
            host, state = before.host or report.host, DOWN if report.is_refused else before.state
            by_name[name] = replace(before, state=state, why=why, host=host, last_line=report.last_line)
        elif (
            record is not None
            and not report.host
            and len(record.roster) >= core.state.config.policy.start_replicas
        ):
            continue  # a refused stranger may be meant for another job of this name
        elif not report.is_spare and (record is None or record.member(name) is None):
            why, last = report.sentence, report.last_line
            by_name[name] = Absence(name, DOWN, why, report.at, report.host, False, last)


def _add_hosts(
    core: LeaderCore, by_name: dict[str, Absence], nodes: Mapping[str, ReplicaNodes], now: float
) -> None:
    """Say which hosts an absent replica of several hosts lacks; add those that have never attached."""
    record = core.state.record
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
