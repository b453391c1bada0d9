"""What a member core hears (events, past tense) and orders (effects, imperative).

The shell performs effects in order. Sends are ordered per peer; operations (link up, exchange, fetch,
snapshot, install) end in exactly one event each, success or failure.
"""

from dataclasses import dataclass

from fabric.model import Fence, JobEnd, Member, Poison, Record, SnapshotRef, StepTimes
from fabric.protocol.messages.network import LeaderMessage, MemberMessage, PeerMessage
from fabric.protocol.messages.prepared_round import PreparedRound as PreparedRound

# --- events: the trainer's main thread ------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Ready:
    """The state at ``step`` is complete and the main thread waits. ``digest`` is empty when not taken;
    ``later``: it is being taken, and told when TellDigest asks for it. ``entries``: small ones of that state,
    see ``parted``."""

    step: int
    digest: str = ""
    times: StepTimes | None = None
    later: bool = False
    entries: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True, slots=True)
class Digested:
    """The state at ``step`` has this digest; the main thread waits as before."""

    step: int
    digest: str
    entries: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True, slots=True)
class Streaming:
    """The last backward of what is being computed has begun: the kept gradient becomes final part by part
    from now on. What is being computed adds ``weight`` to it. Computed follows."""

    step: int
    weight: float


@dataclass(frozen=True, slots=True)
class Computed:
    """The gradients of these micro-batches are added to the kept gradient; the main thread waits.

    ``redo`` says why what was streamed of them is not what they are now, if so.
    """

    step: int
    micro_batches: tuple[int, ...]
    weight: float
    metrics: tuple[tuple[str, float], ...] = ()
    redo: str = ""


@dataclass(frozen=True, slots=True)
class Installed:
    """The fetched state was loaded and has this digest; the main thread waits, or with ``last`` it is at
    the end of its loop, as after Closing."""

    step: int
    digest: str
    last: bool = False


@dataclass(frozen=True, slots=True)
class InstallFailed:
    """The fetched state does not fit; nothing was changed."""

    why: str


@dataclass(frozen=True, slots=True)
class LoopRaised:
    """The user's loop has raised, and the main thread waits to be told to stop."""

    why: str


@dataclass(frozen=True, slots=True)
class Busy:
    """The user's code is away for ``reason``, at most so many seconds; an empty reason: not any more."""

    reason: str
    at_most_s: float


@dataclass(frozen=True, slots=True)
class Closing:
    """The user's loop has ended at the current step."""


# --- events: links and the data plane ---------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Linked:
    """Every link of ``epoch`` is up: control to all its members, data to the ring neighbours."""

    epoch: int


@dataclass(frozen=True, slots=True)
class LinkFailed:
    """Links of ``epoch`` could not be made. ``unreachable``: those to whose hosts no connection came about;
    others may only be slow to answer."""

    epoch: int
    about: str
    why: str
    unreachable: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class LinkLost:
    """The control link to this process ended. ``silent``: nothing got through any more, though nobody had
    closed it."""

    replica: str
    incarnation: int
    why: str
    silent: bool = False


@dataclass(frozen=True, slots=True)
class Probed:
    """Of those that were to be probed these could not be reached."""

    unreachable: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Exchanged:
    """Round (epoch, step) is fully reduced in my memory and no I/O touches it any more.

    ``nonfinite`` names the first tensor of the sum that holds an infinity or a NaN, ``mine`` the first of
    what I put in; both stay empty where nobody asked for the check.
    """

    epoch: int
    step: int
    gradient_digest: str
    nonfinite: str = ""
    mine: str = ""


@dataclass(frozen=True, slots=True)
class ExchangeFailed:
    """The exchange of round (epoch, step) ended without a result. ``waited_for``: whose bytes were due then,
    whoever ended it. ``mismatch``: the peer that it is about takes part in something else."""

    epoch: int
    step: int
    about: str
    why: str
    waited_for: str = ""
    mismatch: bool = False


# --- events: messages -------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class FromPeer:
    replica: str
    incarnation: int
    message: PeerMessage


@dataclass(frozen=True, slots=True)
class FromLeader:
    message: LeaderMessage


@dataclass(frozen=True, slots=True)
class LeaderConnected:
    """A session to the leader is open; the shell has sent nothing on it yet."""


@dataclass(frozen=True, slots=True)
class LeaderLost:
    """The session ended."""


# --- events: transfer -------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class StateFetched:
    """The state lies complete and verified in my own memory, not yet loaded."""

    step: int
    digest: str


@dataclass(frozen=True, slots=True)
class FetchFailed:
    """No source delivered the state. ``unusable``: what the sources hold is damaged or cannot be read, and
    asking them again is of no use. ``misfit``: it is the state of another model, wherever it is read."""

    why: str
    unusable: bool = False
    misfit: bool = False


@dataclass(frozen=True, slots=True)
class GradientFetched:
    """The published gradient of ``step`` lies verified in my memory."""

    step: int
    gradient_digest: str


@dataclass(frozen=True, slots=True)
class GradientGone:
    """Nobody holds the gradient of ``step`` (any more); ``gone`` False: not published within the wait."""

    step: int
    gone: bool
    why: str = ""


@dataclass(frozen=True, slots=True)
class Snapshotted:
    """The checkpoint server holds the state at ``step``; digest empty when it could not be taken.

    ``generation`` is the one it was taken in; negative: the current one.
    """

    step: int
    digest: str
    generation: int = -1


@dataclass(frozen=True, slots=True)
class RingWaitsFor:
    """The data plane waits for bytes of this member now (empty: for nobody's). It starts nothing: an abort
    that follows names that member."""

    replica: str


@dataclass(frozen=True, slots=True)
class Tick:
    """Time passed."""


Event = (
    Ready
    | Digested
    | Streaming
    | Computed
    | Installed
    | InstallFailed
    | Closing
    | Busy
    | LoopRaised
    | Linked
    | LinkFailed
    | LinkLost
    | Probed
    | Exchanged
    | ExchangeFailed
    | FromPeer
    | FromLeader
    | LeaderConnected
    | LeaderLost
    | StateFetched
    | FetchFailed
    | GradientFetched
    | GradientGone
    | Snapshotted
    | RingWaitsFor
    | Tick
)

# --- effects: messages --------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class SendPeer:
    replica: str
    incarnation: int
    message: PeerMessage


@dataclass(frozen=True, slots=True)
class SendLeader:
    message: MemberMessage


# --- effects: links and the data plane ------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class LinkUp:
    """Make what is missing of the links of ``record``; ends in Linked or LinkFailed."""

    record: Record


@dataclass(frozen=True, slots=True)
class Probe:
    """Find out which of these members can be reached from here, and leave no link behind; ends in Probed."""

    members: tuple[Member, ...]


@dataclass(frozen=True, slots=True)
class Switch:
    """``record`` is in force for me: links of older epochs may go."""

    record: Record


@dataclass(frozen=True, slots=True)
class StartExchange:
    """Reduce round (epoch, step): the kept gradient, or zeros when ``weight`` is zero. ``streaming``: it is
    still being added to, and each part goes out when it is final."""

    fence: Fence
    step: int
    weight: float
    streaming: bool = False


@dataclass(frozen=True, slots=True)
class AbortExchange:
    """End every wait of this epoch's exchanges at once."""

    epoch: int
    why: str


# --- effects: the trainer's main thread -------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Compute:
    """Add these micro-batches to the kept gradient of ``step``; ends in Computed."""

    step: int
    micro_batches: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class DropGradient:
    """Forget the kept gradient."""


@dataclass(frozen=True, slots=True)
class Apply:
    """Step ``step`` is committed: let the user's update code run on its averaged gradient; ends in Ready.

    ``prepared`` is the reduced round in my memory, or None for a published gradient that was fetched.
    ``digest`` asks for the digest of the state after the update. ``contributed`` is false where I contributed
    nothing.
    """

    step: int
    prepared: PreparedRound | None
    contributed: bool
    digest: bool


@dataclass(frozen=True, slots=True)
class Publish:
    """Serve this committed round's reduced gradient to whoever catches up."""

    generation: int
    prepared: PreparedRound


@dataclass(frozen=True, slots=True)
class Install:
    """Load the fetched state; ends in Installed or InstallFailed."""

    step: int
    digest: str


@dataclass(frozen=True, slots=True)
class TellDigest:
    """The digest that Ready left for later is needed now; ends in Digested."""

    step: int


@dataclass(frozen=True, slots=True)
class TakeSnapshot:
    """Snapshot the state at ``step``, which is the current one; ends in Snapshotted.

    ``generation``: to take it in; negative: the current one.
    """

    step: int
    generation: int = -1


@dataclass(frozen=True, slots=True)
class Finish:
    """The job is complete: the main thread may close. ``alone``: no lighthouse has said so, and why this is
    the end all the same, in a sentence. ``ended``: what a lighthouse is to hear when there is one again."""

    step: int
    alone: str = ""
    ended: JobEnd | None = None


@dataclass(frozen=True, slots=True)
class Stop:
    """This process must end with ``code`` (75: restart me, 1: do not). ``poison``: the micro-batches that
    are the reason, where they are."""

    code: int
    reason: str
    poison: tuple[Poison, ...] = ()


# --- effects: transfer ----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class FetchState:
    """Fetch a snapshot; ends in StateFetched or FetchFailed. ``urls`` serve it; in a replica of several ranks
    they serve this rank's part, and ``lanes`` are all ranks', for a state in another layout."""

    state: SnapshotRef
    urls: tuple[str, ...]
    lanes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class FetchGradient:
    """Fetch or await the published gradient of ``step``; ends in GradientFetched or GradientGone."""

    generation: int
    step: int
    urls: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class CancelFetch:
    """The fetch under way is no longer wanted; it may still end in its event."""


@dataclass(frozen=True, slots=True)
class RetainGradients:
    """Keep published gradients from now on (or no longer) beyond the last two: somebody catches up."""

    on: bool


# --- effects: telling people ------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class WriteJournal:
    """Something worth a line in the journal: ``kind`` names it."""

    kind: str
    epoch: int
    step: int
    why: str = ""
    about: str = ""
    micro_batches: tuple[int, ...] = ()


Effect = (
    SendPeer
    | SendLeader
    | LinkUp
    | Probe
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
    | WriteJournal
)
