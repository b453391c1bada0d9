"""What members are told of the record in force."""

from fabric.model import Record
from fabric.protocol.messages import network as m
from fabric.protocol.messages import roster_delta


class RosterAnnouncement:
    """The record in force as the messages that tell it, made once: all members get the same objects."""

    def __init__(self, record: Record, before: Record | None) -> None:
        self.record = record
        self.whole = m.Epoch(record, changes=True)
        self._again = roster_delta.change(record, record)
        self.change = self.whole if before is None else roster_delta.change(before, record)

    def told_to(self, session: m.OpenSession) -> m.Epoch | m.RosterDelta:
        """What a session that begins is told: no more of the roster than it lacks."""
        for told in (self._again, self.change):
            if isinstance(told, m.RosterDelta) and told.before == session.roster:
                return told
        return self.whole
