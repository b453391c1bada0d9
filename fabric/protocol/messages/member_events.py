"""Events (past tense) and effects (imperative) of a member core.

The shell performs effects in order. Sends are ordered per peer. Each operation (link up, exchange, fetch,
snapshot, install) ends in exactly one event, success or failure.
"""

from fabric.model import (
    DataPlan,
    Fence,
    Int64,
    JobEnd,
    Member,
    OfProcess,
    Poison,
    Record,
    SnapshotRef,
    StepTimes,
    Value,
)
from fabric.protocol.messages.network import Contribution, LeaderMessage, MemberMessage, PeerMessage


class PreparedRound(Value):
    """A fully reduced round, with all that its commit applies and announces; a member holds it until then."""

    epoch: Int64
    step: Int64
    gradient_digest: str
    weight: float
    contributions: tuple[tuple[str, tuple[Int64, ...]], ...]  # micro-batches by member, in roster order
    metrics: tuple[tuple[str, float], ...] = ()  # sums over the members
    nonfinite: str = ""  # a tensor of the sum that is not finite: the step is committed without an update


# --- events: the trainer's main thread ------------------------------------------------------------


class Ready(Value):
    """The state at ``step`` is complete and the main thread waits."""

    step: Int64
    digest: str = ""  # the state's digest; empty: no digest was taken
    times: StepTimes | None = None
    later: bool = False  # the digest is being taken; TellDigest asks for it
    entries: tuple[tuple[str, str], ...] = ()  # small entries of the state, which members compare
    plan: DataPlan | None = None  # the data from this step on; None: as before


class Digested(Value):
    """The state at ``step`` has this digest; the main thread waits as before."""

    step: Int64
    digest: str
    entries: tuple[tuple[str, str], ...] = ()


class Streaming(Value):
    """The last backward of the share has begun: the kept gradient becomes final part by part.

    Computed follows.
    """

    step: Int64
    weight: float  # of the micro-batches under way; any positive one where it is said later


class Computed(Value):
    """The gradients of these micro-batches are added to the kept gradient; the main thread waits."""

    step: Int64
    micro_batches: tuple[Int64, ...]
    weight: float
    metrics: tuple[tuple[str, float], ...] = ()
    redo: str = ""  # why the streamed bytes differ from these gradients; empty: they are equal


class Installed(Value):
    """The fetched state was loaded and has this digest; the main thread waits."""

    step: Int64
    digest: str
    last: bool = False  # the main thread is at the end of its loop, as after Closing
    plan: DataPlan | None = None  # as in Ready


class InstallFailed(Value):
    """The fetched state does not fit the model. The state in memory is unchanged."""

    why: str


class LoopRaised(Value):
    """The user's loop has raised, and the main thread waits for the effect ``Stop``."""

    why: str


class Busy(Value):
    """The user's code announced that its next part takes long."""

    reason: str  # why the announced work takes long; empty: the work is over
    at_most_s: float


class Noticed(Value):
    """This process has notice that it will be killed soon."""


class Saved(Value):
    """The state at ``step`` is in durable storage, or cannot be written."""

    step: Int64
    why: str = ""  # why it cannot be written; empty: it is written


class Closing(Value):
    """The user's loop has ended at the current step."""


# --- events: links and the data plane ---------------------------------------------------------------


class Linked(Value):
    """Every link of ``epoch`` is up: control to all its members, data to the ring neighbours."""

    epoch: Int64


class LinkFailed(Value):
    """Links of ``epoch`` could not be made."""

    epoch: Int64
    about: str
    why: str
    unreachable: tuple[str, ...] = ()  # members to whose hosts no connection came about


class LinkLost(OfProcess):
    """The control link to this process ended."""

    why: str
    silent: bool = False  # the link carried no bytes any more, although neither side had closed it


class Probed(Value):
    """The members of the last Probe that could not be reached."""

    unreachable: tuple[str, ...]
    lost_bytes: int = 0  # as in Heartbeat


class Exchanged(Value):
    """The gradient of round (epoch, step) is fully reduced in my memory; no I/O touches it any more."""

    epoch: Int64
    step: Int64
    gradient_digest: str
    nonfinite: str = ""  # the first tensor of the sum with an infinity or a NaN; empty without the check
    nonfinite_input: str = ""  # the first tensor of my own contribution that is not finite
    # The members whose contribution the ring has carried, each with it: mine to the others, theirs to me.
    carried: tuple[tuple[str, Contribution], ...] = ()


class ExchangeFailed(Value):
    """The exchange of round (epoch, step) ended without a result."""

    epoch: Int64
    step: Int64
    about: str
    why: str
    waited_for: str = ""  # the member whose bytes were due at the end
    mismatch: bool = False  # the peer ``about`` takes part in another exchange


# --- events: messages -------------------------------------------------------------------------------


class FromPeer(OfProcess):
    message: PeerMessage


class FromLeader(Value):
    message: LeaderMessage


class LeaderConnected(Value):
    """A session to the leader is open; the shell has sent nothing on it yet."""


class LeaderLost(Value):
    """The session ended."""


# --- events: transfer -------------------------------------------------------------------------------


class StateFetched(Value):
    """The state lies complete and verified in my own memory, not yet loaded."""

    step: Int64
    digest: str


class FetchFailed(Value):
    """No source delivered the state."""

    why: str
    unusable: bool = False  # the state is damaged or unreadable at every source: another try would fail too
    misfit: bool = False  # the state belongs to another model
    restart: bool = False  # storage stays away: the next process may find it


class GradientFetched(Value):
    """The published gradient of ``step`` lies verified in my memory."""

    step: Int64
    gradient_digest: str


class GradientGone(Value):
    """No source delivered the published gradient of ``step``."""

    step: Int64
    gone: bool  # no server holds the gradient any more; False: none published it within the wait
    why: str = ""


class Snapshotted(Value):
    """The checkpoint server holds the state at ``step``, or cannot."""

    step: Int64
    digest: str  # the snapshot's digest; empty: the snapshot could not be taken
    generation: Int64 = -1  # the generation of the snapshot; negative: the current generation


class RingWaitsFor(Value):
    """The data plane waits for bytes of this member. An abort that follows names the member."""

    replica: str  # the member that the data plane waits for; empty: none


class Tick(Value):
    """Time passed."""


# The events that each rank of a replica has.
RankEvent = (
    Ready
    | Digested
    | Streaming
    | Computed
    | Installed
    | InstallFailed
    | Closing
    | Busy
    | Noticed
    | Saved
    | LoopRaised
    | Linked
    | LinkFailed
    | Exchanged
    | ExchangeFailed
    | StateFetched
    | FetchFailed
    | GradientFetched
    | GradientGone
    | Snapshotted
)
MessageEvent = FromPeer | FromLeader | LeaderConnected | LeaderLost
Event = RankEvent | MessageEvent | LinkLost | Probed | RingWaitsFor | Tick

# --- effects: messages --------------------------------------------------------------------------------


class SendPeer(OfProcess):
    message: PeerMessage


class Carry(Value):
    """Let the ring carry my contribution to all members, in the exchange of its round, where it can."""

    message: Contribution


class SendLeader(Value):
    message: MemberMessage


# --- effects: links and the data plane ------------------------------------------------------------------


class LinkUp(Value):
    """Make the missing links of ``record``; ends in Linked or LinkFailed."""

    record: Record


class Probe(Value):
    """Find out which of these members can be reached; close each connection again; ends in Probed."""

    members: tuple[Member, ...]


class Switch(Value):
    """Put ``record`` in force in this process: links of older epochs may be closed."""

    record: Record


class StartExchange(Value):
    """Reduce round (epoch, step): the kept gradient, or zeros when ``weight`` is zero."""

    fence: Fence
    step: Int64
    weight: float
    streaming: bool = False  # the last backward still runs: send each part of the gradient when it is final


class AbortExchange(Value):
    """End every wait of this epoch's exchanges at once."""

    epoch: Int64
    why: str


# --- effects: the trainer's main thread -------------------------------------------------------------------


class Compute(Value):
    """Add these micro-batches to the kept gradient of ``step``; ends in Computed."""

    step: Int64
    micro_batches: tuple[Int64, ...]
    measure: Int64 = 0  # first run the micro-benchmark with this number; 0: run none
    echo: str = ""  # the member that the micro-benchmark echoes; empty: it measures the device


class DropGradient(Value):
    """Forget the kept gradient."""


class Apply(Value):
    """Let the user's update code apply the averaged gradient of committed step ``step``; ends in Ready."""

    generation: Int64  # in which the step is committed; the process may be in a newer one when it applies it
    step: Int64
    prepared: PreparedRound | None  # the gradient in my memory; None: apply the fetched published gradient
    contributed: bool  # whether I contributed to this gradient
    digest: bool  # whether to take the digest of the state after the update


class Publish(Value):
    """Serve this committed round's reduced gradient to replicas that catch up."""

    generation: Int64
    prepared: PreparedRound


class Install(Value):
    """Load the fetched state; ends in Installed or InstallFailed."""

    step: Int64
    digest: str


class TellDigest(Value):
    """Tell the digest that ``Ready`` did not have yet; ends in Digested."""

    step: Int64


class TakeSnapshot(Value):
    """Snapshot the current state, which is the state at ``step``; ends in Snapshotted."""

    step: Int64
    generation: Int64 = -1  # the generation to name in the snapshot; negative: the current generation
    durable: bool = False  # write it to durable storage too, before this process is killed; ends in Saved


class Finish(Value):
    """Let the main thread close, because the job is complete."""

    step: Int64
    alone: str = ""  # why the job is over although no lighthouse has said so; empty: a lighthouse has
    ended: JobEnd | None = None  # the job's end, which a lighthouse learns later


class Stop(Value):
    """End this process."""

    code: Int64  # see ``exit_codes``: RESTART, FAILED or FINISHED
    reason: str
    poison: tuple[Poison, ...] = ()  # the micro-batches that are the reason, if any are
    layout: str = ""  # order the launcher to start this replica in this layout; empty: order nothing


# --- effects: transfer ----------------------------------------------------------------------------------


class FetchState(Value):
    """Fetch a snapshot; ends in StateFetched or FetchFailed."""

    state: SnapshotRef
    urls: tuple[str, ...]  # the servers that hold this snapshot, or this rank's part of it
    lanes: tuple[str, ...] = ()  # the servers of all ranks, for a state in another layout


class FetchGradient(Value):
    """Fetch or await the published gradient of ``step``; ends in GradientFetched or GradientGone."""

    generation: Int64
    step: Int64
    urls: tuple[str, ...]
    members: tuple[Member, ...] = ()  # the members that publish it, where layouts of ranks may be unequal


class CancelFetch(Value):
    """Stop the fetch under way. The event that ends the fetch may still come."""


class RetainGradients(Value):
    """Keep more published gradients than the last two, because a replica catches up."""

    on: bool  # False: keep only the gradients of the last two steps again


# --- effects: telling people ------------------------------------------------------------------------------


class WriteJournal(Value):
    """Write a line into the journal."""

    kind: str
    epoch: int
    step: int
    why: str = ""
    about: str = ""
    micro_batches: tuple[int, ...] = ()


class ClaimAbove(Value):
    """Let the next process on this host claim an incarnation above this one."""

    incarnation: int


# The effects that each rank of a replica performs.
RankEffect = (
    LinkUp
    | Switch
    | StartExchange
    | AbortExchange
    | Compute
    | DropGradient
    | Apply
    | Publish
    | Install
    | TellDigest
    | TakeSnapshot
    | Finish
    | Stop
    | FetchState
    | FetchGradient
    | CancelFetch
    | RetainGradients
)
# The effects that rank 0 performs for its replica.
ReplicaEffect = SendPeer | Carry | SendLeader | Probe | WriteJournal | ClaimAbove
Effect = RankEffect | ReplicaEffect
