"""The thread that performs this rank's collectives with the equal ranks of the other replicas.

It performs them in the order of the calls. Before the bytes move, the members agree on the call
(``calls``). A collective that fails ends with CollectiveFailed, and so do those that were queued behind it.
The result of the newest collective is kept for a member that has to repeat its call. While no call is under
way here, the thread answers such a member.
"""

import threading
import time
from collections.abc import Callable
from concurrent.futures import CancelledError, Future
from contextlib import AbstractContextManager

import torch
from msgspec import field
from msgspec.structs import replace

from fabric.client.collectives.calls import (
    Call,
    CallFrame,
    Go,
    GroupRing,
    Key,
    Offer,
    Payload,
    Refuse,
    Supply,
    describe,
    judge,
    make_call,
)
from fabric.client.control.engine import Engine, EngineParts
from fabric.client.control.peers import CollectiveGroup, CollectiveLinks, LinkedRing
from fabric.client.process.worker import Worker
from fabric.errors import CollectiveFailed, ConfigError, Mismatch, NotAMember, ProtocolError, RoundAborted
from fabric.model import Member, Record, Value
from fabric.protocol.messages import member_events as io
from fabric.runtime.failpoints import Failpoints

_NOT_STARTED = "the first step has not begun: call collectives inside the loop over session.steps, or after "
_NOT_STARTED += "the first session.exchange"


class Phase(Value):
    """A part of a step in which the same members take part in all collectives."""

    place: tuple[int, int]  # committed steps, and whether the next step is being computed
    epoch: int  # the epoch of the round
    members: tuple[Member, ...]
    generation: int = 0  # the generation of the round: after a cold start the same step is another one


class CollectiveMembers:
    """The main thread begins phases; any thread asks for their groups.

    Before the commit of a step these are the members that compute it. After the commit they are all members
    of the round that committed it, also where an epoch with newcomers is in force by then. A forced epoch
    takes out the members that it does not list.
    """

    def __init__(self, engine: Engine, replica: str, incarnation: int) -> None:
        self._engine = engine
        self.replica = replica
        self._incarnation = incarnation
        self._records: dict[int, Record] = {}  # the epochs in which a step may yet be committed, as announced
        self._committed: Record | None = None  # the epoch of the newest round that this process committed
        self._phase: Phase | None = None
        self._why_not = _NOT_STARTED

    @property
    def phase(self) -> Phase:
        """The phase of the main thread. Raises NotAMember."""
        if self._phase is None:
            raise NotAMember(f"{self.replica} takes part in no collective now: {self._why_not}")
        return self._phase

    def note(self, record: Record) -> None:
        """Keep the record of an epoch that is announced or in force.

        A prepared round is a promise: a decision may commit it any number of epochs later. So the records
        stay until the next step ends.
        """
        before = self._records.get(record.epoch)
        if before is not None and before.fence != record.fence:
            del self._records[record.epoch]  # another store counts its epochs from 1: this one is new
        self._records[record.epoch] = record

    def begin_step(self, order: io.Compute | io.Apply) -> None:
        """Begin the phase before the commit of a step of ``session.steps``."""
        record, before = self._engine.current, self._committed
        if not isinstance(order, io.Compute) or record is None:
            self.leave(f"step {order.step} was committed without its micro-batches, call after the commit")
            return
        members = tuple(
            x
            for x in record.roster
            if not x.joining or (before is not None and before.lists(x.replica, x.incarnation))
        )
        self._phase = Phase((order.step, 1), record.epoch, members, record.generation)

    def end_step(self, order: io.Apply) -> None:
        """Begin the phase after the commit of a step."""
        if order.prepared is None:
            if self._engine.current is not None:
                self._forget_before(self._engine.current.epoch)
            self.leave(f"it replays step {order.step}, call collectives only where step.replayed is false")
            return
        self._committed = record = self._records[order.prepared.epoch]
        self._phase = Phase((order.step + 1, 0), record.epoch, record.roster, record.generation)
        self._forget_before(record.epoch)

    def _forget_before(self, epoch: int) -> None:
        """Forget the epochs announced before ``epoch``: later steps are committed in it or after it."""
        announced = list(self._records)
        if epoch in announced:
            for earlier in announced[: announced.index(epoch)]:
                del self._records[earlier]

    def leave(self, why: str) -> None:
        """Take part in no collective until the next step; ``why``, for the error of a call."""
        self._phase, self._why_not = None, why

    def group(self, phase: Phase) -> CollectiveGroup:
        """Return the members of ``phase`` that are still in the job. Raises NotAMember if this one is not."""
        newest = self._engine.newest or self._engine.current
        assert newest is not None
        members = phase.members
        if newest.forced > phase.epoch:
            members = tuple(x for x in members if newest.lists(x.replica, x.incarnation))
        if not any((x.replica, x.incarnation) == (self.replica, self._incarnation) for x in members):
            raise NotAMember(
                f"{self.replica} takes part in no collective now: epoch {newest.epoch} does not list it, go "
                "on to the next step, where it catches up"
            )
        return CollectiveGroup(newest, members, self.replica)


TIMEOUT_S = 60.0
# How long an idle member waits for the others when one of them asks for a kept result.
_ANSWER_S = 10.0


class _Job(Value):
    key: Key | None  # None: only answer repeated calls
    call: Call
    phase: Phase
    group: CollectiveGroup
    source: torch.Tensor | None
    deadline_s: float  # monotonic
    failures: int  # the number of failed collectives when this one was called
    future: "Future[Payload]" = field(default_factory=Future)

    def __str__(self) -> str:
        return describe(self.key or (*self.phase.place, 0), str(self.call))


class Collectives:
    """The collectives of one rank with the equal ranks of the other replicas."""

    def __init__(
        self,
        engine: Engine,
        links: CollectiveLinks,
        members: CollectiveMembers,
        pause: Callable[[], AbstractContextManager[None]],
        points: Failpoints,
        refused: str = "",
    ) -> None:
        """``pause`` keeps a wait out of the computing time. ``refused``: why this job has no collectives."""
        self._points = points
        self._engine = engine
        self._links = links
        self.members = members
        self.replica = members.replica
        self._pause = pause
        self._refused = refused
        self._lock = threading.Lock()
        self._worker: Worker | None = None
        self._ring: GroupRing | None = None  # the newest ring, which may have failed
        self._broken = True  # whether the newest ring has failed
        self._attempts: dict[int, int] = {}  # number of the group -> its newest attempt
        self._active: _Job | None = None
        self._linking: Future[LinkedRing] | None = None
        self._held: tuple[Key, Phase, Call, Payload] | None = None
        self._place = (-1, -1)
        self._calls = 0  # collectives called since this place
        self._under_way = 0
        self._failures = 0
        self._last_failure = ""
        links.watch(self._note, self._answer)

    # --- for the user's code --------------------------------------------------------------------------

    def names_or_own(self) -> tuple[str, ...]:
        """Return the replicas that take part in a collective called now, or this one if it does not."""
        try:
            return self.members.group(self.members.phase).names
        except NotAMember:
            return (self.replica,)

    def wait(self, kind: str, tensor: torch.Tensor | None, option: str, timeout_s: float) -> Payload:
        """As ``start``, and return the result; for the training loop's thread."""
        with self._pause():
            return self.start(kind, tensor, option, timeout_s).result()

    def start(
        self, kind: str, tensor: torch.Tensor | None, option: str, timeout_s: float
    ) -> "Future[Payload]":
        """Queue a collective; its Future has the result, or one of the errors below. Any thread.

        ``timeout_s`` bounds the wait for the other members, and later every wait without progress. Raises
        CollectiveFailed (repeat the same call), NotAMember (leave it out), Mismatch (the members call unequal
        collectives) and ConfigError.
        """
        if self._refused:
            raise ConfigError(self._refused)
        if not 0 < timeout_s < float("inf"):
            raise ConfigError(f"timeout_s is {timeout_s!r}: give a finite number of seconds above 0")
        call, source = make_call(kind, tensor, option)
        with self._lock:
            phase = self.members.phase
            if phase.place != self._place:
                self._place, self._calls = phase.place, 0
            group = self.members.group(phase)
            key = (*phase.place, self._calls)
            self._calls += 1
            self._under_way += 1
            job = _Job(key, call, phase, group, source, time.monotonic() + timeout_s, self._failures)
        self._submit(job)
        return job.future

    def close(self) -> None:
        self._refused = "the session is closed"
        if self._ring is not None:
            self._ring.abort("this process closed its session")
        if self._worker is not None:
            self._worker.close(within_s=2.0)
        if self._ring is not None:
            self._ring.close()
        self._links.close()

    # --- on the control thread ------------------------------------------------------------------------

    def _note(self, record: Record) -> None:
        """Note a record; end the collective under way if one of its members is gone."""
        self.members.note(record)
        job, ring, linking = self._active, self._ring, self._linking
        if job is not None and self._gone(job):
            if linking is not None:
                linking.cancel()
            elif ring is not None:
                ring.abort(f"epoch {record.epoch} is in force")
        self._answer()

    def _answer(self) -> None:
        """If a member has begun a new attempt while no call is under way here, take part in it."""
        held = self._held
        with self._lock:
            if held is None or self._under_way:
                return
            _, phase, call, _ = held
            try:
                group = self.members.group(phase)
            except NotAMember:
                return
            ring = self._ring
            used = ring.attempt if ring is not None and ring.group.number == group.number else -1
            if len(group.members) < 2 or self._links.arrived(group) <= used:
                return
            self._under_way += 1
            deadline_s = time.monotonic() + _ANSWER_S
            job = _Job(None, call, phase, group, None, deadline_s, self._failures)
        self._submit(job)

    # --- on the thread of the collectives ---------------------------------------------------------------

    def _submit(self, job: _Job) -> None:
        with self._lock:
            if self._worker is None:
                self._worker = Worker("fabric-collectives", lambda _: None)
        self._worker.submit(lambda: self._run(job))

    def _run(self, job: _Job) -> None:
        try:
            if job.failures != self._failures and job.key is not None:
                raise CollectiveFailed(f"{job} was not tried, the one before it failed: {self._last_failure}")
            self._active = job
            result = self._perform(job)
        except Exception as error:  # noqa: BLE001  (the caller gets it, whatever it is)
            self._fail(job, error)
        else:
            self._active = None
            with self._lock:
                self._under_way -= 1
            job.future.set_result(result)
        self._answer()

    def _fail(self, job: _Job, error: Exception) -> None:
        self._active = None
        with self._lock:
            self._under_way -= 1
            if job.key is not None:
                self._failures += job.failures == self._failures
                self._last_failure = str(error)
                if job.key[:2] == self._place:
                    self._calls = min(self._calls, job.key[2])  # a repeated call gets the same number
        job.future.set_exception(error)

    def _perform(self, job: _Job) -> Payload:
        """Take part until this job has its result."""
        names = job.group.names
        if len(names) == 1:
            return self._hold(job, Offer(job.call, job.source).alone(names))
        while True:
            ring = self._linked(job)
            if ring is None:
                continue
            try:
                frame = CallFrame(job.key, str(job.call))
                # A result of a generation before would be of other states.
                if self._held is not None and self._held[1].generation == job.group.record.generation:
                    key, _, call, payload = self._held
                    frame = replace(frame, held=key, held_call=str(call), held_bytes=payload.nbytes)
                frames = [CallFrame.unpack(x) for x in ring.gather(frame.pack())]
            except (RoundAborted, ProtocolError) as error:
                self._break(job, str(error))
                continue
            verdict = judge(names, frames)
            if isinstance(verdict, Go):
                return self._hold(job, self._exchange(job, ring))
            if isinstance(verdict, Supply) and (supplied := self._supply(job, ring, verdict)) is not None:
                return self._hold(job, supplied)
            if isinstance(verdict, Refuse) and verdict.key == job.key:
                raise CollectiveFailed(verdict.why) if verdict.may_retry else Mismatch(verdict.why)
            if job.key is None:
                return Payload()

    def _exchange(self, job: _Job, ring: GroupRing) -> Payload:
        self._points.hit("collective", job.phase.place[0])
        try:
            return Offer(job.call, job.source).exchanged(ring)
        except RoundAborted as error:
            self._drop_ring()
            raise CollectiveFailed(f"{job} failed: {error}; repeat the call") from error

    def _supply(self, job: _Job, ring: GroupRing, verdict: Supply) -> Payload | None:
        """Move a kept result to those that lack it; return it if this job does."""
        own = None
        if self._held is not None and ring.group.ring.position == verdict.source:
            own = self._held[3].packed()
        try:
            data = ring.broadcast(own, verdict.nbytes)
            return Payload.unpacked(job.call, data) if verdict.key == job.key else None
        except (RoundAborted, ProtocolError) as error:
            self._break(job, str(error))
            return None

    def _hold(self, job: _Job, result: Payload) -> Payload:
        """Keep the result for members that lose theirs. The caller may change its own copy."""
        if job.key is not None:
            self._held = (job.key, job.phase, job.call, result.copied())
        return result

    # --- links ----------------------------------------------------------------------------------------

    def _linked(self, job: _Job) -> GroupRing | None:
        """Return a ring of the job's group, made if there is none; None: try again. Raises as ``_break``."""
        ring, group = self._ring, job.group
        fits = ring is not None and not self._broken and ring.group.number == group.number
        if ring is None or not fits or self._links.arrived(group) > ring.attempt:
            self._drop_ring()
            ring = self._make_ring(job)
        left_s = job.deadline_s - time.monotonic()
        if ring is None or left_s <= 0 or self._gone(job):
            self._break(job, "")
            return None
        ring.limit(left_s)
        return ring

    def _make_ring(self, job: _Job) -> GroupRing | None:
        group = job.group
        attempt = self._attempts[group.number] = self._attempts.get(group.number, -1) + 1
        self._linking = linking = self._engine.run_soon(self._links.link(group, attempt))
        try:
            if self._gone(job):
                linking.cancel()
            links = linking.result(max(0.0, job.deadline_s - time.monotonic()))
        except (TimeoutError, CancelledError):
            if linking.cancel() or linking.cancelled():
                return None
            links = linking.result()
        finally:
            self._linking = None
        self._attempts[group.number] = links.attempt
        self._ring, self._broken = GroupRing(group, links), False
        return self._ring

    def _gone(self, job: _Job) -> bool:
        """Whether a member of the job's group is gone."""
        try:
            return self.members.group(job.phase).number != job.group.number
        except NotAMember:
            return True

    def _break(self, job: _Job, why: str) -> None:
        """After a failure before any bytes moved: return to try again, unless the job's time is over.

        Raises CollectiveFailed, and NotAMember if this replica has left the job.
        """
        self._drop_ring()
        group, now = job.group, self.members.group(job.phase)
        if now.number != group.number:
            left = ", ".join(x for x in group.names if x not in now.names) or "a member"
            raise CollectiveFailed(
                f"{job} failed: {left} left the job (epoch {now.record.epoch}); repeat the call, the other "
                "members answer it"
            )
        if time.monotonic() >= job.deadline_s:
            others = ", ".join(x for x in group.names if x != group.replica)
            raise CollectiveFailed(
                f"{job} timed out: {others} did not call it in time{', ' if why else ''}{why}; "
                "repeat the call, or give a longer timeout_s"
            )

    def _drop_ring(self) -> None:
        if self._ring is not None and not self._broken:
            self._broken = True
            self._ring.close()


def make_collectives(
    engine: Engine, parts: EngineParts, pause: Callable[[], AbstractContextManager[None]]
) -> Collectives:
    peers = parts.peers
    refused = ""
    if parts.exchange.lanes is not None:
        refused = (
            "collectives between replicas need equal layouts of ranks, and FABRIC_LAYOUT allows unequal "
            "ones: unset FABRIC_LAYOUT"
        )
    members = CollectiveMembers(engine, peers.replica, peers.incarnation)
    return Collectives(engine, CollectiveLinks(peers), members, pause, parts.points, refused)


class SoloCollectives:
    """As Collectives, alone."""

    def __init__(self, replica: str) -> None:
        self.replica = replica

    def names_or_own(self) -> tuple[str, ...]:
        return (self.replica,)

    def wait(self, kind: str, tensor: torch.Tensor | None, option: str, timeout_s: float) -> Payload:
        """As Collectives.wait; a broadcast is from this process, whatever its source."""
        return self.start(kind, tensor, "" if kind == "broadcast" else option, timeout_s).result()

    def start(
        self, kind: str, tensor: torch.Tensor | None, option: str, timeout_s: float
    ) -> "Future[Payload]":
        """As Collectives.start, done at once."""
        done: Future[Payload] = Future()
        done.set_result(Offer(*make_call(kind, tensor, option)).alone((self.replica,)))
        return done


class SessionCollectives:
    """Collectives between the equal ranks of all replicas, as methods of a session.

    All members must make the same calls in the same order. ``timeout_s`` bounds the wait for the other
    members, and later every wait without progress. Each method raises CollectiveFailed (repeat the same
    call), NotAMember (leave it out), Mismatch (the members' calls are unequal) and ConfigError.
    """

    collectives: Collectives | SoloCollectives

    def all_reduce(self, tensor: torch.Tensor, op: str = "sum", timeout_s: float = TIMEOUT_S) -> torch.Tensor:
        """Return ``tensor`` reduced over the members: the same bits on all of them.

        ``op``: sum, mean, min or max. ``tensor``: float16, bfloat16, float32, float64, int32 or int64, of any
        shape; it is not changed.
        """
        return self.collectives.wait("all_reduce", tensor, op, timeout_s).tensors[0].to(tensor.device)

    def broadcast(self, tensor: torch.Tensor, source: str = "", timeout_s: float = TIMEOUT_S) -> torch.Tensor:
        """Return the tensor of the replica ``source``, by default of the first member.

        ``tensor``: of any type, of equal shape. Raises NotAMember also where ``source`` is gone.
        """
        return self.collectives.wait("broadcast", tensor, source, timeout_s).tensors[0].to(tensor.device)

    def all_gather(self, tensor: torch.Tensor, timeout_s: float = TIMEOUT_S) -> dict[str, torch.Tensor]:
        """Return the tensors of all members by replica, in ring order; of any type, of equal shape."""
        gathered = self.collectives.wait("all_gather", tensor, "", timeout_s)
        return {n: x.to(tensor.device) for n, x in zip(gathered.names, gathered.tensors, strict=True)}

    def barrier(self, timeout_s: float = TIMEOUT_S) -> None:
        """Return once all members have called it."""
        self.collectives.wait("barrier", None, "", timeout_s)
