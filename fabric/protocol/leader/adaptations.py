"""Rule 12: unequal shares against slow members, while an operator allows them."""

from dataclasses import dataclass, replace

from fabric.model import Adaptation, MemberSpeed, Record
from fabric.protocol.leader.outbox import LeaderOutbox
from fabric.protocol.leader.record_writer import RecordWriter
from fabric.protocol.leader.state import JobState, RosterLimits
from fabric.protocol.messages import leader_events as io
from fabric.protocol.rules.shares import objection_to_shares

OFF, ACT = "off", "act"
HOUR_S = 3600.0


@dataclass(slots=True, eq=False)
class Adaptations:
    """Lowers the shares of slow members as the detector advises, and gives the shares back."""

    state: JobState
    outbox: LeaderOutbox
    limits: RosterLimits
    writer: RecordWriter
    advice: io.SharesAdvised | None = None
    held: str = ""  # why the advice is not followed now, as last reported

    @property
    def mode(self) -> str:
        """The mode of the job: the operator's, else that of its most senior member; empty: not known yet."""
        if self.limits.overrides.adapt:
            return self.limits.overrides.adapt
        record, peers = self.state.record, self.state.liveness.peers
        for member in record.roster if record is not None else ():
            if (peer := peers.get(member.replica)) is not None:
                return peer.session.adapt or OFF
        return ""

    def on_advised(self, event: io.SharesAdvised) -> None:
        self.advice = event

    def adapt(self, record: Record) -> bool:
        """Take back shares that an operator no longer wants, or follow the advice."""
        if self.state.is_parked(record) or any(x.leaving or not self.state.knows(x) for x in record.roster):
            return False
        return self._take_back(record) or self._follow(record)

    def _take_back(self, record: Record) -> bool:
        """Undo what the mode or a veto forbids."""
        speeds, mode, vetoed = record.adaptation.speeds, self.mode, self.limits.overrides.vetoed
        if not speeds or not mode:
            return False
        kept = tuple(x for x in speeds if x.replica not in vetoed) if mode == ACT else ()
        if kept == speeds:
            return False
        why = "an operator's veto forbids lower shares" if mode == ACT else f"the mode is {mode}"
        self._write(record, replace(record.adaptation, speeds=kept), why)
        return True

    def _follow(self, record: Record) -> bool:
        """Write the advised shares into one planned epoch, if they still fit the roster."""
        advice = self.advice
        if advice is None or self.mode != ACT:
            return False
        listed = {x.process: x for x in record.roster}
        if advice.epoch != record.epoch or any(x.process not in listed for x in advice.speeds):
            self.advice = None  # the detector plans again for every new epoch
            return False
        speeds = tuple(
            replace(x, asked=self.writer.asked(record, listed[x.process]))
            for x in sorted(advice.speeds, key=lambda x: x.replica)
        )
        if speeds == record.adaptation.speeds:
            self.advice, self.held = None, ""
            return False
        recent = self.recent_actions(record)
        lowers = not set(speeds) <= set(record.adaptation.speeds)
        if lowers and (why := self._objection(record, speeds, len(recent))):
            if why != self.held:
                self.held = why
                self.outbox.record_event("shares kept", _names(speeds), why)
            return False
        acted = (*recent, round(self.state.unix_now, 1)) if lowers else recent
        adaptation = Adaptation(
            speeds, advice.gain, advice.cost_s, advice.reason, self.state.micro_batches(), acted
        )
        self._write(record, adaptation, advice.reason)
        self.advice, self.held = None, ""
        return True

    def _objection(self, record: Record, speeds: tuple[MemberSpeed, ...], recent: int) -> str:
        """Why no share may be lowered now, in a sentence, or empty."""
        vetoed = sorted({x.replica for x in speeds} & set(self.limits.overrides.vetoed))
        if vetoed:
            return (
                f"an operator's veto keeps the share of {', '.join(vetoed)}: `fabric adapt --allow` ends it"
            )
        most = self.state.config.actions_per_hour
        if recent >= most:
            return f"the budget of {most} actions per hour is spent: the shares stay for now"
        return objection_to_shares(record.sharing)

    def recent_actions(self, record: Record) -> tuple[float, ...]:
        """When leaders acted in the last hour. A time ahead of this clock counts as now."""
        now = self.state.unix_now
        return tuple(min(at, now) for at in record.adaptation.acted if now - at < HOUR_S)

    def _write(self, record: Record, adaptation: Adaptation, why: str) -> None:
        """Write one planned epoch: all members change their shares after the same step."""
        if adaptation.speeds:
            effect = f"throughput {adaptation.gain:+.0%}, cost {adaptation.cost_s:g} s"
            why = f"shares by speed: {why}; predicted: {effect}"
        else:
            adaptation, why = Adaptation(acted=adaptation.acted), f"shares as asked for again: {why}"
        about = _names(adaptation.speeds or record.adaptation.speeds)
        self.outbox.record_event("shares", about, why)
        self.writer.write_epoch(record, record.roster, forced=False, why=why, adaptation=adaptation)


def _names(speeds: tuple[MemberSpeed, ...]) -> str:
    return ", ".join(x.replica for x in speeds)
