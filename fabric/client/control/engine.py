"""The control thread: an event loop that holds the links and drives the member core.

The trainer's main thread posts events and takes orders from ``orders``; the exchange, fetch and snapshot
threads post the outcomes of their work. The posting thread hands its event to the core at once, and itself
performs the effects listed in ``_ANYWHERE``. So in a step without faults only messages from peers wake the
control thread. The member core decides; this module performs.
"""

import asyncio
import contextlib
import queue
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, TypeVar, get_args

import uvloop
from msgspec.structs import replace

from fabric.ckpt_server.attach import ServerHandle
from fabric.ckpt_server.state.training_state import StateDescriber
from fabric.client.control.lighthouse_link import LighthouseLink
from fabric.client.control.link_echo import run_echo
from fabric.client.control.peers import Peers
from fabric.client.gradients.bucket_stream import BucketReadiness
from fabric.client.gradients.exchange_thread import ExchangeThread
from fabric.client.gradients.forward_buffers import ForwardBuffers, ReplicaStates, first_member
from fabric.client.gradients.gradient_slots import GradientSlots
from fabric.client.process.incarnation_lock import ProcessIdentity, claim_above
from fabric.client.process.journal import Journal
from fabric.client.process.last_notes import CrashMarker
from fabric.client.process.worker import Worker
from fabric.client.state.durable_policy import DurableCheckpoints
from fabric.client.state.fetch_thread import FetchThread
from fabric.client.state.snapshots import Snapshots
from fabric.errors import FabricError, ProtocolError, RoundsFailed
from fabric.exit_codes import FAILED, RESTART
from fabric.ftar.buckets import FlatGradients
from fabric.ftar.plane import DataPlane
from fabric.model import Fence, Record, SpeedMeasurement, first_of, incident_id_of
from fabric.protocol.member.core import MemberCore
from fabric.protocol.messages import member_events as io
from fabric.protocol.messages import wire
from fabric.protocol.messages.network import CommitVote, Contribution
from fabric.protocol.messages.rank_messages import NameSnapshot, RankEvent
from fabric.runtime import logs
from fabric.runtime.config import Settings
from fabric.runtime.driver import Core, Driver
from fabric.runtime.failpoints import Failpoints


@dataclass(slots=True)
class FailedRounds:
    """Counts the rounds in a row that were aborted after this process had contributed."""

    most: int  # the count that gives an error; 0 for none
    count: int = 0
    has_contributed: bool = False  # whether members know of a contribution to the round under way

    def aborted(self, step: int, why: str) -> RoundsFailed | None:
        """Note that the round under way is aborted; return the error that the loop must see, if any."""
        counts, self.has_contributed = self.has_contributed, False
        self.count += counts
        if not counts or self.count != self.most:
            return None
        return RoundsFailed(
            f"{self.count} exchanges of step {step} failed in a row, the last because {why}: this process "
            "has left the job, and a new process may join it"
        )


_NAMED = 8  # a sentence names this many members and counts the others


class RoundJournal:
    """The control thread's lines: one per epoch and one per contribution, however often the core repeats."""

    def __init__(self, journal: Journal, tell: Callable[[str], None] = lambda _sentence: None) -> None:
        """``tell`` gets a sentence on each later epoch, for the terminal of this trainer."""
        self._journal, self._tell = journal, tell
        # Returns the samples of a step's micro-batches; the session sets it.
        self.samples: Callable[[int, tuple[int, ...]], dict[str, list[int]]] = lambda _step, _ids: {}
        self._contributed: tuple[int, int] = (0, -1)  # epoch and step of the contribution line written last
        self._fence: Fence | None = None  # fence of the epoch line written last

    def note_contribution(self, message: Contribution) -> None:
        """Journal a contribution before it leaves this process; an empty one gets no line."""
        epoch = message.fence.epoch
        if self._contributed == (epoch, message.step) or not message.micro_batches:
            return
        self._contributed = (epoch, message.step)
        self._journal.write(
            "contribute",
            generation=message.fence.generation,
            epoch=epoch,
            step=message.step,
            micro_batches=list(message.micro_batches),
            samples=self.samples(message.step, message.micro_batches),
            weight=message.weight,
        )

    def note_epoch(self, record: Record) -> None:
        """Journal an epoch when its links are made, once, even if the core asks for the links again."""
        if record.fence == self._fence:
            return
        if self._fence is not None:
            # Say in one line why the members changed, or made their links again, and which ones go on.
            self._tell(f"epoch {record.epoch} with {first_of(record.names, _NAMED)}: {record.reason}")
        self._fence = record.fence
        logs.describe(epoch=record.epoch, incident_id=record.incident_id)
        self._journal.write(
            "epoch",
            epoch=record.epoch,
            generation=record.generation,
            forced=record.is_forced,
            roster=list(record.names),
            data_slots={x.replica: x.data_slot for x in record.roster},
            reason=record.reason,
            incident_id=record.incident_id,
        )


# Effects that are orders to the trainer's main thread.
MainThreadOrder = (
    io.Compute
    | io.Apply
    | io.Install
    | io.TellDigest
    | io.TakeSnapshot
    | io.DropGradient
    | io.Finish
    | io.Stop
)
# Journal events that are also printed to standard error, and the words printed before the event's reason.
_PRINTED = {"kept out": " waits", "loops differ": ""}
Event = io.Event | RankEvent
Outcome = TypeVar("Outcome")
# A step without faults has only these effects: the thread with the event performs them without an event loop.
_ANYWHERE = frozenset(
    (io.Compute, io.StartExchange, io.SendPeer, io.Carry, io.Publish, io.Apply, io.TellDigest)
)


@dataclass(slots=True)
class EngineParts:
    """The parts that ``attach`` has made, one each per process; the engine and the session hold them."""

    settings: Settings
    process: ProcessIdentity
    describer: StateDescriber  # of the shared state
    gradients: FlatGradients
    handle: ServerHandle
    plane: DataPlane
    peers: Peers
    leader: LighthouseLink
    slots: GradientSlots
    exchange: ExchangeThread
    fetch_thread: FetchThread
    snapshot_worker: Worker
    recover: Callable[[], None]
    journal: Journal
    points: Failpoints
    snapshots: Snapshots
    crash_marker: CrashMarker
    buffers: ForwardBuffers
    own_states: ReplicaStates
    durable: DurableCheckpoints


class _Informed:
    """``core``, which learns before every event for which peer the data plane waits."""

    def __init__(self, core: Core[Any, Any], plane: DataPlane) -> None:
        self._core, self._plane = core, plane
        self._ring_waits_for = ""
        self.next_deadline = core.next_deadline

    def handle(self, event: Any, now: float) -> list[Any]:
        waits_for = self._plane.waiting_for
        if waits_for or self._ring_waits_for:
            self._ring_waits_for = waits_for
            self._core.handle(io.RingWaitsFor(waits_for), now)
        return self._core.handle(event, now)


class Engine:
    """Runs from ``listen`` until ``close``; the main thread uses ``post`` and ``orders``.

    This is the engine of a replica of one process; ``rank_engines`` has those of larger replicas.
    """

    def __init__(self, parts: EngineParts) -> None:
        self.orders: queue.SimpleQueue[MainThreadOrder | io.StartExchange | RoundsFailed] = (
            queue.SimpleQueue()
        )
        self.member: MemberCore | None = None
        self._parts = parts
        self._loop: asyncio.AbstractEventLoop | None = None
        self._driver: Driver[Event, io.Effect] | None = None
        self._stopping: asyncio.Event | None = None
        self._thread: threading.Thread | None = None
        self._round_journal = RoundJournal(parts.journal, self._say)
        self._failed_rounds = FailedRounds(parts.settings.max_failed_rounds)
        self._session: asyncio.Task[None] | None = None  # with the lighthouse, or with the rank that speaks
        parts.peers.on_linked = lambda epoch, planes: parts.journal.write("plane", epoch=epoch, **planes)
        if parts.fetch_thread.pieces is not None:
            parts.fetch_thread.pieces.newest = lambda: self.newest
        self._number = 0  # number of the order being performed, in a replica of several ranks
        # Set by the session: returns which buckets of the gradient under way are final.
        self._readiness: Callable[[], BucketReadiness | None] = lambda: None
        self._performers: dict[type, Callable[[Any], None]] = {
            **dict.fromkeys(get_args(MainThreadOrder), self.orders.put),
            io.Apply: self._apply,
            io.SendPeer: self._send_peer,
            io.Carry: self._carry,
            io.SendLeader: lambda e: parts.leader.send(e.message),
            io.LinkUp: self._link_up,
            io.Probe: lambda e: parts.peers.probe(e.members),
            io.Switch: self._switch,
            io.StartExchange: self._start_exchange,
            io.AbortExchange: self._abort_exchange,
            io.Publish: self._publish,
            io.FetchState: lambda e: parts.fetch_thread.fetch_state(e, self._answer_to_this()),
            io.FetchGradient: lambda e: parts.fetch_thread.fetch_gradient(e, self._answer_to_this()),
            io.CancelFetch: lambda _: parts.fetch_thread.cancel(),
            io.RetainGradients: self._listen,
            io.WriteJournal: self._note,
            io.ClaimAbove: lambda e: claim_above(e.incarnation),
            NameSnapshot: lambda e: parts.snapshot_worker.submit(lambda: parts.snapshots.name(e, self.post)),
        }

    # --- reading ---------------------------------------------------------------------------------

    @property
    def is_running(self) -> bool:
        return self.member is not None

    @property
    def generation(self) -> int:
        """The generation of the state in memory; 0 where it belongs to none."""
        return self.member.memory.state.generation if self.member is not None else 0

    @property
    def current(self) -> Record | None:
        """The record of the epoch in force here."""
        return self.member.epochs.current if self.member is not None else None

    @property
    def epoch(self) -> int:
        """The epoch in force here, 0 before the first."""
        return self.current.epoch if self.current is not None else 0

    @property
    def newest(self) -> Record | None:
        """The record of the newest epoch that a leader has announced."""
        return self.member.epochs.newest if self.member is not None else None

    @property
    def step(self) -> int:
        return self.member.memory.state.step if self.member is not None else 0

    def describe(self) -> dict[str, object]:
        """Describe this trainer's epoch, step and waits, for people.

        Any thread may call it while values change: they may come from different moments.
        """
        member, parts = self.member, self._parts
        status: dict[str, object] = {
            "epoch": self.epoch,
            "newest_epoch": self.newest.epoch if self.newest is not None else 0,
            "roster": list(self.current.names) if self.current is not None else [],
            "generation": self.generation,
            "step": self.step,
            "lighthouse": {"url": parts.leader.url, "connected": parts.leader.is_connected},
            "peers": parts.peers.linked,
            "ring_waits_for": parts.plane.waiting_for,
        }
        if member is not None:
            round_ = member.rounds.round
            status |= {
                "phase": member.session.phase,
                "busy": member.session.busy,
                "catching_up": member.catch_up.fetch.doing,
                "round": None,
            }
            if round_ is not None:
                status["round"] = {
                    "epoch": round_.record.epoch,
                    "step": round_.step,
                    "share": list(round_.share),
                    "contributed": round_.contributed,
                    "exchanging": round_.exchanging,
                    "missing": list(round_.missing()),
                }
        return status

    # --- from the main thread -----------------------------------------------------------------------

    def listen(self, bind: str, ports: str) -> int:
        """Start the control thread; returns the port. Raises ConfigError where the listener cannot bind."""
        ready: queue.SimpleQueue[BaseException | int] = queue.SimpleQueue()
        self._thread = threading.Thread(
            target=lambda: uvloop.run(self._main(bind, ports, ready)),
            name="fabric-control",
            daemon=True,
        )
        self._thread.start()
        outcome = ready.get()
        if isinstance(outcome, BaseException):
            raise outcome
        return outcome

    def connect_loop(
        self,
        readiness: Callable[[], BucketReadiness | None],
        samples: Callable[[int, tuple[int, ...]], dict[str, list[int]]],
    ) -> None:
        """Set the functions that read the training loop's data directly, without the core.

        ``readiness`` returns the gradient's final buckets, ``samples`` the samples of micro-batches.
        """
        self._readiness = readiness
        self._round_journal.samples = samples

    def begin(self, member: MemberCore) -> None:
        """Start to drive ``member``, and look for the lighthouse."""
        assert self._loop is not None
        asyncio.run_coroutine_threadsafe(self._begin(member), self._loop).result()

    def run_soon(self, work: Coroutine[Any, Any, Outcome]) -> "Future[Outcome]":
        """Run ``work`` on the control thread; for any other thread. The Future cancels it."""
        assert self._loop is not None
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    def echo(self, number: int, replica: str) -> SpeedMeasurement:
        """Measure the link to ``replica`` for the main thread, as micro-benchmark ``number``: see
        ``run_echo``."""
        dialled = self.run_soon(self._parts.peers.dial_echo(replica))
        return run_echo(number, dialled, lambda: self._parts.points.hit("echo", self.step))

    def post(self, event: Event, number: int = 0) -> None:
        """Hand an event to the core; for any thread, never waits. ``number``: of the order that it
        answers."""
        if self._driver is not None:
            self._driver.feed(event)

    def call_soon(self, work: Callable[[], None]) -> None:
        """Let the control thread call ``work``; also for a signal's handler, which may take no lock."""
        if self._loop is not None:
            with contextlib.suppress(RuntimeError):
                self._loop.call_soon_threadsafe(work)

    def exchange_alone(self, order: io.StartExchange) -> None:
        """Do the round of the only member on the main thread, which the round keeps waiting anyway."""
        self._parts.exchange.run_alone(order, self.post, self.may_be_asked())

    def may_be_asked(self) -> bool:
        """Whether a replica may compare states with this one, or ask for its gradients: one was met.

        The journal wants the digests of the gradients.
        """
        slots = self._parts.slots
        # The control thread may set it meanwhile, so no thread sets it to False.
        if any(x is not None and len(x.roster) > 1 for x in (self.current, self.newest)):
            slots.wanted = True
        return slots.wanted or self._parts.journal.on

    def close(self) -> None:
        """Say goodbye to the peers and end the thread."""
        if self._loop is not None and self._stopping is not None and self._thread is not None:
            with contextlib.suppress(RuntimeError):
                self._loop.call_soon_threadsafe(self._stopping.set)
            self._thread.join(timeout=5.0)
        self._parts.fetch_thread.close()
        self._parts.exchange.close()
        self._parts.snapshot_worker.close(within_s=2.0)

    def crash(self, error: BaseException) -> None:
        """Stop this process for a defect in the core or a thread; its launcher starts it again."""
        is_defect = isinstance(error, Exception)  # Ctrl-C may come while the main thread drives the core
        reason = f"internal error in {type(error).__name__}: {error}" if is_defect else "interrupted"
        self._parts.crash_marker.clear()
        self._parts.journal.write("stop", code=RESTART, reason=reason)
        self.orders.put(io.Stop(RESTART, reason))

    async def _main(self, bind: str, ports: str, ready: "queue.SimpleQueue[BaseException | int]") -> None:
        parts = self._parts
        self._loop, self._stopping = asyncio.get_running_loop(), asyncio.Event()
        try:
            port = await parts.peers.start(bind, ports, self._feed)
        except FabricError as error:
            ready.put(error)
            return
        ready.put(port)
        await self._stopping.wait()
        await self._end()
        parts.plane.close()

    async def _begin(self, member: MemberCore, core: Core[Any, Any] | None = None) -> None:
        """``core``: the core that has ``member`` within, in a replica of several ranks."""
        self.member = member
        self._driver = Driver(
            _Informed(core or member, self._parts.plane),
            self._perform,
            tick=io.Tick(),
            on_crash=self.crash,
            thread_safe_effects=_ANYWHERE,
        )
        self._session = asyncio.create_task(self._parts.leader.run(self._feed, self._refused))

    async def _end(self) -> None:
        await self._parts.leader.drain(within_s=1.0)
        if self._driver is not None:
            # Close the core first, or it would blame the peers for the links that this process ends now.
            self._driver.close()
        await self._parts.peers.close()
        if self._session is not None:
            self._session.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._session

    def _feed(self, event: Any, number: int = 0) -> None:
        if self._driver is not None:
            self._driver.feed(event)

    def _refused(self, reason: str) -> None:
        self.orders.put(io.Stop(FAILED, reason))

    def _answer_to_this(self) -> Callable[[io.Event], None]:
        """Return a function that posts the answer to the order being performed."""
        number = self._number
        return lambda event: self.post(event, number)

    # --- effects ----------------------------------------------------------------------------------

    def _perform(self, effect: Any) -> None:
        self._performers[type(effect)](effect)

    def _apply(self, effect: io.Apply) -> None:
        self._failed_rounds.count, self._failed_rounds.has_contributed = 0, False
        if effect.prepared is not None:
            self._parts.points.hit("after-barrier", effect.step)
        self.orders.put(effect)

    def _send_peer(self, effect: io.SendPeer) -> None:
        message = effect.message
        if isinstance(message, CommitVote):
            self._parts.points.hit("before-barrier", message.step)
        self._parts.peers.send(effect.replica, effect.incarnation, message)
        if isinstance(message, CommitVote):
            self._parts.points.hit("barrier", message.step)

    def _carry(self, effect: io.Carry) -> None:
        message = effect.message
        self._failed_rounds.has_contributed = True
        self._round_journal.note_contribution(message)
        self._parts.plane.notes.put(message.fence.epoch, message.step, wire.encode(message))

    def _post_outcome(self, event: io.Event) -> None:
        """Post the outcome of an exchange, with the contributions that the ring has carried."""
        current = self.current
        if isinstance(event, io.Exchanged) and current is not None and current.epoch == event.epoch:
            notes = self._parts.plane.notes.carried(event.epoch, event.step)
            carried = []
            for at, note in notes.items():
                with contextlib.suppress(
                    ProtocolError
                ):  # its sender tells it over the links too, after a moment
                    if isinstance(message := wire.decode(note), Contribution):
                        carried.append((current.names[at], message))
            event = replace(event, carried=tuple(carried))
        self.post(event)

    def _link_up(self, effect: io.LinkUp) -> None:
        self._round_journal.note_epoch(effect.record)
        self._parts.peers.link_up(effect.record)

    def _switch(self, effect: io.Switch) -> None:
        step = self.step
        self._parts.points.hit("switch", step)
        self._parts.peers.switch(effect.record)
        me = effect.record.member(self._parts.peers.replica)
        if me is not None and me.joining:
            self._parts.points.hit("first-round", step)

    def _start_exchange(self, effect: io.StartExchange) -> None:
        own = self.member.rounds.own_contribution() if self.member is not None else None
        if own is not None:  # None while backward still computes: the session passes the contribution later
            self._round_journal.note_contribution(own)
        if self.epoch == effect.fence.epoch and first_member(self.current) == self._parts.peers.replica:
            self._parts.exchange.gives_in.append(effect.fence.epoch)
        if self.current is not None and len(self.current.roster) == 1 and not effect.streaming:
            self.orders.put(effect)
            return
        stream = self._readiness() if effect.streaming else None
        self._parts.exchange.start(effect, stream, self._post_outcome)

    def _abort_exchange(self, effect: io.AbortExchange) -> None:
        self._parts.plane.abort(effect.epoch, effect.why)
        self._parts.exchange.abort(effect.epoch, effect.why)
        self._parts.points.hit("abort", self.step)
        if (failure := self._failed_rounds.aborted(self.step, effect.why)) is not None:
            self.orders.put(failure)

    def _publish(self, effect: io.Publish) -> None:
        parts = self._parts
        stays = parts.exchange.stays(effect.prepared.step)
        # During the round a replica may have come.
        if stays and not (self.may_be_asked() and parts.exchange.move()):
            return
        try:
            done = parts.slots.label(effect.generation, effect.prepared)
        except FabricError:
            done = False
        if not done:

            def publish() -> None:
                try:
                    parts.slots.publish(effect.generation, effect.prepared)
                    parts.slots.prepare()
                except FabricError:
                    parts.recover()

            parts.snapshot_worker.submit(publish)

    def _listen(self, effect: io.RetainGradients) -> None:
        self._parts.slots.wanted = True
        self._parts.slots.listening = effect.on

    def _cause(self, note: io.WriteJournal) -> str:
        """Return the incident of a journal entry.

        An abort belongs to the forced epoch that ended its round. Before a leader has announced that epoch,
        the abort gets the incident of the next epoch.
        """
        newest = self.newest
        if newest is None:
            return ""
        answered = note.kind != "abort" or note.epoch < newest.forced
        return newest.incident_id if answered else incident_id_of(newest.epoch + 1)

    def _say(self, sentence: str, doing: str = "") -> None:
        logs.tell(f"{self._parts.peers.replica}{doing}: {sentence}")

    def _note(self, note: io.WriteJournal) -> None:
        if note.kind == "resume":
            self._parts.points.hit("recovery", note.step)
        if note.kind in _PRINTED:
            self._say(note.why, _PRINTED[note.kind])
        extra: dict[str, Any] = {"micro_batches": list(note.micro_batches)} if note.micro_batches else {}
        extra["incident_id"] = self._cause(note)
        self._parts.journal.write(
            note.kind.replace(" ", "-"),
            epoch=note.epoch,
            step=note.step,
            why=note.why,
            about=note.about,
            **extra,
        )
