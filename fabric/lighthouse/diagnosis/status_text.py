"""Sentences on what a job waits for, and on faults of its checkpoint servers.

They say why, and until when as a time of day (UTC)."""

import math
import time
from collections.abc import Callable, Collection, Iterator
from dataclasses import asdict, dataclass, field, replace
from datetime import UTC, datetime
from functools import partial
from signal import Signals

from fabric.model import Member, Policy, Record, SnapshotRef, counted, first_of
from fabric.protocol.leader.admission import Backoff
from fabric.protocol.leader.core import LeaderCore
from fabric.protocol.leader.liveness import Liveness, Peer
from fabric.protocol.leader.server_statuses import LastStatus
from fabric.protocol.messages import leader_events as io
from fabric.protocol.messages.network import Heartbeat, HeartbeatAck, LeaderMessage, TrainerStatus
from fabric.protocol.rules.assignment import lost_parts, readers_of, waits_for_data

# Faults of checkpoint servers: a server is silent although its trainer sends heartbeats, or durable
# checkpoints fail. An event says when a fault begins and when it ends.


# A server sends a status every quarter of a second, in large jobs every second.
SILENT_S = 5.0


@dataclass(slots=True)
class HeardStatus:
    """The newest status of one rank over one connection, and when the core heard it."""

    status: TrainerStatus
    fed_at: float


@dataclass(slots=True)
class CheckpointServers:
    """The checkpoint servers of one job. ``failing``: why a replica's last durable checkpoint was not
    written; cleared when a replica writes a checkpoint."""

    failing: dict[str, str] = field(default_factory=dict)
    silent: set[str] = field(default_factory=set)
    _newest: SnapshotRef | None = None
    _errors: dict[str, str] = field(default_factory=dict)

    def look(self, core: LeaderCore, now: float, note: Callable[[str, str, str], None]) -> None:
        """Look for changes, and ``note`` each as an event (kind, replica, why)."""
        self._look_at_storage(core.state.liveness)
        record = core.state.record
        roster = record.roster if record is not None and not record.complete and not record.failed else ()
        live = core.state.liveness
        silent = {x.replica: sentence for x in roster if (sentence := silence(live, x, now))}
        for replica, sentence in silent.items():
            if replica not in self.silent:
                note("server silent", replica, sentence)
        for replica in sorted(self.silent - silent.keys()):
            if any(member.replica == replica for member in roster):
                note("server heard", replica, "its checkpoint server answers again")
        self.silent = set(silent)

    def _look_at_storage(self, liveness: Liveness) -> None:
        newest = max(liveness.durable(), key=lambda ref: (ref.generation, ref.step), default=None)
        statuses = liveness.statuses().items()
        errors = {name: status.durable_error for name, status in statuses if status.durable_error}
        if newest != self._newest:
            self.failing.clear()
        for name, error in errors.items():
            if self._errors.get(name) != error:
                self.failing[name] = error
        self.failing = {name: error for name, error in self.failing.items() if name in errors}
        self._newest, self._errors = newest, errors


def silence(liveness: Liveness, member: Member, now: float) -> str:
    """Say that this member's checkpoint server is silent while its trainer beats, or return an empty text."""
    peer = liveness.peers.get(member.replica)
    if peer is None or not peer.connected or peer.incarnation != member.incarnation:
        return ""
    for rank, status in _statuses(liveness, member):
        quiet_s = now - status.seen
        if status.incarnation == member.incarnation and quiet_s >= SILENT_S + liveness.late_s:
            whose = f"the checkpoint server of its rank {rank}" if rank else "its checkpoint server"
            return f"{whose} has not answered for {quiet_s:.0f} s"
    return ""


def _statuses(liveness: Liveness, member: Member) -> Iterator[tuple[int, LastStatus]]:
    for rank in range(len(member.addresses)):
        status = liveness.statuses(rank).get(member.replica)
        if status is not None:
            yield rank, status


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


def others(replica: str, sessions: Collection[str], record: Record | None, allowed: int) -> int:
    """Count the other replicas of the job. A member of a roster within the limit needs no count and gets 0.

    This saves time, because thousands of sessions open within seconds, and most belong to members.
    """
    members = len(record.roster) if record is not None else 0
    if len(sessions) + members < allowed:
        return 0
    if members <= allowed and record is not None and record.member(replica) is not None:
        return 0
    return len({*sessions, *(record.names if record is not None else ())} - {replica})


def no_room(job: str, replica: str, others: int, needed: int, allowed: int) -> str:
    """Return why ``replica`` gets no session, or an empty string.

    Either the ``others`` fill the ``allowed`` places, or the replica needs more than are ``allowed``.
    """
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
    return _waiting_in_epoch(core, record, now)


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


def _waiting_in_epoch(core: LeaderCore, record: Record, now: float) -> str:
    """Describe the first condition that is not met; later conditions depend on it."""
    for look in (
        _waiting_to_evict,
        _waiting_to_form_again,
        _waiting_for_reports,
        _waiting_for_members,
        _waiting_for_data,
        _waiting_to_enter,
        _waiting_for_snapshots,
        _waiting_to_end,
        _waiting_to_link,
        _waiting_in_step,
        _waiting_in_exchange,
    ):
        text = look(core, record, now)
        if text:
            return text
    return "nothing: every member runs"


def _waiting_to_evict(core: LeaderCore, record: Record, now: float) -> str:
    epoch = core.state.epoch
    if not epoch.pending_evictions:
        return ""
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


def _waiting_to_form_again(core: LeaderCore, _: Record, now: float) -> str:
    epoch = core.state.epoch
    if not epoch.aborted:
        return ""
    due = time_of_day(max(core.rebuilds.rebuild_due, now), now)
    if epoch.unreachable:
        links = [f"{name} to {other}" for name, to in sorted(epoch.unreachable.items()) for other in to]
        return f"all complaints of missing links (so far {_some(links)}), to leave some out at {due}"
    who = _some(sorted(epoch.aborted))
    return f"a death that explains why {who} aborted, before forming again at {due}"


def _waiting_for_reports(core: LeaderCore, record: Record, now: float) -> str:
    epoch = core.state.epoch
    if not record.is_forced or epoch.decision is not None:
        return ""
    silent = [x.replica for x in record.roster if x.replica not in epoch.reports]
    if not silent:
        return "a decision of a person: the reports contradict each other, see the events"
    begun = max(epoch.since, core.state.liveness.elected)
    return f"the report of {_some(silent)} on epoch {record.epoch}{_heard(core, silent, begun, now)}"


def _waiting_for_members(core: LeaderCore, record: Record, now: float) -> str:
    if len(record.roster) >= core.limits.least:
        return ""
    text = f"replicas: {len(record.roster)} of at least {core.limits.least} are members"
    if record.overrides.paused:
        return f"{text}; joins are paused {record.overrides.paused}"
    live = core.state.liveness
    outside = [
        f"; {name} is outside: {why}"
        for name, why in sorted(core.admission.waiting_outside.items())
        if name in live.peers and not live.suspicion(live.peers[name].session, now)
    ]
    return text + "".join(outside[:_NAMED])


def _waiting_to_enter(core: LeaderCore, record: Record, now: float) -> str:
    away = [x.replica for x in record.roster if x.replica not in core.state.epoch.running]
    if not away:
        return ""
    return f"{_some(away)} to enter the first round of epoch {record.epoch}{_heard(core, away, None, now)}"


def _waiting_for_snapshots(core: LeaderCore, _: Record, now: float) -> str:
    for joiner, serving in sorted(core.joins.serving.items()):
        late = [x for x in serving.asked if x not in serving.taken and x not in serving.missed]
        if not serving.has_sources and late:
            last_heard = _heard(core, late, None, now)
            return f"{_some(sorted(late))} to take a snapshot at step {serving.step} for {joiner}{last_heard}"
    return ""


def _waiting_for_data(_: LeaderCore, record: Record, _now: float) -> str:
    if not waits_for_data(record.sharing, record.roster):
        return ""
    shard = lost_parts(record.sharing, record.roster)[0]
    data_slots = ", ".join(str(data_slot) for data_slot in readers_of(shard, record.sharing))
    return f"a replica that can read shard {shard}: none of the members can, data slots {data_slots} could"


def _waiting_to_end(core: LeaderCore, record: Record, now: float) -> str:
    """Describe the members that have not finished, for which the finished members wait."""
    late = [x.replica for x in record.roster if x.replica not in core.endings.finished and not x.leaving]
    if not core.endings.finished or not late:
        return ""
    early = _some(sorted(core.endings.finished))
    return f"{_some(late)} to finish as {early} did{_heard(core, late, None, now)}"


def _beats(core: LeaderCore, record: Record) -> dict[str, Heartbeat]:
    """Return the newest heartbeats of this epoch, by member."""
    beats = {}
    for member in record.roster:
        peer = core.state.liveness.peers.get(member.replica)
        if peer is not None and peer.connected and peer.incarnation == member.incarnation and peer.beat:
            beats[member.replica] = peer.beat
    return {name: beat for name, beat in beats.items() if beat.epoch == record.epoch}


def _waiting_to_link(core: LeaderCore, record: Record, now: float) -> str:
    """Describe members whose links of this epoch take long to connect; they cannot contribute yet."""
    since = max(core.state.epoch.since, core.state.epoch.decided_at)
    if now - since < _WORTH_S:
        return ""
    linking = [name for name, beat in _beats(core, record).items() if beat.is_linking]
    if not linking:
        return ""
    return f"the links of {_some(linking)} in epoch {record.epoch}, for {now - since:.1f} s now"


def _waiting_in_exchange(core: LeaderCore, record: Record, now: float) -> str:
    """Describe an exchange in which every member waits for bytes."""
    beats = _beats(core, record)
    if now - core.progress.last_step_at < _LONG_S or len(beats) < len(record.roster):
        return ""
    steps = {beat.step for beat in beats.values()}
    if len(steps) > 1 or not all(beat.waits for beat in beats.values()):
        return ""
    stalled_s = now - core.progress.last_step_at
    return f"the exchange of step {steps.pop()}, in which every member is, for {stalled_s:.1f} s now"


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
    absent = [x for x in awaited if not _is_back(core.state.liveness.peers[x[1]], x[2])]
    if not absent:
        return _waiting_for_bytes(core, awaited, now)
    awaited = absent
    since, name, step = min(awaited)
    peer = core.state.liveness.peers[name]
    busy = f"busy with {peer.beat.busy}" if peer.beat is not None and peer.beat.busy else "in user code"
    others = f" (and {len(awaited) - 1} more)" if len(awaited) > 1 else ""
    last_heard = _heard(core, [name], since, now)
    member = record.member(name)
    if member is not None and (trouble := silence(core.state.liveness, member, now)):
        last_heard += f"; {trouble}"
    return f"{name}{others}, {busy} in step {step}, for {now - since:.1f} s now{last_heard}"


def _is_back(peer: Peer, step: int) -> bool:
    """Whether the member's main thread has returned from user code in this step and waits."""
    return peer.beat is not None and peer.beat.step == step and peer.beat.waits and not peer.beat.busy


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
