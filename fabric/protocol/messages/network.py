"""Every message of the protocol. Each section head names sender and receiver.

A message carries the fence of its epoch. A receiver drops messages of epochs older than it promised.
"""

import hashlib

from fabric.model import (
    EVERYTHING,
    NOT_LAUNCHED,
    DataPlan,
    Death,
    EarlierStep,
    Fence,
    Int64,
    JobEnd,
    LaunchedLayouts,
    Member,
    OfProcess,
    Poison,
    RankAddress,
    Record,
    Sharing,
    SnapshotRef,
    StepTimes,
    Value,
)

# The word in a heartbeat's phase while this member still lacks links of the epoch.
LINKING = ", linking"
# The size of a message that tests a link: above every usual size of a packet.
LARGE_BYTES = 16384
# A text of that size. No tunnel can compress it to a small packet.
PADDING = hashlib.shake_256(b"fabric").hexdigest(LARGE_BYTES // 2)

# --- member to member ---------------------------------------------------------------------------


class Contribution(Value):
    """My part in round (epoch, step): weight, micro-batches and metrics, sent to every member."""

    fence: Fence
    step: Int64
    weight: float  # the sum of the micro-batches' weights; zero: I add no gradient
    micro_batches: tuple[Int64, ...]
    layout: str = ""  # a member with another layout fails the round with a clear error
    metrics: tuple[tuple[str, float], ...] = ()  # summed over the members at the commit
    # As ``DataPlan.described``; empty: as in the sender's contribution before in this epoch, or not said.
    data: str = ""
    padding: str = ""  # PADDING in a contribution that is sent again to test the link; else empty


class CommitVote(Value):
    """I have prepared round (epoch, step), and can commit it from now on."""

    fence: Fence
    step: Int64
    ready: Int64  # the epoch for which the sender is ready, at least the epoch of the round
    gradient_digest: str
    state_digest: str = ""  # of the shared state at ``step``; empty: not computed
    nonfinite: str = ""  # a tensor of my contribution that is not finite; empty without the check
    entries: tuple[tuple[str, str], ...] = ()  # small entries of the state, sent with its digest
    carried: bool = False  # the ring has carried all contributions of the round, mine and those to me


class Finished(Value):
    """My loop ended at ``step``: I contribute to no later round, and stay linked until the job is over.

    It goes to the leader. A member that has taken part in rounds also sends it to all members.
    """

    fence: Fence
    step: Int64
    why: str = ""  # why another member's finish at ``step`` stopped my loop; empty: it ended normally


PeerMessage = Contribution | CommitVote | Finished

# --- leader to member ---------------------------------------------------------------------------


class Epoch(Value):
    """A committed record. The leader announces it to every replica with a session."""

    record: Record


class RosterDelta(Value):
    """A committed record for a replica that holds the roster with digest ``before``."""

    record: Record  # the new record, but with an empty roster
    before: str
    after: str  # the digest of the roster that results
    joined: tuple[Member, ...] = ()  # the entries that are new or have changed
    left: tuple[str, ...] = ()  # the names of the removed members
    order: tuple[str, ...] = ()  # all names in order; empty: the old order, with new names at the end


class Assignment(Value):
    """One member's row of a Resume table: whether to drop the kept gradient, and what to compute."""

    replica: str
    micro_batches: tuple[Int64, ...]
    drop: bool = False


class Resume(Value):
    """The decision of forced epoch ``fence.epoch``: go on at ``step`` with this table."""

    fence: Fence
    step: Int64
    table: tuple[Assignment, ...]  # the receiver's row alone; a member without a row computes nothing more
    commit_digest: str = ""  # a member one step behind with a gradient of this digest commits it first
    reason: str = ""
    # No member has begun ``step``: the table is empty, and each divides the step among the roster without
    # ``idle``.
    undivided: bool = False
    idle: tuple[str, ...] = ()


class TakeSnapshotFor(Value):
    """Snapshot the state at ``step``, and keep published gradients from ``step`` on for ``joiner``."""

    fence: Fence
    joiner: str
    step: Int64


class StopServing(Value):
    """``joiner`` needs no more published gradients."""

    fence: Fence
    joiner: str


class StateSources(Value):
    """Where a joining replica finds a state."""

    fence: Fence
    state: SnapshotRef
    urls: tuple[str, ...]  # base URLs of checkpoint servers that hold the state
    again: bool = False  # the leader restarts a replay that does not catch up: begin again from this state


class Complete(Value):
    """The job is complete at ``step``: close, exit 0."""

    fence: Fence
    step: Int64


class Rejected(Value):
    """The leader refuses the session."""

    reason: str  # the reason of the rejection, for a person
    retry: bool = False  # the session stays open, but the leader does not admit its replica for now
    poison: tuple[Poison, ...] = ()  # the micro-batches that are the reason, if any are
    # Start again with an incarnation above this one, because the host's clock is behind; 0: end for good.
    above: Int64 = 0
    outvoted: bool = False  # the reports of most members call the state of this process wrong


class HeartbeatAck(Value):
    """The answer to the heartbeat with the same number. ``autonomy_s`` counts from its sending."""

    number: Int64
    waiting_for: str = ""  # what the job waits for, in a sentence for people; empty while it steps
    measure: Int64 = 0  # run micro-benchmark number ``measure`` before the next step; 0: run none
    echo: str = ""  # the member that the micro-benchmark echoes; empty: it measures the device
    save: bool = False  # stop at the next step boundary, and write the state there to durable storage
    goes_on: bool = False  # a member without notice stays: take part until you are drained, and save nothing
    leave: str = ""  # why a member with notice may end now, in a sentence; empty: it goes on


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


class OpenSession(OfProcess):
    """First message of every session: identity, state and addresses of the replica."""

    generation: Int64  # generation of the sender's state; 0: the sender holds only its initial state
    step: Int64
    digest: str
    epoch: Int64  # the newest epoch that the sender knows
    link: str  # rank 0's address for other members
    ckpt: str  # base URL of rank 0's checkpoint server
    micro_batches: Int64  # the number of micro-batches in a step, when the process began
    layout: str = ""
    data: str = ""  # the settings that the data order depends on: "name value name value ...", at ``began``
    shares: Int64 = 1
    snapshots: tuple[SnapshotRef, ...] = ()
    finished: bool = False  # the user's loop has ended at this step
    sharing: Sharing = EVERYTHING
    data_slot: Int64 = -1  # the data slot whose data this replica can read; -1: any data slot
    ranks: tuple[RankAddress, ...] = ()  # addresses of ranks 1 and up, where the replica has several
    replay: bool = True  # the replica catches up by published gradients; False: by a blocking join
    exchange_s: float = 60.0  # the replica's time budget for an exchange
    user_code_s: float = 1800.0  # the replica's time budget for user code
    spare: bool = False  # the replica contributes only while a member is missing
    # The parameters in order, for people: "name dtype[shape]"; empty: too many to send.
    tensors: tuple[str, ...] = ()
    roster: str = ""  # digest of the newest roster that the sender holds; empty: it holds none
    plane: str = ""  # how members exchange gradients (host, device, nccl); empty: not said
    durable: tuple[SnapshotRef, ...] = ()  # complete durable checkpoints that it can load, oldest first
    # Earlier incarnations on this host that have ended by the kernel's evidence, newest first.
    predecessors: tuple[Int64, ...] = ()
    secret: str = ""  # known to this process and the lighthouse: no other process can send in its name
    autonomy_s: float = 0.0  # how long it may commit without a lighthouse's answer
    # The job's end, which an earlier process on this host reached without a lighthouse.
    ended: JobEnd | None = None
    rack: str = ""  # as in ``Member.rack``
    stores: bool = True  # as in ``Member.stores``
    adapt: str = ""  # the job's mode against slow replicas: "off", "advise" or "act"; empty: off
    cuts: str = ""  # as in ``Member.cuts``
    launched: LaunchedLayouts = NOT_LAUNCHED
    known_generation: Int64 = 0  # the newest that the sender knows; its state may belong to none
    began: Int64 = 0  # the step at which the process began, before it loaded any state
    store_id: str = ""  # the store of the newest epoch that the sender knows; empty: it knows none
    replay_steps: Int64 = 0  # the most gradients with fewer bytes than its servers' snapshots; 0: not said
    serves: tuple[str, ...] = ()  # the newcomers for which it keeps gradients, as an earlier leader asked


class Heartbeat(Value):
    """Progress: sent at every step and at least once a second."""

    number: Int64
    epoch: Int64
    generation: Int64
    step: Int64
    digest: str = ""
    phase: str = ""  # the mode, and what the main thread does
    waiting_for: tuple[str, ...] = ()
    busy: str = ""  # the reason given to ``session.busy``; empty: the user's code announced no long work
    times: StepTimes | None = None
    earlier: tuple[EarlierStep, ...] = ()  # steps since the last heartbeat without the newest, oldest first
    busy_s: float = 0.0  # the longest time for the announced work
    empty: Int64 = -1  # the newest step that was committed with total weight 0
    unreachable: tuple[str, ...] = ()  # members that I cannot reach; sent from outside the roster
    lost_bytes: Int64 = 0  # small messages reach all of ``unreachable``, this size does not
    micro_batches: Int64 = 0  # the number of micro-batches in a step now; 0: as in OpenSession
    noticed: bool = False  # this process has notice that it will be killed soon
    saved: bool = False  # it has stopped at ``step``, and this state is in durable storage
    saves: bool = False  # it saves the state for all, or has saved it

    @property
    def is_linking(self) -> bool:
        """Whether links of its epoch are still to be made. A member contributes nothing without them."""
        return LINKING in self.phase

    @property
    def is_outside(self) -> bool:
        return self.phase.startswith("outside")

    @property
    def waits(self) -> bool:
        """Whether the main thread has returned from the user's code and waits."""
        return self.phase.endswith(", waiting")


class Running(Value):
    """I entered round ``step`` of this epoch. It is sent at the first round, and again when a leader asks."""

    fence: Fence
    step: Int64 = -1


class Aborted(Value):
    """My round of this epoch ended without a result."""

    fence: Fence
    step: Int64
    why: str
    about: str = ""  # the peer on which the round failed
    waiting_for: tuple[str, ...] = ()  # the members for which the sender still waited when the round ended
    stalled: bool = False  # the round took longer than its time budget
    mismatch: bool = False  # the peer ``about`` takes part in another exchange: other parameters or sizes
    unreachable: tuple[str, ...] = ()  # members that the sender cannot reach
    lost_bytes: Int64 = 0  # the size of messages whose loss ended those links; 0: any size


class Report(Value):
    """My answer to forced epoch ``fence.epoch``, built once: a promise to take no part in older epochs."""

    fence: Fence
    state_generation: Int64
    step: Int64
    digest: str
    round_epoch: Int64  # the epoch of the newest round that the sender entered; 0: none
    round_step: Int64
    round_lacked: tuple[str, ...]  # the members of this epoch that were not in that round
    prepared: bool  # whether the sender has prepared the newest round that it entered
    gradient_digest: str
    have: tuple[Int64, ...]  # the micro-batches of ``step`` in my kept gradient
    plan: DataPlan  # the data of the sender's steps, without words
    committed_digest: str = ""  # the digest of the gradient that led to ``step``; empty: none did
    # A vote named another digest than mine, and no majority has my digest: no member can commit the round.
    disputed: bool = False
    outvoted: bool = False  # in one of my rounds most members named another state digest at ``step``
    unconfirmed: bool = False  # since my admission no state that I updated equalled another member's
    parted: str = ""  # where the members' states differed in that round, for people


class RequestRoster(Value):
    """I do not hold the roster that this epoch's ``RosterDelta`` starts from: send me the whole roster."""

    fence: Fence


class RequestState(Value):
    """I am outside the roster and cannot catch up by replay: ask members for a snapshot for me."""

    fence: Fence
    why: str
    lost: bool = False  # the sender holds no usable state


class SnapshotTaken(Value):
    """My answer to TakeSnapshotFor: the digest of the snapshot that my checkpoint server holds."""

    fence: Fence
    joiner: str
    step: Int64
    digest: str  # empty: I was past ``step`` when TakeSnapshotFor came, or could not take the snapshot


class CannotContinue(Value):
    """I am in the roster but cannot go on: evict me, then I can join again."""

    fence: Fence
    why: str
    unusable: bool = False  # no source has the generation's base in a form that can be loaded


class LoopFailed(Value):
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
    | Finished
    | CannotContinue
    | LoopFailed
)

# --- checkpoint server to leader ------------------------------------------------------------------


class TrainerStatus(OfProcess):
    """The second source of liveness: the trainer's state by the kernel, and the snapshots in memory."""

    trainer: str  # ``running``, ``stopped``, ``gone`` or ``absent`` (none has attached yet)
    number: Int64
    ckpt: str = ""
    snapshots: tuple[SnapshotRef, ...] = ()
    # Micro-batches at which processes of the trainer died, repeated until the job has passed their step.
    deaths: tuple[Death, ...] = ()
    rank: Int64 = 0  # the rank of this checkpoint server, in a replica of several ranks
    ages_s: tuple[float, ...] = ()  # for each snapshot, how long ago the trainer had that state
    durable: tuple[SnapshotRef, ...] = ()  # the newest durable checkpoint that this server wrote
    durable_error: str = ""  # why the last durable checkpoint was not written, in a sentence
    # For each of ``snapshots``, the number of ranks that hold its parts; empty: an older version.
    parts: tuple[Int64, ...] = ()
    ended: JobEnd | None = None  # the job's end, which the trainer reached without a lighthouse


class ServerStatus(Value):
    """The statuses of all ranks of one checkpoint server; it has dropped the ranks that are missing.

    A server of one rank sends the TrainerStatus alone.
    """

    statuses: tuple[TrainerStatus, ...]


class StatusUnchanged(Value):
    """All that this checkpoint server last said over this connection still holds; its states have aged."""

    number: Int64


# --- leader to checkpoint server ------------------------------------------------------------------


class EpochNotice(Value):
    """The epoch in force, for the checkpoint server's log and state. The server decides nothing by it."""

    fence: Fence
    incident_id: str = ""
    why: str = ""
    every_s: float = 0.0  # seconds between unchanged statuses, if more than the server's own setting
    complete: bool = False  # the job is complete, and its record says so


class StatusTerms(Value):
    """How a lighthouse wants statuses; it understands StatusUnchanged, which an older one does not."""

    every_s: float  # as in EpochNotice


ServerMessage = TrainerStatus | ServerStatus | StatusUnchanged
Message = PeerMessage | LeaderMessage | MemberMessage | ServerMessage | EpochNotice | StatusTerms
