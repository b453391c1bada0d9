"""Serving joining members: snapshots promised to them, and published gradients."""

from fabric.model import SnapshotRef
from fabric.protocol.member.context import CoreContext
from fabric.protocol.member.epochs import KnownEpochs
from fabric.protocol.member.memory import MemberMemory
from fabric.protocol.member.session import LighthouseSession
from fabric.protocol.member.state import Mode
from fabric.protocol.messages import member_events as io
from fabric.protocol.messages import network as m


class SnapshotServing:
    """Keeps this member's promises to joining members."""

    def __init__(
        self,
        context: CoreContext,
        memory: MemberMemory,
        epochs: KnownEpochs,
        session: LighthouseSession,
        snapshots: tuple[SnapshotRef, ...],
    ) -> None:
        self._context = context
        self._memory = memory
        self._epochs = epochs
        self._session = session
        self.promised: dict[str, int] = {}  # joining member -> the step at which a snapshot is promised to it
        self.listeners: set[str] = set()  # joining members that replay published gradients
        self.snapshots = snapshots  # the snapshots that my checkpoint server holds
        self.snapshotting = -1  # the step of the snapshot that is being taken

    def on_serve(self, message: m.TakeSnapshotFor) -> None:
        if self._epochs.mode not in (Mode.RUN, Mode.CATCH_UP) or message.step < self._memory.state.step:
            self._context.emit(
                io.SendLeader(m.SnapshotMissed(self._epochs.fence(), message.joiner, message.step))
            )
            # The leader knows only an older step of this member: send this step and each later step at once.
            self._session.contact.next_beat = self._session.contact.asked = self._context.now
            return
        self.promised[message.joiner] = message.step
        self.listeners.add(message.joiner)
        self._context.emit(io.RetainGradients(True))

    def on_serve_end(self, message: m.StopServing) -> None:
        self.promised.pop(message.joiner, None)
        self.listeners.discard(message.joiner)
        if not self.listeners:
            self._context.emit(io.RetainGradients(False))

    def on_snapshotted(self, event: io.Snapshotted) -> None:
        if event.step == self.snapshotting:
            self.snapshotting = -1
        if event.digest:
            generation = event.generation if event.generation >= 0 else self._memory.state.generation
            ref = SnapshotRef(generation, event.step, event.digest)
            self.snapshots = (*self.snapshots[-1:], ref)
        for joiner, step in list(self.promised.items()):
            if step == event.step:
                del self.promised[joiner]
                reply: m.MemberMessage = (
                    m.SnapshotTaken(self._epochs.fence(), joiner, step, event.digest)
                    if event.digest
                    else m.SnapshotMissed(self._epochs.fence(), joiner, step)
                )
                self._context.emit(io.SendLeader(reply))

    def snapshot_when_due(self) -> None:
        due = (
            self._epochs.mode in (Mode.RUN, Mode.CATCH_UP)
            and self._memory.state.step in self.promised.values()
        )
        if due and self.snapshotting != self._memory.state.step:
            self.snapshotting = self._memory.state.step
            self._context.emit(io.TakeSnapshot(self._memory.state.step))
