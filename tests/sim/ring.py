"""A trainer's data plane: the ring of one epoch over two connections, by the shipping schedule and headers.

Segments are symbols: the members' parts in the order of addition. The rest is as in ``fabric.ftar``: a member
forwards what its neighbour sent, failed links stay failed, an abort's notice travels backwards, and only an
exchange notices a failure.
"""

import math
from collections import deque
from dataclasses import dataclass, field
from functools import cache
from typing import TYPE_CHECKING, cast

from sim.checkers import Violation, demand
from sim.network import Connection, End, decode, encode
from sim.server import Gradient, digest_of

from fabric.ftar import chunk_headers
from fabric.ftar.plane import RingNotes
from fabric.ftar.ring_schedule import ALIGNMENT, RingPiece, Schedule, schedule
from fabric.model import Record
from fabric.protocol.messages import member_events as io
from fabric.protocol.messages import network as m

if TYPE_CHECKING:
    from sim.trainer import Trainer

Key = tuple[str, int]
# A ``Part`` is one member's contribution to a sum; a segment is a tuple of parts in the order of addition.
Part = tuple[str, tuple[int, ...]]
Segment = tuple[Part, ...]
SLOTS = 3
FLIPPED: Part = ("a flipped bit", ())


@dataclass(slots=True)
class Chunk:
    """A frame of the ring: the shipping header, the payload's bytes, and their meaning."""

    header: bytes
    payload: bytes
    segment: Segment
    note: tuple[int, bytes] | None = None  # a member's position and note, in front of the chunk


@dataclass(slots=True)
class RingLinks:
    """The two connections of one epoch's ring; None in a ring of one."""

    record: Record
    position: int
    next: tuple[Connection, int] | None = None
    previous: tuple[Connection, int] | None = None
    inbox: deque[Chunk] = field(default_factory=deque)
    incident_id: tuple[str, str] | None = None
    came_back: tuple[str, str] | None = None
    lost: dict[str, str] = field(default_factory=dict)  # neighbour -> why its connection ended

    @property
    def names(self) -> tuple[str, ...]:
        return self.record.names


@dataclass(slots=True)
class Running:
    """One exchange under way."""

    order: io.StartExchange
    links: RingLinks
    plan: Schedule
    own: Part
    segments: list[Segment]
    sent: int = 0
    received: int = 0
    notes: dict[int, tuple[int, bytes]] = field(default_factory=dict)  # to send on, by the start of the piece


@cache
def plan_of(world: int, position: int) -> Schedule:
    return schedule(ALIGNMENT * world, world, position, ALIGNMENT)


def is_intact(payload: bytes, digest: int | None) -> bool:
    return chunk_headers.digest(payload) == digest


class Ring:
    """The data plane of one trainer process; ``slots`` are its result buffers by step, the newest last."""

    def __init__(self, trainer: "Trainer") -> None:
        self.trainer = trainer
        self.epochs: dict[int, RingLinks] = {}
        self.arrivals: dict[tuple[int, Key], RingLinks] = {}
        self.slots: dict[int, Gradient] = {}
        self.flip = False  # whether to flip one bit of the next result
        self.digest_s = 0.0  # additional seconds for the digest of the next result
        self._early: dict[int, tuple[str, str]] = {}
        self._retired_before = 0
        self._running: Running | None = None
        self._waits_for = ""
        self._busy_until = 0.0
        # an exchange whose gradient is not final yet, while backward streams it
        self.awaited: io.StartExchange | None = None
        self.notes = RingNotes()

    def carry(self, message: m.Contribution) -> None:
        """Let the ring carry a contribution. The thread that exchanges may be faster."""
        clockwork = self.trainer.clockwork
        late = clockwork.between(0.0, 0.02) if clockwork.chance(0.1) else 0.0
        note = message.fence.epoch, message.step, encode(message)
        self.trainer.after(late, lambda: self.notes.put(*note))

    # --- links -------------------------------------------------------------------------------------

    def dial(
        self, record: Record, there: "Trainer", established: "object", ring: "Ring | None" = None
    ) -> None:
        """Connect to the next member; call ``established(links)`` after its greeting."""
        ring = ring or there.ring
        here, network = self.trainer, self.trainer.world.network
        mine = (here.host, here.incarnation)
        near_links, far_links = RingLinks(record, 0), RingLinks(record, 0)

        def accepted() -> None:
            if not network.can_talk(here.host, there.host) or not here.alive:
                return
            name, other = there.host, here.host
            near = End(
                here,
                here.host,
                lambda x: self._notice(near_links, x),
                lambda why: self._ended(near_links, name, why),
            )
            far = End(
                there,
                there.host,
                lambda x: ring._chunk(far_links, x),
                lambda why: ring._ended(far_links, other, why),
            )
            connection = Connection(network, near, far)
            near_links.next, far_links.previous = (connection, 0), (connection, 1)
            ring._arrived((record.epoch, mine), far_links)
            here.after(network.delay(), lambda: established(near_links))  # type: ignore[operator]

        there.after(network.delay(), accepted)

    def _arrived(self, key: tuple[int, Key], links: RingLinks) -> None:
        stale = self.arrivals.pop(key, None)
        if stale is not None:
            self._close(stale, "replaced")
        self.arrivals[key] = links
        self.trainer.links.check()

    def install(self, record: Record, forward: RingLinks | None, previous: Key | None) -> None:
        """Take over both connections of a linked epoch."""
        links = forward or RingLinks(record, 0)
        links.position = record.names.index(self.trainer.host)
        if previous is not None:
            behind = self.arrivals.pop((record.epoch, previous))
            assert behind.previous is not None
            # Take over the link's received bytes and its end.
            links.previous, links.inbox = behind.previous, behind.inbox
            links.lost.update(behind.lost)
            connection, side = behind.previous
            connection.ends[side].on_message = lambda x: self._chunk(links, x)
            other = previous[0]
            connection.ends[side].on_close = lambda why: self._ended(links, other, why)
        if record.epoch < self._retired_before:
            self._close(links, "the epoch is over")
            return
        self.epochs[record.epoch] = links
        if record.epoch in self._early:
            self._abort(links, *self._early.pop(record.epoch))

    def retire(self, before: int) -> None:
        """Close the links of older epochs, which ends exchanges that still use them."""
        self._retired_before = max(self._retired_before, before)
        for epoch in [e for e in self.epochs if e < before]:
            links = self.epochs.pop(epoch)
            self._abort(links, f"epoch {before} is in force", "")
            self._close(links, "the epoch is over")
        for key in [k for k in self.arrivals if k[0] < before]:
            self._close(self.arrivals.pop(key), "the epoch is over")
        self._early = {e: incident_id for e, incident_id in self._early.items() if e >= before}

    def abort(self, epoch: int, why: str, about: str = "") -> None:
        links = self.epochs.get(epoch)
        if links is not None:
            self._abort(links, why, about)
        elif epoch >= self._retired_before:
            self._early.setdefault(epoch, (why, about))

    def _abort(self, links: RingLinks, why: str, about: str) -> None:
        """Abort the epoch's links for good, and send the notice to the previous member once."""
        if links.incident_id is not None:
            return
        links.incident_id = (why, about)
        if links.previous is not None:
            connection, side = links.previous
            connection.send(side, (why, about))
        running = self._running
        if running is not None and running.links is links:
            waited_for = self._waits_for
            self._stop()
            self._failed(running.order, why, about, waited_for)
        awaited = self.awaited
        if awaited is not None and awaited.fence.epoch == links.record.epoch:
            self.awaited = None
            self.trainer.clockwork.counts["path: aborted while streaming"] += 1
            self._failed(awaited, why, about)

    def _stop(self) -> None:
        """Note that no exchange is under way and no bytes are awaited."""
        self._running = None
        self._wait_for("")

    def _wait_for(self, replica: str) -> None:
        self._waits_for = replica
        self.trainer.wait_in_ring(replica)

    def _close(self, links: RingLinks, why: str) -> None:
        for found in (links.next, links.previous):
            if found is not None:
                found[0].close(found[1], why)

    def _failed(self, order: io.StartExchange, why: str, about: str, waited_for: str = "") -> None:
        event = io.ExchangeFailed(order.fence.epoch, order.step, about, why, waited_for)
        self.trainer.after(0.0, lambda: self.trainer.feed(event))

    # --- an exchange -------------------------------------------------------------------------------

    def start(self, order: io.StartExchange) -> None:
        clockwork = self.trainer.clockwork
        busy = max(0.0, self._busy_until - clockwork.now)
        self.trainer.after(busy + clockwork.between(0.0, 0.002), lambda: self._begin(order))

    def finished(self, step: int, changed: bool) -> None:
        """Give the final gradient to the exchange that waits for the last backward."""
        order, self.awaited = self.awaited, None
        if order is not None and order.step == step:
            self._begin(order, changed)

    def _begin(self, order: io.StartExchange, changed: bool = False) -> None:
        trainer, epoch = self.trainer, order.fence.epoch
        if trainer.host in trainer.world.hung:
            trainer.after(0.1, lambda: self._begin(order))
            return
        links = self.epochs.get(epoch)
        if links is None:
            over = epoch < self._retired_before or epoch in self._early
            demand(over, f"{trainer.name} starts an exchange of epoch {epoch} without links")
            self._failed(order, *self._early.get(epoch, ("the epoch is over", "")))
            return
        if links.incident_id is not None:
            self._failed(order, *links.incident_id)
            return
        if order.streaming and trainer.main.streaming:
            self.awaited = order
            return
        content = trainer.main.gradient if order.weight > 0 else ()
        trainer.clockwork.counts["path: streamed"] += order.streaming
        if order.weight == 0 and not links.record.is_forced:
            trainer.clockwork.counts["path: weight zero in the first round"] += 1
        if changed:
            content = content[:-1]  # no member may commit it; an order to abort is on its way to this rank
        else:
            trainer.world.checks.gathered(trainer, order, content)
        if not trainer.core.context.config.retain and content:
            # the gradient was reduced in place
            trainer.main.given, trainer.main.gradient = (order.step, content), ()
            trainer.clockwork.counts["path: a gradient is given away"] += 1
        demand(self._running is None, f"{trainer.name} starts two exchanges at once")
        world, own = len(links.names), (trainer.host, content)
        self._running = Running(order, links, plan_of(world, links.position), own, [(own,)] * world)
        self._pump()

    def _pump(self) -> None:
        """Send and receive all chunks that can move now."""
        running = self._running
        if running is None:
            return
        links = running.links
        while links.inbox and running.received < len(running.plan.receives):
            if not self._receive(running, links.inbox.popleft()):
                return
        self._send(running)
        self._wait_for(links.names[links.position - 1])
        if running.received == len(running.plan.receives):
            self._finish(running)
        elif links.came_back is not None:
            self._abort(links, *links.came_back)
        elif links.lost:
            name, why = next(iter(links.lost.items()))
            self._abort(links, f"the ring link to {name} was lost: {why}", name)

    def _header(self, running: Running, number: int, sends: bool) -> chunk_headers.ChunkHeader:
        order, links = running.order, running.links
        world = len(links.names)
        piece = (running.plan.sends if sends else running.plan.receives)[number]
        source = links.position if sends else (links.position - 1) % world
        round_ = chunk_headers.ExchangeSpec(order.fence.epoch, order.step, 0, world, 1, ALIGNMENT * world)
        kind = chunk_headers.GATHER if piece.gather else chunk_headers.REDUCE
        return chunk_headers.ChunkHeader(round_, kind, source, piece.sequence, ALIGNMENT)

    def _send(self, running: Running) -> None:
        plan, links = running.plan, running.links
        while running.sent < min(len(plan.sends), plan.free + running.received):
            segment = running.segments[plan.sends[running.sent].start // ALIGNMENT]
            payload = repr(segment).encode()
            header = chunk_headers.pack(
                self._header(running, running.sent, sends=True), chunk_headers.digest(payload)
            )
            if self.trainer.world.network.flips.pop(self.trainer.host, False):
                payload, segment = bytes([payload[0] ^ 1]) + payload[1:], (*segment, FLIPPED)
            assert links.next is not None
            note = self._note(running, plan.sends[running.sent])
            links.next[0].send(links.next[1], Chunk(header, payload, segment, note), bulk=True)
            running.sent += 1

    def _note(self, running: Running, piece: RingPiece) -> tuple[int, bytes] | None:
        """Return what goes in front of a piece of the result, over a link that carries notes."""
        order, links = running.order, running.links
        if not piece.gather or self.trainer.host in self.trainer.world.noteless:
            return None
        if piece.hop > len(links.names) - 1:
            return running.notes.get(piece.start)
        note = self.notes.take(order.fence.epoch, order.step, links.position)
        return (links.position, note) if note else None

    def _receive(self, running: Running, chunk: Chunk) -> bool:
        links, piece = running.links, running.plan.receives[running.received]
        previous = links.names[links.position - 1]
        got, digest = chunk_headers.unpack(chunk.header)
        expected = self._header(running, running.received, sends=False)
        if got.spec.order < expected.spec.order:
            return True  # drop a chunk of an old round
        if got != expected:
            raise Violation(f"{self.trainer.name} is sent {got} where {expected} is due")
        if not is_intact(chunk.payload, digest):
            self.trainer.clockwork.counts["path: corrupted chunk refused"] += 1
            self._abort(links, f"a chunk from {previous} does not match its digest", previous)
            return False
        if chunk.note is not None:
            running.notes[piece.start] = chunk.note
            self.notes.arrived(running.order.fence.epoch, running.order.step, *chunk.note)
        index = piece.start // ALIGNMENT
        running.segments[index] = chunk.segment if piece.gather else (*chunk.segment, running.own)
        running.received += 1
        return True

    def _finish(self, running: Running) -> None:
        self._stop()
        step, epoch = running.order.step, running.order.fence.epoch
        gradient = result_of(step, running.segments)
        if self.flip and len(running.segments) > 2:
            self.flip, self.trainer.world.flipped = False, True
            # Flip another bit on every host: two equally wrong results would pass for right.
            flipped: Part = (f"a bit flipped at {self.trainer.host}", ())
            gradient = Gradient(step, (*gradient.parts, flipped), digest_of(step, gradient, flipped))
        self.slots.pop(step, None)
        self.slots[step] = gradient
        while len(self.slots) > SLOTS:
            del self.slots[next(iter(self.slots))]  # drop the slot that was used longest ago
        nonfinite = "weight" if self.trainer.main.is_skipped(step) else ""
        notes, names = self.notes.carried(epoch, step), running.links.names
        carried = tuple((names[at], cast(m.Contribution, decode(x))) for at, x in notes.items())
        done = io.Exchanged(epoch, step, gradient.digest, nonfinite, carried=carried)
        is_whole = self.trainer.world.carries and 1 < len(names) == len(carried)
        round_ = self.trainer.core.rounds.round if is_whole else None
        if round_ is not None and round_.due_s < math.inf:
            self.trainer.clockwork.counts["carried: by the ring alone"] += 1
        clockwork = self.trainer.clockwork
        # The exchange thread takes the digest, and does nothing else meanwhile.
        busy = clockwork.between(0.0, 0.06 if clockwork.chance(0.1) else 0.001)
        busy, self.digest_s = busy + self.digest_s, 0.0
        self._busy_until = clockwork.now + busy
        self.trainer.after(busy, lambda: self.trainer.feed(done))

    def result(self, step: int) -> Gradient:
        """Return this member's result of ``step``."""
        demand(
            step in self.slots, f"{self.trainer.name} is told to use the result of step {step}, and has none"
        )
        return self.slots[step]

    # --- what arrives ------------------------------------------------------------------------------

    def _chunk(self, links: RingLinks, chunk: object) -> None:
        assert isinstance(chunk, Chunk)
        links.inbox.append(chunk)
        self._pump_for(links)

    def _notice(self, links: RingLinks, incident_id: object) -> None:
        assert isinstance(incident_id, tuple)
        links.came_back = incident_id
        self._pump_for(links)

    def _ended(self, links: RingLinks, name: str, why: str) -> None:
        links.lost[name] = why
        self._pump_for(links)

    def _pump_for(self, links: RingLinks) -> None:
        if self._running is not None and self._running.links is links:
            self._pump()


def result_of(step: int, segments: list[Segment]) -> Gradient:
    """The reduced gradient. Return the result of a round; its bits depend on the ring order, because floating
    point is not associative.

    Segment s is summed from member s on. Parts are in ring order; a segment that is not made of the same
    parts as the first shows as a part of its own.
    """
    first = segments[0]
    turned = [x if s == 0 else x[-s:] + x[:-s] for s, x in enumerate(segments)]
    odd = tuple((f"segment {s}", ()) for s, x in enumerate(turned) if x != first or FLIPPED in x)
    return Gradient(step, (*first, *odd), digest_of(step, segments))
