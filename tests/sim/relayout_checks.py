"""Checks orders of layouts from outside: what the launchers run, and the allowed reasons of every change."""

from collections import Counter
from typing import TYPE_CHECKING

from sim.checkers import Violation, demand

from fabric.model import LayoutChange, Member, Record, ReplicaProcess

if TYPE_CHECKING:
    from sim.relayout_worlds import RelayoutWorld

# Between an order and its record: the leader's write, which a mishap of the store delays.
WRITE_S = 2.0


def layout_of(order: str) -> str:
    return order.partition(" ")[0]


class LayoutChecks:
    """Fed with each record that the store takes, and with each order that a process hands to its launcher."""

    def __init__(self, world: "RelayoutWorld") -> None:
        self._world = world
        self.advised: set[tuple[int, ReplicaProcess, str]] = set()  # epoch, process and order
        self.met: Counter[str] = Counter()
        self._actions = 0  # ordered layouts and drains; shares have a checker of their own
        self._ordered: set[tuple[ReplicaProcess, str]] = set()  # the orders of all records
        self._taken_back: set[tuple[ReplicaProcess, str]] = set()  # the orders of usual layouts
        # The processes that planned epochs have left out, and the election of the leader that did so.
        self._left: dict[ReplicaProcess, int] = {}
        self._forgotten: set[tuple[ReplicaProcess, str]] = set()  # the orders of a store that was wiped
        self._elsewhere: set[str] = set()  # the replicas whose newest order was another layout

    def forget(self) -> None:
        """The store was wiped: the next leader knows neither orders nor actions."""
        self._actions = 0
        self._elsewhere.clear()
        self._forgotten = set(self._ordered)

    def written(self, before: Record | None, after: Record) -> None:
        """Check the entries of the record, and each order and its end. Raises Violation."""
        changed = [x.replica for x in after.adaptation.layouts]
        demand(len(changed) == len(set(changed)), f"epoch {after.epoch} has two orders for one of {changed}")
        for member in after.roster:
            self._is_of_its_process(after, member)
        if before is None:
            return
        if after.generation != before.generation:
            self._left.clear()  # it begins with each process that still has a session
            kept = after.adaptation.layouts == before.adaptation.layouts
            demand(kept, f"the cold start in epoch {after.epoch} forgets the ordered layouts")
            self.met["layouts: kept over a cold start"] += bool(changed)
            return
        listed = {x.process: x for x in before.roster}
        for member in after.roster:
            if (old := listed.get(member.process)) is None:
                demand(not member.leaving, f"{member.replica} enters epoch {after.epoch} to leave it")
            elif old.leaving:
                self._is_kept(after, old, member)
            elif member.leaving:
                self._leaves(before, after, member)
        self._admits_no_ending_process(before, after)
        for change in before.adaptation.layouts:
            self._ends(after, change)
        for change in after.adaptation.layouts:
            is_new = change not in before.adaptation.layouts
            entry = after.member(change.replica)
            orders = entry is not None and entry.leaving and entry.returns == change.layout
            demand(not is_new or orders, f"epoch {after.epoch} changes a layout and orders nothing: {change}")

    def obeyed(self, process: ReplicaProcess, order: str) -> None:
        """Check that a record has ordered this from this process."""
        demand((process, order) in self._ordered, f"{process} leaves for {order}, which no record orders")
        if (process, order) in self._forgotten:
            return
        if (process, order) in self._taken_back:
            self._elsewhere.discard(process.replica)
        else:
            self._elsewhere.add(process.replica)

    def drained(self, process: ReplicaProcess) -> None:
        """Check that a process which leaves for good has no order to come back."""
        records = [r for r in self._world.checks.records if r.lists(*process)]
        last = records[-1].member(process.replica) if records else None
        demand(last is None or not last.returns, f"{process} leaves for good, and was ordered to come back")

    # --- entries -------------------------------------------------------------------------------------

    def _is_of_its_process(self, record: Record, member: Member) -> None:
        """The record names the layout that the process runs."""
        trainer = self._world.by_key.get(member.process)
        if trainer is not None and trainer.cuts != member.cuts:
            raise Violation(f"epoch {record.epoch} names another layout of {member.replica} than it runs")
        demand(member.leaving or not member.returns, f"{member.replica} returns and does not leave")
        if member.returns:
            self._ordered.add((member.process, member.returns))

    @staticmethod
    def _is_kept(after: Record, old: Member, new: Member) -> None:
        """A member that leaves goes on to leave, with its order. Only a drain takes the order away."""
        is_drained = not new.returns and "drained by" in after.reason
        if not new.leaving or (new.returns != old.returns and not is_drained):
            raise Violation(f"epoch {after.epoch} forgets that {new.replica} leaves for {old.returns!r}")

    def _admits_no_ending_process(self, before: Record, after: Record) -> None:
        """A process that has left ends. The next leader does not know that, and may admit it until then."""
        leader = self._world.checks.leader
        again = [x.process for x in after.roster if self._left.get(x.process) == leader]
        demand(not again, f"epoch {after.epoch} admits {again}, which a planned epoch has left out")
        if not after.is_forced:
            gone = [x.process for x in before.roster if x.leaving and not after.lists(*x.process)]
            self._left.update(dict.fromkeys(gone, leader))

    # --- orders --------------------------------------------------------------------------------------

    def _leaves(self, before: Record, after: Record, member: Member) -> None:
        """A member begins to leave: as an operator says, as advised, or to get its usual layout back."""
        name, order = member.replica, member.returns
        change = _change_of(before, name)
        if not order and "drained by" in after.reason:
            return
        others = [x.replica for x in before.roster if x.leaving]
        demand(not after.is_forced and not others, f"epoch {after.epoch} orders {name} beside {others}")
        least = after.overrides.min_replicas or self._world.settings.min_replicas
        demand(len(before.roster) > least, f"epoch {after.epoch} leaves fewer than {least} members")
        if change is not None and order == change.usual:
            self._is_taken_back(after, change, member)
        else:
            demand(change is None, f"epoch {after.epoch} orders {name} from one other layout to the next")
            self._is_advised(before, after, member)

    def _is_advised(self, before: Record, after: Record, member: Member) -> None:
        epoch, orders, order = after.epoch, after.overrides, member.returns
        known = (before.epoch, member.process, order) in self.advised
        demand(known, f"epoch {epoch} orders {member.process} to {order!r}, which no advice says")
        demand(orders.adapt in ("", "act"), f"epoch {epoch} orders a layout in the mode {orders.adapt}")
        demand(member.replica not in orders.vetoed, f"epoch {epoch} orders {member.replica} against a veto")
        assert self._world.checks.shares is not None
        self._actions += 1
        self.met["layouts: ordered"] += 1
        total = self._actions + self._world.checks.shares.actions
        most = self._world.settings.leader.actions_per_hour
        demand(total <= most, f"epoch {epoch} is action {total} of {most} within an hour")
        change = _change_of(after, member.replica)
        if not order:
            demand(change is None, f"epoch {epoch} drains {member.replica} and expects it back")
            spare = self._world.settings.spare
            free = spare and after.member(spare) is None and len(before.roster) >= self._full
            demand(bool(free), f"epoch {epoch} drains {member.replica} for good, and no spare is left over")
            return
        right = change is not None and (change.process, change.layout) == (member.process, order)
        demand(right, f"epoch {epoch} orders {member.replica} to {order} and notes {change}")
        assert change is not None
        lives = self._world.by_key.get(member.process) is not None
        demand(not lives or change.usual == self._running(member), f"a wrong usual layout: {change}")

    def _running(self, member: Member) -> str:
        return self._world.launchers[member.replica].running

    @property
    def _full(self) -> int:
        return self._world.settings.leader.policy.start_replicas

    def _is_taken_back(self, after: Record, change: LayoutChange, member: Member) -> None:
        """By an order of the operator, after the trial time, or again because the order was not heard."""
        orders, note = after.overrides, _change_of(after, member.replica)
        awaited = note is not None and (note.process, note.layout) == (member.process, change.usual)
        demand(awaited, f"epoch {after.epoch} orders {member.replica} back and does not wait for it")
        self._taken_back.add((member.process, change.usual))
        if change.process == member.process:
            return
        forbidden = orders.adapt not in ("", "act") or member.replica in orders.vetoed
        if forbidden and change.layout != change.usual:
            return
        clockwork, trial_s = self._world.clockwork, self._world.settings.leader.trial_s
        error_s = 2 * clockwork.skew * clockwork.now + WRITE_S
        waited = clockwork.now - (change.at - 1e9)
        demand(waited > trial_s - error_s, f"{member.replica} was tried {waited:.1f} s after {change}")

    def _ends(self, after: Record, change: LayoutChange) -> None:
        """A change ends when its replica runs another layout than the ordered one, or never left."""
        member, now = after.member(change.replica), _change_of(after, change.replica)
        if now is not None or (member is not None and member.leaving and not member.returns):
            return
        why = f"epoch {after.epoch} forgets {change}"
        if member is None:
            raise Violation(f"{why} while the replica is away")
        trainer = self._world.by_key.get(member.process)
        if trainer is None or change.process == member.process:
            return
        if self._running(member) == layout_of(change.layout) and change.layout != change.usual:
            raise Violation(f"{why}, which holds")

    # --- the end -------------------------------------------------------------------------------------

    def has_ended(self, record: Record) -> bool:
        """Whether no member waits for a layout, and each replica runs what the record says."""
        if any(x.leaving for x in record.roster):
            return False
        changes = {x.replica: x for x in record.adaptation.layouts}
        for member in record.roster:
            launcher, change = self._world.launchers[member.replica], changes.get(member.replica)
            if change is not None:
                return False
            if member.replica in self._elsewhere and launcher.ordered == launcher.running:
                return False
        return True


def _change_of(record: Record, replica: str) -> LayoutChange | None:
    return next((x for x in record.adaptation.layouts if x.replica == replica), None)
