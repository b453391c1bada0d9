"""Every message of the protocol. Each section head names sender and receiver.

A message carries the fence of its epoch. A receiver drops messages of epochs older than it promised.
"""

from dataclasses import dataclass

from fabric.model import (
    EVERYTHING,
    Death,
    Fence,
    Int64,
    JobEnd,
    Member,
    Poison,
    RankAddress,
    Record,
    Sharing,
    SnapshotRef,
    StepTimes,
)

# In the phase of a heartbeat: links of the epoch are still to be made.
LINKING = ", linking"

# --- member to member ---------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Contribution:
    """My part in round (epoch, step), sent to every member before the first chunk of it."""

    fence: Fence
    step: Int64
    weight: float  # the sum of the micro-batches' weights; zero: I only listen
    micro_batches: tuple[Int64, ...]
    layout: str = ""  # a member with another layout fails the round with a clear error
    metrics: tuple[tuple[str, float], ...] = ()  # summed over the members at the commit


@dataclass(frozen=True, slots=True)
class CommitVote:
    """I have prepared round (epoch, step), and can commit it from now on."""

    fence: Fence
    step: Int64
    ready: Int64  # the epoch I am ready for, at least that of the round
    gradient_digest: str
    state_digest: str = ""  # of the shared state at ``step``; empty: not computed
    nonfinite: str = ""  # a tensor of my contribution that is not finite; empty without the check
    entries: tuple[tuple[str, str], ...] = ()  # small entries of that state, sent with its digest


@dataclass(frozen=True, slots=True)
class Finished:
    """My loop ended at ``step``: I contribute to no later round, and stay linked until the job is over.

    It goes to the leader. A member that has taken part in rounds also sends it to all members.
    """

    fence: Fence
    step: Int64
    why: str = ""  # not empty: others had finished at ``step``, and so my loop was stopped


PeerMessage = Contribution | CommitVote | Finished

# --- leader to member ---------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Epoch:
    """A committed record, announced to every replica with a session after its commit."""

    record: Record
    changes: bool = False  # this leader understands ``RequestRoster`` and ``Report.round_lacked``


@dataclass(frozen=True, slots=True)
class RosterDelta:
    """A committed record for a replica that holds the roster with digest ``before``."""

    record: Record  # with an empty roster
    before: str
    after: str  # the digest of the roster that results
    joined: tuple[Member, ...] = ()  # the entries that are new or differ
    left: tuple[str, ...] = ()  # the names that are gone
    order: tuple[str, ...] = ()  # all names; empty: the old order, and new ones at the end


@dataclass(frozen=True, slots=True)
class Assignment:
    """One member's row of a Resume table: drop the kept gradient if told so, then compute these."""

    replica: str
    micro_batches: tuple[Int64, ...]
    drop: bool = False


@dataclass(frozen=True, slots=True)
class Resume:
    """The decision of forced epoch ``fence.epoch``: go on at ``step`` with this table."""

    fence: Fence
    step: Int64
    table: tuple[Assignment, ...]  # a member gets its own row only; without a row it adds nothing
    commit_digest: str = ""  # a member one step behind with a gradient of this digest commits it first
    reason: str = ""


@dataclass(frozen=True, slots=True)
class TakeSnapshotFor:
    """Snapshot the state at ``step`` and keep published gradients from there on for ``joiner``."""

    fence: Fence
    joiner: str
    step: Int64


@dataclass(frozen=True, slots=True)
class StopServing:
    """``joiner`` needs no more published gradients."""

    fence: Fence
    joiner: str


@dataclass(frozen=True, slots=True)
class StateSources:
    """Where a joining replica finds a state."""

    fence: Fence
    state: SnapshotRef
    urls: tuple[str, ...]  # of checkpoint servers
    again: bool = False  # the replica did not ask, but its replay leads nowhere: start again from this state


@dataclass(frozen=True, slots=True)
class Complete:
    """The job is complete at ``step``: close, exit 0."""

    fence: Fence
    step: Int64


@dataclass(frozen=True, slots=True)
class Rejected:
    """The leader refuses the session."""

    reason: str  # for a person
    retry: bool = False  # the session stays, but its replica is not admitted for now
    poison: tuple[Poison, ...] = ()  # the micro-batches that are the reason, if any are


@dataclass(frozen=True, slots=True)
class HeartbeatAck:
    """Answer to the heartbeat with the same number; contact dates from when that heartbeat was sent."""

    number: Int64
    waiting_for: str = ""  # what the job waits for, in a sentence for people; empty while it steps


LeaderMessage = (
    Epoch
    | RosterDelta
    | Resume
    | TakeSnapshotFor
    | StopServing
    | StateSources
    | Complete
    | Rejected
    | HeartbeatAck
)

# --- member to leader ---------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class OpenSession:
    """First message of every session: identity, state and addresses of the replica."""

    replica: str
    incarnation: Int64
    generation: Int64  # 0: nothing but my initial state
    step: Int64
    digest: str
    epoch: Int64  # the newest epoch I know
    link: str  # rank 0's address for other members
    ckpt: str  # base URL of rank 0's checkpoint server
    micro_batches: Int64  # how many make a step
    layout: str = ""
    data: str = ""  # the settings that the data order depends on: "name value name value ..."
    shares: Int64 = 1
    snapshots: tuple[SnapshotRef, ...] = ()
    finished: bool = False  # the user's loop has ended at this step
    sharing: Sharing = EVERYTHING
    data_slot: Int64 = -1  # the data slot that this replica's data are for; -1: any will do
    ranks: tuple[RankAddress, ...] = ()  # addresses of ranks 1 and up, where the replica has several
    replay: bool = True  # it catches up by published gradients; else the others wait for its state
    exchange_s: float = 60.0  # its time budget for an exchange
    user_code_s: float = 1800.0  # its time budget for user code
    spare: bool = False  # it contributes only while a member is missing
    # The parameters in order, for people: "name dtype[shape]"; empty: very many.
    tensors: tuple[str, ...] = ()
    roster: str = ""  # digest of the newest roster I hold; empty: an older version, without RosterDelta
    plane: str = ""  # how gradients are exchanged (host, device, nccl); empty: not said
    durable: tuple[SnapshotRef, ...] = ()  # complete durable checkpoints that it could load, oldest first
    # Earlier incarnations on this host that have ended, as the kernel says, newest first.
    predecessors: tuple[Int64, ...] = ()
    secret: str = ""  # known to this process and the lighthouse alone: no other process can speak for it
    autonomy_s: float = 0.0  # how long it may commit without a lighthouse's answer; 0: an older version
    # The job's end, which an earlier process here saw while no lighthouse could be told.
    ended: JobEnd | None = None
    rack: str = ""  # as in ``Member.rack``
    adapt: str = ""  # its job\'s mode against slow replicas: "off", "advise"; empty: an older version
    cuts: str = ""  # as in ``Member.cuts``


@dataclass(frozen=True, slots=True)
class Heartbeat:
    """Progress: sent at every step and at least once a second."""

    number: Int64
    epoch: Int64
    generation: Int64
    step: Int64
    digest: str = ""
    phase: str = ""  # the mode, and what the main thread does
    waiting_for: tuple[str, ...] = ()
    busy: str = ""  # the reason given to ``session.busy``; empty outside of it
    times: StepTimes | None = None
    busy_s: float = 0.0  # its bound
    empty: Int64 = -1  # the newest step that was committed with total weight 0
    unreachable: tuple[str, ...] = ()  # members that I cannot reach; sent from outside the roster

    @property
    def is_linking(self) -> bool:
        """Whether links of its epoch are still to be made; it contributes nothing without them."""
        return LINKING in self.phase

    @property
    def waits(self) -> bool:
        """Whether the main thread has come back from the user's code and waits."""
        return self.phase.endswith(", waiting")


@dataclass(frozen=True, slots=True)
class Running:
    """I entered round ``step`` of this epoch. It is sent at the first round, and again when a leader asks."""

    fence: Fence
    step: Int64 = -1


@dataclass(frozen=True, slots=True)
class Aborted:
    """My round of this epoch ended without a result."""

    fence: Fence
    step: Int64
    why: str
    about: str = ""  # the peer it failed on
    waiting_for: tuple[str, ...] = ()  # the members I waited for at that moment
    stalled: bool = False  # the time budget was over
    mismatch: bool = False  # that peer takes part in another exchange: other parameters, other sizes
    unreachable: tuple[str, ...] = ()  # members to which nothing gets through


@dataclass(frozen=True, slots=True)
class Report:
    """My answer to forced epoch ``fence.epoch``; built once, and a promise to stay out of older ones."""

    fence: Fence
    state_generation: Int64
    step: Int64
    digest: str
    round_epoch: Int64  # of the newest round I entered; 0: none
    round_step: Int64
    round_roster: tuple[str, ...]
    prepared: bool  # whether I have prepared that round
    gradient_digest: str
    have: tuple[Int64, ...]  # the micro-batches of ``step`` in my kept gradient
    committed_digest: str = ""  # of the gradient that led to ``step``; empty: there was none
    # The members of this epoch that the round lacked, in place of ``round_roster``; None: see there.
    round_lacked: tuple[str, ...] | None = None
    # A vote named another result, and no majority has mine: no member can have committed the round.
    disputed: bool = False
    outvoted: bool = False  # in a round of mine most members named another state at ``step``
    unconfirmed: bool = False  # since my admission no later state of mine has agreed with another member's
    parted: str = ""  # where the members' states differed in that round, for people


@dataclass(frozen=True, slots=True)
class RequestRoster:
    """I do not hold the roster that the RosterDelta of this epoch starts from: send all of it."""

    fence: Fence


@dataclass(frozen=True, slots=True)
class RequestState:
    """I am outside the roster and cannot go on by replay: let a member snapshot for me."""

    fence: Fence
    why: str
    lost: bool = False  # the state that I hold, if any, is of no use any more


@dataclass(frozen=True, slots=True)
class SnapshotTaken:
    """My checkpoint server holds the snapshot that ``joiner`` was promised."""

    fence: Fence
    joiner: str
    step: Int64
    digest: str


@dataclass(frozen=True, slots=True)
class SnapshotMissed:
    """I was past ``step`` when TakeSnapshotFor came, or could not snapshot."""

    fence: Fence
    joiner: str
    step: Int64


@dataclass(frozen=True, slots=True)
class CannotContinue:
    """I am in the roster but cannot go on: evict me, and I join again."""

    fence: Fence
    why: str
    unusable: bool = False  # no source of the generation's base has it in a form that can be loaded


@dataclass(frozen=True, slots=True)
class LoopFailed:
    """The user's loop raised at ``step``. Any other member would raise there too, so the job fails."""

    fence: Fence
    step: Int64
    why: str


MemberMessage = (
    OpenSession
    | Heartbeat
    | Running
    | Aborted
    | Report
    | RequestRoster
    | RequestState
    | SnapshotTaken
    | SnapshotMissed
    | Finished
    | CannotContinue
    | LoopFailed
)

# --- checkpoint server to leader ------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class TrainerStatus:
    """The second source of liveness: the trainer's state by the kernel, and the snapshots in memory."""

    replica: str
    incarnation: Int64
    trainer: str  # ``running``, ``stopped``, ``gone`` or ``absent`` (none has attached yet)
    number: Int64
    ckpt: str = ""
    snapshots: tuple[SnapshotRef, ...] = ()
    # Micro-batches that its processes died at, repeated until the job is past them.
    deaths: tuple[Death, ...] = ()
    rank: Int64 = 0  # whose checkpoint server this is, in a replica of several ranks
    ages_s: tuple[float, ...] = ()  # for each of ``snapshots``, how long ago it was its trainer's state
    durable: tuple[SnapshotRef, ...] = ()  # the newest durable checkpoint that this server wrote
    durable_error: str = ""  # why the last one was not written, in a sentence
    # For each of ``snapshots``, of how many ranks it is; empty: an older version.
    parts: tuple[Int64, ...] = ()
    ended: JobEnd | None = None  # the job's end, which the trainer saw without a lighthouse


# --- leader to checkpoint server ------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class EpochNotice:
    """The epoch in force, for the server's log and state. The server decides nothing by it."""

    fence: Fence
    incident_id: str = ""
    why: str = ""
    every_s: float = 0.0  # seconds between unchanged statuses, if more than the server's own setting
    complete: bool = False  # the job is complete, and that is on record


Message = PeerMessage | LeaderMessage | MemberMessage | TrainerStatus | EpochNotice
