"""Value types that every part shares: who is in the job, which epoch is in force, and the fence."""

import hashlib
from collections.abc import KeysView
from dataclasses import dataclass, field, fields
from functools import cached_property
from operator import attrgetter

# Version of every message and of the stored record. A reader accepts its own version and the one
# before, and ignores fields it does not know; a writer only ever adds optional fields. Version 3 renamed
# messages and fields, which no reader of version 1 could tell from missing ones: so there is no version 2.
PROTOCOL_VERSION = 3


@dataclass(frozen=True, slots=True, order=True)
class Fence:
    """The fencing token carried by every message: compare as (generation, epoch) within one store.

    ``store_id`` names the store's lifetime: a wiped store is another store, never a younger one.
    """

    store_id: str
    generation: int
    epoch: int


def incident_id_of(epoch: int) -> str:
    """The name of whatever epoch ``epoch`` answers: a failure, a newcomer, a drain. Nobody hands it out:
    a member that aborts and a lighthouse that notices a death name it alike, before there is an answer."""
    return f"e{epoch}"


def counted(count: int, noun: str) -> str:
    """For sentences: "1 step", "2 steps"."""
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


@dataclass(frozen=True, slots=True)
class RankAddress:
    """Where one rank of a replica is reached: ``host:port`` of its links, base URL of its checkpoint server
    (whose fragment names the rank: ``http://host:port#1``)."""

    link: str
    ckpt: str


@dataclass(frozen=True, slots=True)
class Member:
    """One replica's entry in a roster.

    ``link`` is ``host:port`` where peers dial it, ``ckpt`` the base URL of its checkpoint server; of a
    replica of several ranks these are rank 0's, and ``ranks`` has those of the ranks from 1 on.
    ``joining`` says that it has not yet taken part in a round; ``leaving`` that it is being drained.
    ``shares`` is its relative part of the micro-batches, ``layout`` the hash of its parameters' names,
    shapes and dtypes. ``since`` is the epoch that let this process in (its tenure; 0: not known).
    ``data_slot`` is
    its place in the division of the global batch, kept for it while it is away (-1: none given yet).
    ``blocking_join``: it came in by the fallback: the others wait in their round until its state has arrived.
    """

    replica: str
    incarnation: int
    link: str
    ckpt: str
    joining: bool = False
    leaving: bool = False
    shares: int = 1
    layout: str = ""
    since: int = 0
    data_slot: int = -1
    blocking_join: bool = False
    ranks: tuple[RankAddress, ...] = ()
    rack: str = ""  # what fails together with others' hosts, as the replica names it; empty: not named

    @property
    def addresses(self) -> tuple[RankAddress, ...]:
        """Of every rank, in rank order."""
        return (RankAddress(self.link, self.ckpt), *self.ranks)


_ENTRY = attrgetter(*(f.name for f in fields(Member)))


@dataclass(frozen=True, slots=True)
class Sharing:
    """How a job's global batch is shared out; equal in all sessions of the job.

    ``policy``: "constant" (the members compute everything, whoever is away) or "shrink" (the part of a data
    slot that nobody sits on is skipped). ``data_slots``: into how many parts the batch is divided where data
    slots matter.
    ``readers``: on how many data slots the data of a part can be read, by SPARe's layout; 0: on all.
    ``on_poison``: "stop" the job at a micro-batch that killed two processes, or "skip" it. ``on_loss``:
    what follows when no member can read a part: "wait" for one, "shrink" (the part is skipped) or "stop"
    the job.
    """

    policy: str = "constant"
    data_slots: int = 1
    readers: int = 0
    on_poison: str = "stop"
    on_loss: str = "wait"


# Everybody can compute everything, and does.
EVERYTHING = Sharing()


@dataclass(frozen=True, slots=True)
class Poison:
    """Micro-batches of ``step`` at each of which two processes died: nobody computes them again."""

    step: int
    micro_batches: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Death:
    """A process of a replica died while its main thread was at this micro-batch."""

    incarnation: int
    step: int
    micro_batch: int


# A source of state beside the addresses of checkpoint servers: durable storage, which every replica reaches
# by its own settings.
DURABLE = "durable:"


@dataclass(frozen=True, slots=True)
class Base:
    """Where a generation starts: the state that everybody must hold before its first round.

    ``digest`` empty means "the initial state of the first roster member", which nobody has vouched for.
    ``sources`` are base URLs of checkpoint servers that hold it; DURABLE among them: it lies in durable
    storage."""

    generation: int
    step: int
    digest: str = ""
    sources: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class JobEnd:
    """A member of the epoch of ``fence``, for whose contribution its rounds wait, came to the end of its loop
    at ``step``. That was the end of the job, whether a lighthouse has heard of it or not. ``incarnation``: of
    its process, which no other job of this name has."""

    fence: Fence
    step: int
    incarnation: int


@dataclass(frozen=True, slots=True)
class OperatorOverrides:
    """What operators said of a job; it holds until they say otherwise, whoever leads.

    ``paused``: by whom and why nobody is admitted, empty: newcomers are. ``min_replicas``, ``max_replicas``:
    in place of what the sessions ask for (0: as they ask), ``scaled``: by whom and why.
    """

    paused: str = ""
    min_replicas: int = 0
    max_replicas: int = 0
    scaled: str = ""


@dataclass(frozen=True, slots=True)
class HostFailure:
    """A member had to be evicted from ``epoch``, by nobody's wish: evidence against the replica and its host.

    ``host`` is empty where the replica is spread over several. ``at``: Unix seconds. ``why`` is a sentence.
    """

    replica: str
    host: str
    epoch: int
    at: float
    why: str = ""


@dataclass(frozen=True, slots=True)
class HostHistory:
    """What is remembered of a host for days: how many ``times`` replicas on it failed, when last (``at``,
    Unix seconds) and ``why``. ``score``: what its failures came to then, the older the less."""

    host: str
    times: int
    score: float
    at: float
    why: str = ""


@dataclass(frozen=True)
class Record:
    """The membership epoch: one key in the store, replaced by guarded compare-and-set only.

    ``forced`` is the epoch of the newest forced record, so ``forced == epoch`` means that members must
    report before they may run in it. ``cold`` is the epoch of the last cold start, ``base`` where that
    one began. ``nonce`` lets a writer recognise its own write after an indefinite outcome. ``sharing`` is as
    the sessions had it when the generation began. ``poison`` is what nobody computes any more; it changes in
    forced records alone. ``failed``: why the job has stopped for a person to mend, or empty.
    ``incident_id``: what
    this epoch answers (``incident_id_of`` its number, or the loss of the replica that it lets in again);
    empty
    where the writer was of an older release. ``min_replicas``: how many members this epoch needs to step (0:
    as each member's own setting says). ``overrides``, ``failures`` (the newest of the last while) and
    ``hosts`` (those that failed in the last days) concern those to come; they may change within an epoch.
    ``ended``: when the job was complete, in Unix seconds (0: not known).
    ``autonomy_s``: the longest for which any member may commit without a lighthouse (0: none has
    said it).
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
    sharing: Sharing = EVERYTHING
    poison: tuple[Poison, ...] = ()
    failed: str = ""
    incident_id: str = ""
    min_replicas: int = 0
    overrides: OperatorOverrides = OperatorOverrides()
    failures: tuple[HostFailure, ...] = ()
    ended: float = 0.0
    autonomy_s: float = 0.0
    hosts: tuple[HostHistory, ...] = ()

    # Asked for with every message, so found once. They are no fields: not compared, stored or sent.

    @cached_property
    def fence(self) -> Fence:
        return Fence(self.store_id, self.generation, self.epoch)

    @property
    def is_forced(self) -> bool:
        return self.forced == self.epoch

    @cached_property
    def names(self) -> tuple[str, ...]:
        return tuple(m.replica for m in self.roster)

    @cached_property
    def roster_digest(self) -> str:
        """Of every entry and their order, 32 hexadecimal digits: two records with the same one have the same
        roster. Never stored: versions with other fields have other digests."""
        entries = "\n".join(repr(_ENTRY(member)) for member in self.roster)
        return hashlib.blake2b(entries.encode(), digest_size=16).hexdigest()

    @cached_property
    def _members(self) -> dict[str, Member]:
        return {m.replica: m for m in reversed(self.roster)}

    def poisoned(self, step: int) -> frozenset[int]:
        """The micro-batches of ``step`` that nobody computes."""
        return frozenset(i for p in self.poison if p.step == step for i in p.micro_batches)

    def member(self, replica: str) -> Member | None:
        """The roster entry of ``replica``, or None."""
        return self._members.get(replica)

    def strangers(self, replicas: KeysView[str]) -> set[str]:
        """Those that are not in the roster, whatever process of them."""
        known = self._members.keys()
        return set() if replicas <= known else replicas - known

    def missing(self, replicas: KeysView[str]) -> set[str]:
        """The members that are not among these."""
        known = self._members.keys()
        return set() if known <= replicas else known - replicas

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
