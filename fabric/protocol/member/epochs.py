"""The epochs that a member knows, and its mode among them."""

from fabric.errors import IllegalTransition
from fabric.model import Fence, Record
from fabric.protocol.member.context import CoreContext
from fabric.protocol.member.memory import MemberMemory
from fabric.protocol.member.state import (
    TRANSITIONS,
    LinkState,
    Mode,
)
from fabric.protocol.messages import member_events as io
from fabric.protocol.messages import network as m


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

    def enter_mode(self, mode: Mode) -> None:
        if mode not in TRANSITIONS[self.mode]:
            raise IllegalTransition(
                f"{self._context.replica} cannot go from {self.mode.value} to {mode.value} "
                f"at step {self._memory.state.step} in epoch {self.epoch()}"
            )
        self.mode = mode

    def runs(self, epoch: int) -> bool:
        current = self.current
        running = self.mode in (Mode.RUN, Mode.CATCH_UP)
        return running and current is not None and current.epoch == epoch

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

    def is_past(self, fence: Fence) -> bool:
        """Whether I know a newer epoch of the same store."""
        newest = self.newest
        return newest is not None and fence.store_id == newest.store_id and fence < newest.fence

    def is_at(self, where: Record | Fence, step: int) -> bool:
        return (self._memory.state.generation, self._memory.state.step) == (where.generation, step)
