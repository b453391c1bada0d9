"""Worlds of replicas with unequal layouts of ranks, which change when a replica starts again.

One process, FSDP over two or three ranks, tensor parallelism with copies, and two splits into pipeline stages
train together, under the faults of worlds of ranks. Lanes, the choice of a layout to load, and the pieces of
published gradients come from the shipping ``LaneDirectory``, ``RankLanes``, ``StateLoader`` and
``PieceFetcher``. Invariants hold for each lane and each element: see ``Pieces``.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, cast

import torch
from msgspec.structs import replace
from sim.checkers import Checks, Violation, demand
from sim.lane_rings import Element, LaneGradient, LaneLinks, LaneRings, Pieces
from sim.ranks import Following, Heading, Lane, RankMain, RankWorld, _Core
from sim.server import Gradient, Server, digest_of
from sim.trainer import Trainer
from sim.transfer import POLL_S, Transfer

from fabric.ckpt_server.fetch.fetcher import GradientMeta
from fabric.client.state.fetch_thread import PieceFetcher
from fabric.client.state.state_loader import StateLoader, fetch_failure
from fabric.errors import Gone, StateError, Unreachable
from fabric.model import NOT_LAUNCHED, LaunchedLayouts, RankAddress, SnapshotRef
from fabric.protocol.member.core import MemberCore
from fabric.protocol.messages import member_events as io
from fabric.protocol.messages import rank_messages as ro
from fabric.protocol.rules.lanes import HeldParameter, ReplicaLayout, TensorRegion
from fabric.protocol.rules.layout_text import layout_text

if TYPE_CHECKING:
    from sim.faults import Aims

NAMES, SIZE = "abcd", 6
MOST_RANKS = 3
# What a hunt over these worlds must have met.
REQUIRED = (
    "fault: kill rank",
    "fault: lighthouse crash",
    "path: a layout changed",
    "path: lanes of unequal layouts",
    "path: streamed",
    "path: aborted while streaming",
    "path: a state of another layout",
    "path: a gradient of another layout",
    "path: a snapshot of all ranks",
    "path: a rank lost ends its replica",
    "path: replay",
    "path: cold start",
    "path: join",
    "path: drain",
    "finish",
)


def _part(name: str, begin: int = 0, size: int = SIZE) -> HeldParameter:
    return HeldParameter(name, "int64", (SIZE,), TensorRegion((begin,), (size,)))


def _cut(ranks: int, cut: str = NAMES) -> ReplicaLayout:
    """Over so many ranks; what is not ``cut`` has a copy at each of them."""
    size = SIZE // ranks
    return ReplicaLayout(
        tuple(tuple(_part(n, k * size, size) if n in cut else _part(n) for n in NAMES) for k in range(ranks))
    )


def _staged(*stages: str) -> ReplicaLayout:
    return ReplicaLayout(tuple(tuple(map(_part, names)) for names in stages))


LAYOUTS = (_cut(1), _cut(2), _cut(3), _cut(2, "ac"), _staged("ab", "cd"), _staged("abc", "d"))


class PieceChecks(Checks):
    """Ranks of other layouts hold other parts, so elements are compared and not ranks."""

    has_equal_layouts = False

    def _ground(self, trainer: Trainer, generation: int, step: int) -> tuple[object, ...]:
        return generation, step, trainer.cuts

    def applied(self, trainer: Trainer, order: io.Apply, gradient: Gradient, generation: int) -> None:
        super().applied(trainer, order, gradient, generation)
        if order.prepared is not None and isinstance(gradient, LaneGradient):
            trainer.world.pieces.committed(trainer, gradient)

    def state(self, trainer: Trainer, generation: int, step: int, digest: str) -> None:
        self.steps[trainer.host, trainer.incarnation] = step
        if generation:
            trainer.world.pieces.state(trainer, generation, step, trainer.main.values)


class PieceMain(RankMain):
    """``values`` is the state of this rank: for each element the chain of gradients applied to it."""

    def __init__(self, trainer: Trainer) -> None:
        super().__init__(trainer)
        seed = trainer.host if trainer.world.settings.different_starts else "same"
        self.values = {x: digest_of("initial", seed, x) for x in trainer.ring.elements()}
        self.digest = self.content()

    def content(self) -> str:
        """As ``ContentDigests``: a sum over the elements; of copies the lowest rank's counts."""
        layout, rank, total = self.trainer.layout, self.trainer.rank, 0
        lower = {(p.name, p.region) for row in layout.ranks[:rank] for p in row}
        for held in layout.ranks[rank]:
            if (held.name, held.region) not in lower:
                for element in LaneRings._elements(held):
                    total += int(digest_of(element, self.values[element]), 16)
        return f"{0:016x}{total % 2**64:016x}"

    def update(self, gradient: Gradient) -> None:
        assert isinstance(gradient, LaneGradient)
        for element, value in self.trainer.ring.sums(gradient).items():
            self.values[element] = digest_of(self.values[element], value)
        self.digest = self.content()

    def start(self) -> None:
        self.unnamed: dict[tuple[int, int], Any] = {}
        self._ready()
        if self.trainer.rank == 0 and not self.trainer.holds_snapshots:
            self._order_snapshot(0)

    def snapshot(self, generation: int) -> None:
        """By policy: when rank 0 says so."""
        if self.trainer.rank == 0:
            self._order_snapshot(generation)

    def _order_snapshot(self, generation: int) -> None:
        if self.trainer.is_alone:
            self.take(io.TakeSnapshot(self.step, generation))
        else:
            self.trainer.feed(ro.SnapshotDue(self.step))

    def take(self, order: io.TakeSnapshot) -> None:
        trainer, server, step = self.trainer, self.trainer.server, order.step
        generation = trainer.core.memory.state.generation if trainer.is_alone else order.generation
        demand(step == self.step, f"a snapshot of step {step} with the state at {self.step}")
        if not server.alive:
            trainer.server = trainer.world.ensure_server(trainer)
            trainer.feed(io.Snapshotted(step, "", generation))
            return
        digest, values = self.digest, dict(self.values)
        server.take_slot()

        def copied() -> None:
            if server.alive and trainer.is_alone:
                trainer.world.keep(server, SnapshotRef(generation, step, digest), (digest,), values)
            elif server.alive:
                self.unnamed[generation, step] = digest, values
                while len(self.unnamed) > 2:
                    del self.unnamed[next(iter(self.unnamed))]
            trainer.feed(io.Snapshotted(step, digest if server.alive else "", generation))

        trainer.after(trainer.clockwork.between(0.002, 0.04), copied)

    def name(self, order: ro.NameSnapshot) -> None:
        trainer = self.trainer
        copied = self.unnamed.pop((order.generation, order.step), None)
        done = copied is not None and bool(order.digests) and trainer.server.alive
        trainer.clockwork.counts["path: a snapshot of all ranks"] += done
        if done:
            ref = SnapshotRef(order.generation, order.step, ro.summed_digest(order.digests))
            trainer.world.keep(trainer.server, ref, order.digests, copied[1])
        trainer.feed(ro.SnapshotNamed(order.step, order.generation, done))

    def _install(self, order: io.Install) -> None:
        trainer, arrived, values = self.trainer, self.trainer.transfer.state, self.trainer.transfer.values
        demand(arrived is not None and arrived.digest == order.digest, "told to install another state")
        assert arrived is not None
        self.gradient = ()

        def loaded() -> None:
            self.step, self.values = arrived.step, dict(values)
            self.said = self.digest = self.content()
            trainer.world.happened("install", trainer.host)
            self.close_when_loaded()
            trainer.feed(io.Installed(order.step, self.digest, last=self.closing))

        self._work(trainer.clockwork.between(0.005, 0.05), loaded)


class PieceTransfer(Transfer):
    """``values``: the elements of the state that arrived. It is the fetcher of the shipping classes too."""

    is_cancelled = False

    def __init__(self, trainer: Trainer) -> None:
        super().__init__(trainer)
        self.values: dict[Element, str] = {}

    # --- states ------------------------------------------------------------------------------------

    def _state_arrives(self, order: io.FetchState) -> None:
        trainer, size = self.trainer, len(self.trainer.layout.ranks)
        own = trainer.world.kept.get((trainer.server.url, order.state))
        wanted = set(trainer.ring.elements())
        if own is not None and trainer.server.alive and len(own[0]) == size and set(own[1]) == wanted:
            self._take(order, own[1])
            return
        try:
            nothing = cast(Any, None)
            loader = StateLoader(nothing, nothing, nothing, trainer.rank, size, lambda _: self, True)
            served = loader._of_one_layout(ro.by_rank(order.lanes or order.urls), order.state)
            files = [self._part(served[rank], order.state) for rank in sorted(served)]
        except StateError as error:
            trainer.clockwork.counts["path: state not delivered"] += 1
            trainer.feed(fetch_failure(order, error))
            return
        named, parts = {name for name, _ in files}, [part for _, part in files]
        if len(named) > 1 or len(next(iter(named))) != len(parts):
            raise Violation(f"{trainer.name} loads parts of several layouts, or not all of them: {named}")
        values = {element: value for part in reversed(parts) for element, value in part.items()}
        if wanted - set(values):
            raise Violation(f"{trainer.name} loads {order.state} without {wanted - set(values)}")
        trainer.clockwork.counts["path: a state of another layout"] += len(parts) != size
        self._take(order, {x: values[x] for x in wanted})

    def _take(self, order: io.FetchState, values: dict[Element, str]) -> None:
        self.state, self.values = order.state, values
        self.trainer.feed(io.StateFetched(order.state.step, order.state.digest))

    def _part(self, urls: Sequence[str], state: SnapshotRef) -> tuple[tuple[str, ...], dict[Element, str]]:
        for server in self._reachable(tuple(urls), with_own=True):
            if state in server.memory.snapshots:
                return self.trainer.world.kept[server.url, state]
        raise StateError(f"no server delivered its part of {state}")

    def fetch_manifest(self, url: str, step: int, generation: int) -> dict[str, Any]:
        for server in self._reachable((url,), with_own=True):
            for ref in server.memory.snapshots:
                if (ref.generation, ref.step) == (generation, step):
                    named = self.trainer.world.kept[url, ref][0]
                    return {"content": named[0], **({"ranks": list(named)} if len(named) > 1 else {})} | {
                        "digest": f"{named} in {url}" if len(named) > 1 else named[0]
                    }
        raise StateError(f"{url} does not serve step {step}")

    def close(self) -> None:
        """Nothing is open."""

    # --- gradients ---------------------------------------------------------------------------------

    def _poll(self, order: io.FetchGradient, ticket: int, deadline: float) -> None:
        if ticket != self._ticket:
            return
        trainer, self.parts = self.trainer, set[Any]()
        flat = torch.zeros(trainer.ring.places.nbytes, dtype=torch.uint8)
        pieces = PieceFetcher(trainer.ring.directory)
        pieces.newest = lambda: trainer.core.epochs.newest  # type: ignore[method-assign]
        try:
            meta = pieces.fetch(self, order, flat, wait_s=-1.0)  # type: ignore[arg-type]
        except Gone:
            trainer.clockwork.counts["path: gradient gone"] += 1
            trainer.feed(io.GradientGone(order.step, gone=True, why="every source is past it"))
            return
        except StateError:
            if trainer.clockwork.now >= deadline:
                trainer.feed(io.GradientGone(order.step, gone=False, why="not published in time"))
            else:
                trainer.after(POLL_S, lambda: self._poll(order, ticket, deadline))
            return
        parts = next(iter(self.parts))
        demand(len(self.parts) == 1, f"{trainer.name} puts a gradient together from {self.parts}")
        arrived = LaneGradient(order.step, parts, meta.digest, flat, meta.epoch, "", ())

        def arrive() -> None:
            if ticket == self._ticket:
                self.gradient = arrived
                trainer.feed(io.GradientFetched(order.step, meta.digest))

        trainer.after(trainer.clockwork.between(0.001, 0.02), arrive)

    def fetch_gradient(self, *orders: Any, **what: Any) -> Any:
        """An order of the core; or the request of ``PieceFetcher`` for one rank's gradient."""
        if not what:
            return super().fetch_gradient(*orders)
        (url,) = orders[0]
        generation, step = what["generation"], what["step"]
        servers = self._reachable((url,))
        if not servers:
            raise Unreachable(f"{url} does not answer")
        gradients = servers[0].memory.gradients
        found = gradients.get((generation, step))
        if found is None:
            held = [s for g, s in gradients if g == generation]
            raise Gone(url) if held and min(held) > step else StateError(f"{url} has no step {step}")
        assert isinstance(found, LaneGradient)
        if len(found.flat) > len(what["into"]):  # as the fetcher refuses it
            raise StateError(f"{url} has {len(found.flat)} bytes where {len(what['into'])} fit")
        what["into"][: len(found.flat)] = found.flat.numpy().data
        self.parts.add(found.parts)
        other = len(found.flat) != self.trainer.ring.places.nbytes
        self.trainer.clockwork.counts["path: a gradient of another layout"] += other
        name = {"round_digest": found.digest}
        return GradientMeta(generation, step, found.epoch, 1.0, "", "", len(found.flat), name, url)


class _Piecewise:
    """The part of a rank that knows its layout; the layout of a process never changes."""

    links_class, ring_class, transfer_class, main_class = LaneLinks, LaneRings, PieceTransfer, PieceMain

    @property
    def is_alone(self) -> bool:
        """Whether the replica is this process."""
        return len(self.layout.ranks) == 1  # type: ignore[attr-defined]

    def _publish(self, effect: io.Publish) -> None:
        step, digest = effect.prepared.step, effect.prepared.gradient_digest
        gradient = self.ring.result(step)  # type: ignore[attr-defined]
        self.world.pieces.named(self, gradient, digest)  # type: ignore[attr-defined]
        self.ring.slots[step] = replace(gradient, digest=digest)  # type: ignore[attr-defined]
        super()._publish(effect)  # type: ignore[misc]


class UnequalHead(_Piecewise, Heading):
    """Rank 0, or the only process of its replica."""

    def __init__(self, clockwork: Any, world: "UnequalWorld", host: str, *rest: Any) -> None:
        self.layout = world.next_layout(host)
        self.cuts = layout_text(self.layout)
        self.holds_snapshots = False
        super().__init__(clockwork, world, host, *rest)

    def join_up(self, followers: list[Following]) -> None:
        """The ranks have told each other what they are, and are linked."""
        member, ranks = self.core.member, [self, *followers]
        addresses = tuple(RankAddress(f"{x.host}.{x.rank}", x.server.ckpt) for x in followers)
        held = [self.world.held_by(x.server, len(ranks)) for x in ranks]
        snapshots = tuple(s for s in held[0] if all(s in other for other in held))
        self.holds_snapshots = any(x.server.memory.snapshots for x in ranks)
        digest = ro.summed_digest([x.main.digest for x in ranks])
        identity = replace(member.context.identity, ranks=addresses, cuts=self.cuts, digest=digest)
        identity = replace(identity, snapshots=snapshots)
        config = replace(member.context.config, launched=self.world.launched(self.host))
        core = MemberCore(identity, config, self.clock())
        self.core = core if self.is_alone else _Core(core, (0,) * len(ranks), unequal=True)
        if followers:
            self.link_ranks(followers)

    def feed(self, event: Any) -> None:
        if self.is_alone:
            Trainer.feed(self, event)
        else:
            super().feed(event)


class UnequalFollower(_Piecewise, Following):
    """Rank 1 and up."""

    def __init__(self, clockwork: Any, lane: Lane, host: str, *rest: Any) -> None:
        head = lane.world.hosts[host].trainer
        self.layout, self.cuts, self.rank = head.layout, head.cuts, lane.rank
        super().__init__(clockwork, lane, host, *rest)


class UnequalWorld(RankWorld):
    """``kept``: for each server and snapshot, the digests of all ranks' parts and the values of this one."""

    trainer_class = UnequalHead
    follower_class = UnequalFollower
    checks_class = PieceChecks
    patience = 8  # a rank reduces up to six lanes, one after the other

    def __init__(self, seed: int, tracing: bool = False, faultless: bool = False, aims: "Aims" = ()) -> None:
        self.pieces = Pieces()
        self.kept: dict[tuple[str, SnapshotRef], tuple[tuple[str, ...], dict[Element, str]]] = {}
        self.layouts: dict[str, ReplicaLayout] = {}
        super().__init__(seed, tracing, faultless, aims)
        self.lanes = [Lane(self, rank) for rank in range(1, MOST_RANKS)]
        if not faultless and not self.blackout and self.clockwork.chance(0.2):
            # All come back at once, many of them in another layout.
            self.clockwork.at(self.clockwork.between(0.8, 2.5), lambda: self.faults.strike("kill everybody"))
        # Members compare states within one layout only, and tests/protocol/test_round.py shows that.
        self.faults._flip_in_a_state = lambda name, other: None  # type: ignore[method-assign]

    def next_layout(self, host: str) -> ReplicaLayout:
        """The layout of the process that starts now: often another one than before."""
        random, before = self.clockwork.random, self.layouts.get(host)
        if before is None or random.random() < 0.6:
            self.layouts[host] = random.choice(LAYOUTS)
        changed = before is not None and before != self.layouts[host]
        self.clockwork.counts["path: a layout changed"] += changed
        return self.layouts[host]

    def launched(self, host: str) -> LaunchedLayouts:
        """The layouts that the present process of this host announces."""
        return NOT_LAUNCHED

    def lanes_of(self, trainer: Any) -> list[Lane]:
        return self.lanes[: len(trainer.layout.ranks) - 1]

    def of_rank(self, key: tuple[str, int], rank: int) -> Trainer | None:
        """The living process of this rank."""
        return self.lanes[rank - 1].trainer(key) if rank else self.trainer(key)

    def keep(self, server: Server, ref: SnapshotRef, named: tuple[str, ...], values: dict[Any, str]) -> None:
        self.kept[server.url, ref] = named, values
        server.publish_snapshot(ref)

    def parts_of(self, server: Server) -> tuple[int, ...]:
        return tuple(len(self.kept[server.url, x][0]) for x in server.memory.snapshots)

    def held_by(self, server: Server, ranks: int) -> list[SnapshotRef]:
        """The snapshots there that a replica of so many ranks has taken: see ``ServerHandle.held_by``."""
        return [x for x in server.memory.snapshots if len(self.kept[server.url, x][0]) == ranks]


def play(seed: int, tracing: bool = False, faultless: bool = False, aims: "Aims" = ()) -> UnequalWorld:
    """One world to its end; raises what went wrong, with the world attached."""
    world = UnequalWorld(seed, tracing, faultless, aims)
    try:
        world.run()
    except Exception as error:
        error.world = world  # type: ignore[attr-defined]
        raise
    return world
