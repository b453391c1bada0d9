"""The notice that tells checkpoint servers which epoch is in force."""

from fabric.model import Record
from fabric.protocol.messages import network as m
from fabric.protocol.messages import wire

# Checkpoint servers of a large job send their status less often, down to once a second.
_STATUSES_PER_S = 2000


def notice_of(record: Record) -> str:
    """Return the message as text."""
    every_s = min(len(record.roster) / _STATUSES_PER_S, 1.0)
    return wire.encode(
        m.EpochNotice(record.fence, record.incident_id, record.reason, every_s, record.complete)
    ).decode()
