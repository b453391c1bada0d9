"""A job as people see it: plain JSON values, and one sentence on what its leader is waiting for."""

from dataclasses import asdict
from typing import Any

from fabric.lighthouse.job import Job
from fabric.lighthouse.progress import recoverable, top_step
from fabric.model import Member, Record
from fabric.protocol.leader import Leader
from fabric.protocol.liveness import Peer, PulseState

_NAMED = 8  # that many replicas are named in a sentence, the rest counted


def job_line(job: Job) -> dict[str, Any]:
    """One job in the list of all."""
    record = job.core.record
    return {
        "job": job.name,
        "generation": record.generation if record else 0,
        "epoch": record.epoch if record else 0,
        "step": top_step(job.core),
        "members": len(record.roster) if record else 0,
        "sessions": len(job.sessions),
        "complete": bool(record and record.complete),
        "paused": record.orders.paused if record else "",
        "waiting_for": waiting_for(job.core, job.now),
    }


def job_view(job: Job) -> dict[str, Any]:
    """Everything the leader knows about a job. Ages and durations are in seconds."""
    core, now = job.core, job.now
    record = core.record
    peers = core.liveness.peers
    roster = record.roster if record else ()
    outside = [p for n, p in sorted(peers.items()) if not (record and record.lists(n, p.incarnation))]
    return {
        **job_line(job),
        "record": _record_view(record),
        "roster": [member.replica for member in roster],
        "policy": {
            **asdict(core.config.policy),
            "min_replicas": core.least,
            "max_replicas": core.most,
        },
        "penalties": [asdict(penalty) for penalty in core.penalties()],
        "members": [_member_view(core, member, now) for member in roster],
        "joiners": [_joiner_view(core, peer, now) for peer in outside if peer.connected],
        "checkpoint_servers": [
            {"replica": name, "rank": rank, "incarnation": pulse.incarnation, **_pulse_view(pulse, now)}
            for name, rank, pulse in _servers(core)
        ],
        "recoverable": recoverable(core, now),
        "durable": _durable(core),
    }


def _servers(core: Leader) -> list[tuple[str, int, PulseState]]:
    """Every checkpoint server that has spoken, by replica and rank."""
    ranks = {0: core.liveness.pulses, **core.liveness.rank_pulses}
    found = [(name, rank, pulse) for rank, pulses in ranks.items() for name, pulse in pulses.items()]
    return sorted(found, key=lambda entry: entry[:2])


def _durable(core: Leader) -> dict[str, Any] | None:
    """The newest durable checkpoint that anybody has found or written, and how old it is in committed
    steps."""
    newest = max(
        core.liveness.durable(), key=lambda ref: (ref.generation, ref.step, ref.digest), default=None
    )
    if newest is None:
        return None
    return {**asdict(newest), "steps_behind": max(0, top_step(core) - newest.step)}


def waiting_for(core: Leader, now: float) -> str:
    """What must happen before the leader's next move, in a sentence."""
    record = core.record
    if core.reading:
        return "the store, to read the record again after a write that was refused or got lost"
    if core.writing is not None:
        return f"the store, to commit epoch {core.writing.epoch}"
    if record is None:
        return _waiting_to_start(core, now)
    if record.complete:
        return f"nothing: the job is complete at step {record.base.step}"
    if record.failed:
        return f"a person, to mend what failed and start the replicas again: {record.failed}"
    return _waiting_in_epoch(core, record, now)


def _waiting_to_start(core: Leader, now: float) -> str:
    policy = core.config.policy
    count = sum(peer.connected for peer in core.liveness.peers.values())
    if count < core.least:
        return f"replicas to start with: {count} of at least {core.least} have a session"
    waited = now - core.waiting_since if core.waiting_since is not None else 0.0
    return (
        f"replicas to start with: {count} of {policy.start_replicas} have a session, "
        f"after {policy.start_wait_s:g} s (now {waited:.1f} s) {core.least} will do"
    )


def _waiting_in_epoch(core: Leader, record: Record, now: float) -> str:
    epoch = core.epoch
    left = [x for x in record.roster if x.replica not in epoch.condemned]
    if epoch.condemned and not any(not x.fresh or x.replica in epoch.running for x in left):
        unsure = [x.replica for x in record.roster if not core.liveness.confirmed(x)]
        limit_s = core.config.autonomy_s + core.config.autonomy_margin_s
        if unsure:
            return (
                f"certainty before a cold start: {_some(unsure)} must be seen to have ended, or be out of "
                f"contact for {limit_s:g} s"
            )
        return f"replicas for a cold start: {_waiting_to_start(core, now)}"
    if epoch.condemned:
        return f"further deaths within {core.config.coalesce_s:g} s, to evict them together"
    if epoch.aborted:
        return f"a death that explains why {_some(sorted(epoch.aborted))} aborted, before forming again"
    if record.is_forced and epoch.decision is None:
        silent = [x.replica for x in record.roster if x.replica not in epoch.reports]
        if silent:
            return f"the report of {_some(silent)} on epoch {record.epoch}"
        return "a decision of a person: the reports contradict each other, see the events"
    if len(record.roster) < core.least:
        paused = f"; joins are paused {record.orders.paused}" if record.orders.paused else ""
        return f"replicas: {len(record.roster)} of at least {core.least} are members{paused}"
    away = [x.replica for x in record.roster if x.replica not in epoch.running]
    if away:
        return f"{_some(away)} to enter the first round of epoch {record.epoch}"
    for joiner, serving in sorted(core.serving.items()):
        if not serving.told:
            late = [x for x in serving.asked if x not in serving.taken and x not in serving.missed]
            return f"{_some(sorted(late))} to take a snapshot at step {serving.step} for {joiner}"
    return "nothing: every member runs"


def _record_view(record: Record | None) -> dict[str, Any] | None:
    if record is None:
        return None
    body = asdict(record)
    del body["roster"]
    return {**body, "is_forced": record.is_forced}


def _member_view(core: Leader, member: Member, now: float) -> dict[str, Any]:
    liveness, epoch = core.liveness, core.epoch
    peer, pulse = liveness.peers.get(member.replica), liveness.pulses.get(member.replica)
    verdict = epoch.condemned.get(member.replica) or liveness.verdict(member, now)
    if not verdict and member.replica in epoch.aborted:
        verdict = f"aborted: {epoch.aborted[member.replica].why}"
    alive = pulse is not None and pulse.incarnation == member.incarnation and pulse.ckpt
    return {
        **asdict(member),
        # A server that was started again listens elsewhere than the record says.
        "ckpt": pulse.ckpt if pulse is not None and alive else member.ckpt,
        "running": member.replica in epoch.running,
        **_session_view(peer if peer and peer.incarnation == member.incarnation else None, now),
        "pulse": _pulse_view(pulse, now) if pulse and pulse.incarnation == member.incarnation else None,
        "verdict": verdict or "alive",
    }


def _joiner_view(core: Leader, peer: Peer, now: float) -> dict[str, Any]:
    session = peer.session
    pulse = core.liveness.pulses.get(session.replica)
    if core.record is None:
        verdict = "waits for the first start"
    elif session.replica in core.finished:
        verdict = f"has finished at step {core.finished[session.replica]}"
    elif core.kept_out(peer):
        verdict = core.kept_out(peer)
    elif peer.generation != core.record.generation:
        verdict = "has no state of this generation yet"
    else:
        verdict = f"catches up: {max(0, top_step(core) - peer.step)} steps behind"
    return {
        "replica": session.replica,
        "incarnation": session.incarnation,
        "link": session.link,
        "ckpt": session.ckpt,
        "spare": session.spare,
        **_session_view(peer, now),
        "pulse": _pulse_view(pulse, now) if pulse and pulse.incarnation == session.incarnation else None,
        "verdict": verdict,
    }


def _session_view(peer: Peer | None, now: float) -> dict[str, Any]:
    if peer is None:
        return {"connected": False, "session_age_s": None, "phase": "", "step": None, "generation": None}
    beat = peer.beat
    return {
        "connected": peer.connected,
        "session_age_s": round(now - peer.seen, 3),
        "phase": beat.phase if beat else "",
        "step": peer.step,
        "generation": peer.generation,
        "busy": beat.busy if beat else "",
        "waiting_for": list(beat.waiting_for) if beat else [],
        "times": asdict(beat.times) if beat and beat.times else None,
    }


def _pulse_view(pulse: PulseState, now: float) -> dict[str, Any]:
    return {
        "trainer": pulse.trainer,
        "age_s": round(now - pulse.seen, 3),
        "connected": pulse.connected,
        "ckpt": pulse.ckpt,
        "snapshots": [asdict(ref) for ref in pulse.snapshots],
    }


def _some(names: list[str]) -> str:
    more = len(names) - _NAMED
    return ", ".join(names[:_NAMED]) + (f" and {more} more" if more > 0 else "")
