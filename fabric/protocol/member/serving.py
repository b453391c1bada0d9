"""Snapshots for others: promised to joining members, and the last one before this process is killed."""

import math

from msgspec import Struct, field

from fabric.exit_codes import RESTART
from fabric.model import Record, SnapshotRef, writer_of
from fabric.protocol.member.session import LighthouseSession
from fabric.protocol.member.state import CoreContext, KnownEpochs, MemberMemory, Mode
from fabric.protocol.messages import member_events as io
from fabric.protocol.messages import network as m
from fabric.protocol.rules.own_memory import KEPT

# After a notice a member without answers from the leader decides on its own after this time.
ALONE_S = 3.0
# The pause after a state could not be saved.
AGAIN_S = 1.0
# The others wait this long for the member that saves the state.
SAVE_S = 3600.0


class SnapshotServing(Struct, eq=False):
    """Keeps this member's promises to joining members, and saves the state after a notice."""

    _context: CoreContext
    _memory: MemberMemory
    _epochs: KnownEpochs
    _session: LighthouseSession
    snapshots: tuple[SnapshotRef, ...]  # the snapshots that my checkpoint server holds
    # joining member -> the step at which a snapshot is promised to it
    promised: dict[str, int] = field(default_factory=dict)
    # replica that replays published gradients, or may soon -> the last step that is kept for it
    listeners: dict[str, float] = field(default_factory=dict)
    snapshotting: int = -1  # the step of the snapshot that is being taken
    saves: bool = False  # whether I save the state for all, as the leader says or because none answers
    saving: int = -1  # the step whose state is being saved, or is saved
    saved: bool = False  # whether the state where I have stopped is in durable storage
    _save_at: float = -math.inf  # the earliest time of the next try

    def on_serve(self, message: m.TakeSnapshotFor) -> None:
        # A request to the process before me may come to me, and no order to stop would: I am outside.
        if self._epochs.mode is not Mode.OUTSIDE:
            self._keep_gradients(message.joiner, math.inf)
        if self._epochs.mode not in (Mode.RUN, Mode.CATCH_UP) or message.step < self._memory.state.step:
            missed = m.SnapshotTaken(self._epochs.fence(), message.joiner, message.step, "")
            self._context.emit(io.SendLeader(missed))
            self._session.follow_steps()
            return
        self.promised[message.joiner] = message.step

    def on_serve_end(self, message: m.StopServing) -> None:
        self.promised.pop(message.joiner, None)
        self._keep_gradients(message.joiner, -1)

    def leave(self) -> None:
        """Forget all promises: this member is outside the roster."""
        self.promised.clear()
        self.listeners.clear()

    def keep_for_lost(self, before: Record, after: Record) -> None:
        """Keep the next gradients for each lost member, which may begin again from its hosts' memory."""
        for lost in before.roster:
            if not lost.leaving and after.member(lost.replica) is None:
                self._keep_gradients(lost.replica, self._memory.state.step + KEPT)

    def _keep_gradients(self, replica: str, last: float) -> None:
        """Keep gradients for this replica until step ``last``, or no more if that is negative."""
        self.listeners[replica] = last
        self.listeners = {name: step for name, step in self.listeners.items() if step >= 0}
        self._context.emit(io.RetainGradients(bool(self.listeners)))

    def on_snapshotted(self, event: io.Snapshotted) -> None:
        if event.step == self.snapshotting:
            self.snapshotting = -1
        if event.digest:
            generation = event.generation if event.generation >= 0 else self._memory.state.generation
            ref = SnapshotRef(generation, event.step, event.digest)
            self.snapshots = (*self.snapshots[-1:], ref)
        elif event.step == self.saving:
            self.on_saved(io.Saved(event.step, "its snapshot could not be taken"))
        for joiner, step in list(self.promised.items()):
            if step == event.step:
                del self.promised[joiner]
                reply = m.SnapshotTaken(self._epochs.fence(), joiner, step, event.digest)
                self._context.emit(io.SendLeader(reply))

    def snapshot_when_due(self) -> None:
        step = self._memory.state.step
        for replica in [name for name, last in self.listeners.items() if last < step]:
            self._keep_gradients(replica, -1)
        due = self._epochs.mode in (Mode.RUN, Mode.CATCH_UP) and step in self.promised.values()
        if due and self.snapshotting != step:
            self.snapshotting = step
            self._context.emit(io.TakeSnapshot(step))

    # --- notice --------------------------------------------------------------------------------------

    def on_noticed(self, _: io.Noticed) -> None:
        """Rule 13: tell the leader at once. A further notice changes nothing."""
        if self._context.noticed_at == math.inf:
            self._context.notice()
            self._session.hurry()

    def heed(self, ack: m.HeartbeatAck) -> None:
        """Rule 13: follow the leader's answer to my notice."""
        if ack.save and not self.saves:
            self.saves = True
            self._session.hurry()  # a leader names no other member while one says that it saves
        elif ack.goes_on and self.saves:
            self.saves, self.saving, self.saved = False, -1, False
            self._session.on_busy(io.Busy("", 0.0))
        if ack.leave:
            self._context.stop(RESTART, ack.leave)

    @property
    def _alone_at(self) -> float:
        """When to decide without the leader, unless it answers before."""
        return max(self._context.noticed_at, self._session.contact.last) + ALONE_S

    def save_deadline(self) -> float | None:
        """When to decide without the leader, or to try again; None without such a time."""
        if self._context.noticed_at == math.inf and self._save_at <= self._context.now:  # nearly always
            return None
        dues = (self._alone_at, self._save_at)
        return min((due for due in dues if self._context.now < due < math.inf), default=None)

    def is_to_save(self) -> bool:
        """Rule 13: whether I save the state for all, because the leader says so or does not answer."""
        # Nearly always no process has notice.
        if self._context.noticed_at < math.inf and self._context.now >= self._alone_at:
            is_writer = writer_of(self._epochs.current, storing=True) == self._context.replica
            self.saves = self.saves or is_writer
        return self.saves

    def save(self) -> None:
        """Rule 13: write the state of this step boundary to storage. No member goes beyond it without me."""
        step = self._memory.state.step
        if self.saving != step and self._context.now >= self._save_at:
            self.saving, self.saved = step, False
            self._memory.drop_kept()
            self._session.on_busy(io.Busy("it saves the state, because every replica has notice", SAVE_S))
            self._context.emit(io.TakeSnapshot(step, durable=True))

    def on_saved(self, event: io.Saved) -> None:
        if event.step == self.saving and event.why:
            self.saving, self._save_at = -1, self._context.now + AGAIN_S
        elif event.step == self.saving:
            self.saved = True
            self._session.hurry()
