"""A checkpoint server process: its memory outlives the trainer, and its status says how the trainer is."""

import hashlib
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from sim.clockwork import Clockwork, Process
from sim.network import Connection, End, encode

from fabric.model import Death, JobEnd, SnapshotRef, Value
from fabric.protocol.messages.network import TrainerStatus

if TYPE_CHECKING:
    from sim.trainer import Trainer
    from sim.world import World

STATUS_S = 0.1
# After this many seconds without an answer to its ping, the server tries another lighthouse.
PING_S = 1.5
ALWAYS = 2


# This mark in a digest means that a bit was flipped; every later state keeps the mark.
FLIPPED = "~"


def digest_of(*parts: object) -> str:
    return hashlib.blake2b(repr(parts).encode(), digest_size=6).hexdigest()


class Gradient(Value):
    """A reduced gradient as symbols: who put in what, in ring order, and the digest of that."""

    step: int
    parts: tuple[tuple[str, tuple[int, ...]], ...]
    digest: str


@dataclass(slots=True)
class Memory:
    """The server's memory: two snapshots (with the state's history), and gradients by (generation, step)."""

    snapshots: list[SnapshotRef] = field(default_factory=list)
    gradients: dict[tuple[int, int], Gradient] = field(default_factory=dict)


class Server(Process):
    """``url`` is new with every process, like a port."""

    def __init__(self, clockwork: Clockwork, world: "World", host: str, number: int) -> None:
        super().__init__(clockwork, f"{host}/srv")
        self.world = world
        self.host = host
        self.url = self.ckpt = f"http://{host}/{number}"
        self.rank = 0
        self.memory = Memory()
        self.held_since: dict[SnapshotRef, float] = {}
        self.trainer: Trainer | None = None
        self.deaths: list[Death] = []
        self.ended: JobEnd | None = None  # the job's end as the former trainer reported it
        self.written: tuple[SnapshotRef, ...] = ()  # the newest durable checkpoint that this server wrote
        self._connection: Connection | None = None
        self._answered = 0.0  # when the lighthouse last answered a ping
        self._number = 0
        self._said = ""
        self.after(0.0, self._beat)

    def attach(self, trainer: "Trainer") -> None:
        self.trainer = trainer
        self.after(0.0, self.status)

    def state_of_trainer(self) -> str:
        if self.trainer is None:
            return "absent"
        if not self.trainer.alive:
            return "gone"
        return "stopped" if self.trainer.paused else "running"

    # --- memory ------------------------------------------------------------------------------------

    def take_slot(self) -> None:
        """Withdraw the older snapshot; its memory takes the next snapshot."""
        while len(self.memory.snapshots) >= 2:
            self.memory.snapshots.pop(0)

    def publish_snapshot(self, ref: SnapshotRef) -> None:
        self.memory.snapshots.append(ref)
        self.held_since[ref] = self.clockwork.now
        self.world.published(self, ref)

    def publish_gradient(self, generation: int, gradient: Gradient, listening: bool) -> None:
        gradients = self.memory.gradients
        gradients[generation, gradient.step] = gradient
        while len(gradients) > (self.world.settings.kept if listening else ALWAYS):
            del gradients[next(iter(gradients))]

    # --- status -------------------------------------------------------------------------------------

    def _beat(self) -> None:
        self.after(STATUS_S, self._beat)
        self._ping()
        self.status()

    def _ping(self) -> None:
        """Close the connection to a lighthouse that is stopped."""
        if self._connection is None or not self._connection.ends[1].process.paused:
            self._answered = self.clockwork.now
        elif self.clockwork.now - self._answered > PING_S:
            self._connection.close(0, "no answer to a ping")
            self._connection = None

    def status(self) -> None:
        """Send the trainer's status to the leading lighthouse, if it can be reached."""
        if self._connection is None:
            self._connect()
        if self._connection is not None and self.trainer is not None:
            self._number += 1
            self._connection.send(
                0,
                encode(
                    TrainerStatus(
                        replica=self.host,
                        incarnation=self.trainer.incarnation,
                        trainer=self.state_of_trainer(),
                        number=self._number,
                        ckpt=self.ckpt,
                        snapshots=tuple(self.memory.snapshots),
                        rank=self.rank,
                        deaths=tuple(self.deaths),
                        durable=self.written,
                        ended=self.ended,
                        parts=self.world.parts_of(self),
                    )
                ),
            )

    def reach(self, world: Any) -> None:
        """Change the part of the world that this process reaches; its connection ends."""
        self.world = world
        if self._connection is not None:
            self._connection.reset("timed out")

    def _connect(self) -> None:
        leader = self.world.find_leader(self.host)
        if leader is None:
            return

        def closed(_: str) -> None:
            self._connection = None

        holder: list[Connection] = []
        near = End(self, self.host, lambda _: None, closed)
        far = End(
            leader,
            leader.name,
            lambda message: leader.on_status(holder[0], message),
            lambda _: leader.on_status_closed(holder[0]),
        )
        self._connection = Connection(self.world.network, near, far)
        holder.append(self._connection)
