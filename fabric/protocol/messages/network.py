"""Every message of the protocol. Frozen values; who sends what to whom is in the section heads.

All carry the fence of the epoch they speak about; a receiver drops what is older than it promised.
"""

from dataclasses import dataclass

from fabric.model import (
    EVERYTHING,
    Death,
    Fence,
    JobEnd,
    Member,
    Poison,
    RankAddress,
    Record,
    Sharing,
    SnapshotRef,
    StepTimes,
)

# In the phase of a beat: links of the epoch are still to be made.
LINKING = ", linking"

# --- member to member ---------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Contribution:
    """What I put into round (epoch, step): sent to every member before my first chunk of it.

    ``weight`` is the sum of the micro-batches' weights; zero listens. ``metrics`` are summed over
    members at the commit. ``layout`` fails the round with a clear error where it differs.
    """

    fence: Fence
    step: int
    weight: float
    micro_batches: tuple[int, ...]
    layout: str = ""
    metrics: tuple[tuple[str, float], ...] = ()


@dataclass(frozen=True, slots=True)
class CommitVote:
    """I hold round (epoch, step), and can commit it from now on."""

    fence: Fence
    step: int
    ready: int  # the epoch I am ready for, at least that of the round
    gradient_digest: str
    state_digest: str = ""  # of the shared state at ``step``; empty: not computed
    nonfinite: str = ""  # a tensor of what I put in that is not finite, where that was asked for
    entries: tuple[tuple[str, str], ...] = ()  # small entries of that state, said with its digest


@dataclass(frozen=True, slots=True)
class Finished:
    """My loop ended at ``step``, and I contribute to no round from there on; I stay linked until the job is
    over. Said to the leader, and by who has taken part in rounds to all members.

    ``why``: my loop did not end by itself; others had finished there, in a sentence."""

    fence: Fence
    step: int
    why: str = ""


PeerMessage = Contribution | CommitVote | Finished

# --- leader to member ---------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Epoch:
    """A committed record. Announced to everybody with a session, never before it is committed.

    ``changes``: this leader understands ``RequestRoster`` and reports that say whom their round lacked.
    """

    record: Record
    changes: bool = False


@dataclass(frozen=True, slots=True)
class RosterDelta:
    """The same for who holds the roster with digest ``before``: ``record`` has an empty one, ``joined`` are
    the entries that are new or differ, ``left`` the names that are gone, ``order`` all names where it is not
    the old order with the new ones at the end. ``after`` is the digest of the roster that results."""

    record: Record
    before: str
    after: str
    joined: tuple[Member, ...] = ()
    left: tuple[str, ...] = ()
    order: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Assignment:
    """One member's row of a Resume table: drop the kept gradient or not, then compute these."""

    replica: str
    micro_batches: tuple[int, ...]
    drop: bool = False


@dataclass(frozen=True, slots=True)
class Resume:
    """The decision of forced epoch ``fence.epoch``: go on at ``step`` with this table, of which a member is
    told its own row; without one there is nothing to add.

    Who is one step behind and holds a gradient of digest ``commit_digest`` commits it first.
    """

    fence: Fence
    step: int
    table: tuple[Assignment, ...]
    commit_digest: str = ""
    reason: str = ""


@dataclass(frozen=True, slots=True)
class TakeSnapshotFor:
    """Snapshot the state at ``step`` and keep published gradients from there on for ``joiner``."""

    fence: Fence
    joiner: str
    step: int


@dataclass(frozen=True, slots=True)
class StopServing:
    """``joiner`` needs no more published gradients."""

    fence: Fence
    joiner: str


@dataclass(frozen=True, slots=True)
class StateSources:
    """Where a joiner finds the state at ``step``: base URLs of checkpoint servers, one digest.

    ``again``: nobody asked, but what it is doing now leads nowhere: start again from this one.
    """

    fence: Fence
    state: SnapshotRef
    urls: tuple[str, ...]
    again: bool = False


@dataclass(frozen=True, slots=True)
class Complete:
    """The job is finished at ``step``: close, exit 0."""

    fence: Fence
    step: int


@dataclass(frozen=True, slots=True)
class Rejected:
    """The session is refused: ``reason`` is for a person. ``retry``: it stays, but is not let in for now.
    ``poison``: the micro-batches that are the reason, where they are."""

    reason: str
    retry: bool = False
    poison: tuple[Poison, ...] = ()


@dataclass(frozen=True, slots=True)
class HeartbeatAck:
    """Answer to the beat with the same number: contact dates from when that beat was sent. ``waiting_for``:
    what the job waits for, in a sentence for people; empty while it steps."""

    number: int
    waiting_for: str = ""


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
    """First message of every session: who I am, what state I hold, where I am reached."""

    replica: str
    incarnation: int
    generation: int  # 0: nothing but my initial state
    step: int
    digest: str
    epoch: int  # the newest one I know
    link: str  # rank 0's address for other members
    ckpt: str  # base URL of rank 0's checkpoint server
    micro_batches: int  # how many make a step
    layout: str = ""
    data: str = ""  # everything that the data order depends on: "name value name value ..."
    shares: int = 1
    snapshots: tuple[SnapshotRef, ...] = ()
    predecessors_gone: bool = False  # for leaders of an older version, which ask for no names
    finished: bool = False  # the user's loop has ended at this step
    sharing: Sharing = EVERYTHING
    data_slot: int = -1  # the one that this replica's data are for; -1: any will do
    ranks: tuple[RankAddress, ...] = ()  # addresses of ranks 1 and up, where the replica has several
    replay: bool = True  # it catches up by published gradients; else the others wait for its state
    exchange_s: float = 60.0  # its time budget for an exchange
    user_code_s: float = 1800.0  # its time budget for user code
    spare: bool = False  # it takes part only where a member is missing
    # The parameters in order, for people: "name dtype[shape]"; empty: very many.
    tensors: tuple[str, ...] = ()
    roster: str = ""  # digest of the newest roster I hold; empty: an older version, without RosterDelta
    plane: str = ""  # how gradients are exchanged (host, device, nccl); empty: not said
    durable: tuple[SnapshotRef, ...] = ()  # complete durable checkpoints that it could load, oldest first
    # Earlier incarnations on this host that the kernel says have ended, newest first.
    predecessors: tuple[int, ...] = ()
    secret: str = ""  # known to this process and the lighthouse alone: no other process speaks for it
    autonomy_s: float = 0.0  # how long it may commit without a lighthouse's answer; 0: an older version
    # The job's end, which an earlier process here saw while no lighthouse could be told.
    ended: JobEnd | None = None
    rack: str = ""  # where its host stands, see ``Member.rack``


@dataclass(frozen=True, slots=True)
class Heartbeat:
    """Progress: sent at every step and at least once a second."""

    number: int
    epoch: int
    generation: int
    step: int
    digest: str = ""
    phase: str = ""  # the mode, and what the main thread does
    waiting_for: tuple[str, ...] = ()
    busy: str = ""  # the reason given to ``session.busy``; empty outside of it
    times: StepTimes | None = None
    busy_s: float = 0.0  # its bound
    empty: int = -1  # the newest step that was committed with total weight 0
    unreachable: tuple[str, ...] = ()  # members that I cannot reach, said from outside the roster

    @property
    def is_linking(self) -> bool:
        """Whether links of its epoch are still to be made, without which it contributes nothing."""
        return LINKING in self.phase

    @property
    def waits(self) -> bool:
        """Whether the main thread has come back from the user's code, and waits."""
        return self.phase.endswith(", waiting")


@dataclass(frozen=True, slots=True)
class Running:
    """I entered round ``step`` of this epoch; said at the first one, and again when a leader asks."""

    fence: Fence
    step: int = -1


@dataclass(frozen=True, slots=True)
class Aborted:
    """My round of this epoch ended without a result."""

    fence: Fence
    step: int
    why: str
    about: str = ""  # the peer it failed on
    waiting_for: tuple[str, ...] = ()  # the members I waited for at that moment
    stalled: bool = False  # the time budget was over
    mismatch: bool = False  # that peer takes part in something else: other parameters, other sizes
    unreachable: tuple[str, ...] = ()  # members to which nothing gets through


@dataclass(frozen=True, slots=True)
class Report:
    """My answer to forced epoch ``fence.epoch``; built once, and a promise to stay out of older ones."""

    fence: Fence
    state_generation: int
    step: int
    digest: str
    round_epoch: int  # of the newest round I entered; 0: none
    round_step: int
    round_roster: tuple[str, ...]
    prepared: bool  # whether I hold that round
    gradient_digest: str
    have: tuple[int, ...]  # the micro-batches of ``step`` in my kept gradient
    committed_digest: str = ""  # of the gradient that led to ``step``; empty: there was none
    # Where not None, the members of this epoch that the round lacked: stands for ``round_roster``.
    round_lacked: tuple[str, ...] | None = None
    disputed: bool = False  # a vote named another result, and no majority mine: nobody can have committed it
    outvoted: bool = False  # most members of a round of mine named another state at ``step`` than mine
    unconfirmed: bool = False  # since I was let in, no later state of mine has agreed with another member's
    parted: str = ""  # where the members' states differed in that round, for people


@dataclass(frozen=True, slots=True)
class RequestRoster:
    """I do not hold the roster that your change of this epoch starts from: tell me the whole."""

    fence: Fence


@dataclass(frozen=True, slots=True)
class RequestState:
    """I am outside and cannot go on by replay: have somebody snapshot for me. ``lost``: what I hold, if
    anything, is of no use any more."""

    fence: Fence
    why: str
    lost: bool = False


@dataclass(frozen=True, slots=True)
class SnapshotTaken:
    """My checkpoint server holds the snapshot that ``joiner`` was promised."""

    fence: Fence
    joiner: str
    step: int
    digest: str


@dataclass(frozen=True, slots=True)
class SnapshotMissed:
    """I was past ``step`` when Serve came, or could not snapshot."""

    fence: Fence
    joiner: str
    step: int


@dataclass(frozen=True, slots=True)
class CannotContinue:
    """I am in the roster but cannot go on in it: evict me, I will join again. ``unusable``: the base of the
    generation cannot be loaded from what holds it."""

    fence: Fence
    why: str
    unusable: bool = False


@dataclass(frozen=True, slots=True)
class LoopFailed:
    """The user's loop raised at ``step``: the same would happen to whoever took over, so the job fails."""

    fence: Fence
    step: int
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
    """The second source of liveness: what the kernel says of the trainer, and what memory holds."""

    replica: str
    incarnation: int
    trainer: str  # ``running``, ``stopped``, ``gone`` or ``absent`` (none has attached yet)
    number: int
    ckpt: str = ""
    snapshots: tuple[SnapshotRef, ...] = ()
    # Micro-batches that its processes died at, repeated until the job is past them.
    deaths: tuple[Death, ...] = ()
    rank: int = 0  # whose checkpoint server this is, in a replica of several ranks
    # For each of ``snapshots``, how many seconds ago it was its trainer's state.
    ages_s: tuple[float, ...] = ()
    durable: tuple[SnapshotRef, ...] = ()  # the newest durable checkpoint that was written from here
    durable_error: str = ""  # why the last one was not written, in a sentence
    parts: tuple[int, ...] = ()  # for each of ``snapshots``, of how many ranks it is; empty: an older version
    ended: JobEnd | None = None  # the job's end, which the trainer saw while no lighthouse could be told


# --- leader to checkpoint server ------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class EpochNotice:
    """The epoch in force and what it answers, for the server's log and state: nothing is decided by it.
    ``every_s``: how often an unchanged status is wanted, where that is less often than the server's own.
    ``complete``: the job is, and that is on record."""

    fence: Fence
    incident_id: str = ""
    why: str = ""
    every_s: float = 0.0
    complete: bool = False


Message = PeerMessage | LeaderMessage | MemberMessage | TrainerStatus | EpochNotice
