"""A job as people see it: plain JSON values, and one sentence on what its leader is waiting for."""

import asyncio
import json
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import islice
from typing import Any
from weakref import WeakKeyDictionary

from msgspec import to_builtins
from msgspec.structs import replace

from fabric.lighthouse.diagnosis.status_text import headline, outside_because, silence, waiting_for
from fabric.lighthouse.history.recovery import Absence, recoverable
from fabric.lighthouse.jobs.job import Job
from fabric.model import Member, Record, Sharing, StepTimes, Value, first_of
from fabric.protocol.leader.core import LeaderCore
from fabric.protocol.leader.evidence import host_of
from fabric.protocol.leader.liveness import LastStatus, Peer, as_member
from fabric.protocol.rules.assignment import readers_of
from fabric.protocol.rules.spare import settle, stack_of

# For data that only some replicas can read: which member reads and computes which shards, and which
# shards have only one reader left.


# The consequence when no member can read a shard, by ``Sharing.on_loss``.
_LOSSES = {
    "wait": "the job waits for a replica that can read it",
    "shrink": "its part of each step is skipped",
    "stop": "the job stops",
}
_NAMED = 4  # a sentence names this many shards and counts the other shards


def shard_readers(record: Record | None) -> dict[str, Any] | None:
    """Return SPARe's layout in this epoch as JSON values; None where every replica can read all data.

    ``redundancy``: how many data slots read each shard. ``depth``: how many parts the busiest member
    computes. ``last_reader``: shard number -> replica, for each shard that only one member reads. ``lost``:
    the shards that no member can read. ``warning``: a sentence on the shards with one reader, empty where
    there are none or the redundancy is 1.
    """
    if record is None or not record.sharing.readers:
        return None
    sharing, on_data_slot = record.sharing, {m.data_slot: m for m in record.roster}
    readers = {
        shard: [on_data_slot[slot].replica for slot in readers_of(shard, sharing) if slot in on_data_slot]
        for shard in range(sharing.data_slots)
    }
    members = [_reader_view(member, sharing, on_data_slot) for member in record.roster]
    last_reader = {str(shard): names[0] for shard, names in readers.items() if len(names) == 1}
    warning = ""
    if last_reader and sharing.readers > 1:
        named = first_of([f"{shard} ({replica})" for shard, replica in last_reader.items()], _NAMED)
        shards = f"shard {named} has" if len(last_reader) == 1 else f"shards {named} have"
        warning = (
            f"{shards} one reader left: when it dies, {_LOSSES[sharing.on_loss]}; bring back a replica that "
            "reads the same data"
        )
    return {
        "redundancy": sharing.readers,
        "shards": sharing.data_slots,
        "on_loss": sharing.on_loss,
        "depth": max((len(view["computes"]) for view in members), default=0),
        "members": members,
        "last_reader": last_reader,
        "lost": [shard for shard, names in readers.items() if not names],
        "warning": warning,
    }


def _reader_view(member: Member, sharing: Sharing, present: Iterable[int]) -> dict[str, Any]:
    """Return the shards that ``member`` reads, and those it computes beside the ``present`` data slots."""
    slot, owner = member.data_slot, list(range(sharing.data_slots))
    if sharing.policy == "constant":
        seated = frozenset(x for x in present if 0 <= x < sharing.data_slots)
        owner = list(settle(sharing.data_slots, sharing.readers, seated).owner)
    has_shard = 0 <= slot < sharing.data_slots
    return {
        "replica": member.replica,
        "data_slot": slot,
        "rack": member.rack,
        "reads": sorted(stack_of(slot, sharing.data_slots, sharing.readers)) if has_shard else [],
        "computes": [shard for shard, computed_on in enumerate(owner) if computed_on == slot],
    }


# The status of each job as JSON, computed once for all viewers.
#
# The status of a job grows with its members. Each of many viewers asks several times a second, and the
# same thread answers heartbeats. So every viewer gets the same answer until the next one is due.


# Seconds between two computations of a job's status, more in a job of many members.
_LOOK_S = 0.25
_ROWS_PER_S = 4000
# The newest recoveries that the page shows: each may name a hundred replicas.
_SHOWN = 20


class CachedStatus(Value):
    """A job's view and its newest recoveries as JSON, and when they were computed."""

    view: str
    recoveries: str
    at: float


class StatusCache:
    """The newest status of each job that has viewers."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._newest: WeakKeyDictionary[Job, CachedStatus] = WeakKeyDictionary()
        self._under_way: dict[Job, asyncio.Task[CachedStatus]] = {}

    def period_s(self, job: Job) -> float:
        """Return the seconds for which a computed status of this job is used."""
        return max(_LOOK_S, len(job.core.state.liveness.peers) / _ROWS_PER_S)

    async def look(self, job: Job) -> CachedStatus:
        """Return the job's status, computed at most ``period_s`` ago, and once for all viewers."""
        cached = self._newest.get(job)
        if cached is None or self._clock() - cached.at >= self.period_s(job):
            if job not in self._under_way:
                self._under_way[job] = asyncio.create_task(self._compute(job))
                self._under_way[job].add_done_callback(lambda _: self._under_way.pop(job, None))
            cached = await asyncio.shield(self._under_way[job])
        return cached

    async def _compute(self, job: Job) -> CachedStatus:
        now, view = self._clock(), await job_text(job)
        shown = job.history.recoveries.kept[-_SHOWN:]
        recoveries = json.dumps([recovery.to_json() for recovery in shown])
        cached = self._newest[job] = CachedStatus(view, recoveries, now)
        return cached


# The rows that one turn of the loop describes.
_ROWS = 16
# The most names, and the most snapshots, in one row of a status: a job may have a thousand rows.
_MOST_LISTED = 16


def job_line(job: Job, absent: list[Absence] | None = None) -> dict[str, Any]:
    """Describe one job in the list of all jobs; ``absent``: the replicas that it misses, if known."""
    record = job.core.state.record
    absent = job.absences() if absent is None else absent
    waiting = waiting_for(job.core, job.now, job.history.left_by)
    peers = job.core.state.liveness.peers.values()
    timed = [(peer.step, peer.times.loss) for peer in peers if peer.times is not None]
    return {
        "job": job.name,
        "generation": record.generation if record else 0,
        "epoch": record.epoch if record else 0,
        "step": job.core.state.top_step(),
        # Of the newest step that a member has told; empty where the user's code counts none.
        "loss": max(timed, default=(0, ""))[1],
        "members": len(record.roster) if record else 0,
        "sessions": len(job.connections.sessions),
        "complete": bool(record and record.complete),
        "paused": record.overrides.paused if record else "",
        "failed": job.core.endings.refused_for,
        "headline": headline(job.core, absent),
        # The headline has the reason of a failure.
        "waiting_for": waiting.removesuffix(f": {record.failed}" if record and record.failed else ""),
    }


async def job_text(job: Job, more: Mapping[str, Any] | None = None) -> str:
    """Describe all that the leader knows about a job, and ``more``, as JSON, in several turns of the loop.

    Ages and durations are in seconds.
    """
    text = json.dumps({**_head(job), **(more or {})})[:-1]
    for name, rows in _rows(job).items():
        pieces = []
        while piece := list(islice(rows, _ROWS)):
            pieces.append(json.dumps(piece)[1:-1])
            await asyncio.sleep(0)
        text += f', "{name}": [{", ".join(pieces)}]'
    return text + "}"


def _rows(job: Job) -> dict[str, Iterator[dict[str, Any]]]:
    core, now = job.core, job.now
    record = core.state.record
    servers = [
        (name, rank, status)
        for rank, statuses in core.state.liveness.servers.counting.items()
        for name, status in statuses.items()
        if status.connected or not core.state.is_complete
    ]
    servers.sort(key=lambda entry: entry[:2])
    peers = sorted(core.state.liveness.peers.items())
    outside = [p for n, p in peers if not (record and record.lists(n, p.incarnation))]
    return {
        "members": (_member_view(core, member, now) for member in (record.roster if record else ())),
        "nodes": ({**to_builtins(host), "since": round(time.time() - host.for_s, 1)} for host in job.hosts()),
        "joiners": (_joiner_view(core, peer, now) for peer in outside if peer.connected),
        "checkpoint_servers": (
            {"replica": name, "rank": rank, "incarnation": status.incarnation, **_status_view(status, now)}
            for name, rank, status in servers
        ),
    }


def _head(job: Job) -> dict[str, Any]:
    core, now = job.core, job.now
    record = core.state.record
    roster = record.roster if record else ()
    absent = job.absences()
    shown: dict[str, Any] | None = None
    if record is not None:
        shown = {**to_builtins(replace(record, roster=())), "is_forced": record.is_forced}
        del shown["roster"]
    checkpoints = core.state.liveness.durable()
    newest = max(checkpoints, key=lambda ref: (ref.generation, ref.step, ref.digest), default=None)
    behind = max(0, core.state.top_step() - newest.step) if newest is not None else 0
    return {
        **job_line(job, absent),
        "record": shown,
        "roster": [member.replica for member in roster],
        "policy": {
            **to_builtins(core.state.config.policy),
            "min_replicas": core.limits.least,
            "max_replicas": core.limits.most,
        },
        "penalties": to_builtins(core.evidence.penalties()),
        "hosts": core.evidence.hosts_that_failed(),
        "absent": to_builtins(absent),
        "data_shards": shard_readers(record),
        "recoverable": recoverable(core, now),
        "durable": {**to_builtins(newest), "steps_behind": behind} if newest is not None else None,
        "durable_failing": job.servers.failing,
        "ledger": job.look_at_ledger().to_json(),
        "health": job.slowness.to_json(core),
    }


def _member_view(core: LeaderCore, member: Member, now: float) -> dict[str, Any]:
    liveness, epoch = core.state.liveness, core.state.epoch
    peer, status = liveness.peers.get(member.replica), liveness.statuses().get(member.replica)
    verdict = epoch.pending_evictions.get(member.replica) or liveness.failure_reason(member, now)
    is_complete = core.state.is_complete
    if is_complete:
        status = status if status and status.connected else None  # checkpoint servers end soon after the job
        verdict = "finished"
    elif not verdict and member.replica in epoch.aborted:
        verdict = f"aborted: {epoch.aborted[member.replica].why}"
    session = _session_view(peer if peer and peer.incarnation == member.incarnation else None, now)
    alive = status is not None and status.incarnation == member.incarnation and status.ckpt
    return {
        **{name: value for name, value in to_builtins(member).items() if name != "cuts"},  # very long
        # A restarted server listens at another address than the record says.
        "ckpt": status.ckpt if status is not None and alive else "" if is_complete else member.ckpt,
        "host": host_of(member),
        "joining": member.joining and not core.state.knows(member),
        "running": member.replica in epoch.running,
        **session,
        "phase": "" if is_complete else session["phase"],
        "step": core.state.top_step() if is_complete else session["step"],
        "trainer_status": _status_of(status, member.incarnation, now),
        "verdict": verdict
        or (f"alive, but {trouble}" if (trouble := silence(liveness, member, now)) else "alive"),
    }


def _joiner_view(core: LeaderCore, peer: Peer, now: float) -> dict[str, Any]:
    session = peer.session
    status = core.state.liveness.statuses().get(session.replica)
    shown = ("replica", "incarnation", "link", "ckpt", "spare")
    return {
        **{name: getattr(session, name) for name in shown},
        "host": host_of(as_member(session)),
        **_session_view(peer, now),
        "trainer_status": _status_of(status, session.incarnation, now),
        "verdict": outside_because(core, peer, now),
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
        "waiting_for": list(beat.waiting_for[:_MOST_LISTED]) if beat else [],
        "times": _times_view(peer.times) if peer.times is not None else None,
    }


def _times_view(times: StepTimes) -> dict[str, Any]:
    body: dict[str, Any] = to_builtins(replace(times, work={}))
    del body["work"]
    for name in ("ranks", "measured"):
        body[name] = body[name][:_MOST_LISTED]
    for name in ("waiting_s", "sending_s"):
        body[name] = dict(list(body[name].items())[:_MOST_LISTED])
    return body


def _status_of(status: LastStatus | None, incarnation: int, now: float) -> dict[str, Any] | None:
    return _status_view(status, now) if status and status.incarnation == incarnation else None


def _status_view(status: LastStatus, now: float) -> dict[str, Any]:
    return {
        "trainer": status.trainer,
        "age_s": round(now - status.seen, 3),
        "connected": status.connected,
        "ckpt": status.ckpt,
        "snapshots": to_builtins(status.snapshots[-_MOST_LISTED:]),
    }
