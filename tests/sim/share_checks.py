"""Checks unequal shares from outside: the allowed shares of every record, and the allowed reasons of a
change.
"""

from collections.abc import Callable

from fabric.model import Member, MemberSpeed, Record

FULL = 1000


class ShareChecks:
    """Fed with each record that the store takes; ``asked``: the share that a replica asks for."""

    def __init__(self, asked: Callable[[str], int], micro_batches: int, budget: int) -> None:
        self._asked = asked
        self._micro_batches = micro_batches
        self._budget = budget
        self.advised: set[tuple[int, frozenset[tuple[str, int, int]]]] = set()
        self.actions = 0
        self.met: list[str] = []

    def advise(self, epoch: int, speeds: tuple[MemberSpeed, ...]) -> None:
        """Note that the detector gives this advice to a leader."""
        self.advised.add((epoch, facts_of(speeds)))

    def written(self, before: Record | None, after: Record) -> str:
        """Return what is wrong with this record, or empty."""
        wrong = self._wrong_shares(after)
        if wrong or before is None or after.generation != before.generation:
            return wrong
        return self._wrong_change(before, after)

    def _wrong_shares(self, record: Record) -> str:
        """Every share is the asked one, or all shares are asked shares times speeds in thousandths."""
        speeds = {x.process: x.speed for x in record.adaptation.speeds}
        strangers = speeds.keys() - {x.process for x in record.roster}
        if strangers:
            return f"epoch {record.epoch} has a speed of {sorted(strangers)}, outside its roster"
        for member in record.roster:
            asked = self._asked(member.replica)
            allowed = [asked * speeds.get(member.process, FULL)] if speeds else [asked]
            if member.process in speeds:
                allowed.append(min(self._least(record, member), asked * FULL))
            if member.shares not in allowed:
                given = f"epoch {record.epoch} gives {member.replica} the share {member.shares}"
                return f"{given}, not one of {allowed}"
        total = sum(x.shares for x in record.roster)
        starved = [
            x.replica
            for x in record.roster
            if x.process in speeds
            and self._micro_batches * x.shares < total
            and x.shares < FULL * self._asked(x.replica)
        ]
        if starved:
            return f"epoch {record.epoch} leaves {starved} without a micro-batch: their speed is not measured"
        return ""

    def _least(self, record: Record, member: Member) -> int:
        """The least share with which this member has a micro-batch beside healthy others."""
        others = sum(FULL * self._asked(x.replica) for x in record.roster if x is not member)
        share = 0
        while self._micro_batches * share < others + share:
            share += 1
        return share

    def _wrong_change(self, before: Record, after: Record) -> str:
        old, new = facts_of(before.adaptation.speeds), facts_of(after.adaptation.speeds)
        there = {x.process for x in after.roster}
        gone = {x for x in old if (x[0], x[1]) not in there}
        if gone:
            self.met.append("shares: a slow process left")
        if old and any(not before.lists(x.replica, x.incarnation) for x in after.roster):
            self.met.append("shares: a newcomer beside slow members")
        if new == old - gone:
            return ""
        if after.is_forced or after.epoch == before.epoch:
            return f"epoch {after.epoch} changes speeds from {sorted(old)} to {sorted(new)} in mid-step"
        if before.names != after.names:
            return f"epoch {after.epoch} changes both the roster and the speeds"
        return self._wrong_new(before, after, new - old) or self._wrong_undo(before, after, old - new)

    def _wrong_new(self, before: Record, after: Record, new: frozenset[tuple[str, int, int]]) -> str:
        """A share is lowered only as advised for this epoch, within the budget, as operators allow."""
        if not new:
            return ""
        self.actions += 1
        self.met.append("shares: lowered")
        orders = after.overrides
        if self.actions > self._budget:
            return f"epoch {after.epoch} is action {self.actions} of {self._budget} within an hour"
        if orders.adapt not in ("", "act"):
            return f"epoch {after.epoch} lowers shares in the mode {orders.adapt}"
        if {name for name, _, _ in new} & set(orders.vetoed):
            return f"epoch {after.epoch} lowers the share of {sorted(new)} against a veto"
        if (before.epoch, facts_of(after.adaptation.speeds)) not in self.advised:
            return (
                f"epoch {after.epoch} has speeds {sorted(new)} that nobody advised for epoch {before.epoch}"
            )
        return ""

    def _wrong_undo(self, before: Record, after: Record, lost: frozenset[tuple[str, int, int]]) -> str:
        """A share is given back only as advised, or by an operator's order."""
        if not lost:
            return ""
        orders = after.overrides
        if orders.adapt not in ("", "act") or {name for name, _, _ in lost} <= set(orders.vetoed):
            self.met.append("shares: taken back by an order")
            return ""
        if (before.epoch, facts_of(after.adaptation.speeds)) in self.advised:
            self.met.append("shares: given back")
            return ""
        return f"epoch {after.epoch} gives shares back to {sorted(lost)} without a cause"


def facts_of(speeds: tuple[MemberSpeed, ...]) -> frozenset[tuple[str, int, int]]:
    """The speeds without the asked shares, which the detector does not know."""
    return frozenset((x.replica, x.incarnation, x.speed) for x in speeds)
