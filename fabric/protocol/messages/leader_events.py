"""Events (past tense) and effects (imperative) of a leader core, for one job."""

from fabric.model import MemberSpeed, OfProcess, Policy, Record, ReplicaProcess, Value
from fabric.protocol.messages.network import LeaderMessage, MemberMessage, OpenSession, TrainerStatus

# --- events -----------------------------------------------------------------------------------------


class Elected(Value):
    """This lighthouse leads."""

    store_id: str
    record: Record | None  # the job's record in the store; None: the store has none yet
    unix_s: float = 0.0  # the time of day, for times that one leader writes and another reads


class SessionOpened(Value):
    """A member's session began with this message."""

    session: OpenSession
    policy: Policy | None = None  # what this replica asks for; None: nothing


class SessionClosed(OfProcess):
    """The session of this process ended."""


class FromMember(OfProcess):
    message: MemberMessage


class TrainerStatusSeen(Value):
    status: TrainerStatus


class StatusesUnchanged(Value):
    """A checkpoint server says that these statuses still hold, and it said them ``ago_s`` seconds ago."""

    statuses: tuple[TrainerStatus, ...]
    ago_s: tuple[float, ...]


class TrainerStatusClosed(Value):
    """The connection ended over which the checkpoint server at ``ckpt`` had sent this rank's status."""

    replica: str
    ckpt: str
    rank: int = 0


class RecordWritten(Value):
    """The write with this nonce is committed in the store."""

    nonce: str


class RecordRead(Value):
    """The store holds ``record`` now, read after an indefinite write or a refused guard."""

    record: Record | None


class WriteFailed(Value):
    """The write failed, or its outcome is unknown."""

    nonce: str
    definite: bool  # the store certainly did not apply the write


class Operator(Value):
    """An operator's command."""

    action: str  # drain, evict, admit, pause, resume, scale, adapt, veto, allow, end or retry
    replica: str  # the subject of drain, evict, admit, veto and allow; admit takes a host too
    who: str
    why: str
    min_replicas: int | None = None  # the new minimum, for scale; None: unchanged, 0: as the sessions ask
    max_replicas: int | None = None  # the new maximum, for scale; None: unchanged, 0: as the sessions ask
    mode: str = ""  # the new mode, for adapt
    host_is_gone: bool = False  # for evict: a person knows that the member's host will never return


class LaunchFailed(Value):
    """A process of a replica ended before it had a session, says its launcher."""

    replica: str
    host: str
    why: str


class HostReplaced(Value):
    """The ranks of a replica start, and one of its hosts may have no state in memory."""

    replica: str


class AcceptQueueFull(Value):
    """Too many members connect at once: some of them wait in the queue, for ``seconds`` more."""

    seconds: float


class SharesAdvised(Value):
    """The detector advises shares for the members of ``epoch``; with no speeds, the shares they asked for."""

    epoch: int
    speeds: tuple[MemberSpeed, ...]
    gain: float  # predicted gain of throughput, as a share
    cost_s: float  # predicted time that the job loses by the change
    reason: str


class LayoutAdvised(Value):
    """The detector advises that a member of ``epoch`` leaves, and comes back in another layout."""

    epoch: int
    process: ReplicaProcess
    layout: str  # the order to its launcher; empty: a spare takes its place, and it does not come back
    gain: float  # predicted gain of throughput, as a share, beyond the best shares
    cost_s: float  # predicted time that the job loses by the change
    reason: str
    remedy: str = ""  # the kind of remedy, for people


class LeaderTick(Value):
    """Time passed."""


Event = (
    Elected
    | SessionOpened
    | SessionClosed
    | FromMember
    | TrainerStatusSeen
    | StatusesUnchanged
    | TrainerStatusClosed
    | RecordWritten
    | RecordRead
    | WriteFailed
    | Operator
    | LaunchFailed
    | HostReplaced
    | AcceptQueueFull
    | SharesAdvised
    | LayoutAdvised
    | LeaderTick
)

# --- effects ----------------------------------------------------------------------------------------


class SendMember(OfProcess):
    message: LeaderMessage


class WriteRecord(Value):
    """Replace the record, guarded by the election key and by ``previous`` still being in the store."""

    record: Record
    previous: Record | None


class ReadRecord(Value):
    """Read the record again; RecordRead follows."""


class StepDown(Value):
    """Stop leading, because another leader has written."""

    reason: str


class RecordEvent(Value):
    """Write an event to the log that operators read."""

    kind: str
    epoch: int
    about: str = ""  # the replica that the event is about; empty: none
    why: str = ""  # why the event happened, in one sentence
    incident_id: str = ""  # empty: the event belongs to no change of the roster


Effect = SendMember | WriteRecord | ReadRecord | StepDown | RecordEvent
