"""What a leader core hears (events, past tense) and orders (effects, imperative), for one job."""

from dataclasses import dataclass

from fabric.model import Policy, Record
from fabric.protocol.messages.network import LeaderMessage, MemberMessage, OpenSession, TrainerStatus

# --- events -----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Elected:
    """This lighthouse leads, and ``record`` is what the store holds for the job (None: nothing yet).
    ``unix_s`` is the time of day, in Unix seconds: times that one leader writes are read by another."""

    store_id: str
    record: Record | None
    unix_s: float = 0.0


@dataclass(frozen=True, slots=True)
class SessionOpened:
    """A member's session began with this message."""

    session: OpenSession
    policy: Policy | None = None  # in force from now on; None: the policy of the sessions before it stays


@dataclass(frozen=True, slots=True)
class SessionClosed:
    replica: str
    incarnation: int


@dataclass(frozen=True, slots=True)
class FromMember:
    replica: str
    incarnation: int
    message: MemberMessage


@dataclass(frozen=True, slots=True)
class TrainerStatusSeen:
    status: TrainerStatus


@dataclass(frozen=True, slots=True)
class TrainerStatusClosed:
    """The connection ended over which the server at ``ckpt`` told of this replica (of this rank of it)."""

    replica: str
    ckpt: str
    rank: int = 0


@dataclass(frozen=True, slots=True)
class RecordWritten:
    """The write with this nonce is committed in the store."""

    nonce: str


@dataclass(frozen=True, slots=True)
class RecordRead:
    """What the store holds now, read after an indefinite write or a refused guard."""

    record: Record | None


@dataclass(frozen=True, slots=True)
class WriteFailed:
    """The write did not happen (``definite``), or nobody knows yet."""

    nonce: str
    definite: bool


@dataclass(frozen=True, slots=True)
class Operator:
    """``action`` is drain or evict (about ``replica``), admit (about a replica or a host), pause, resume,
    scale or retry (a job that has failed); recorded with who and why. ``min_replicas``, ``max_replicas``:
    what scale sets (None: as it is, 0: as the sessions ask)."""

    action: str
    replica: str
    who: str
    why: str
    min_replicas: int | None = None
    max_replicas: int | None = None


@dataclass(frozen=True, slots=True)
class AcceptQueueFull:
    """So many connect at once that some are made to wait, for so many seconds yet."""

    seconds: float


@dataclass(frozen=True, slots=True)
class LeaderTick:
    """Time passed."""


Event = (
    Elected
    | SessionOpened
    | SessionClosed
    | FromMember
    | TrainerStatusSeen
    | TrainerStatusClosed
    | RecordWritten
    | RecordRead
    | WriteFailed
    | Operator
    | AcceptQueueFull
    | LeaderTick
)

# --- effects ----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class SendMember:
    replica: str
    incarnation: int
    message: LeaderMessage


@dataclass(frozen=True, slots=True)
class WriteRecord:
    """Replace the record, guarded by the election key and by ``previous`` still being in the store."""

    record: Record
    previous: Record | None


@dataclass(frozen=True, slots=True)
class ReadRecord:
    """Read the record again; ends in RecordRead."""


@dataclass(frozen=True, slots=True)
class StepDown:
    """Somebody else wrote: stop leading."""

    reason: str


@dataclass(frozen=True, slots=True)
class RecordEvent:
    """A transition worth a line for people: ``kind``, who it is about, why in a sentence, and the id of what
    it belongs to (empty: to nothing that changes the roster)."""

    kind: str
    epoch: int
    about: str = ""
    why: str = ""
    incident_id: str = ""


Effect = SendMember | WriteRecord | ReadRecord | StepDown | RecordEvent
