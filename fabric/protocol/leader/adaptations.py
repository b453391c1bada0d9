"""Rules 12 and 13: unequal shares and other layouts against slow members, while an operator allows them."""

from msgspec import Struct
from msgspec.structs import replace

from fabric.model import Adaptation, LaunchedLayouts, LayoutChange, Member, MemberSpeed, Record
from fabric.protocol.leader.record_writer import RecordWriter
from fabric.protocol.leader.state import JobState, LeaderOutbox, RosterLimits
from fabric.protocol.messages import leader_events as io
from fabric.protocol.rules.assignment import lost_parts, objection_to_shares

OFF, ACT = "off", "act"
HOUR_S = 3600.0


class Adaptations(Struct, eq=False):
    """Lowers the shares of slow members as the detector advises, and gives the shares back."""

    state: JobState
    outbox: LeaderOutbox
    limits: RosterLimits
    writer: RecordWriter
    advice: io.SharesAdvised | None = None
    held: str = ""  # why the advice is not followed now, as last reported

    @property
    def mode(self) -> str:
        """The mode of the job: the operator's, else that of its most senior member; empty: not known yet.

        The order of the roster is that of the ring, which changes. So tenure and name say which is senior.
        """
        if self.limits.overrides.adapt:
            return self.limits.overrides.adapt
        record, peers = self.state.record, self.state.liveness.peers
        senior = min(record.roster, key=lambda x: (x.since, x.replica), default=None) if record else None
        peer = peers.get(senior.replica) if senior is not None else None
        if senior is None or peer is None or peer.incarnation != senior.incarnation:
            return ""
        return peer.session.adapt or OFF

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
                self.outbox.record_event("shares kept", ", ".join(x.replica for x in speeds), why)
            return False
        acted = (*recent, round(self.state.unix_now, 1)) if lowers else recent
        total, layouts = self.state.micro_batches(record), record.adaptation.layouts
        adaptation = Adaptation(speeds, advice.gain, advice.cost_s, advice.reason, total, acted, layouts)
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
        return self.spent_budget(recent) or objection_to_shares(record.sharing)

    def spent_budget(self, recent: int) -> str:
        """Why no further action is allowed after ``recent`` actions in the last hour, or empty."""
        most = self.state.config.actions_per_hour
        return f"the budget of {most} actions per hour is spent" if recent >= most else ""

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
            adaptation, why = adaptation.with_asked_shares, f"shares as asked for again: {why}"
        about = ", ".join(x.replica for x in adaptation.speeds or record.adaptation.speeds)
        self.outbox.record_event("shares", about, why)
        self.writer.write_epoch(record, record.roster, forced=False, why=why, adaptation=adaptation)


class Relayouts(Struct, eq=False):
    """Orders members into other layouts as the detector advises, and back into their usual layouts."""

    job: Adaptations  # the parts of the leader, the mode and the budget
    advice: io.LayoutAdvised | None = None
    held: str = ""  # why the advice is not followed now, as last reported

    def on_advised(self, event: io.LayoutAdvised) -> None:
        self.advice = event

    def change(self, record: Record) -> bool:
        """End the orders whose replicas are back, take a layout back, or follow the advice."""
        state = self.job.state
        if state.is_parked(record) or any(x.leaving or not state.knows(x) for x in record.roster):
            return False
        return self._end(record) or self._take_back(record) or self._follow(record)

    def _end(self, record: Record) -> bool:
        """Drop the changes that no longer hold: their replicas are back in a layout other than ordered."""
        for change in record.adaptation.layouts:
            launched = self._launched(record, change)
            if launched is None:
                continue
            replica, is_as_ordered = change.replica, launched.layout == _layout_of(change.layout)
            kind, why = "layout refused", ""
            if record.lists(*change.process):
                kind, why = "layout kept", f"{replica} was left out before it heard the order"
                why = "" if change.ends else why  # it gets the order to come back again
            elif change.ends and is_as_ordered:
                kind, why = "layout", f"{replica} is back in its usual layout {change.usual}"
            elif _layout_of(change.layout) in launched.refused:
                why = f"the script of {replica} cannot build the layout {change.layout}"
            elif not change.ends and not is_as_ordered:
                why = f"{replica} came back in the layout {launched.layout or 'that it builds alone'}"
            if why:
                self.job.outbox.record_event(kind, replica, why)
                left = _with(record.adaptation, replica)
                self.job.writer.write_epoch(record, record.roster, False, why, adaptation=left)
                return True
        return False

    def _launched(self, record: Record, change: LayoutChange) -> LaunchedLayouts | None:
        """The launcher's layouts, as the present member names them; None while the replica is away."""
        member, peer = record.member(change.replica), self.job.state.liveness.peers.get(change.replica)
        if member is None or peer is None or peer.incarnation != member.incarnation:
            return None
        return peer.session.launched

    def _take_back(self, record: Record) -> bool:
        """Order the usual layout where the mode or a veto forbids the other one, or to try it again.

        The record keeps the change until the replica is back, because it may die before it leaves.
        """
        for change in record.adaptation.layouts:
            member, why = record.member(change.replica), self._end_of(record, change)
            if member is None or not why or self._launched(record, change) is None:
                continue
            if not self._may_leave(record, member):
                now = round(self.job.state.unix_now, 1)
                back = LayoutChange(*member.process, change.usual, change.usual, now, why)
                adaptation = _with(record.adaptation, member.replica, back)
                self._leave(record, member, change.usual, adaptation, why)
                return True
        return False

    def _end_of(self, record: Record, change: LayoutChange) -> str:
        """Why this change ends now, or empty."""
        if change.ends and record.lists(*change.process):
            return change.reason
        mode, trial_s = self.job.mode, self.job.state.config.trial_s
        if not change.ends and mode and mode != ACT:
            return f"the mode is {mode}"
        if not change.ends and change.replica in self.job.limits.overrides.vetoed:
            return "an operator's veto forbids another layout"
        # A launcher that lacks a device cannot obey, so an order that came to nothing is not repeated
        # at once.
        is_over = self.job.state.unix_now - change.at >= trial_s
        return f"its usual layout is tried again after {trial_s / 60:g} minutes" if is_over else ""

    def _follow(self, record: Record) -> bool:
        advice = self.advice
        if advice is None or self.job.mode != ACT:
            return False
        member = record.member(advice.process.replica)
        peer = self.job.state.liveness.peers.get(advice.process.replica)
        if member is None or peer is None or (advice.epoch, advice.process) != (record.epoch, member.process):
            self.advice = None  # the detector plans again for every new epoch
            return False
        recent = self.job.recent_actions(record)
        if why := self._objection(record, member, advice, len(recent)):
            if why != self.held:
                self.held = why
                self.job.outbox.record_event("layout kept", member.replica, why)
            return False
        now = round(self.job.state.unix_now, 1)
        layouts = record.adaptation.layouts
        if advice.layout:
            usual = peer.session.launched.layout
            layouts += (LayoutChange(*member.process, advice.layout, usual, now, advice.reason),)
        adaptation = replace(record.adaptation, acted=(*recent, now), layouts=layouts)
        effect = f"predicted: throughput {advice.gain:+.0%}, cost {advice.cost_s:.1f} s"
        self._leave(record, member, advice.layout, adaptation, f"{advice.reason}; {effect}")
        self.held = ""  # the advice stays until the next epoch, because the store may lose this write
        return True

    def _objection(self, record: Record, member: Member, advice: io.LayoutAdvised, recent: int) -> str:
        """Why this advice may not be followed now, in a sentence, or empty."""
        if member.replica in self.job.limits.overrides.vetoed:
            return f"an operator's veto keeps the layout of {member.replica}: `fabric adapt --allow` ends it"
        if advice.layout and not all(x.cuts for x in record.roster):
            return "all replicas must have equal layouts: set FABRIC_UNEQUAL=1 on every replica"
        if not advice.layout and not self._spare_waits(record):
            return f"no spare stands by for {member.replica}"
        return self.job.spent_budget(recent) or self._may_leave(record, member)

    def _spare_waits(self, record: Record) -> bool:
        """Whether a spare is left over when spares have taken the places of the missing members."""
        state = self.job.state
        peers = [x for x in state.liveness.peers.values() if x.connected and x.session.spare]
        spares = [x for x in peers if not state.lists(x.session.replica)]
        return len(spares) > max(0, self.job.limits.full - len(record.roster))

    def _may_leave(self, record: Record, member: Member) -> str:
        """Why this member may not leave now, or empty."""
        name, others = member.replica, [x for x in record.roster if x is not member]
        least = max(1, self.job.limits.least)
        if len(others) < least:
            return f"without {name} the job has {len(others)} of the {least} members that it needs"
        now, trial_s = self.job.state.unix_now, self.job.state.config.trial_s
        away = [
            x.replica
            for x in record.adaptation.layouts
            if record.member(x.replica) is None and now - x.at < trial_s
        ]
        if away:
            return f"{away[0]} is not back yet in its ordered layout, and one member leaves at a time"
        lost = set(lost_parts(record.sharing, others)) - set(lost_parts(record.sharing, record.roster))
        return f"no other member can read shard {min(lost)}" if lost else ""

    def _leave(self, record: Record, member: Member, layout: str, adaptation: Adaptation, why: str) -> None:
        """Write the epoch in which the member leaves; an empty ``layout`` drains it for good."""
        what = f"comes back in the layout {layout}" if layout else "is drained"
        why = f"{member.replica} {what}: {why}"
        self.job.outbox.record_event("layout" if layout else "drained", member.replica, why)
        leaving = replace(member, leaving=True, returns=layout)
        roster = tuple(leaving if x is member else x for x in record.roster)
        self.job.writer.write_epoch(record, roster, False, why, adaptation=adaptation)


def _layout_of(order: str) -> str:
    """The layout in an order, which may also name ranks to leave out."""
    return order.partition(" ")[0]


def _with(adaptation: Adaptation, replica: str, change: LayoutChange | None = None) -> Adaptation:
    """The adaptation with this change of the replica's layout, and no other one."""
    others = tuple(x for x in adaptation.layouts if x.replica != replica)
    return replace(adaptation, layouts=(*others, change) if change is not None else others)
