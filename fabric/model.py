"""Value types that every part shares: the members of a job, the epoch in force, and the fence."""

import hashlib
from collections.abc import KeysView
from dataclasses import dataclass, field, fields
from functools import cached_property
from operator import attrgetter
from typing import Annotated, NamedTuple

import msgspec

# Version of every message and of the stored record. A reader accepts its own version and the one
# before, and ignores fields it does not know. A writer only ever adds optional fields. Version 2 was skipped:
# version 3 renamed messages and fields, which a reader of version 1 takes for missing ones.
PROTOCOL_VERSION = 3

MAX_INTEGER = 2**63 - 1
# An integer of a message or of the record: a decoder refuses a longer one.
Int64 = Annotated[int, msgspec.Meta(ge=-MAX_INTEGER, le=MAX_INTEGER)]


@dataclass(frozen=True, slots=True, order=True)
class Fence:
    """The fencing token carried by every message: compare as (generation, epoch) within one store."""

    store_id: str  # names the store's lifetime: a wiped store is another store, never a younger one
    generation: Int64
    epoch: Int64


def incident_id_of(epoch: int) -> str:
    """Name the failure, join or drain that epoch ``epoch`` answers.

    A member that aborts and a lighthouse that notices a death give it the same name before the epoch exists.
    """
    return f"e{epoch}"


def counted(count: int, noun: str) -> str:
    """Say "1 step" or "2 steps"."""
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


class ReplicaProcess(NamedTuple):
    """One process start of a replica."""

    replica: str
    incarnation: int


@dataclass(frozen=True, slots=True)
class RankAddress:
    """Where one rank of a replica is reached."""

    link: str  # ``host:port``, where peers dial it
    ckpt: str  # base URL of its checkpoint server; the fragment names the rank: ``http://host:port#1``


@dataclass(frozen=True, slots=True)
class Member:
    """One replica's entry in a roster."""

    replica: str
    incarnation: Int64
    link: str  # ``host:port`` where peers dial it; rank 0's, if it has several ranks
    ckpt: str  # base URL of its checkpoint server; rank 0's, if it has several ranks
    joining: bool = False  # it has not yet taken part in a round
    leaving: bool = False  # it is being drained
    shares: Int64 = 1  # its part of the micro-batches, relative to the others'
    layout: str = ""  # hash of its parameters' names, shapes and dtypes
    since: Int64 = 0  # the epoch that let this process in (its tenure); 0: not known
    data_slot: Int64 = -1  # its place in the division of the batch, kept while it is away; -1: none given yet
    blocking_join: bool = False  # the others wait in their round until its state has arrived
    ranks: tuple[RankAddress, ...] = ()  # addresses of ranks 1 and up
    rack: str = ""  # names the hosts that fail together, as the replica says; empty: not named
    cuts: str = ""  # the parts of the parameters that each rank holds; empty: all members are cut alike

    @property
    def process(self) -> ReplicaProcess:
        return ReplicaProcess(self.replica, self.incarnation)

    @property
    def addresses(self) -> tuple[RankAddress, ...]:
        """The address of every rank, in rank order."""
        return (RankAddress(self.link, self.ckpt), *self.ranks)


_ENTRY = attrgetter(*(f.name for f in fields(Member)))


@dataclass(frozen=True, slots=True)
class Sharing:
    """How a job's global batch is shared out; equal in all sessions of the job."""

    # "constant": the members present compute all of it; "shrink": skip the part of a data slot without member
    policy: str = "constant"
    data_slots: Int64 = 1  # into how many parts the batch is divided, where data slots matter
    readers: Int64 = 0  # on how many data slots a part's data can be read, by SPARe's layout; 0: on all
    on_poison: str = "stop"  # at a micro-batch that killed two processes: "stop" the job, or "skip" it
    on_loss: str = "wait"  # if no member can read a part: "wait" for one, "shrink" (skip it), "stop" the job


# Every member can compute everything, and together they do.
EVERYTHING = Sharing()


@dataclass(frozen=True, slots=True)
class Poison:
    """Micro-batches of ``step`` at each of which two processes died: no member computes them again."""

    step: Int64
    micro_batches: tuple[Int64, ...]


@dataclass(frozen=True, slots=True)
class Death:
    """A process of a replica died while its main thread was at this micro-batch."""

    incarnation: Int64
    step: Int64
    micro_batch: Int64


# Stands among the addresses of checkpoint servers for durable storage. Every replica reaches that by its own
# settings.
DURABLE = "durable:"


@dataclass(frozen=True, slots=True)
class Base:
    """Where a generation starts: the state that every member must hold before its first round."""

    generation: Int64
    step: Int64
    digest: str = ""  # empty: the initial state of the first roster member, which no peer has confirmed
    sources: tuple[str, ...] = ()  # base URLs of checkpoint servers that hold it, and perhaps DURABLE


@dataclass(frozen=True, slots=True)
class JobEnd:
    """The end of a job, whether a lighthouse has heard of it or not: a member's loop ended at ``step``.

    The rounds of that member's epoch waited for its contribution.
    """

    fence: Fence  # of that epoch
    step: Int64
    incarnation: Int64  # of its process, which no other job of this name has


@dataclass(frozen=True, slots=True)
class OperatorOverrides:
    """Operators' limits for a job. They hold until an operator changes them, under every leader."""

    paused: str = ""  # by whom and why newcomers are not admitted; empty: they are
    min_replicas: Int64 = 0  # in place of the sessions' own figure; 0: as they ask
    max_replicas: Int64 = 0  # likewise
    scaled: str = ""  # by whom and why


@dataclass(frozen=True, slots=True)
class HostFailure:
    """A member failed and was evicted from ``epoch``: evidence against the replica and its host."""

    replica: str
    host: str  # empty: the replica is spread over several
    epoch: Int64
    at: float  # Unix seconds
    why: str = ""  # a sentence


@dataclass(frozen=True, slots=True)
class HostHistory:
    """The failures of a host in the last days."""

    host: str
    times: Int64  # how often replicas on it failed
    score: float  # the weight of its failures at ``at``; older ones weigh less
    at: float  # of the last failure, Unix seconds
    why: str = ""


@dataclass(frozen=True)
class Record:
    """The membership epoch: one key in the store, replaced by guarded compare-and-set only.

    ``overrides``, ``failures`` and ``hosts`` concern replicas still to come. They may change within an epoch.
    """

    store_id: str
    generation: Int64
    cold: Int64  # the epoch of the last cold start
    epoch: Int64
    forced: Int64  # the epoch of the newest forced record; equal to ``epoch``: members report before they run
    nonce: str  # lets a writer recognise its own write after an indefinite outcome
    roster: tuple[Member, ...]
    base: Base  # of the last cold start
    reason: str = ""
    complete: bool = False
    sharing: Sharing = EVERYTHING  # as the sessions had it when the generation began
    poison: tuple[Poison, ...] = ()  # changes in forced records alone
    failed: str = ""  # why the job has stopped for a person to mend; empty: it has not
    # Of its number, or of the loss of the replica that it lets in again; empty: a writer of an older release.
    incident_id: str = ""
    min_replicas: Int64 = 0  # how many members this epoch needs to step; 0: as each member's own setting says
    overrides: OperatorOverrides = OperatorOverrides()
    failures: tuple[HostFailure, ...] = ()  # the newest of the last while
    ended: float = 0.0  # when the job was complete, Unix seconds; 0: not known
    autonomy_s: float = 0.0  # the longest that any member may commit without a lighthouse; 0: not known
    hosts: tuple[HostHistory, ...] = ()  # those that failed in the last days

    # Every message asks for these, so they are cached. They are not compared, stored or sent.

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
        """A hash of every entry and their order, in 32 hexadecimal digits.

        It is never stored, because versions with other fields compute other digests.
        """
        entries = "\n".join(repr(_ENTRY(member)) for member in self.roster)
        return hashlib.blake2b(entries.encode(), digest_size=16).hexdigest()

    @cached_property
    def _members(self) -> dict[str, Member]:
        return {m.replica: m for m in reversed(self.roster)}

    def poisoned(self, step: int) -> frozenset[int]:
        """The micro-batches of ``step`` that no member computes."""
        return frozenset(i for p in self.poison if p.step == step for i in p.micro_batches)

    def member(self, replica: str) -> Member | None:
        return self._members.get(replica)

    def strangers(self, replicas: KeysView[str]) -> set[str]:
        """Those of ``replicas`` that are not in the roster, under any incarnation."""
        members = self._members.keys()
        return set() if replicas <= members else replicas - members

    def missing(self, replicas: KeysView[str]) -> set[str]:
        """The members that are not among ``replicas``."""
        members = self._members.keys()
        return set() if members <= replicas else members - replicas

    def lists(self, replica: str, incarnation: int) -> bool:
        """Whether exactly this process is in the roster."""
        member = self.member(replica)
        return member is not None and member.incarnation == incarnation


@dataclass(frozen=True, slots=True)
class Policy:
    """The numbers of replicas that a job asks for."""

    min_replicas: int = 1  # needed to step at all
    max_replicas: int = 1024  # may join
    start_replicas: int = 1  # awaited before the first round
    start_wait_s: float = 120.0  # so long; then ``min_replicas`` are enough


@dataclass(frozen=True, slots=True)
class SnapshotRef:
    """A snapshot that some checkpoint server holds."""

    generation: Int64
    step: Int64
    digest: str


@dataclass(frozen=True, slots=True)
class StepTimes:
    """Where one step's time went, and the work that it was spent on."""

    compute_s: float = 0.0
    exchange_s: float = 0.0
    optimizer_s: float = 0.0
    waiting_s: dict[str, float] = field(default_factory=dict)  # by peer
    work: dict[Int64, float] = field(default_factory=dict)  # by micro-batch: as declared, else its samples
    samples: float = 0.0
    squares: float = 0.0  # sum of the squared lengths of all documents; 0: not declared
    micro_batches: Int64 = 0  # computed, with repetitions; 0: an older version
