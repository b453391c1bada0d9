"""A new roster told as its difference from one that the receiver holds: what large jobs send for every epoch.

Rosters are named by their digests, so nobody has to remember what was sent to whom: who does not hold the
roster that a change starts from, or does not get the one that it ends in, asks for the whole. Pure.
"""

from collections.abc import Mapping
from dataclasses import replace

from fabric.model import Member, Record
from fabric.protocol.messages import network as m


def for_members(record: Record) -> Record:
    """Without what concerns only the leaders: evidence against those who failed."""
    return replace(record, failures=(), hosts=())


def change(before: Record, after: Record) -> m.RosterDelta:
    """``after``, told to whoever holds the roster of ``before``."""
    if after is before:
        return m.RosterDelta(replace(after, roster=()), after.roster_digest, after.roster_digest)
    old = {x.replica: x for x in before.roster}
    # Nearly every entry is the very same one, which is seen sooner than that an equal one is equal.
    joined = tuple(x for x in after.roster if (known := old.get(x.replica)) is not x and known != x)
    left = tuple(name for name in before.names if after.member(name) is None)
    told = m.RosterDelta(replace(after, roster=()), before.roster_digest, after.roster_digest, joined, left)
    return told if _merged(before.roster, told) == after.roster else replace(told, order=after.names)


def applied(told: m.RosterDelta, known: Record | None) -> Record | None:
    """The whole record, or None where ``known`` is not what the change starts from."""
    held = known.roster_digest if known is not None else ""
    if held not in (told.before, told.after):
        return None
    assert known is not None
    roster = known.roster if held == told.after else _merged(known.roster, told)
    record = replace(told.record, roster=roster)
    return record if record.roster_digest == told.after else None


def _merged(roster: tuple[Member, ...], told: m.RosterDelta) -> tuple[Member, ...]:
    """Without those that left, with the entries that are new or differ; in the order that is said, else
    everybody in the old place and who is new at the end. Incomplete where the order names a stranger."""
    entries = {x.replica: x for x in roster}
    for name in told.left:
        entries.pop(name, None)
    entries.update((x.replica, x) for x in told.joined)
    return _ordered(entries, told.order) if told.order else tuple(entries.values())


def _ordered(entries: Mapping[str, Member], order: tuple[str, ...]) -> tuple[Member, ...]:
    return tuple(entries[name] for name in order if name in entries)
