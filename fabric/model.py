"""Value types that every part shares: the members of a job, the epoch in force, and the fence."""

import hashlib
from collections.abc import KeysView, Sequence
from functools import cached_property
from operator import attrgetter
from typing import Annotated, NamedTuple, dataclass_transform

import msgspec
from msgspec import field

# The version of every message and of the stored record. A reader accepts its own version and the one before.
# A reader ignores unknown fields. A writer only adds optional fields. No version 2 exists: version 3 renamed
# messages and fields, which a reader of version 1 takes for missing ones.
PROTOCOL_VERSION = 3

MAX_INTEGER = 2**63 - 1
# The most micro-batches of a step. A decision of the leader divides them in one turn of the loop.
MAX_MICRO_BATCHES = 60_000
# An integer of a message or of the record: a decoder refuses a longer one.
Int64 = Annotated[int, msgspec.Meta(ge=-MAX_INTEGER, le=MAX_INTEGER)]


@dataclass_transform(frozen_default=True, field_specifiers=(msgspec.field,))
class Value(msgspec.Struct, frozen=True):
    """A value without identity: equal fields make it equal, and no field changes."""


class Fence(Value, order=True):
    """The fencing token in every message. Within one store, compare fences as (generation, epoch)."""

    store_id: str  # the name of one life of the store: a wiped store gets another name
    generation: Int64
    epoch: Int64


def incident_id_of(epoch: int) -> str:
    """Name the failure, join or drain that epoch ``epoch`` answers.

    So a member that aborts and a lighthouse that notices a death use one name before that epoch exists.
    """
    return f"e{epoch}"


def counted(count: int, noun: str) -> str:
    """Say "1 step" or "2 steps"."""
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


def printable(text: str, stand_in: str = "?") -> str:
    """Return ``text`` in one line, with ``stand_in`` for each character that is not printable."""
    return text if text.isprintable() else "".join(c if c.isprintable() else stand_in for c in text)


def first_of(names: Sequence[object], most: int = 4) -> str:
    """Name the first ones and count the others, as in "r0, r1 and 3 more"."""
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(map(str, names[:most])) + more


def shortened(text: str, most: int) -> str:
    """Return ``text`` in at most ``most`` characters. A longer one ends with "...", after a whole word.

    A word that fills half of what is kept, or more, is cut.
    """
    if len(text) <= most:
        return text
    kept = text[: most - 3]
    words = kept.rpartition(" ")[0]
    return (words if len(words) > len(kept) // 2 else kept).rstrip(" ,;:(") + "..."


def apportion(total: int, shares: Sequence[int]) -> list[int]:
    """Split ``total`` into integers proportional to ``shares`` that sum to ``total``.

    Hamilton's largest remainder method in integer arithmetic, so that every replica computes the same. Ties
    go to the earlier share. Shares must not be negative; when all are zero the split is even.
    """
    if sum(shares) <= 0:
        shares = [1] * len(shares)
    divisor = sum(shares)
    parts = [total * share // divisor for share in shares]
    remainders = [(-(total * share % divisor), i) for i, share in enumerate(shares)]
    for _, index in sorted(remainders)[: total - sum(parts)]:
        parts[index] += 1
    return parts


class ReplicaProcess(NamedTuple):
    """One process start of a replica."""

    replica: str
    incarnation: int


class RankAddress(Value):
    """The addresses of one rank of a replica."""

    link: str  # ``host:port`` at which peers dial this rank, or ``host,host:port``
    ckpt: str  # base URL of its checkpoint server; the fragment names the rank: ``http://host:port#1``

    @property
    def host(self) -> str:
        """The host of this rank, by the first of its addresses."""
        return self.link.rpartition(":")[0].partition(",")[0]


class OfProcess(Value):
    """A value about one process start of a replica."""

    replica: str
    incarnation: Int64

    @property
    def process(self) -> ReplicaProcess:
        return ReplicaProcess(self.replica, self.incarnation)


class Member(OfProcess):
    """One replica's entry in a roster."""

    link: str  # ``host:port`` at which peers dial the member's rank 0
    ckpt: str  # base URL of the checkpoint server of the member's rank 0
    joining: bool = False  # whether this member has not yet taken part in a round
    leaving: bool = False  # whether this member is being drained
    shares: Int64 = 1  # the member's part of the micro-batches, relative to the parts of the other members
    layout: str = ""  # hash of the names, shapes and dtypes of the member's parameters
    since: Int64 = 0  # the epoch that let this process in (its tenure); 0: not known
    data_slot: Int64 = -1  # the member's place in the division of the batch, kept while it is away; -1: none
    blocking_join: bool = False  # the other members wait in their round until this member has its state
    ranks: tuple[RankAddress, ...] = ()  # addresses of ranks 1 and up
    rack: str = ""  # the name of the hosts that fail together with its host; empty: not named
    cuts: str = ""  # the parts of the parameters that each rank holds; empty: all members are cut alike
    # The layout in which a leaving member's launcher starts it again; empty: the member does not come back.
    returns: str = ""
    stores: bool = True  # whether it has storage for durable checkpoints

    @property
    def addresses(self) -> tuple[RankAddress, ...]:
        """The address of every rank, in rank order."""
        return (RankAddress(self.link, self.ckpt), *self.ranks)


_ENTRY = attrgetter(*Member.__struct_fields__)


class Sharing(Value):
    """How a job's global batch is divided among members; equal in all sessions of the job."""

    # "constant": the members compute the whole batch; "shrink": skip the part of a data slot without member
    policy: str = "constant"
    data_slots: Int64 = 1  # into how many parts the batch is divided, where data slots matter
    readers: Int64 = 0  # number of data slots that can read a part's data, by SPARe's layout; 0: all slots
    on_poison: str = "stop"  # at a micro-batch that killed two processes: "stop" the job, or "skip" it
    on_loss: str = "wait"  # at a part without a reader: "wait" for one, "shrink" (skip it), "stop" the job


# Every member can read all data, and the members together compute the whole batch.
EVERYTHING = Sharing()


class Poison(Value):
    """Micro-batches of ``step`` at each of which two processes died: no member computes them again."""

    step: Int64
    micro_batches: tuple[Int64, ...]


class Death(Value):
    """A process of a replica died while its main thread was at this micro-batch."""

    incarnation: Int64
    step: Int64
    micro_batch: Int64


# The entry for durable storage among the addresses of checkpoint servers. Each replica's own settings say
# where that storage is.
DURABLE = "durable:"


class Base(Value):
    """The state that every member must hold before the first round of a generation."""

    generation: Int64
    step: Int64
    digest: str = ""  # empty: the initial state of the first roster member, which no peer has confirmed
    sources: tuple[str, ...] = ()  # base URLs of checkpoint servers that hold the base, and perhaps DURABLE


class JobEnd(Value):
    """The end of a job, perhaps not known to any lighthouse: a member's loop ended at ``step``.

    The rounds of that member's epoch needed its contribution, so no later step was committed.
    """

    fence: Fence  # the fence of the epoch in which the job ended
    step: Int64
    incarnation: Int64  # incarnation of the process that reported the end; no other job of this name has it


class GoneHost(OfProcess):
    """A process whose host will never return, as an operator says."""

    why: str


class OperatorOverrides(Value):
    """Operators' limits for a job. They hold until an operator changes them, under every leader."""

    paused: str = ""  # who paused joins, and why; empty: joins are not paused
    min_replicas: Int64 = 0  # replaces the minimum of members that sessions ask for; 0: as the sessions ask
    max_replicas: Int64 = 0  # replaces the maximum of members that sessions ask for; 0: as the sessions ask
    scaled: str = ""  # who scaled the job, and why
    adapt: str = ""  # replaces FABRIC_ADAPT of the sessions: "off", "advise" or "act"; empty: as they ask
    vetoed: tuple[str, ...] = ()  # replicas whose shares no leader lowers
    gone: tuple[GoneHost, ...] = ()  # of the roster's processes; a process that is heard again ends its entry


class MemberSpeed(OfProcess):
    """One process whose share follows its measured speed."""

    speed: Int64  # thousandths of a healthy member's speed, 1 to 1000
    asked: Int64 = 1  # the share that the process asked for


class LaunchedLayouts(Value):
    """The layouts of a replica that `fabric launch` has started, each as ``FABRIC_LAYOUT`` says it."""

    layout: str = ""  # the layout of these ranks
    allowed: tuple[str, ...] = ()  # those that the launcher may start, preferred first; empty: none on order
    refused: tuple[str, ...] = ()  # layouts that the script has refused


NOT_LAUNCHED = LaunchedLayouts()


class LayoutChange(OfProcess):
    """A leader has ordered this process of a replica to come back in another layout."""

    layout: str  # the ordered layout; the usual one where the order is to come back in it
    usual: str  # the layout before, which the replica gets back
    at: float  # Unix seconds
    reason: str = ""

    @property
    def ends(self) -> bool:
        """Whether the order was to come back in the usual layout."""
        return self.layout == self.usual


class Adaptation(Value):
    """The shares that a leader has written against slow members, and its recent actions."""

    speeds: tuple[MemberSpeed, ...] = ()  # the slow members; empty: each member has the share it asked for
    gain: float = 0.0  # predicted gain of throughput, as a share
    cost_s: float = 0.0  # predicted time that the job loses by the change
    reason: str = ""
    micro_batches: Int64 = 0  # micro-batches of a step, of which each slow member keeps at least one
    acted: tuple[float, ...] = ()  # when leaders acted in the last hour, Unix seconds
    layouts: tuple[LayoutChange, ...] = ()  # the replicas whose layouts leaders have changed

    @property
    def with_asked_shares(self) -> "Adaptation":
        """The same actions and layouts, while each member has the share it asked for."""
        return Adaptation(acted=self.acted, layouts=self.layouts)


class HostFailure(Value):
    """A member failed and was evicted from ``epoch``: evidence against the replica and its host."""

    replica: str
    host: str  # the member's host; empty: its ranks are on several hosts
    epoch: Int64
    at: float  # Unix seconds
    why: str = ""  # the reason of the failure in one sentence


class HostHistory(Value):
    """The failures of a host in the last days."""

    host: str
    times: Int64  # how often replicas on this host failed
    score: float  # the weight of the host's failures at ``at``; older failures weigh less
    at: float  # the time of the last failure, Unix seconds
    why: str = ""


class Policy(Value):
    """The numbers of replicas that a job asks for."""

    min_replicas: Int64 = 1  # the fewest members with which the job steps
    max_replicas: Int64 = 1024  # the most members of the job
    start_replicas: Int64 = 1  # the replicas that the first round waits for
    start_wait_s: float = 120.0  # seconds after which ``min_replicas`` are enough for the first round


class Record(Value, dict=True):
    """The stored truth about one job: one key in the store, replaced by guarded compare-and-set only.

    ``overrides``, ``failures`` and ``hosts`` concern only later joins. They may change within an epoch.
    """

    store_id: str
    generation: Int64
    cold: Int64  # the epoch of the last cold start
    epoch: Int64
    forced: Int64  # the epoch of the newest forced record; equal to ``epoch``: members report before they run
    nonce: str  # lets a writer recognise its own write after an indefinite outcome
    roster: tuple[Member, ...]
    base: Base  # the base of the last cold start
    reason: str = ""
    complete: bool = False
    sharing: Sharing = EVERYTHING  # what the sessions asked for when the generation began
    poison: tuple[Poison, ...] = ()  # changes only in forced records
    failed: str = ""  # why the job has failed, for a person; empty: it has not failed
    incident_id: str = ""  # of this epoch, or of the loss that a rejoin in this epoch ends
    min_replicas: Int64 = 0  # how many members this epoch needs to step; 0: as each member's own setting says
    overrides: OperatorOverrides = OperatorOverrides()
    failures: tuple[HostFailure, ...] = ()  # the newest failures
    ended: float = 0.0  # when the job was complete, Unix seconds; 0: not known
    autonomy_s: float = 0.0  # the longest that any member may commit without a lighthouse; 0: not known
    hosts: tuple[HostHistory, ...] = ()  # the hosts that failed in the last days
    adaptation: Adaptation = Adaptation()  # changes only with the epoch
    policy: Policy | None = None  # what the replicas agreed on; None: they have not said it
    # The replica on each data slot, also while it is away; empty: nobody, or data slots do not matter.
    seats: tuple[str, ...] = ()

    # Every message needs the cached properties. They are not compared, stored or sent.

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
    def has_blocking_join(self) -> bool:
        return any(m.blocking_join for m in self.roster)

    @cached_property
    def roster_digest(self) -> str:
        """A hash of all entries in their order, in 32 hexadecimal digits.

        The digest is never stored, because distant versions compute other digests.
        """
        entries = "\n".join(repr(_ENTRY(member)) for member in self.roster)
        return hashlib.blake2b(entries.encode(), digest_size=16).hexdigest()

    @cached_property
    def _members(self) -> dict[str, Member]:
        return {m.replica: m for m in reversed(self.roster)}

    def gone_since(self, before: "Record | None") -> list[Member]:
        """The members of ``before`` that this forced epoch of the same generation leaves out."""
        if before is None or self.generation != before.generation or not self.is_forced:
            return []
        return [x for x in before.roster if not self.lists(*x.process) and not x.leaving]

    def poisoned(self, step: int) -> frozenset[int]:
        """The micro-batches of ``step`` that no member computes."""
        return frozenset(i for p in self.poison if p.step == step for i in p.micro_batches)

    def member(self, replica: str) -> Member | None:
        return self._members.get(replica)

    def strangers(self, replicas: KeysView[str]) -> set[str]:
        """The names in ``replicas`` that are not in the roster, under any incarnation."""
        members = self._members.keys()
        return set() if replicas <= members else replicas - members

    def missing(self, replicas: KeysView[str]) -> set[str]:
        """The members that are not among ``replicas``."""
        members = self._members.keys()
        return set() if members <= replicas else members - replicas

    def lists(self, replica: str, incarnation: int) -> bool:
        """Whether exactly this process is in the roster."""
        member = self._members.get(replica)
        return member is not None and member.incarnation == incarnation


class SnapshotRef(Value):
    """A snapshot that some checkpoint server holds."""

    generation: Int64
    step: Int64
    digest: str


class DataPlan(Value):
    """The data of the steps from ``begin`` to ``until``: those of one call of the user's loop."""

    micro_batches: Int64  # the number of micro-batches in a step
    described: str = ""  # the settings that members must have in common: "name value name value ..."
    begin: Int64 = 0
    until: Int64 = MAX_INTEGER

    def covers(self, step: int) -> bool:
        """Whether ``step`` is one of these steps."""
        return self.begin <= step < self.until


class RankTimes(Value):
    """One rank's part of a step of its replica."""

    compute_s: float = 0.0  # seconds of computing, without ``waited_s``
    waited_s: float = 0.0  # seconds for which the rank waited for other ranks of its replica
    tokens: float = 0.0  # declared work, else samples
    squares: float = 0.0
    stage: Int64 = 0  # the rank's pipeline stage


class EarlierStep(Value):
    """The computing time and the work of one step, without its details."""

    step: Int64
    compute_s: float
    tokens: float  # the declared work, else the number of samples
    squares: float
    samples: float
    micro_batches: Int64


class SpeedMeasurement(Value):
    """The result of one micro-benchmark."""

    number: Int64  # number of the lighthouse's request
    rank: Int64 = 0
    product_s: float = 0.0  # mean seconds of one matrix product on the device; 0: it failed
    copy_s: float = 0.0  # mean seconds of one copy of memory; 0: it failed
    round_trip_s: float = 0.0  # least seconds of a round trip to the echoed peer; 0: it failed, or no echo
    bytes_per_s: float = 0.0  # of a transfer to the echoed peer; 0: no byte was acknowledged in time
    interface: str = ""  # of the echo, with its speed and a faster one of the host; empty: unknown


class StepTimes(Value):
    """How one step's time was spent, and on which work."""

    compute_s: float = 0.0
    exchange_s: float = 0.0
    optimizer_s: float = 0.0
    waiting_s: dict[str, float] = field(default_factory=dict)  # peer -> the time spent waiting for it
    work: dict[Int64, float] = field(default_factory=dict)  # micro-batch -> declared work, else samples
    samples: float = 0.0
    squares: float = 0.0  # sum of the squared lengths of all documents; 0: not declared
    micro_batches: Int64 = 0  # number of micro-batches computed, repetitions included
    waited_s: float = 0.0  # part of ``compute_s`` for which this rank waited for other ranks of its replica
    ranks: tuple[RankTimes, ...] = ()  # by rank, in a replica of several ranks
    measured: tuple[SpeedMeasurement, ...] = ()  # micro-benchmarks that ran before this step
    sending_s: dict[str, float] = field(default_factory=dict)  # peer -> time for which bytes were under way
    loss: str = ""  # of the step, for people: the sum of the metric "loss" over the step's weight


def writer_of(record: Record | None, storing: bool = False) -> str:
    """Return the replica that writes for all: of those with the state that do not leave, the one whose
    process is longest in the job, then the first by name. A process that joined has not seen all of the run.

    ``storing``: only replicas with storage for durable checkpoints count.
    """
    roster = record.roster if record is not None else ()
    there = (x for x in roster if not x.joining and not x.leaving and (x.stores or not storing))
    return min(((x.since, x.replica) for x in there), default=(0, ""))[1]
