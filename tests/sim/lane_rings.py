"""The data plane of a rank in worlds of unequal replicas: a ring per lane, reduced one after the other.

The shipping ``LaneDirectory`` says which pieces lie in which lane and who its neighbours are. The shipping
``RankLanes`` copies pieces from the flat gradient to the lanes and back. An element of a flat gradient is a
symbol's number: what the element is (``Element``), or what its sum is made of (``Sum``).
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from sim.checkers import Violation, demand
from sim.links import Linking, Links
from sim.ring import FLIPPED, SLOTS, Part, Ring, RingLinks, Running, Segment, plan_of, result_of
from sim.server import Gradient, digest_of

from fabric.ftar.lanes import EpochLanes, FlatPlaces, LaneDirectory, LaneSection
from fabric.model import Record
from fabric.protocol.messages import member_events as io
from fabric.protocol.messages.rank_messages import summed_digest
from fabric.protocol.rules.lanes import HeldParameter

if TYPE_CHECKING:
    from sim.trainer import Trainer


class Element(NamedTuple):
    """An element of a parameter."""

    name: str
    index: int


class Sum(NamedTuple):
    """The reduced gradient of an element: the parts in the order in which they were added."""

    element: Element
    step: int
    parts: Segment
    flipped: str = ""


class LaneGradient(Gradient):
    """A rank's part of a reduced gradient. ``digest`` names the round, ``own`` is this rank's summand."""

    flat: torch.Tensor
    epoch: int
    own: str
    lanes: tuple[tuple[int, str], ...]  # the number of each lane of this rank, and the digest of its sums


class Pieces:
    """What all ranks of a world know of elements: their symbols, and what must be equal everywhere."""

    def __init__(self) -> None:
        self._symbols: list[Element | Sum] = []
        self._numbers: dict[Element | Sum, int] = {}
        self._elements: dict[tuple[int, int], tuple[Element, ...]] = {}  # (epoch, lane) -> what it reduces
        self._holders: dict[tuple[int, int], dict[str, int]] = {}  # (epoch, lane) -> replica -> rank
        self._digests: dict[tuple[int, int, int], str] = {}  # (epoch, step, lane) -> digest, of a commit
        self._rounds: dict[tuple[str, int, int], dict[int, str]] = {}  # (process, epoch, step) -> rank -> own
        self._values: dict[tuple[int, int, Element], str] = {}  # (generation, step, element) -> its state

    def number(self, symbol: Element | Sum) -> int:
        if symbol not in self._numbers:
            self._numbers[symbol] = len(self._symbols)
            self._symbols.append(symbol)
        return self._numbers[symbol]

    def symbol(self, number: int) -> Element | Sum:
        return self._symbols[number]

    def gathered(self, who: "Trainer", record: Record, lane: int, elements: tuple[Element, ...]) -> None:
        """All holders of a lane must have put the same elements into it, and each replica has one holder."""
        known = self._elements.setdefault((record.epoch, lane), elements)
        if known != elements:
            raise Violation(f"{who.name} puts {elements} into lane {lane} of {record.epoch}, others {known}")
        holders = self._holders.setdefault((record.epoch, lane), {})
        if holders.setdefault(who.host, who.rank) != who.rank:
            raise Violation(f"two ranks of {who.host} hold lane {lane} of epoch {record.epoch}")

    def reduced(self, who: "Trainer", record: Record, lane: int) -> None:
        """A lane is reduced when all replicas' holders have taken part."""
        missing = set(record.names) - set(self._holders[record.epoch, lane])
        if missing:
            raise Violation(f"{who.name} has reduced lane {lane} of {record.epoch} without {missing}")

    def named(self, who: "Trainer", gradient: LaneGradient, digest: str) -> None:
        """The name of a round is the sum over the ranks of a replica."""
        ranks = self._rounds.setdefault((f"{who.host}.{who.incarnation}", gradient.epoch, gradient.step), {})
        ranks[who.rank] = gradient.own
        if len(ranks) == len(who.layout.ranks):
            total = summed_digest([ranks[rank] for rank in sorted(ranks)])
            demand(total == digest, f"{who.host} names step {gradient.step} {digest}, and its sum is {total}")

    def committed(self, who: "Trainer", gradient: LaneGradient) -> None:
        """Each lane has one result."""
        for lane, digest in gradient.lanes:
            known = self._digests.setdefault((gradient.epoch, gradient.step, lane), digest)
            if known != digest:
                raise Violation(f"{who.name} commits {digest} in lane {lane}, others {known}")

    def state(self, who: "Trainer", generation: int, step: int, values: dict[Element, str]) -> None:
        """Each element has one value, in all copies of all layouts."""
        for element, value in values.items():
            known = self._values.setdefault((generation, step, element), value)
            if known != value:
                raise Violation(f"{who.name} has another {element} at step {step} of generation {generation}")


class LaneRing(Ring):
    """The ring of one lane; its plane hears how an exchange ends."""

    def __init__(self, plane: "LaneRings", lane: int) -> None:
        super().__init__(plane.trainer)
        self.plane = plane
        self.lane = lane

    def refusal(self, epoch: int) -> tuple[str, str] | None:
        """Why an exchange of this epoch cannot begin, and about whom."""
        links = self.epochs.get(epoch)
        if links is not None:
            return links.incident_id
        over = epoch < self._retired_before or epoch in self._early
        demand(over, f"{self.trainer.name} reduces lane {self.lane} of epoch {epoch} without links")
        return self._early.get(epoch, ("the epoch is over", ""))

    def run(self, order: io.StartExchange, own: Part) -> None:
        epoch = order.fence.epoch
        refusal = self.refusal(epoch)
        if refusal is not None:
            self._failed(order, *refusal)
        else:
            demand(self._running is None, f"{self.trainer.name} starts two exchanges at once")
            links = self.epochs[epoch]
            world = len(links.names)
            plan = plan_of(world, links.position)
            self._running = Running(order, links, plan, own, [(own,)] * world)
            self._pump()

    def _failed(self, order: io.StartExchange, why: str, about: str, waited_for: str = "") -> None:
        self.plane.lane_failed(order, why, about, waited_for)

    def _finish(self, running: Running) -> None:
        self._stop()
        self.plane.reduced(self.lane, running)


@dataclass(slots=True)
class _Exchange:
    """One round under way: ``left`` are the lanes still to reduce."""

    order: io.StartExchange
    record: Record
    lanes: EpochLanes
    flat: torch.Tensor
    own: Part
    left: list[int]
    parts: Segment = ()
    done: list[tuple[int, str]] = field(default_factory=list)


class LaneRings:
    """In the place of ``Ring``, as the shipping ``LanePlane`` is in that of ``CpuRing``."""

    def __init__(self, trainer: "Trainer") -> None:
        self.trainer = trainer
        self.directory = LaneDirectory(trainer.host, trainer.rank, trainer.layout, trainer.cuts)
        self.row: tuple[HeldParameter, ...] = trainer.layout.ranks[trainer.rank]
        self.places = FlatPlaces(self.row)
        self.rings: dict[int, LaneRing] = {}
        self.slots: dict[int, LaneGradient] = {}
        self.flip = False
        self.digest_s = 0.0
        self.awaited: io.StartExchange | None = None  # waits for the last backward
        self._aborted: dict[int, tuple[str, str]] = {}
        self._retired_before = 0
        self._exchange: _Exchange | None = None
        self._busy_until = 0.0

    def of(self, lane: int) -> LaneRing:
        """The ring of a lane, which has heard of every abort."""
        if lane not in self.rings:
            ring = self.rings[lane] = LaneRing(self, lane)
            ring.retire(self._retired_before)
            for epoch, cause in self._aborted.items():
                ring.abort(epoch, *cause)
        return self.rings[lane]

    def elements(self) -> Iterator[Element]:
        """The elements that this rank holds."""
        for held in self.places.regions():
            yield from self._elements(held)

    @staticmethod
    def _elements(held: HeldParameter) -> list[Element]:
        begin, size = held.region.begin[0], held.region.sizes[0]
        return [Element(held.name, begin + i) for i in range(size)]

    def sums(self, gradient: LaneGradient) -> dict[Element, Sum]:
        """The reduced gradient of every element that this rank holds. Raises Violation where one is lost."""
        pieces, found = self.trainer.world.pieces, {}
        for held in self.places.regions():
            numbers = self.places.view(gradient.flat, held.name, held.region).tolist()
            for element, number in zip(self._elements(held), numbers, strict=True):
                value = pieces.symbol(number)
                if not isinstance(value, Sum) or (value.element, value.step) != (element, gradient.step):
                    raise Violation(f"{self.trainer.name} has {value} in the place of {element}")
                found[element] = value
        return found

    # --- links and ends ----------------------------------------------------------------------------

    def abort(self, epoch: int, why: str, about: str = "") -> None:
        if epoch >= self._retired_before:
            self._aborted.setdefault(epoch, (why, about))
        for ring in list(self.rings.values()):
            ring.abort(epoch, why, about)
        awaited = self.awaited
        if awaited is not None and awaited.fence.epoch == epoch:
            self.awaited = None
            self.trainer.clockwork.counts["path: aborted while streaming"] += 1
            self._fail(awaited, why, about)

    def retire(self, before: int) -> None:
        self._retired_before = max(self._retired_before, before)
        self._aborted = {e: cause for e, cause in self._aborted.items() if e >= self._retired_before}
        for ring in list(self.rings.values()):
            ring.retire(before)

    # --- an exchange -------------------------------------------------------------------------------

    def start(self, order: io.StartExchange) -> None:
        clockwork = self.trainer.clockwork
        busy = max(0.0, self._busy_until - clockwork.now)
        self.trainer.after(busy + clockwork.between(0.0, 0.002), lambda: self._begin(order))

    def finished(self, step: int, changed: bool) -> None:
        """Give the final gradient to the exchange that waits for it. No member may commit a changed one."""
        order, self.awaited = self.awaited, None
        if order is not None and order.step == step:
            self._begin(order)

    def _begin(self, order: io.StartExchange) -> None:
        trainer, pieces, epoch = self.trainer, self.trainer.world.pieces, order.fence.epoch
        if trainer.host in trainer.world.hung:
            trainer.after(0.1, lambda: self._begin(order))
            return
        record, lanes = trainer.world.checks.by_epoch[epoch], self.directory.get(epoch)
        left = list(dict.fromkeys(x.lane for x in lanes.rank_lanes.sections))
        demand(bool(left), f"{trainer.name} has no lane in epoch {epoch}")
        refusal = self.of(left[0]).refusal(epoch)
        if refusal is not None:
            self._fail(order, *refusal)
            return
        if order.streaming and trainer.main.streaming:
            self.awaited = order
            return
        demand(self._exchange is None, f"{trainer.name} starts two exchanges at once")
        trainer.clockwork.counts["path: streamed"] += order.streaming
        content = trainer.main.gradient if order.weight > 0 else ()
        if order.weight == 0 and not record.is_forced:
            trainer.clockwork.counts["path: weight zero in the first round"] += 1
        trainer.world.checks.gathered(trainer, order, content)
        if not trainer.core.context.config.retain and content:
            trainer.main.given, trainer.main.gradient = (order.step, content), ()
        flat = torch.zeros(self.places.nbytes, dtype=torch.uint8)
        for held in self.places.regions():
            numbers = torch.tensor([pieces.number(x) for x in self._elements(held)])
            self.places.view(flat, held.name, held.region).copy_(numbers)
        self._exchange = _Exchange(order, record, lanes, flat, (trainer.host, content), left)
        for lane in left:
            # All lanes are gathered before the first result is written: see ``ExchangeThread``.
            elements = tuple(e for x in self._sections(lane) for e in self._gather(x))
            pieces.gathered(trainer, record, lane, elements)
        texts = {x.cuts for x in record.roster}
        trainer.clockwork.counts["path: lanes of unequal layouts"] += len(texts) > 1
        self.of(left[0]).run(order, self._exchange.own)

    def _sections(self, lane: int) -> list[LaneSection]:
        assert self._exchange is not None
        return [x for x in self._exchange.lanes.rank_lanes.sections if x.lane == lane]

    def _gather(self, section: LaneSection) -> list[Element]:
        exchange, into = self._exchange, torch.zeros(section.size, dtype=torch.int64)
        assert exchange is not None
        try:
            exchange.lanes.rank_lanes.gather(section, exchange.flat, into)
        except (KeyError, RuntimeError) as error:
            raise Violation(f"{self.trainer.name} holds nothing of {error}, which its lane has") from error
        symbols = [self.trainer.world.pieces.symbol(number) for number in into[: section.elements].tolist()]
        return [x.element if isinstance(x, Sum) else x for x in symbols]

    def lane_failed(self, order: io.StartExchange, why: str, about: str, waited_for: str) -> None:
        """The exchange has ended without a result."""
        if self._exchange is not None and self._exchange.order is order:
            self._exchange = None
            self._fail(order, why, about, waited_for)

    def _fail(self, order: io.StartExchange, why: str, about: str, waited_for: str = "") -> None:
        event = io.ExchangeFailed(order.fence.epoch, order.step, about, why, waited_for)
        self.trainer.after(0.0, lambda: self.trainer.feed(event))

    def reduced(self, lane: int, running: Running) -> None:
        """Write the sums to their places, and go on with the next lane."""
        exchange, pieces = self._exchange, self.trainer.world.pieces
        assert exchange is not None
        pieces.reduced(self.trainer, exchange.record, lane)
        result = result_of(exchange.order.step, running.segments)
        flipped = ""
        if self.flip and len(running.segments) > 2:
            self.flip, self.trainer.world.flipped = False, True
            flipped = f"at {self.trainer.host}"
        demand(exchange.parts in ((), result.parts), f"lanes of {self.trainer.name} have other parts")
        exchange.parts = result.parts
        sums: list[Sum] = []
        for section in self._sections(lane):
            elements = self._gather(section)
            numbers = []
            for place, element in enumerate(elements):
                segment = running.segments[place * len(running.segments) // len(elements)]
                sums.append(Sum(element, exchange.order.step, _as_added(segment), flipped))
                numbers.append(pieces.number(sums[-1]))
            presence = [1] * len(section.pieces)
            exchange.lanes.rank_lanes.scatter(section, torch.tensor(numbers + presence), exchange.flat)
        exchange.done.append((lane, digest_of(lane, sums)))
        exchange.left.remove(lane)
        if exchange.left:
            self.of(exchange.left[0]).run(exchange.order, exchange.own)
        else:
            self._finish(exchange, flipped)

    def _finish(self, exchange: _Exchange, flipped: str) -> None:
        order, trainer, self._exchange = exchange.order, self.trainer, None
        total = sum(int(digest, 16) for _, digest in exchange.done) % 2**64
        own, lanes = f"{exchange.lanes.name}{total:016x}", tuple(exchange.done)
        parts = (*exchange.parts, FLIPPED) if flipped else exchange.parts
        gradient = LaneGradient(order.step, parts, own, exchange.flat, order.fence.epoch, own, lanes)
        self.sums(gradient)
        self.slots.pop(order.step, None)
        self.slots[order.step] = gradient
        while len(self.slots) > SLOTS:
            del self.slots[next(iter(self.slots))]
        clockwork = trainer.clockwork
        busy = clockwork.between(0.0, 0.06 if clockwork.chance(0.1) else 0.001)
        busy, self.digest_s = busy + self.digest_s, 0.0
        self._busy_until = clockwork.now + busy
        done = io.Exchanged(order.fence.epoch, order.step, own)
        trainer.after(busy, lambda: trainer.feed(done))

    def result(self, step: int) -> LaneGradient:
        """The result of ``step`` here."""
        name = self.trainer.name
        demand(step in self.slots, f"{name} is told to use the result of step {step}, and has none")
        return self.slots[step]


def _as_added(segment: Segment) -> Segment:
    """The parts in an order that tells which sums are equal in bits: the first two may change places."""
    return (*sorted(segment[:2]), *segment[2:])


@dataclass(slots=True)
class LaneLinking(Linking):
    forwards: dict[int, RingLinks] = field(default_factory=dict)  # lane -> the connection to the next holder
    dials: dict[int, float] = field(default_factory=dict)


class LaneLinks(Links):
    """A connection for every lane of this rank, to the rank that holds the lane in the next replica."""

    linking_class = LaneLinking
    epochs: dict[int, LaneLinking]  # type: ignore[assignment]

    def _rings(self, record: Record) -> tuple[Any, ...]:
        if not record.lists(*self.key):
            return ()
        return self.trainer.ring.directory.enter(record).rings

    def _drop(self, linking: Linking) -> None:
        assert isinstance(linking, LaneLinking)
        for links in linking.forwards.values():
            if links.next is not None:
                links.next[0].close(links.next[1], "the epoch is over")

    def _dial_next(self, linking: Linking) -> None:
        assert isinstance(linking, LaneLinking)
        record = linking.record
        if len(record.roster) > 1:
            for x in self._rings(record):
                following = (x.next_member.replica, x.next_member.incarnation)
                there = self.trainer.world.of_rank(following, x.next_rank)
                if there is not None:
                    self._dial_lane(linking, x.lane, there)

    def _dial_lane(self, linking: LaneLinking, lane: int, there: "Trainer") -> None:
        now, epoch = self.trainer.clockwork.now, linking.record.epoch
        waits = now - linking.dials.get(lane, -10.0) < 0.5
        if lane in linking.forwards or waits or not self._can_reach(there):
            return
        linking.dials[lane] = now

        def established(links: RingLinks) -> None:
            if lane not in linking.forwards and self.epochs.get(epoch) is linking:
                linking.forwards[lane] = links
                self.check()
            elif links.next is not None:
                links.next[0].close(links.next[1], "not needed")

        self.trainer.ring.of(lane).dial(linking.record, there, established, there.ring.of(lane))

    def _install(self, linking: Linking) -> None:
        assert isinstance(linking, LaneLinking)
        record = linking.record
        for x in self._rings(record):
            behind = self._neighbour(record, -1)
            self.trainer.ring.of(x.lane).install(record, linking.forwards.get(x.lane), behind)

    def _without_ring(self, linking: Linking) -> list[str]:
        assert isinstance(linking, LaneLinking)
        record, missing = linking.record, list[str]()
        for x in self._rings(record) if len(record.roster) > 1 else ():
            behind = self._neighbour(record, -1)
            assert behind is not None
            if (record.epoch, behind) not in self.trainer.ring.of(x.lane).arrivals:
                missing.append(behind[0])
            if x.lane not in linking.forwards:
                missing.append(x.next_member.replica)
        return missing
