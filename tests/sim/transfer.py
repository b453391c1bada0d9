"""Fetches from other replicas' checkpoint servers: whole states, and one published gradient at a time."""

from typing import TYPE_CHECKING

from sim.server import Gradient, Server

from fabric.model import DURABLE, SnapshotRef
from fabric.protocol.messages import member_events as io

if TYPE_CHECKING:
    from sim.trainer import Trainer

POLL_S = 0.02
WAIT_S = 1.0
STUCK_S = 10.0  # how long a fetch takes that loses its large packets
# Slow fetches end after this time: four in a row would last longer than the checker waits for progress.
SLOW_UNTIL_S = 12.0


class Transfer:
    """The fetches of one trainer; ``state`` and ``gradient`` arrived last, verified but not yet loaded or
    applied.
    """

    def __init__(self, trainer: "Trainer") -> None:
        self.trainer = trainer
        self.state: SnapshotRef | None = None
        self.gradient: Gradient | None = None
        self._ticket = 0

    def fetch_state(self, order: io.FetchState) -> None:
        if self.trainer.host in self.trainer.world.starving:
            self.trainer.after(0.1, lambda: self.fetch_state(order))
            return
        if any(self.trainer.host in way for way in self.trainer.world.network.lossy):
            self.trainer.after(STUCK_S, lambda: self._state_arrives(order))
            return
        self.trainer.world.happened("fetch", self.trainer.host)
        delay = self.trainer.clockwork.between(0.01, 0.1)
        if self.trainer.clockwork.chance(0.2):
            delay += 0.5
        clockwork, extra = self.trainer.clockwork, self.trainer.world.settings.fetch_s
        if extra and clockwork.now < SLOW_UNTIL_S and clockwork.chance(0.5):
            delay += extra
        self.trainer.after(delay, lambda: self._state_arrives(order))

    def _state_arrives(self, order: io.FetchState) -> None:
        """Complete a fetch of ranges from all sources, if one source still holds the state at the end."""
        own, counts = self.trainer.server, self.trainer.clockwork.counts
        if own.alive and order.state not in own.memory.snapshots:
            own.take_slot()
        named = [self.trainer.world.servers.get(url.partition("#")[0]) for url in order.lanes or order.urls]
        if order.state.generation and any(x is not None and x.host == own.host for x in named):
            there = own.alive and order.state in own.memory.snapshots
            counts["own: from memory" if there else "own: not in memory"] += 1
        for server in self._reachable(order.urls, with_own=True):
            if order.state in server.memory.snapshots:
                self.state = order.state
                self.trainer.feed(io.StateFetched(order.state.step, order.state.digest))
                return
        stored = DURABLE in order.urls
        if stored and self.trainer.world.can_load(self.trainer.host, order.state):
            self.trainer.clockwork.counts["durable: loaded"] += 1
            self.state = order.state
            self.trainer.feed(io.StateFetched(order.state.step, order.state.digest))
            return
        self.trainer.clockwork.counts["path: state not delivered"] += 1
        self.trainer.feed(io.FetchFailed(f"no source delivered {order.state}", unusable=stored))

    def fetch_gradient(self, order: io.FetchGradient) -> None:
        self._ticket += 1
        ticket, deadline = self._ticket, self.trainer.clockwork.now + WAIT_S
        self.trainer.after(self.trainer.world.network.delay(), lambda: self._poll(order, ticket, deadline))

    def _poll(self, order: io.FetchGradient, ticket: int, deadline: float) -> None:
        if ticket != self._ticket:
            return
        trainer, key = self.trainer, (order.generation, order.step)
        servers = self._reachable(order.urls)
        found = next((s.memory.gradients[key] for s in servers if key in s.memory.gradients), None)
        if found is not None:

            def arrive() -> None:
                if ticket == self._ticket:
                    self.gradient = found
                    trainer.feed(io.GradientFetched(order.step, found.digest))

            trainer.after(trainer.clockwork.between(0.001, 0.02), arrive)
            return
        newer = [s for s in servers if self._is_past(s, order)]
        if servers and len(newer) == len(servers):
            trainer.clockwork.counts["path: gradient gone"] += 1
            trainer.feed(io.GradientGone(order.step, gone=True, why="every source is past it"))
        elif trainer.clockwork.now >= deadline:
            trainer.feed(io.GradientGone(order.step, gone=False, why="not published in time"))
        else:
            trainer.after(POLL_S, lambda: self._poll(order, ticket, deadline))

    @staticmethod
    def _is_past(server: Server, order: io.FetchGradient) -> bool:
        steps = [step for generation, step in server.memory.gradients if generation == order.generation]
        return bool(steps) and min(steps) > order.step

    def cancel(self) -> None:
        self._ticket += 1

    def _reachable(self, urls: tuple[str, ...], with_own: bool = False) -> list[Server]:
        world, me = self.trainer.world, self.trainer.host
        found = [world.servers[url] for url in urls if url in world.servers]
        return [
            s
            for s in found
            if s.alive and not s.paused and (with_own or s.host != me) and world.network.can_carry(me, s.host)
        ]
