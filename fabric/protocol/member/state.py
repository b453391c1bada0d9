"""The parts of a member core's state: its mode and the moves between modes, what its memory holds, the
gradient it keeps, what it fetches, its session with the leader, and its links."""

import math
from dataclasses import dataclass, field
from enum import Enum

from fabric.model import EVERYTHING, JobEnd, RankAddress, Sharing, SnapshotRef
from fabric.protocol.messages import member_events as io
from fabric.protocol.messages import network as m

# Rounds that peers may be ahead of me with their first messages: the next step, and the next epoch's.
MAX_EARLY_ROUNDS = 8
# How often in a row a gradient that must exist may not be delivered before another way is sought.
MAX_MISSES = 3


class Mode(Enum):
    OUTSIDE = "outside"
    JOINED = "joined"
    RUN = "run"
    ABORTED = "aborted"
    REPORTED = "reported"
    CATCH_UP = "catch-up"


TRANSITIONS: dict[Mode, frozenset[Mode]] = {
    Mode.OUTSIDE: frozenset({Mode.JOINED}),
    Mode.JOINED: frozenset({Mode.RUN, Mode.REPORTED, Mode.OUTSIDE}),
    Mode.RUN: frozenset({Mode.ABORTED, Mode.OUTSIDE}),
    Mode.ABORTED: frozenset({Mode.REPORTED, Mode.OUTSIDE}),
    Mode.REPORTED: frozenset({Mode.RUN, Mode.CATCH_UP, Mode.REPORTED, Mode.OUTSIDE}),
    Mode.CATCH_UP: frozenset({Mode.RUN, Mode.ABORTED, Mode.OUTSIDE}),
}


@dataclass(frozen=True, slots=True)
class MemberIdentity:
    """Who this process is; the same in every session it opens. ``predecessors``: the incarnations that ran on
    this host before and have ended, newest first. ``durable``: the durable checkpoints that it found when it
    started; ``storage_unread``: storage could not be listed then. ``ended``: an earlier process left word of
    the job's end here."""

    replica: str
    incarnation: int
    link: str
    ckpt: str
    micro_batches: int
    layout: str = ""
    data: str = ""
    shares: int = 1
    predecessors: tuple[int, ...] = ()
    sharing: Sharing = EVERYTHING
    data_slot: int = -1
    ranks: tuple[RankAddress, ...] = ()
    tensors: tuple[str, ...] = ()
    plane: str = ""
    durable: tuple[SnapshotRef, ...] = ()
    storage_unread: bool = False
    spare: bool = False
    ended: JobEnd | None = None
    secret: str = ""
    rack: str = ""


@dataclass(frozen=True, slots=True)
class MemberConfig:
    """Times in seconds. ``digest_every``: steps between digests of the shared state (0: never). ``retain``:
    whether the kept gradient survives the exchange, so that a retry need not compute it again.
    ``replay``: whether to catch up by applying published gradients, or by a state that the others wait for.
    ``exchange_s`` and ``user_code_s``: the time budget, see ``budget``. ``on_nan``: what becomes of a step
    whose averaged gradient is not finite."""

    min_replicas: int = 1
    autonomy_s: float = 1800.0
    beat_s: float = 1.0
    digest_every: int = 1
    retain: bool = True
    replay: bool = True
    exchange_s: float = 60.0
    user_code_s: float = 1800.0
    on_nan: str = "propagate"


@dataclass(slots=True)
class MemberState:
    """What my memory holds: ``generation`` 0 is a state that nobody vouches for. ``later``: its digest is
    being taken, and ``asked`` for once it is needed. ``outvoted``: most members of a round have called it
    wrong. ``entries``: small ones of it, known with the digest. ``parted``: where it differs from others'."""

    generation: int = 0
    step: int = 0
    digest: str = ""
    committed_digest: str = ""
    later: bool = False
    asked: bool = False
    outvoted: bool = False
    entries: tuple[tuple[str, str], ...] = ()
    parted: str = ""


@dataclass(slots=True)
class KeptGradient:
    """The kept gradient of the current step, and what the main thread is adding to it. ``streaming`` is
    what it will stand for when the backward under way, the last one, has ended; 0 before that."""

    have: set[int] = field(default_factory=set)
    computing: tuple[int, ...] = ()
    streaming: float = 0.0
    weight: float = 0.0
    metrics: dict[str, float] = field(default_factory=dict)
    stale: bool = False


@dataclass(frozen=True, slots=True)
class LastRound:
    """The newest round that a member entered."""

    epoch: int = 0  # 0: none
    step: int = 0
    roster: tuple[str, ...] = ()

    def is_that_of(self, prepared: io.PreparedRound) -> bool:
        """Whether ``prepared`` is a promise about this round."""
        return (prepared.epoch, prepared.step) == (self.epoch, self.step)


@dataclass(slots=True)
class Fetch:
    """Catch-up: what is under way (``asked``, ``state``, ``install``, ``gradient`` or nothing), what is
    wanted and what lies ready. ``void``: what is under way is no longer wanted. ``generation``: which one
    the state being loaded will belong to. ``misses``: how often in a row nobody had the gradient."""

    doing: str = ""
    void: bool = False
    generation: int = 0
    misses: int = 0
    wanted: SnapshotRef | None = None
    urls: tuple[str, ...] = ()
    state: SnapshotRef | None = None
    gradient: io.GradientFetched | None = None


@dataclass(slots=True)
class Contact:
    """The session with the leader: ``last`` is when the newest answered beat was sent, ``beaten`` when any
    was, and ``beaten_epoch`` what it said of the newest epoch. ``asked`` is when a newcomer last needed to
    know my step. ``changes``: this leader understands short reports, see ``messages.Epoch``. ``unsaid``:
    there was no session when ``aborted`` had to be said. ``unheeded``: a decision that came after the end of
    my autonomy, and waits for an answered beat."""

    last: float
    next_beat: float
    beaten: float = -math.inf
    beaten_epoch: int = -1
    asked: float = -math.inf
    connected: bool = False
    changes: bool = False
    number: int = 0
    sent: dict[int, float] = field(default_factory=dict)
    aborted: m.Aborted | None = None
    unsaid: bool = False
    fallen: m.CannotContinue | None = None
    failed: m.LoopFailed | None = None
    finished: bool = False
    unheeded: m.Resume | None = None


@dataclass(slots=True)
class LinkState:
    """Epochs whose links are up, and messages of rounds that I have not entered yet (bounded). ``silent``:
    members to which nothing gets through, as far as I know. From outside the roster all members are probed:
    ``probing`` while that is under way, and the next time at ``next_probe``. ``flaps``: one of them could not
    be reached since I was linked last."""

    up: set[int] = field(default_factory=set)
    silent: set[str] = field(default_factory=set)
    probing: bool = False
    flaps: bool = False
    next_probe: float = -math.inf
    early: dict[tuple[int, int], list[io.FromPeer]] = field(default_factory=dict)
    first_step: int = -1
    suspect: bool = False

    def keep_early(self, key: tuple[int, int], event: io.FromPeer, floor: int) -> None:
        self.early = {k: v for k, v in self.early.items() if k[0] >= floor}
        kept = self.early.setdefault(key, [])
        twin = [e for e in kept if e.replica == event.replica and type(e.message) is type(event.message)]
        if not twin:
            kept.append(event)
        while len(self.early) > MAX_EARLY_ROUNDS:
            del self.early[min(self.early)]

    def take_early(self, key: tuple[int, int]) -> list[io.FromPeer]:
        return self.early.pop(key, [])
