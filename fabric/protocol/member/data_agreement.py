"""Whether all members take a step from the same data: compared when the data or the epoch change."""

from fabric.exit_codes import FAILED
from fabric.protocol.member.context import CoreContext
from fabric.protocol.member.memory import MemberMemory
from fabric.protocol.member.round import Round
from fabric.protocol.messages import member_events as io
from fabric.protocol.messages import network as m
from fabric.protocol.rules.data_plans import split_by_data


class DataAgreement:
    """Compares the data plans in the contributions of a round, before any member votes."""

    def __init__(self, context: CoreContext, memory: MemberMemory) -> None:
        self._context = context
        self._memory = memory
        self._epoch = 0  # the epoch of my newest committed round
        self._described = ""  # the data of that round

    def committed(self, epoch: int) -> None:
        """Note that a round of ``epoch`` was committed, so that its members know my data."""
        self._epoch, self._described = epoch, self._memory.plan.described

    def news(self, round_: Round) -> str:
        """Return what my data are, where the members of this epoch do not know it yet."""
        described = self._memory.plan.described
        return "" if (round_.record.epoch, described) == (self._epoch, self._described) else described

    def fails(self, round_: Round) -> bool:
        """Whether members take this step from unequal data. Those on the wrong side end, before any commit.

        Where no side is wrong the job fails.
        """
        parts, record, me = round_.contributions, round_.record, self._context.replica
        if not any(part.data for part in parts.values()):
            return False
        before = self._described if self._epoch == record.epoch else ""
        described = {name: parts[name].data or before for name in record.names}
        split = split_by_data(record, described, round_.step)
        if split is None:
            return False
        if split.undecided:
            self._context.emit(io.SendLeader(m.LoopFailed(record.fence, round_.step, split.why)))
        if split.undecided or me in split.wrong:
            self._context.stop(FAILED, split.why)
        return True
