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
    """I hold round (epoch, step), and am ready for epoch ``ready`` (>= epoch).

    ``state_digest`` is of the shared state at ``step``, empty where it was not computed. ``nonfinite`` names
    a tensor of what I put in that is not finite, where that was asked for and the sum is not. ``entries``:
    small ones of that state, said with its digest, see ``parted``.
    """

    fence: Fence
    step: int
    ready: int
    gradient_digest: str
    state_digest: str = ""
    nonfinite: str = ""
    entries: tuple[tuple[str, str], ...] = ()


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
    """First message of every session: who I am, what state I hold, where I am reached.

    ``generation`` 0 means "nothing but my initial state". ``micro_batches`` is how many make a step;
    ``data`` names everything that the data order depends on, "name value name value ...".
    ``predecessors`` are the incarnations that ran on this host before, newest first: the kernel says that
    they have ended. It says nothing of processes elsewhere. ``predecessors_gone`` says the same to leaders of
    an older version, which ask for no names. ``finished``: the user's loop has ended at this step.
    ``data_slot``:
    the one that this replica's data are for, -1 where any will do. ``ranks``: addresses of ranks 1 and up,
    where the replica has several; ``link`` and ``ckpt`` are rank 0's, and digests are of all ranks together.
    ``replay``: whether it catches up by published gradients; else the others wait for its state.
    ``exchange_s`` and ``user_code_s`` are its time budget. ``autonomy_s``: for how long it may commit without
    an answer of a lighthouse; 0 from an older version, which does not say it.
    ``spare``: it takes part only where a member is missing.
    ``tensors`` are the parameters in order, for people: "name dtype[shape]"; empty where they are very many.
    ``roster``: digest of the newest roster I hold; empty from a version that understands no ``RosterDelta``.
    ``plane``: how gradients are exchanged (``host``, ``device``, ``nccl``); empty: not said.
    ``durable``: complete durable checkpoints that it found in storage and could load, oldest first.
    ``ended``: an earlier process here saw the end of the job when no lighthouse could be told.
    ``secret``: known to this process and the lighthouse alone, so that no other process can speak for it.
    """

    replica: str
    incarnation: int
    generation: int
    step: int
    digest: str
    epoch: int
    link: str
    ckpt: str
    micro_batches: int
    layout: str = ""
    data: str = ""
    shares: int = 1
    snapshots: tuple[SnapshotRef, ...] = ()
    predecessors_gone: bool = False
    finished: bool = False
    sharing: Sharing = EVERYTHING
    data_slot: int = -1
    ranks: tuple[RankAddress, ...] = ()
    replay: bool = True
    exchange_s: float = 60.0
    user_code_s: float = 1800.0
    spare: bool = False
    tensors: tuple[str, ...] = ()
    roster: str = ""
    plane: str = ""
    durable: tuple[SnapshotRef, ...] = ()
    predecessors: tuple[int, ...] = ()
    secret: str = ""
    autonomy_s: float = 0.0
    ended: JobEnd | None = None
    rack: str = ""  # where its host stands, see ``Member.rack``


@dataclass(frozen=True, slots=True)
class Heartbeat:
    """Progress: sent at every step and at least once a second.

    ``phase`` is one word (mode and what the main thread does); ``waiting_for`` names peers.
    ``busy`` is the reason given to ``session.busy``, empty outside of it, and ``busy_s`` its bound.
    ``empty``: the newest step that was committed with total weight 0, or -1.
    ``unreachable``: members that I cannot reach, said from outside the roster.
    """

    number: int
    epoch: int
    generation: int
    step: int
    digest: str = ""
    phase: str = ""
    waiting_for: tuple[str, ...] = ()
    busy: str = ""
    times: StepTimes | None = None
    busy_s: float = 0.0
    empty: int = -1
    unreachable: tuple[str, ...] = ()

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
    """My round of this epoch ended without a result. ``about`` is the peer it failed on, or empty;
    ``waiting_for`` whom I waited for at that moment; ``stalled``: the time budget was over; ``mismatch``:
    that peer takes part in something else (other parameters, other sizes); ``unreachable``: members to which
    nothing gets through."""

    fence: Fence
    step: int
    why: str
    about: str = ""
    waiting_for: tuple[str, ...] = ()
    stalled: bool = False
    mismatch: bool = False
    unreachable: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Report:
    """My answer to forced epoch ``fence.epoch``; built once, and a promise to stay out of older ones.

    ``round_epoch``, ``round_step``, ``round_roster`` describe the newest round I entered (epoch 0: none);
    ``prepared`` whether I hold it; ``disputed`` whether somebody said that it holds something else, and
    no majority said what I did, so that nobody can have committed it; ``have`` the micro-batches of step
    ``step`` in my kept gradient; ``committed_digest`` is of the gradient that led to ``step``, empty where
    there was none.
    ``outvoted``: most members of a round that I was in said that the state at ``step`` is another than mine.
    ``parted``: where the states of the members differed in that round, for people.
    ``unconfirmed``: since the epoch that let me in no digest of a state of mine has agreed with another
    member's, but for that of a state as I loaded it.
    ``round_lacked`` stands for ``round_roster`` where it is not None: the members of this epoch that were not
    in that round, which is short where the rosters are long.
    """

    fence: Fence
    state_generation: int
    step: int
    digest: str
    round_epoch: int
    round_step: int
    round_roster: tuple[str, ...]
    prepared: bool
    gradient_digest: str
    have: tuple[int, ...]
    committed_digest: str = ""
    round_lacked: tuple[str, ...] | None = None
    disputed: bool = False
    outvoted: bool = False
    unconfirmed: bool = False
    parted: str = ""


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
    """The second source of liveness: what the kernel says of the trainer, and what memory holds.

    ``trainer`` is ``running``, ``stopped``, ``gone`` or ``absent`` (none has attached yet). ``deaths``: which
    micro-batches the replica's processes died at, said again in every pulse until the job is past them. In a
    replica of several ranks every rank has its checkpoint server, and ``rank`` says whose this is.
    ``ages_s``: how many seconds ago the state of each of ``snapshots`` was its trainer's, in the same order.
    ``durable``: the newest durable checkpoint that was written from here, where there is one;
    ``durable_error``: why the last one was not, in a sentence. ``parts``: of how many ranks each of
    ``snapshots`` is, in the same order; empty from an older version: of as many as the replicas have now.
    ``ended``: the trainer saw the end of the job when no lighthouse could be told.
    """

    replica: str
    incarnation: int
    trainer: str
    number: int
    ckpt: str = ""
    snapshots: tuple[SnapshotRef, ...] = ()
    deaths: tuple[Death, ...] = ()
    rank: int = 0
    ages_s: tuple[float, ...] = ()
    durable: tuple[SnapshotRef, ...] = ()
    durable_error: str = ""
    parts: tuple[int, ...] = ()
    ended: JobEnd | None = None


# --- leader to checkpoint server ------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class EpochNotice:
    """The epoch in force and what it answers, for the server's log and state: nothing is decided by it.
    ``every_s``: how often an unchanged pulse is wanted, where that is less often than the server's own.
    ``complete``: the job is, and that is on record."""

    fence: Fence
    incident_id: str = ""
    why: str = ""
    every_s: float = 0.0
    complete: bool = False


Message = PeerMessage | LeaderMessage | MemberMessage | TrainerStatus | EpochNotice
