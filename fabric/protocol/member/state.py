"""The state, the context, the memory and the known epochs that all parts of a member core share."""

import math
from collections.abc import Iterable
from enum import Enum

from msgspec import Struct, field

from fabric.errors import IllegalTransition
from fabric.exit_codes import FINISHED, RESTART
from fabric.model import (
    NOT_LAUNCHED,
    DataPlan,
    Fence,
    LaunchedLayouts,
    Member,
    Poison,
    Record,
    SnapshotRef,
    Value,
)
from fabric.protocol.messages import member_events as io
from fabric.protocol.messages import network as m
from fabric.protocol.rules.divergence import bounded

# A member keeps early messages of at most this many later rounds, of the next step or the next epoch.
MAX_EARLY_ROUNDS = 8
# After this many failures in a row to fetch a gradient that must exist, the member gives up this replay.
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


class MemberConfig(Value):
    """Settings of a member; times in seconds."""

    min_replicas: int = 1
    autonomy_s: float = 1800.0
    adapt: str = ""  # the job's mode against slow replicas: "off", "advise" or "act"
    launched: LaunchedLayouts = NOT_LAUNCHED  # the layouts that this replica may be started in
    beat_s: float = 1.0
    digest_every: int = 1  # steps between digests of the shared state; 0: never
    retain: bool = True  # the kept gradient survives the exchange, so a retry need not compute it again
    replay: bool = True  # catch up by published gradients; False: by a blocking join
    replay_steps: int = 0  # as in ``OpenSession``
    exchange_s: float = 60.0  # the time budget for an exchange
    user_code_s: float = 1800.0  # the time budget for user code
    stores: bool = True  # this replica has storage for durable checkpoints
    storage_failed: bool = False  # durable storage could not be read at the start
    on_nan: str = "propagate"  # the action at a step whose averaged gradient is not finite
    plan: DataPlan | None = None  # the data of the loop's first steps; None: those of all its steps


class MemberState(Struct):
    """The training state in this member's memory."""

    generation: int = 0  # generation of this state; 0: no other member confirms the state
    step: int = 0
    digest: str = ""
    committed_digest: str = ""  # the digest of the gradient that led to ``step``
    later: bool = False  # the digest of this state is still being taken
    asked: bool = False  # TellDigest has asked for the digest
    outvoted: bool = False  # most members of a round have called this state wrong
    entries: tuple[tuple[str, str], ...] = ()  # small entries of this state, known with the digest
    parted: str = ""  # where this state differs from the other members' states


class KeptGradient(Struct):
    """The kept gradient of the current step."""

    have: set[int] = field(default_factory=set)  # kept micro-batches, and those under way
    computing: tuple[int, ...] = ()  # the micro-batches that the main thread is adding
    streaming: float = 0.0  # positive while the last backward is under way
    weight: float = 0.0
    metrics: dict[str, float] = field(default_factory=dict)
    stale: bool = False  # drop the gradient when the main thread has finished adding


class LastRound(Value):
    """The newest round that a member entered."""

    epoch: int = 0  # epoch of the round; 0: none
    step: int = 0
    roster: tuple[str, ...] = ()


class Fetch(Struct):
    """The fetch of a catch-up."""

    doing: str = ""  # ``asked``, ``state``, ``install``, ``gradient`` or nothing
    void: bool = False  # the result of this fetch is no longer wanted
    generation: int = 0  # the generation to which the state being loaded will belong
    misses: int = 0  # tries in a row in which no source had the gradient
    wanted: SnapshotRef | None = None  # the state to fetch next
    urls: tuple[str, ...] = ()
    state: SnapshotRef | None = None  # a fetched state, ready to install
    gradient: io.GradientFetched | None = None  # a fetched gradient, ready to apply


class Contact(Struct):
    """The session with the leader."""

    last: float  # the time at which the newest answered heartbeat was sent
    next_beat: float
    beaten: float = -math.inf  # when the newest heartbeat was sent
    beaten_epoch: int = -1  # the newest epoch that a heartbeat has named
    asked: float = -math.inf  # when a newcomer last needed to know my step
    connected: bool = False
    number: int = 0  # the newest heartbeat's number
    sent: dict[int, float] = field(default_factory=dict)  # when each unanswered heartbeat was sent
    aborted: m.Aborted | None = None  # my newest abort
    unsaid: bool = False  # whether ``aborted`` is unsent, because there was no session
    fallen: m.CannotContinue | None = None  # message repeated until the leader has answered it
    failed: m.LoopFailed | None = None  # message repeated until the leader has answered it
    finished: bool = False
    unheeded: m.Resume | None = None  # a decision after ``autonomy_s``; an answered heartbeat lets it count


class LinkState(Struct):
    """The links of epochs, and messages that came before their round."""

    up: set[int] = field(default_factory=set)  # epochs whose links are up
    silent: set[str] = field(default_factory=set)  # members that this member cannot reach, as far as it knows
    lost_bytes: int = 0  # as in Heartbeat, by the last probe
    early: dict[tuple[int, int], list[io.FromPeer]] = field(default_factory=dict)  # by epoch and step
    first_step: int = -1  # the first step of the epoch in force

    def came_up(self, epoch: int, names: Iterable[str]) -> None:
        """Note that all links of this epoch are up, those to ``names``."""
        self.up.add(epoch)
        self.silent.difference_update(names)
        self.lost_bytes = 0

    def lose(self, epochs: Iterable[int], unreachable: Iterable[str]) -> None:
        self.up.difference_update(epochs)
        self.silent.update(unreachable)

    def probed(self, unreachable: set[str], lost_bytes: int) -> bool:
        """Take the outcome of a probe; return whether it is news."""
        before = self.silent, self.lost_bytes
        self.silent, self.lost_bytes = unreachable, lost_bytes
        return before != (unreachable, lost_bytes)

    def enter(self, epoch: int, first_step: int) -> None:
        """Forget the links before this epoch, which is in force from now on."""
        self.first_step, self.up = first_step, {x for x in self.up if x >= epoch}

    def take_early(self, key: tuple[int, int]) -> list[io.FromPeer]:
        return self.early.pop(key, [])

    def keep_early(self, key: tuple[int, int], event: io.FromPeer, floor: int) -> None:
        self.early = {k: v for k, v in self.early.items() if k[0] >= floor}
        kept = self.early.setdefault(key, [])
        twin = [e for e in kept if e.replica == event.replica and type(e.message) is type(event.message)]
        if not twin:
            kept.append(event)
        while len(self.early) > MAX_EARLY_ROUNDS:
            del self.early[min(self.early)]


class CoreContext:
    """The context of one core, in each of its parts. Times are monotonic seconds.

    ``identity``: the first message of the first session. Every session repeats what it says of this process.
    """

    def __init__(self, identity: m.OpenSession, config: MemberConfig, now: float) -> None:
        self.identity = identity
        self.replica = identity.replica
        self.config = config
        self.now = now  # the time of the present event
        self.effects: list[io.Effect] = []  # the effects of the present event so far, in order
        self.stopped = False  # whether the core has stopped: it handles no further event
        self.noticed_at = math.inf  # when this process got notice that it will be killed soon

    def begin(self, now: float) -> None:
        self.now, self.effects = now, []

    def notice(self) -> None:
        self.noticed_at = min(self.noticed_at, self.now)

    def end(self, effect: io.Stop | io.Finish) -> None:
        self.emit(effect)
        self.stopped = True

    def stop(self, code: int, reason: str, poison: tuple[Poison, ...] = ()) -> None:
        self.end(io.Stop(code, reason, poison))

    def leave(self, entry: Member | None) -> None:
        """Stop as a leaving member. ``entry``: this member's entry in the last roster that lists it."""
        if entry is None or not entry.returns:
            why = "drained: the others go on without this replica"
            self.stop(RESTART if self.noticed_at < math.inf else FINISHED, why)
            return
        reason = f"comes back in the layout {entry.returns}: the others go on meanwhile"
        self.end(io.Stop(RESTART, reason, layout=entry.returns))

    def emit(self, effect: io.Effect) -> None:
        self.effects.append(effect)

    def to_members(self, record: Record, message: m.PeerMessage) -> None:
        """Send to every other member of ``record``."""
        for x in record.roster:
            if x.replica != self.replica:
                self.emit(io.SendPeer(x.replica, x.incarnation, message))


class MemberMemory:
    """The memory of the trainer process. Only its main thread changes state and gradient, by effects."""

    def __init__(self, context: CoreContext) -> None:
        me = context.identity
        self._context = context
        self.state = MemberState(me.generation, me.step, me.digest)
        self.kept_gradient = KeptGradient()
        self.waiting = False  # whether the main thread waits for a Compute, Apply, Install, ...
        self.began = me.step  # the step at which this process began
        self.loaded = -1  # the step of the last loaded state: its digest does not prove my own updates
        self.empty = -1  # the newest step that was committed with total weight 0
        self.suspect = False  # digests differed: after an eviction for that, do not trust the own state
        # The data of the loop's steps now.
        self.plan = context.config.plan or DataPlan(context.identity.micro_batches)
        self.agreed = 0  # the newest epoch in which a state that I updated had another member's digest

    def order(self, effect: io.Compute | io.Apply | io.Install) -> None:
        """Give the main thread its next work."""
        self.waiting = False
        self._context.emit(effect)

    def compute(self, effect: io.Compute) -> None:
        """Let the main thread add these micro-batches to the kept gradient."""
        self.kept_gradient.have |= set(effect.micro_batches)
        self.kept_gradient.computing = effect.micro_batches
        self.order(effect)

    def apply(self, effect: io.Apply, gradient_digest: str) -> None:
        """Let the main thread apply the gradient of a committed step: my state is then at the next step."""
        self.state = MemberState(self.state.generation, effect.step + 1, "", gradient_digest)
        if effect.prepared is not None:
            self.kept_gradient = KeptGradient()
            self.empty = self.empty if effect.prepared.weight else effect.step
        self.order(effect)

    def on_ready(self, event: io.Ready) -> None:
        state = self.state
        if event.step != state.step:
            raise IllegalTransition(f"ready for step {event.step} with the state at {state.step}")
        state.digest, state.later, state.entries = event.digest, event.later, bounded(event.entries)
        self.waiting, self.plan = True, event.plan or self.plan

    def on_digested(self, event: io.Digested) -> bool:
        """Take the digest of my state; return whether it was awaited."""
        state = self.state
        if not state.later or event.step != state.step:
            return False
        state.digest, state.later, state.asked = event.digest, False, False
        state.entries = bounded(event.entries)
        return True

    def on_streaming(self, event: io.Streaming) -> None:
        if event.step == self.state.step and not self.kept_gradient.stale:
            self.kept_gradient.streaming = self.kept_gradient.weight + event.weight

    def on_computed(self, event: io.Computed) -> bool:
        """Add to the kept gradient; return whether that gradient is still wanted."""
        self.waiting, kept = True, self.kept_gradient
        kept.streaming = 0.0
        if kept.stale or event.step != self.state.step:
            self.drop_kept()
            return False
        kept.computing = ()
        if event.weight == 0 and self._context.identity.sharing.policy == "shrink":
            # These micro-batches contributed nothing (data of another step were discarded): they are skipped.
            kept.have -= set(event.micro_batches)
        kept.weight += event.weight
        for name, value in event.metrics:
            kept.metrics[name] = kept.metrics.get(name, 0.0) + value
        return True

    def on_installed(self, event: io.Installed, generation: int) -> None:
        """Hold the loaded state, which belongs to ``generation``."""
        self.waiting, self.plan = True, event.plan or self.plan
        self.state, self.loaded = MemberState(generation, event.step, event.digest), event.step

    def on_loop_left(self) -> None:
        self.waiting = False

    def adopt(self, generation: int) -> None:
        """Let my state count in this generation: it is the base, or equals the other members' state."""
        self.state.generation, self.state.committed_digest = generation, ""
        self.state.outvoted, self.state.parted = False, ""

    def distrust(self) -> None:
        """No other member confirms my state any more: it belongs to no generation."""
        self.state.generation = 0

    def outvote(self) -> None:
        self.state.outvoted = True

    def doubt(self, parted: str) -> None:
        """Digests differ; ``parted``: where the members' states do."""
        self.state.parted, self.suspect = parted, True

    def confirm(self, epoch: int, others_voted: bool) -> None:
        """All digests of a round of ``epoch`` are equal; ``others_voted``: other members' states have one."""
        self.suspect = False
        if others_voted and self.state.step > self.loaded:
            self.agreed = epoch

    def leave(self) -> None:
        """Drop the kept gradient, and keep the state unless others may have called it wrong."""
        self.drop_kept()
        if self.suspect or self.state.outvoted:
            self.distrust()
            self.suspect = False

    def drop_kept(self) -> None:
        """Forget the kept gradient: at once, or when the main thread has finished adding to it."""
        if not self.waiting and self.kept_gradient.computing:
            self.kept_gradient.stale = True
            return
        if self.kept_gradient.have:
            self._context.emit(io.DropGradient())
        self.kept_gradient = KeptGradient()

    def lacks_digest(self) -> bool:
        """Rule 1: return whether my state's digest is due and still being taken; if so, ask for it."""
        state = self.state
        if state.later and not state.asked:
            state.asked = True
            self._context.emit(io.TellDigest(state.step))
        return state.later


class KnownEpochs:
    """The epoch in force, the newest epoch, the links of both, my report, and the leader's decision."""

    def __init__(self, context: CoreContext, memory: MemberMemory) -> None:
        self._context = context
        self._memory = memory
        self.mode = Mode.OUTSIDE
        self.current: Record | None = None  # the epoch in which this member runs or last ran
        self.newest: Record | None = None  # the newest epoch that this member knows
        self.report: m.Report | None = None  # this member's answer to the newest forced epoch
        self.resume: m.Resume | None = None  # the decision of the epoch in force
        self.links = LinkState()

    def learn(self, record: Record) -> None:
        self.newest = record

    def enter(self, record: Record, first_step: int) -> None:
        self.current = record
        self.links.enter(record.epoch, first_step)
        self._context.emit(io.Switch(record))

    def promise(self, report: m.Report) -> None:
        """Take no part in older epochs than that of this report."""
        self.report = report

    def follow(self, decision: m.Resume) -> None:
        self.resume = decision

    def forget(self) -> None:
        self.newest = self.current = self.report = None

    def enter_mode(self, mode: Mode) -> None:
        if mode not in TRANSITIONS[self.mode]:
            raise IllegalTransition(
                f"{self._context.replica} cannot go from {self.mode.value} to {mode.value} "
                f"at step {self._memory.state.step} in epoch {self.epoch()}"
            )
        self.mode = mode
        if mode is Mode.OUTSIDE:
            self.resume = None

    def journal(self, kind: str, why: str, about: str = "") -> None:
        """Write a line about my epoch and step into the journal."""
        self._context.emit(io.WriteJournal(kind, self.epoch(), self._memory.state.step, why, about))

    def runs(self, epoch: int) -> bool:
        return self.current is not None and self.mode in (Mode.RUN, Mode.CATCH_UP) and self.epoch() == epoch

    def epoch(self) -> int:
        return self.current.epoch if self.current is not None else 0

    def fence(self) -> Fence:
        record = self.current or self.newest
        return record.fence if record is not None else Fence("", 0, 0)

    def is_awaited(self, record: Record) -> bool:
        """Whether the other members wait in this epoch until I have loaded my state."""
        me = record.member(self._context.replica)
        return me is not None and me.blocking_join and me.incarnation == self._context.identity.incarnation

    def is_awaiting(self) -> bool:
        return self.mode is Mode.CATCH_UP and self.current is not None and self.is_awaited(self.current)

    @staticmethod
    def by_veteran(record: Record, event: io.FromPeer) -> bool:
        member = record.member(event.replica)
        return member is not None and not member.joining and isinstance(event.message, m.Contribution)

    def is_at(self, where: Record | Fence, step: int) -> bool:
        return (self._memory.state.generation, self._memory.state.step) == (where.generation, step)
