"""A new roster as its difference from one that the receiver holds, for large jobs. Pure.

Digests name the old and the new roster, so the leader need not remember which roster each member has. A
member that does not hold the old roster, or computes another new roster, asks for the whole new roster.
"""

from msgspec.structs import replace

from fabric.model import Adaptation, Member, Record
from fabric.protocol.messages import network as m


def for_members(record: Record) -> Record:
    """Remove what concerns only leaders: evidence against replicas and hosts, and seats of replicas away."""
    return replace(record, failures=(), hosts=(), adaptation=Adaptation(), seats=())


def change(before: Record, after: Record) -> m.RosterDelta:
    """Describe ``after`` to a member that holds the roster of ``before``."""
    if after is before:
        return m.RosterDelta(replace(after, roster=()), after.roster_digest, after.roster_digest)
    old = {x.replica: x for x in before.roster}
    # Nearly every entry is an unchanged object, and identity is cheaper to test than equality.
    joined = tuple(x for x in after.roster if (entry := old.get(x.replica)) is not x and entry != x)
    left = tuple(name for name in before.names if after.member(name) is None)
    delta = m.RosterDelta(replace(after, roster=()), before.roster_digest, after.roster_digest, joined, left)
    return delta if _merged(before.roster, delta) == after.roster else replace(delta, order=after.names)


def applied(delta: m.RosterDelta, held: Record | None) -> Record | None:
    """The new record, or None where ``held`` does not have the roster that the delta starts from."""
    if held is None or held.roster_digest not in (delta.before, delta.after):
        return None
    roster = held.roster if held.roster_digest == delta.after else _merged(held.roster, delta)
    record = replace(delta.record, roster=roster)
    return record if record.roster_digest == delta.after else None


def _merged(roster: tuple[Member, ...], delta: m.RosterDelta) -> tuple[Member, ...]:
    """Apply ``delta`` to ``roster``. The result lacks names in the delta's order that have no entry."""
    entries = {x.replica: x for x in roster}
    for name in delta.left:
        entries.pop(name, None)
    entries.update((x.replica, x) for x in delta.joined)
    if delta.order:
        return tuple(entries[name] for name in delta.order if name in entries)
    return tuple(entries.values())
