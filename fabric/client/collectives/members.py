"""The members that take part in the collectives of a step, and the place of the user's code in the job.

Before the commit of a step these are the members that compute it. After the commit they are all members of
the round that committed it, also where an epoch with newcomers is in force by then. A forced epoch takes out
the members that it does not list.
"""

from dataclasses import dataclass

from fabric.client.control.collective_links import CollectiveGroup
from fabric.client.control.engine import Engine
from fabric.errors import NotAMember
from fabric.model import Member, Record
from fabric.protocol.messages import member_events as io

_NOT_STARTED = "the first step has not begun: call collectives inside the loop over session.steps, or after "
_NOT_STARTED += "the first session.exchange"


@dataclass(frozen=True, slots=True)
class Phase:
    """A part of a step in which the same members take part in all collectives."""

    place: tuple[int, int]  # committed steps, and whether the next step is being computed
    epoch: int  # the epoch of the round
    members: tuple[Member, ...]
    generation: int = 0  # the generation of the round: after a cold start the same step is another one


class CollectiveMembers:
    """The main thread begins phases; any thread asks for their groups."""

    def __init__(self, engine: Engine, replica: str, incarnation: int) -> None:
        self._engine = engine
        self.replica = replica
        self._incarnation = incarnation
        self._records: dict[int, Record] = {}  # the epochs in which a step may yet be committed, as announced
        self._committed: Record | None = None  # the epoch of the newest round that this process committed
        self._phase: Phase | None = None
        self._why_not = _NOT_STARTED

    @property
    def phase(self) -> Phase:
        """The phase of the main thread. Raises NotAMember."""
        if self._phase is None:
            raise NotAMember(f"{self.replica} takes part in no collective now: {self._why_not}")
        return self._phase

    def note(self, record: Record) -> None:
        """Keep the record of an epoch that is announced or in force.

        A prepared round is a promise: a decision may commit it any number of epochs later. So the records
        stay until the next step ends.
        """
        before = self._records.get(record.epoch)
        if before is not None and before.fence != record.fence:
            del self._records[record.epoch]  # another store counts its epochs from 1: this one is new
        self._records[record.epoch] = record

    def begin_step(self, order: io.Compute | io.Apply) -> None:
        """Begin the phase before the commit of a step of ``session.steps``."""
        record, before = self._engine.current, self._committed
        if not isinstance(order, io.Compute) or record is None:
            self.leave(f"step {order.step} was committed without its micro-batches, call after the commit")
            return
        members = tuple(
            x
            for x in record.roster
            if not x.joining or (before is not None and before.lists(x.replica, x.incarnation))
        )
        self._phase = Phase((order.step, 1), record.epoch, members, record.generation)

    def end_step(self, order: io.Apply) -> None:
        """Begin the phase after the commit of a step."""
        if order.prepared is None:
            if self._engine.current is not None:
                self._forget_before(self._engine.current.epoch)
            self.leave(f"it replays step {order.step}, call collectives only where step.replayed is false")
            return
        self._committed = record = self._records[order.prepared.epoch]
        self._phase = Phase((order.step + 1, 0), record.epoch, record.roster, record.generation)
        self._forget_before(record.epoch)

    def _forget_before(self, epoch: int) -> None:
        """Forget the epochs announced before ``epoch``: later steps are committed in it or after it."""
        announced = list(self._records)
        if epoch in announced:
            for earlier in announced[: announced.index(epoch)]:
                del self._records[earlier]

    def leave(self, why: str) -> None:
        """Take part in no collective until the next step; ``why``, for the error of a call."""
        self._phase, self._why_not = None, why

    def group(self, phase: Phase) -> CollectiveGroup:
        """Return the members of ``phase`` that are still in the job. Raises NotAMember if this one is not."""
        newest = self._engine.newest or self._engine.current
        assert newest is not None
        members = phase.members
        if newest.forced > phase.epoch:
            members = tuple(x for x in members if newest.lists(x.replica, x.incarnation))
        if not any((x.replica, x.incarnation) == (self.replica, self._incarnation) for x in members):
            raise NotAMember(
                f"{self.replica} takes part in no collective now: epoch {newest.epoch} does not list it, go "
                "on to the next step, where it catches up"
            )
        return CollectiveGroup(newest, members, self.replica)
