"""What checkpoint servers are told of the epoch in force."""

from fabric.model import Record
from fabric.protocol.messages import network as m
from fabric.protocol.messages import wire

# Those of a large job are asked to pulse so much less often, down to once a second.
_PULSES_PER_S = 2000


def notice_of(record: Record) -> str:
    """The message as text."""
    every_s = min(len(record.roster) / _PULSES_PER_S, 1.0)
    return wire.encode(
        m.EpochNotice(record.fence, record.incident_id, record.reason, every_s, record.complete)
    ).decode()
