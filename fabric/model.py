"""Value types that every part shares: who is in the job, which epoch is in force, and the fence."""

from dataclasses import dataclass, field

# Version of every message and of the stored record. A reader accepts its own version and the one
# before, and ignores fields it does not know; a writer only ever adds optional fields.
PROTOCOL_VERSION = 1


@dataclass(frozen=True, slots=True, order=True)
class Fence:
    """The fencing token carried by every message: compare as (generation, epoch) within one store.

    ``store_id`` names the store's lifetime: a wiped store is another store, never a younger one.
    """

    store_id: str
    generation: int
    epoch: int


@dataclass(frozen=True, slots=True)
class Member:
    """One replica's entry in a roster.

    ``link`` is ``host:port`` where peers dial it, ``ckpt`` the base URL of its checkpoint server.
    ``fresh`` says that it has not yet taken part in a round; ``leaving`` that it is being drained.
    ``shares`` is its relative part of the micro-batches, ``layout`` the hash of its parameters' names,
    shapes and dtypes.
    """

    replica: str
    incarnation: int
    link: str
    ckpt: str
    fresh: bool = False
    leaving: bool = False
    shares: int = 1
    layout: str = ""


@dataclass(frozen=True, slots=True)
class Base:
    """Where a generation starts: the state that everybody must hold before its first round.

    ``digest`` empty means "the initial state of the first roster member", which nobody has vouched for.
    ``sources`` are base URLs of checkpoint servers that hold it.
    """

    generation: int
    step: int
    digest: str = ""
    sources: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Record:
    """The membership epoch: one key in the store, replaced by guarded compare-and-set only.

    ``forced`` is the epoch of the newest forced record, so ``forced == epoch`` means that members must
    report before they may run in it. ``cold`` is the epoch of the last cold start, ``base`` where that
    one began. ``nonce`` lets a writer recognise its own write after an indefinite outcome.
    """

    store_id: str
    generation: int
    cold: int
    epoch: int
    forced: int
    nonce: str
    roster: tuple[Member, ...]
    base: Base
    reason: str = ""
    complete: bool = False

    @property
    def fence(self) -> Fence:
        return Fence(self.store_id, self.generation, self.epoch)

    @property
    def is_forced(self) -> bool:
        return self.forced == self.epoch

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(m.replica for m in self.roster)

    def member(self, replica: str) -> Member | None:
        """The roster entry of ``replica``, or None."""
        return next((m for m in self.roster if m.replica == replica), None)

    def lists(self, replica: str, incarnation: int) -> bool:
        """Whether exactly this process is in the roster."""
        member = self.member(replica)
        return member is not None and member.incarnation == incarnation


@dataclass(frozen=True, slots=True)
class Policy:
    """What a job wants from the lighthouse.

    ``start_replicas`` sessions are awaited before the first round, at most ``start_wait_s`` seconds, then
    ``min_replicas`` are enough. ``min_replicas`` are needed to step at all, ``max_replicas`` may join.
    """

    min_replicas: int = 1
    max_replicas: int = 1024
    start_replicas: int = 1
    start_wait_s: float = 120.0


@dataclass(frozen=True, slots=True)
class SnapshotRef:
    """A snapshot that some checkpoint server holds."""

    generation: int
    step: int
    digest: str


@dataclass(frozen=True, slots=True)
class StepTimes:
    """Where one step's time went, in seconds; ``waiting_s`` by peer; ``work`` counts per micro-batch."""

    compute_s: float = 0.0
    exchange_s: float = 0.0
    optimizer_s: float = 0.0
    waiting_s: dict[str, float] = field(default_factory=dict)
    work: dict[int, float] = field(default_factory=dict)
