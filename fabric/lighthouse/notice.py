"""What checkpoint servers are told of the epoch in force."""

from fabric.model import Record
from fabric.protocol import messages as m
from fabric.protocol import wire

# Those of a large job are asked to pulse so much less often, down to once a second.
_PULSES_PER_S = 2000


def notice_of(record: Record) -> str:
    """The message as text."""
    every_s = min(len(record.roster) / _PULSES_PER_S, 1.0)
    return wire.encode(m.Notice(record.fence, record.cause, record.reason, every_s, record.complete)).decode()
