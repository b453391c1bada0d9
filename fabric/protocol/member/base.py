"""What all parts of a member core share: its state, and the moves that any of them may make.

A member is built in layers, each calling only those below: this one, then catching up and serving
(``member_catch_up``), then rounds (``member_rounds``), then epochs and the contract (``member``).
"""

from fabric.errors import IllegalTransition
from fabric.model import Fence, Poison, Record, SnapshotRef, StepTimes
from fabric.protocol.member.round import Round
from fabric.protocol.member.state import (
    TRANSITIONS,
    Contact,
    End,
    Fetch,
    KeptGradient,
    Links,
    MemberConfig,
    MemberIdentity,
    MemberState,
    Mode,
)
from fabric.protocol.messages import member_events as io
from fabric.protocol.messages import network as m
from fabric.protocol.rules.adaptive_timeout import AdaptiveTimeout

# A beat names so many that are waited for; the others are named when these have come or were left out.
MAX_NAMED = 64


class MemberBase:
    """State, and moves that keep it consistent. Times are monotonic seconds."""

    _last_times: StepTimes | None = None

    def __init__(
        self,
        identity: MemberIdentity,
        config: MemberConfig,
        now: float,
        state: MemberState | None = None,
        snapshots: tuple[SnapshotRef, ...] = (),
    ) -> None:
        self.identity = identity
        self.config = config
        self.mode = Mode.OUTSIDE
        self.state = state or MemberState()
        self.waiting = False  # whether the main thread waits for an Apply, Compute, ...
        self.kept_gradient = KeptGradient()
        self.prepared: io.PreparedRound | None = None
        self.disputed = (0, 0)  # the (epoch, step) of a round that ended so, see ``Round.is_disputed``
        self.loaded = -1  # the step of the state that I loaded last: its digest says nothing of my updates
        self.empty = -1  # the newest step that was committed with total weight 0
        self.agreed = 0  # the newest epoch in which a later state of mine had another member's digest
        self.round: Round | None = None
        self.current: Record | None = None  # the epoch I run in (or last ran in)
        self.newest: Record | None = None
        self.report: m.Report | None = None
        self.resume: m.Resume | None = None
        self.links = Links()
        self.fetch = Fetch()
        self.contact = Contact(last=now, next_beat=now)
        self.end = End()
        self.serving: dict[str, int] = {}  # newcomer -> the step at which a snapshot is promised to it
        self.listeners: set[str] = set()  # newcomers that live on published gradients
        self.snapshots = snapshots
        self.snapshotting = -1
        self.busy = ""  # what the user's code does for long, for people
        self.busy_s = 0.0  # and how long that may last
        self.ring_waits_for = ""  # whose bytes the data plane waits for; kept up to date by the shell
        self.learned = AdaptiveTimeout(config.exchange_s)
        self.last_round: tuple[int, int, tuple[str, ...]] = (0, 0, ())
        self.stopped = False
        self._now = now
        self._effects: list[io.Effect] = []

    @property
    def phase(self) -> str:
        """Some words for people: the mode, whether links are being made, and what the main thread does."""
        if self.contact.finished:
            return f"{self.mode.value}, finished"
        linking = self.mode is Mode.RUN and self._epoch() not in self.links.up
        return f"{self.mode.value}{m.LINKING if linking else ''}{', waiting' if self.waiting else ''}"

    # --- moves -----------------------------------------------------------------------------------------

    def on_busy(self, event: io.Busy) -> None:
        """Said at once: the others' patience depends on it."""
        self.busy, self.busy_s = event.reason, event.at_most_s
        self.contact.next_beat = self._now

    def on_closing(self, _: io.Closing) -> None:
        self.waiting = False
        self.contact.finished = True
        fence = Fence(self._fence().store_id, self.state.generation, self._fence().epoch)
        self._emit(io.SendLeader(m.Finished(fence, self.state.step)))

    def on_failed(self, event: io.LoopRaised) -> None:
        """The user's loop has raised: said until the leader answers, who stops the job or me alone."""
        self.waiting = False
        self.contact.failed = m.LoopFailed(self._fence(), self.state.step, event.why)
        self._emit(io.SendLeader(self.contact.failed))

    def _waits_for(self) -> tuple[str, ...]:
        """Name the members this round waits for: the ring neighbour, else those whose vote or part lacks."""
        round_ = self.round
        if round_ is None or not round_.contributed:
            return ()
        if round_.everybody_in() and not round_.gradient_digest:
            # In a ring of one the data plane's neighbour is this member itself.
            other = self.ring_waits_for if self.ring_waits_for != self.identity.replica else ""
            return (other,) if other else ()
        return tuple(n for n in round_.missing() if n != self.identity.replica)

    def _abort(self, why: str, about: str, stalled: bool = False, mismatch: bool = False) -> None:
        """Rule 5: once per round; the kept gradient and the hold stay. Without ``retain`` the gradient was
        reduced where it lay, so that what has begun to be exchanged is gone."""
        assert self.current is not None
        if self.mode is Mode.ABORTED:
            return
        waiting_for = self._waits_for()
        self._enter_mode(Mode.ABORTED)
        round_ = self.round
        given_away = round_ is not None and round_.exchanging and not self.config.retain
        self._leave_round()
        self._emit(io.AbortExchange(self.current.epoch, why))
        if given_away:
            self._drop_kept()
        self._emit(io.WriteJournal("abort", self.current.epoch, self.state.step, why, about))
        step, away = self.state.step, self._unreachable()
        self._send_aborted(
            m.Aborted(self.current.fence, step, why, about, waiting_for, stalled, mismatch, away)
        )

    def _unreachable(self) -> tuple[str, ...]:
        """Members of the newest epoch to which nothing gets through, as far as I know."""
        newest = self.newest
        if newest is None or not self.links.silent:
            return ()
        return tuple(n for n in newest.names if n in self.links.silent)[:MAX_NAMED]

    def _leave_round(self) -> None:
        """What others have said of it outlives the round, for they may be gone when somebody asks."""
        round_, self.round = self.round, None
        if round_ is None:
            return
        if round_.is_disputed(self.identity.replica):
            self.disputed = (round_.record.epoch, round_.step)
        if round_.step == self.state.step and round_.is_outvoted(self.state.digest):
            self.state.outvoted = True

    def _send_aborted(self, message: m.Aborted) -> None:
        self.contact.aborted, self.contact.unsaid = message, not self.contact.connected
        self._emit(io.SendLeader(self.contact.aborted))

    def _drop_kept(self) -> None:
        """Forget the kept gradient, at once or when the main thread has finished adding to it."""
        if not self.waiting and self.kept_gradient.computing:
            self.kept_gradient.stale = True
            return
        if self.kept_gradient.have:
            self._emit(io.DropGradient())
        self.kept_gradient = KeptGradient()

    def _go_to(self, record: Record) -> None:
        self.current = record
        self.round = None
        self.links.first_step = self.state.step if record.is_forced else self._planned_first_step(record)
        self.links.up = {e for e in self.links.up if e >= record.epoch}
        self._emit(io.Switch(record))

    def _planned_first_step(self, record: Record) -> int:
        early = [step for epoch, step in self.links.early if epoch == record.epoch]
        return max([self.state.step, *early]) if self.mode is Mode.JOINED else self.state.step

    def _enter_mode(self, mode: Mode) -> None:
        if mode not in TRANSITIONS[self.mode]:
            raise IllegalTransition(
                f"{self.identity.replica} cannot go from {self.mode.value} to {mode.value} "
                f"at step {self.state.step} in epoch {self._epoch()}"
            )
        self.mode = mode

    def _beat_when_due(self) -> None:
        contact = self.contact
        if not contact.connected or self._now < contact.next_beat:
            return
        contact.number += 1
        contact.sent[contact.number] = self._now
        contact.next_beat = self._now + self.config.beat_s
        contact.beaten = self._now
        contact.beaten_epoch = self.newest.epoch if self.newest is not None else 0
        waiting_for = self.round.missing() if self.round is not None and self.round.contributed else ()
        waiting_for = waiting_for[:MAX_NAMED]
        self._emit(
            io.SendLeader(
                m.Heartbeat(
                    number=contact.number,
                    epoch=self.newest.epoch if self.newest is not None else 0,
                    generation=self.state.generation,
                    step=self.state.step,
                    digest=self.state.digest,
                    phase=self.phase,
                    waiting_for=waiting_for,
                    busy=self.busy,
                    times=self._last_times,
                    busy_s=self.busy_s,
                    empty=self.empty,
                    unreachable=self._unreachable() if self.mode is Mode.OUTSIDE else (),
                )
            )
        )
        self._last_times = None

    def _to_roster(self, message: m.PeerMessage) -> None:
        assert self.round is not None
        for x in self.round.record.roster:
            if x.replica != self.identity.replica:
                self._emit(io.SendPeer(x.replica, x.incarnation, message))

    def _stop(self, code: int, reason: str, poison: tuple[Poison, ...] = ()) -> None:
        self._emit(io.Stop(code, reason, poison))
        self.stopped = True

    def _emit(self, effect: io.Effect) -> None:
        self._effects.append(effect)

    def _runs(self, epoch: int) -> bool:
        current = self.current
        running = self.mode in (Mode.RUN, Mode.CATCH_UP)
        return running and current is not None and current.epoch == epoch

    def _is_round(self, epoch: int, step: int) -> bool:
        round_ = self.round
        return round_ is not None and (round_.record.epoch, round_.step) == (epoch, step)

    def _epoch(self) -> int:
        return self.current.epoch if self.current is not None else 0

    def _fence(self) -> Fence:
        record = self.current or self.newest
        return record.fence if record is not None else Fence("", 0, 0)
