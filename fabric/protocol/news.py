"""What members are told of the record in force."""

from fabric.model import Record
from fabric.protocol import changes
from fabric.protocol import messages as m


class News:
    """The record in force as the messages that tell it, made once: all members get the same objects."""

    def __init__(self, record: Record, before: Record | None) -> None:
        self.record = record
        self.whole = m.Epoch(record, changes=True)
        self._again = changes.change(record, record)
        self.change = self.whole if before is None else changes.change(before, record)

    def told_to(self, session: m.Session) -> m.Epoch | m.Change:
        """What a session that begins is told: no more of the roster than it lacks."""
        for told in (self._again, self.change):
            if isinstance(told, m.Change) and told.before == session.roster:
                return told
        return self.whole
